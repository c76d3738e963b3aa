"""The command line: what it accepts, what it says, and with which status it ends."""

from __future__ import annotations

import io
from importlib.metadata import version
from pathlib import Path

import pytest

from router.cli.common import spread
from router.config_reference import reference_yaml
from router.config_source import load_config
from router.release import BUILD
from router.tenant_settings import digest_of
from tests.cli_run import Run, run

__all__ = ["run"]  # a fixture


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
        ("worker", "--simulated", "1", "--lanes", "short+long"),
        ("worker", "--simulated", "1", "--admin-key", "two words"),
        ("worker", "--simulated", "1", "--api-key", "two words"),
        ("worker", "--lanes", "x", "--", "server"),
        ("worker", "--admin-key", "two words", "--", "server"),
        ("worker", "--simulated", "1", "--", "server"),
        ("worker", "--register", "http://h:1", "--"),
        ("worker", "--register", "h:1", "--", "server"),
        ("worker", "--nonsense", "--", "server"),
        ("demo", "--seconds", "0"),
        ("workers", "add"),
        ("workers", "add", "http://h:1", "--lanes", "x"),
        ("workers", "update", "w", "--lanes", "x"),
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


def test_the_flags_of_simulated_workers_are_shown_without_their_number(run: Run) -> None:
    for args in (("--simulated", "--help"), ("--simulated", "2", "--help")):
        ended = run("worker", *args)
        assert ended.status == 0
        assert "--profiles" in ended.out


def test_what_is_wrong_with_simulated_workers_is_said_in_two_lines(
    run: Run, tmp_path: Path
) -> None:
    ended = run("worker", "--simulated", "x")
    usage, message = ended.err.splitlines()
    assert usage == "usage: laneway worker [FLAGS]; --help shows them"
    assert message.endswith("argument --simulated: 'x' is not a whole number")
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
    said = run("check-config", "--set", "queue.depth_max=7").out
    assert "7 requests per lane, 30 s each (late P0 2.4 s, P1 4 s, P2 10 s), then 429" in said
    said = run("check-config", "--set", "queue.wait_s_max=3").out
    assert "3 s each (late P0 2.4 s), then" in said
    never = run("check-config", "--set", "queue.give_up_after_targets=0").out
    assert "30 s each, then 429" in never
    assert run("check-config", "--set", "queue.depth_max=-7").status == 2
    said = run("check-config", "--set", "headroom.kv_margin_mb=64").out
    assert "at most 92% of a worker's pool; 64 MiB stay free" in said
    said = run("check-config", "--set", "headroom.kv_margin_mb=0").out
    assert "at most 92% of a worker's pool\n" in said


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
        "limits: {tenant: {requests_per_minute: 60}, cluster: {cost_per_s: 100},\n"
        "  classes: {p2: {concurrency: 9, cost_per_s: 30}}}\n"
    )
    said = run("check-config", str(path)).out
    for words in (
        "tenant acme: no key; P0 unless claimed, up to P0; 60 requests a minute; "
        "12 cost units/s, one request up to 720; 8 requests at once",
        "tenant gone: disabled, all its requests are 403",
        "a cost unit is 1,000 prompt tokens or 500 output tokens",
        "class P1: 35 cost units/s guaranteed, 100 while the others leave it",
        "class P3: from what P2 has",
        "class P2 at most: 30 cost units/s, one request up to 1800; 9 requests at once",
        "class P2: 5 cost units/s guaranteed, 30 while the others leave it",
    ):
        assert words in said
    assert "Redis is away" not in said
    path.write_text("tenants: {acme: {}}\n")
    assert "limits      none" in run("check-config", str(path)).out


def test_what_tenants_get_above_their_guarantee_is_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    acme = "tenants: {acme: {limits: {cost_per_s: 12, cost_ceiling_per_s: 60}}}\n"
    path.write_text(acme)
    said = run("check-config", str(path)).out
    assert (
        "12 cost units/s guaranteed, up to 60 while the cluster has room, one request up to 720"
    ) in said
    room = (
        "  the cluster has room while saturation is below 0.8 and half is left of what a request "
        "shares with others"
    )
    assert f"{room}\n" in said
    path.write_text(acme + "limits: {cluster: {cost_per_s: 100}}\n")
    assert f"{room}, or all of it\n" in run("check-config", str(path)).out


GUARANTEED = """\
tenants:
  acme: {tier: premium, limits: {cost_per_s: 50, cost_ceiling_per_s: 90}}
  beta: {limits: {cost_per_s: 35, cost_ceiling_per_s: 90}}
  gone: {disabled: true, limits: {cost_per_s: 70, cost_ceiling_per_s: 90}}
  idle: {tier: offline, limits: {cost_per_s: 5, cost_ceiling_per_s: 9}}
  only: {limits: {cost_per_s: 80}}
"""


@pytest.mark.parametrize(
    ("cluster", "warning"),
    [
        ("{}", None),
        ("{cost_per_s: 100}", None),
        (
            "{cost_per_s: 89}",
            "limits.cluster.cost_per_s: it is 89, and tenants are guaranteed 90 together "
            "(cost_per_s, where there is a cost_ceiling_per_s): not all can have theirs",
        ),
        (
            "{cost_per_s: 100, shares: {p0: 0.4, p1: 0.35, p2: 0.05}}",
            "limits.cluster.shares: of cost_per_s P0 has 40 and its tenants are guaranteed 50: "
            "they get the rest only when other classes leave it",
        ),
        (
            "{cost_per_s: 100, shares: {p1: 0.2, p2: 0.04, borrow: false}}",
            "limits.cluster.shares: of cost_per_s P1 has 20 and its tenants are guaranteed 35, "
            "P2 has 4 and its tenants are guaranteed 5: they never get the rest",
        ),
    ],
)
def test_guarantees_above_what_there_is_are_warned_of(
    run: Run, tmp_path: Path, cluster: str, warning: str | None
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{GUARANTEED}limits: {{cluster: {cluster}}}\n")
    ended = run("check-config", str(path))
    said = [line[12:] for line in ended.out.splitlines() if line.startswith("warning     limits")]
    assert (ended.status, said) == (0, [] if warning is None else [warning])


def test_what_all_tenants_are_guaranteed_counts_for_each_that_may_call(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    text = "limits: {tenant: {cost_per_s: 6, cost_ceiling_per_s: 9}, cluster: {cost_per_s: 10}}\n"
    path.write_text(text)  # all callers are one tenant
    assert "limits.cluster.cost_per_s" not in run("check-config", str(path)).out
    path.write_text(f"{text}auth: {{api_keys: [sk-1, sk-2]}}\n")
    assert "tenants are guaranteed 12 together" in run("check-config", str(path)).out


def test_what_holds_while_redis_is_away_is_explained(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "redis: {mode: embedded}\n"
        "limits: {tenant: {concurrency: 2}, away: {p2: open, p3: closed}}\n"
    )
    assert (
        "while Redis is away: P0, P1 by each router's part of these limits; P2 without limits; "
        "P3 503\n"
    ) in run("check-config", str(path)).out


def test_a_bad_configuration_lists_every_fault_with_its_path(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: x}\nqueue: {depth_max: -1}\nnope: 1\n")
    ended = run("check-config", str(path))
    assert ended.status == 2
    for fault in ("server.port: ", "queue.depth_max: ", "nope: "):
        assert f"\n  {fault}" in ended.err


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
