"""The command line: what it accepts, what it says, and with which status it ends."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import pytest

from router.cli import main
from router.cli.common import spread
from router.config_reference import reference_yaml
from router.config_source import load_config
from router.release import BUILD
from router.tenant_settings import digest_of


class Ended:
    """How a command ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status = status
        self.out = out
        self.err = err


class Run:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(args)
        out, err = self._capsys.readouterr()
        return Ended(int(caught.value.code or 0), out, err)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--worker-urls", "a", "b", "--port", "1"],
         ["--worker-urls", "a", "--worker-urls", "b", "--port", "1"]),
        (["--worker-urls", "a", "--worker-urls", "b", "c"],
         ["--worker-urls", "a", "--worker-urls", "b", "--worker-urls", "c"]),
        (["--worker-urls=a", "b"], ["--worker-urls=a", "--worker-urls", "b"]),
        (["--port", "1", "x"], ["--port", "1", "x"]),
        (["--worker-urls", "--port", "1"], ["--worker-urls", "--port", "1"]),
        (["--port", "1", "--worker-urls"], ["--port", "1", "--worker-urls"]),
        ([], []),
    ],
)  # fmt: skip
def test_a_flag_of_several_values_is_repeated(args: list[str], expected: list[str]) -> None:
    assert spread(args) == expected


def test_no_command_shows_the_commands(run: Run) -> None:
    ended = run()
    for command in ("serve", "worker", "workers", "check-config", "demo"):
        assert command in ended.out + ended.err


@pytest.mark.parametrize(
    "args",
    [
        ("serve", "--nonsense"),
        ("serve", "--port", "many"),
        ("serve", "--worker-urls"),
        ("serve", "--port"),
        ("nonsense",),
        ("worker",),
        ("worker", "--simulated", "0"),
        ("worker", "--simulated", "1", "--agent-for", "http://h:1"),
        ("worker", "--simulated", "1", "--port", "70000"),
        ("worker", "--simulated", "3", "--port", "65534"),
        ("worker", "--simulated", "1", "--lanes", "x"),
        ("worker", "--simulated", "1", "--", "server"),
        ("worker", "--register", "http://h:1", "--"),
        ("worker", "--register", "h:1", "--", "server"),
        ("worker", "--nonsense", "--", "server"),
        ("demo", "--seconds", "0"),
        ("workers", "add"),
        ("workers", "list", "--admin-key", "schl\u00fcssel"),
        ("workers", "list", "--admin-key", ""),
        ("check-config",),
    ],
)
def test_wrong_use_is_a_message_and_status_2(run: Run, args: tuple[str, ...]) -> None:
    ended = run(*args)
    assert ended.status == 2
    assert ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("args", "path"),
    [
        (("--port", "70000"), "server.port"),
        (("--policy", "magic"), "policy.name"),
        (("--worker-urls", "ftp://x"), "workers.0.url"),
        (("--worker-urls", "http://a:1", "http://user@b:1"), "workers.1.url"),
        (("--log-level", "loud"), "server.log_level"),
        (("--config", "/nowhere/x.yaml"), "/nowhere/x.yaml"),
        (("--api-key", ""), "auth.api_keys.0"),
        (("--admin-key", "two words"), "auth.admin_keys.0"),
    ],
)
def test_serve_names_the_setting_that_is_wrong(run: Run, args: tuple[str, ...], path: str) -> None:
    ended = run("serve", *args)
    assert ended.status == 2
    assert f"  {path}: " in ended.err


def test_what_is_wrong_with_simulated_workers_is_said_in_two_lines(
    run: Run, tmp_path: Path
) -> None:
    ended = run("worker", "--simulated", "x")
    usage, message = ended.err.splitlines()
    assert usage == "usage: laneway worker [FLAGS]; --help shows them"
    assert message.endswith("argument --count/--simulated: 'x' is not a whole number")
    missing = str(tmp_path / "none.yaml")
    ended = run("worker", "--simulated", "1", "--profiles", missing)
    assert ended.err == f"error: {missing}: No such file or directory\n"


def test_the_version_is_shown(run: Run) -> None:
    assert run("--version").out == f"laneway {version('laneway')} ({BUILD})\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1"])
def test_serve_does_not_listen_beyond_this_machine_without_keys(run: Run, host: str) -> None:
    ended = run("serve", "--host", host, "--port", "0")
    assert ended.status == 2
    assert "auth.api_keys and auth.admin_keys are empty" in ended.err
    assert "auth.allow_open" in ended.err


def test_a_user_key_alone_does_not_open_the_address(run: Run) -> None:
    ended = run("serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "sk-1")
    assert ended.status == 2
    assert "auth.admin_keys is empty" in ended.err
    assert "sk-1" not in ended.err


def test_a_host_that_is_no_address_is_named(run: Run) -> None:
    ended = run("serve", "--host", "no.such.host.invalid", "--port", "0", "--api-key", "a",
                "--admin-key", "b")  # fmt: skip
    assert ended.status == 2
    assert "no.such.host.invalid" in ended.err


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("server: {host: 0.0.0.0}", "server.host: it is 0.0.0.0, so other machines could call"),
        ("server: {host: no.such.host.invalid}", "server.host: no address is known"),
        ("server: {host: ''}", "server.host: it is empty"),
        ("server: {tls: {cert_path: /none.pem, key_path: /none.key}}", "/none.pem"),
        ("workers: [{url: 'http://localhost:30000'}]", "workers.0.url: http://localhost:30000 is"),
    ],
)
def test_what_cannot_be_served_is_not_called_good(
    run: Run, tmp_path: Path, text: str, fault: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    for command in (("check-config", str(path)), ("serve", "--config", str(path))):
        ended = run(*command)
        assert ended.status == 2
        assert fault in ended.err
        assert ended.out == ""


def test_a_configuration_is_checked_with_settings_from_the_command_line(run: Run) -> None:
    assert "7 requests per lane" in run("check-config", "--set", "queue.depth_max=7").out
    assert run("check-config", "--set", "queue.depth_max=-7").status == 2


def test_the_defaults_are_printed_as_the_reference(run: Run) -> None:
    ended = run("check-config", "--defaults")
    assert (ended.status, ended.out) == (0, reference_yaml())


def test_a_good_configuration_is_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "auth: {api_keys: [sk-secret, b]}\n"
        "workers: [{url: 'http://[::1]:1', lanes: [long]}]\n"
        "server: {host: '::1'}\n"
    )
    ended = run("check-config", str(path))
    assert ended.status == 0
    assert "http://[::1]:30000" in ended.out
    assert "2 keys" in ended.out
    assert "[::1]:1  http://[::1]:1  long" in ended.out
    assert "sk-secret" not in ended.out


def test_tenants_and_limits_are_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "tenants:\n"
        "  acme: {tier: premium, limits: {cost_per_s: 12, concurrency: 8}}\n"
        "  gone: {disabled: true, models: [small]}\n"
        "limits: {tenant: {requests_per_minute: 60}, cluster: {cost_per_s: 100}}\n"
    )
    said = run("check-config", str(path)).out
    for words in (
        "tenant acme: no key; P0 unless claimed, up to P0; 60 requests a minute; "
        "12 cost units/s, one request up to 720; 8 requests at once",
        "tenant gone: disabled, all its requests are 403",
        "a cost unit is 1,000 prompt tokens or 500 output tokens",
        "class P1: 35 cost units/s guaranteed, 100 while the others leave it",
        "class P3: from what P2 has",
    ):
        assert words in said
    path.write_text("tenants: {acme: {}}\n")
    assert "limits      none" in run("check-config", str(path)).out


def test_a_bad_configuration_lists_every_fault_with_its_path(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: x}\nqueue: {depth_max: -1}\nnope: 1\n")
    ended = run("check-config", str(path))
    assert ended.status == 2
    for fault in ("server.port: ", "queue.depth_max: ", "nope: "):
        assert f"\n  {fault}" in ended.err


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


def test_a_new_key_is_shown_once_with_the_digest_that_the_configuration_holds(
    run: Run, tmp_path: Path
) -> None:
    made = run("keys", "new", "--tenant", "acme")
    assert made.status == 0
    key = next(line.split()[1] for line in made.out.splitlines() if line.startswith("key "))
    assert len(key) > 40
    lines = made.out.split("\n\n")[1]
    path = tmp_path / "laneway.yaml"
    path.write_text(lines)
    assert key not in lines
    assert load_config(path).tenants["acme"].keys == (digest_of(key),)
    assert run("keys", "new").out != made.out


def test_the_digest_of_a_known_key_comes_from_standard_input(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-old\n"))
    assert digest_of("sk-old") in run("keys", "digest").out
    for said, why in (
        ("", "no key came"),
        ("\n", "no key came"),
        ("sk-old\nsk-new\n", "more than one line"),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        ended = run("keys", "digest")
        assert (ended.status, ended.out) == (2, "")
        assert why in ended.err


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
    router.canned = 200, json.dumps({"version": {"number": 4}}).encode()
    done = run(
        "tenants", "set", "acme", "limits.concurrency=8", "tier=free", "--router", router.url
    )
    assert (done.status, done.out) == (0, "in force as version 4\n")
    assert json.loads(router.bodies[-1]) == {
        "tenants": {"acme": {"limits": {"concurrency": 8}, "tier": "free"}}
    }
    run("tenants", "remove", "acme", "--router", router.url)
    assert router.seen[-1][:2] == ("DELETE", "/tenants/acme")
