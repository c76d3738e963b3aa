"""Commands that ask a running router: what they send, and what they make of its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.cli_run import Run, run

__all__ = ["run"]  # a fixture


class _Canned(BaseHTTPRequestHandler):
    """Answers every request with the server's `canned` status and body, and notes it."""

    def answer(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers.get("authorization")))  # type: ignore[attr-defined]
        status, body = self.server.canned  # type: ignore[attr-defined]
        sent = self.rfile.read(int(self.headers.get("content-length", "0")))
        self.server.bodies.append(sent)  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_DELETE = do_PATCH = answer  # noqa: N815 - the base class's names

    def log_message(self, format: str, *args: object) -> None:
        pass


class CannedRouter(HTTPServer):
    """A router that always says the same."""

    canned: tuple[int, bytes] = (200, b"{}")

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str | None]] = []
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Canned)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def router() -> Iterator[CannedRouter]:
    with CannedRouter() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


WORKER = {
    "id": "w1",
    "state": "active",
    "breaker": "closed",
    "out_s": 0.0,
    "why_unknown": None,
    "lanes": ["short"],
    "models": ["[red]m"],
    "load": 3,
    "queued_requests": None,
    "kv_used_ratio": 0.5,
    "failures": 0,
}


def test_workers_are_listed_with_unknown_figures_as_such(run: Run, router: CannedRouter) -> None:
    listing = {"workers": [WORKER], "total": 1, "stats": {"healthy": 1}}
    router.canned = (200, json.dumps(listing).encode())
    ended = run("workers", "list", "--router", router.url)
    assert ended.status == 0
    row = next(line for line in ended.out.splitlines() if line.startswith("w1"))
    assert row.split() == ["w1", "active", "short", "[red]m", "3", "?", "50%", "0"]
    assert ended.out.endswith("1 worker, 1 healthy\n")


REPLICAS = {
    "standing": "together",
    "why_away": None,
    "config_agrees": True,
    "changes_to_tell": 0,
    "replicas": [
        {"name": "a", "self": True, "leads": True, "draining": False, "address": "http://a:1",
         "version": "1", "config_version": "c0ffee", "workers": 8, "owns": 4, "running": 3},
        {"name": "b", "self": False, "leads": False, "draining": True, "address": None,
         "version": "1", "config_version": None, "workers": 8, "owns": 0, "running": 0},
    ],
}  # fmt: skip


def test_routers_are_listed(run: Run, router: CannedRouter) -> None:
    router.canned = (200, json.dumps(REPLICAS).encode())
    ended = run("replicas", "list", "--router", router.url)
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines()]
    assert rows[1:] == [
        ["a", "(asked)", "http://a:1", "1", "c0ffee", "leads", "8", "4", "3"],
        ["b", "?", "1", "?", "draining", "8", "0", "0"],
    ]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"standing": "alone"}, "it stands alone: no Redis is configured"),
        ({"standing": "away", "why_away": "no answer"}, "Redis is away (no answer): what"),
        ({"config_agrees": False}, "the routers run different configurations"),
        ({"changes_to_tell": 2}, "2 changes are still to be told"),
    ],
)
def test_the_list_of_routers_says_what_is_amiss(
    run: Run, router: CannedRouter, fields: dict[str, object], shown: str
) -> None:
    router.canned = (200, json.dumps({**REPLICAS, **fields}).encode())
    assert shown in run("replicas", "list", "--router", router.url).out
    assert run("replicas", "list", "--router", router.url, "--json").status == 0


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"breaker": "open", "out_s": 9.7}, "active, breaker open"),
        ({"breaker": "half_open", "out_s": None}, "active, breaker half-open"),
        ({"out_s": 3.2}, "active, left out for 3 s"),
        ({"state": "joining", "why_unknown": "connection refused"}, "joining"),
        ({"state": "joining", "why_unknown": "connection refused"}, "\nw1: connection refused\n"),
    ],
)
def test_the_list_says_what_keeps_requests_away(
    run: Run,
    router: CannedRouter,
    fields: dict[str, object],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listing = {"workers": [{**WORKER, **fields}], "total": 1, "stats": {"healthy": 0}}
    router.canned = (200, json.dumps(listing).encode())
    assert shown in run("workers", "list", "--router", router.url).out


def test_the_list_says_lanes_in_the_words_of_the_flag(run: Run, router: CannedRouter) -> None:
    both = {**WORKER, "lanes": ["long", "short"]}
    listing = {"workers": [both], "total": 1, "stats": {"healthy": 1}}
    router.canned = (200, json.dumps(listing).encode())
    row = run("workers", "list", "--router", router.url).out.splitlines()[1]
    assert row.split()[:3] == ["w1", "active", "both"]
    router.canned = (202, b'{"id": "w"}')
    for word, lanes in (("long", ["long"]), ("both", None)):
        run("workers", "add", "http://h:1", "--lanes", word, "--router", router.url)
        assert json.loads(router.bodies[-1]).get("lanes") == lanes


def test_the_list_is_json_for_programs(run: Run, router: CannedRouter) -> None:
    listing = {"workers": [WORKER], "total": 1, "stats": {"healthy": 1}}
    router.canned = (200, json.dumps(listing).encode())
    assert json.loads(run("workers", "list", "--json", "--router", router.url).out) == listing


def test_an_update_sends_what_was_given_and_nothing_else(run: Run, router: CannedRouter) -> None:
    flags = ("--lanes", "both", "--priority", "2", "--label", "rack=a=1", "--label", "x")
    ended = run("workers", "update", "w:1", *flags, "--router", router.url)
    assert (ended.status, ended.out) == (0, "w:1 is changed\n")
    assert router.seen == [("PATCH", "/workers/w%3A1", None)]
    assert json.loads(router.bodies[0]) == {
        "lanes": ["short", "long"],
        "priority": 2,
        "labels": {"rack": "a=1", "x": ""},
    }
    assert run("workers", "update", "w:1", "--router", router.url).status == 2


def test_a_worker_is_named_in_the_path_with_its_colon_encoded(
    run: Run, router: CannedRouter
) -> None:
    run("workers", "drain", "10.0.0.7:30000", "--router", router.url + "/", "--deadline-s", "5")
    run("workers", "remove", "10.0.0.7:30000", "--router", router.url, "--admin-key", "k")
    assert router.seen == [
        ("DELETE", "/workers/10.0.0.7%3A30000?deadline_s=5", None),
        ("DELETE", "/workers/10.0.0.7%3A30000?deadline_s=0", "Bearer k"),
    ]


def test_the_routers_refusal_is_shown_in_its_words(run: Run, router: CannedRouter) -> None:
    router.canned = (409, json.dumps({"error": {"message": "registered already"}}).encode())
    ended = run("workers", "add", "http://h:1", "--router", router.url)
    assert ended.status == 1
    assert ended.err == "laneway: 409: registered already\n"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'"x"', b"", b"{}", b'{"workers": [1]}'])
def test_an_answer_of_something_else_is_called_so(
    run: Run, router: CannedRouter, body: bytes
) -> None:
    router.canned = (200, body)
    ended = run("workers", "list", "--router", router.url)
    assert ended.status == 1
    assert "not as a Laneway router does" in ended.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://[", "ftp://x"])
def test_a_router_that_cannot_be_reached_is_a_message_and_status_1(run: Run, url: str) -> None:
    ended = run("workers", "list", "--router", url)
    assert ended.status == 1
    assert f"no router answers at {url}" in ended.err
    assert "Traceback" not in ended.err


def test_a_router_without_a_scheme_is_told_how(run: Run) -> None:
    ended = run("workers", "list", "--router", "127.0.0.1:30000")
    assert ended.status == 2
    assert ended.err == "laneway: --router wants a URL, as http://127.0.0.1:30000\n"


def test_a_change_that_others_do_not_know_yet_says_so(run: Run, router: CannedRouter) -> None:
    document = {"id": "w", "shared": False, "standing": "away"}
    router.canned = (202, json.dumps(document).encode())
    added = run("workers", "add", "http://h:1", "--router", router.url, "--api-key", "k")
    assert "at this router only" in added.out
    assert router.seen == [("POST", "/workers", None), ("GET", "/replicas", None)]


def test_who_needs_an_admin_key_hears_how_to_give_it(run: Run, router: CannedRouter) -> None:
    router.canned = (401, json.dumps({"error": {"message": "no API key"}}).encode())
    assert "--admin-key or LANEWAY_ADMIN_KEY" in run("tenants", "list", "--router", router.url).err


def test_a_tenant_of_a_strange_name_is_refused(run: Run) -> None:
    ended = run("keys", "new", "--tenant", "a/b")
    assert ended.status == 2
    assert "--tenant" in ended.err


def test_tenants_are_listed_with_what_they_used(run: Run, router: CannedRouter) -> None:
    used = {"requests": 7, "refused": 2, "output_tokens": 900, "cost_units": 2.5}
    acme = {"name": "acme", "tier": None, "keys": ["sha256:0123"], "disabled": True, "used": used}
    router.canned = 200, json.dumps({"tenants": [acme], "total": 1}).encode()
    shown = run("tenants", "list", "--router", router.url).out
    assert [line.split() for line in shown.splitlines()][1] == [
        "acme", "(disabled)", "1", "7", "2", "900", "2.5"
    ]  # fmt: skip
    assert router.seen[-1][:2] == ("GET", "/tenants")


def test_a_tenant_is_set_and_removed(run: Run, router: CannedRouter) -> None:
    document = {"version": {"number": 4}, "told_by": ["key"], "disabled": False}
    router.canned = 200, json.dumps(document).encode()
    done = run(
        "tenants", "set", "acme", "limits.concurrency=8", "tier=free", "--router", router.url
    )
    assert done.status == 0
    assert done.out == "in force as version 4\nrequests with a key of its own are acme's\n"
    assert json.loads(router.bodies[-2]) == {
        "tenants": {"acme": {"limits": {"concurrency": 8}, "tier": "free"}}
    }
    assert router.seen[-1][:2] == ("GET", "/tenants/acme")
    run("tenants", "remove", "acme", "--router", router.url)
    assert router.seen[-1][:2] == ("DELETE", "/tenants/acme")


@pytest.mark.parametrize(
    ("told_by", "disabled", "said"),
    [
        (
            ["key", "proxy"],
            False,
            "requests with a key of its own or under its name from a trusted",
        ),
        (["no_key"], False, "requests without a key are acme's\n"),
        (["key"], True, "are acme's, and refused: it is disabled\n"),
        ([], False, "no request is acme's yet: it has no key, and auth.trusted_proxies is empty"),
        ([], False, "Once there is any key, requests without one are 401 unless"),
        ([], False, "\n  laneway keys new --tenant acme\n  laneway tenants set acme \"keys=['sha"),
    ],
)
def test_who_sets_a_tenant_hears_which_requests_are_its_own(
    run: Run, router: CannedRouter, told_by: list[str], disabled: bool, said: str
) -> None:
    document = {"version": {"number": 4}, "told_by": told_by, "disabled": disabled}
    router.canned = 200, json.dumps(document).encode()
    assert said in run("tenants", "set", "acme", "tier=free", "--router", router.url).out
