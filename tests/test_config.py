"""The configuration: its sources, its faults, and the shipped reference file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import BadConfig, Config
from router.config_reference import reference_yaml
from router.config_source import load_config
from router.contract import Lane

ROOT = Path(__file__).resolve().parent.parent


def faults_of(path: Path) -> list[str]:
    with pytest.raises(BadConfig) as caught:
        load_config(path)
    return caught.value.faults


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "laneway.yaml"
    path.write_text(text)
    return path


def test_the_shipped_reference_is_what_the_code_says() -> None:
    assert (ROOT / "configs/laneway.yaml").read_text() == reference_yaml()


def test_the_reference_loads_and_equals_no_file_at_all(tmp_path: Path) -> None:
    loaded = load_config(written(tmp_path, reference_yaml()))
    assert loaded.model_dump() == load_config().model_dump()


def test_the_example_entries_of_the_reference_load_when_uncommented(tmp_path: Path) -> None:
    lines = [line for line in reference_yaml().splitlines() if line.startswith("#   ")]
    starts = [
        i for i, line in enumerate(lines) if line.startswith(("#   - ", "#   acme", "#   my-"))
    ]
    text = ""
    for name, start, end in zip(
        ("workers", "tenants", "models"), starts, [*starts[1:], len(lines)], strict=True
    ):
        text += "\n".join([f"{name}:", *(line[2:] for line in lines[start:end])]) + "\n"
    config = load_config(written(tmp_path, text))
    assert config.tenants["acme"].degrade
    assert config.workers[0].worker_id == "10.0.0.7:30000"
    assert config.models["my-model"].bytes_per_token == 4.0


def test_every_setting_has_a_description() -> None:
    text = reference_yaml()
    settings = [line for line in text.splitlines() if line.startswith("  ") and ": " in line]
    assert [line for line in settings if "  # " not in line or line.endswith("# ")] == []


def test_the_demo_file_loads() -> None:
    load_config(ROOT / "configs/demo.yaml")


def test_environment_wins_over_the_file_and_flags_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "queue: {depth_max: 1, wait_s_max: 2}\nserver: {port: 3}")
    monkeypatch.setenv("LANEWAY_QUEUE__DEPTH_MAX", "10")
    monkeypatch.setenv("LANEWAY_SERVER__PORT", "30")
    config = load_config(path, {"server": {"port": 300}})
    assert (config.queue.depth_max, config.queue.wait_s_max) == (10, 2.0)
    assert config.server.port == 300


def test_every_fault_is_listed_under_its_path(tmp_path: Path) -> None:
    text = """
server: {port: 99999, hots: x}
queue: {depth_max: -1}
workers: [{url: "ftp://x"}, {url: "http://ok:1", lanes: [short, medium]}]
nonsense: 1
"""
    faults = faults_of(written(tmp_path, text))
    for path in (
        "server.port", "server.hots", "queue.depth_max", "workers.0.url", "workers.1.lanes",
        "nonsense",
    ):  # fmt: skip
        assert any(fault.startswith(path) for fault in faults), (path, faults)


@pytest.mark.parametrize(
    "text",
    ["a: [", "- 1\n- 2", "3", "\x00", "1: 2"],
    ids=["open bracket", "a list", "a number", "a control character", "a number as key"],
)
def test_what_is_no_mapping_in_yaml_is_one_clear_fault(tmp_path: Path, text: str) -> None:
    assert len(faults_of(written(tmp_path, text))) == 1


HEADERS = "LANEWAY_SERVER__REQUEST_ID_HEADERS"
LAUGHS = "\n".join(
    ["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))]
)
MERGED = "\n".join(
    [
        "a0: &a0 {k: 1}",
        *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)),
    ]
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: " + "[" * 5_000, "line 1: nested deeper than 32 levels"),
        ("a: " + "{a: " * 5_000, "line 1: nested deeper than 32 levels"),
        (LAUGHS, "aliases unfold to more than 500000 values"),
        (MERGED, "aliases unfold to more than 500000 values"),
        ("a: &a [*a]", "line 1: an alias holds itself"),
        ("a: &a {b: {c: *a}}", "line 1: an alias holds itself"),
        ("#" * (4 * 2**20 + 1), "longer than 4194304 characters"),
        ("a: 2024-99-99", "not YAML: month must be in 1..12"),
        ("a: !!python/object:x.y {}", "not YAML: could not determine a constructor"),
    ],
)
def test_yaml_is_read_within_bounds(tmp_path: Path, text: str, fault: str) -> None:
    faults = faults_of(written(tmp_path, text))
    assert len(faults) == 1
    assert fault in faults[0]


def test_a_key_that_stands_twice_is_named_with_its_path(tmp_path: Path) -> None:
    text = """
queue: {depth_max: 1}
workers:
  - {url: "http://a:1", "url": "http://b:1"}
queue: {wait_s_max: 2, wait_s_max: 3}
"""
    path = written(tmp_path, text)
    assert faults_of(path) == [
        f"{path}: workers.0.url: given twice, in lines 4 and 4",
        f"{path}: queue: given twice, in lines 2 and 5",
        f"{path}: queue.wait_s_max: given twice, in lines 5 and 5",
    ]


def test_anchors_and_merges_of_a_sensible_size_are_fine(tmp_path: Path) -> None:
    text = """
workers:
  - &first {url: "http://a:1", lanes: [long], cost: 2}
  - {<<: *first, url: "http://b:1"}
"""
    config = load_config(written(tmp_path, text))
    assert [(worker.url, worker.cost) for worker in config.workers] == [
        ("http://a:1", 2.0),
        ("http://b:1", 2.0),
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.yaml: No such file" in faults_of(tmp_path / "none.yaml")[0]


def test_what_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """Its writer may never come."""
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        assert faults_of(path) == [f"{path}: it is not a regular file"]
    assert faults_of(tmp_path) == [f"{tmp_path}: Is a directory"]


@pytest.mark.parametrize(
    "settings",
    ["server: {{tls: {{cert_path: {0}, key_path: {0}}}}}", "upstream: {{ca_path: {0}}}"],
)
def test_a_certificate_that_is_a_pipe_is_refused_at_once(tmp_path: Path, settings: str) -> None:
    pipe = tmp_path / "pipe.pem"
    os.mkfifo(pipe)
    assert f"{pipe} is no file" in faults_of(written(tmp_path, settings.format(pipe)))[0]


@pytest.mark.parametrize("value", ["-1", '"ten"', "1.5", "null"])
def test_a_limit_that_is_no_count_is_refused_by_name(tmp_path: Path, value: str) -> None:
    faults = faults_of(written(tmp_path, f"queue: {{depth_max: {value}}}"))
    assert faults[0].startswith("queue.depth_max: ")


def test_zero_and_unset_differ(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "queue: {depth_max: 0}")).queue.depth_max == 0
    assert load_config().queue.depth_max == 1_000


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("server: {bodies_bytes_max: 2048}", "server: bodies_bytes_max is less than"),
        ("workers: [{url: 'http://a:1'}, {url: 'http://a:1/'}]", "appears twice"),
        ("models: {a: {aliases: [b]}, b: {}}", "appears twice"),
        ("models: {a: {kv: {layers: 32, kv_heads: 8}}}", "models.a.kv.head_dim: is required"),
        ("models: {a: {kv: {layers: 0, kv_heads: 8, head_dim: 128}}}", "models.a.kv.layers"),
        ("headroom: {kv_margin_mb: -1}", "headroom.kv_margin_mb"),
        ("server: {tls: {cert_path: x}}", "server.tls"),
        ("server: {tls: {key_path: x}}", "server.tls"),
        ("server: {tls: {client_ca_path: x}}", "server.tls"),
        ("upstream: {cert_path: x}", "upstream"),
        ("upstream: {key_path: x}", "upstream"),
        ("auth: {api_keys: [same], admin_keys: [same]}", "auth"),
        ("auth: {api_keys: ['']}", "auth.api_keys.0"),
        ("auth: {admin_keys: [a, ' ']}", "auth.admin_keys.1"),
        ("auth: {api_keys: ['kay with blanks']}", "auth.api_keys.0"),
        ("auth: {api_keys: ['schl\u00fcssel']}", "auth.api_keys.0"),
        ("workers: [{url: 'http://a:1'}, {url: 'http://a:1', id: b}]", "http://a:1 appears twice"),
        ("server: {port: true}", "server.port: must be a number"),
        ("upstream: {idle_s: false}", "upstream.idle_s: must be a number"),
        ("policy: {seed: true}", "policy.seed: must be a number"),
        ("workers: [{url: 'http://a:1', priority: true}]", "workers.0.priority: must be a number"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, text: str, path: str
) -> None:
    assert any(path in fault for fault in faults_of(written(tmp_path, text)))


DATA = Path(__file__).parent / "e2e" / "data"
CERT, KEY = DATA / "tls_cert.pem", DATA / "tls_key.pem"


@pytest.mark.parametrize(
    "settings",
    [
        {"server": {"tls": {"cert_path": CERT, "key_path": KEY, "client_ca_path": CERT}}},
        {"upstream": {"ca_path": CERT, "cert_path": CERT, "key_path": KEY}},
    ],
)
def test_certificates_that_can_be_used_are_accepted(settings: dict[str, Any]) -> None:
    load_config(overrides=settings)


@pytest.mark.parametrize("bad", [Path("none.pem"), Path(__file__)], ids=["missing", "no PEM"])
@pytest.mark.parametrize(
    ("path", "settings"),
    [
        ("upstream.ca_path", lambda bad: {"upstream": {"ca_path": bad}}),
        ("upstream", lambda bad: {"upstream": {"cert_path": CERT, "key_path": bad}}),
        ("server.tls", lambda bad: {"server": {"tls": {"cert_path": bad, "key_path": KEY}}}),
        (
            "server.tls.client_ca_path",
            lambda bad: {
                "server": {"tls": {"cert_path": CERT, "key_path": KEY, "client_ca_path": bad}}
            },
        ),
    ],
)
def test_certificates_that_cannot_be_used_are_found_when_the_configuration_is_read(
    path: str, settings: Callable[[Path], dict[str, Any]], bad: Path
) -> None:
    with pytest.raises(BadConfig) as caught:
        load_config(overrides=settings(bad))
    (fault,) = caught.value.faults
    assert fault.startswith(f"{path}: ")


def test_a_fault_never_repeats_a_key(tmp_path: Path) -> None:
    faults = faults_of(written(tmp_path, "auth: {api_keys: [sk-secret], admin_keys: [sk-secret]}"))
    assert "sk-secret" not in str(faults)
    assert "sk-secret" not in repr(load_config(overrides={"auth": {"api_keys": ["sk-secret"]}}))


def test_left_out_a_worker_serves_both_lanes() -> None:
    config = Config(workers=({"url": "http://h:1"},))
    assert config.workers[0].lanes == {Lane.SHORT, Lane.LONG}


def test_every_repetition_is_named(tmp_path: Path) -> None:
    text = "workers: [{url: 'http://a:1'}, {url: 'http://b:1'}, {url: 'http://a:1'}, {url: 'http://b:1'}]\n"
    (fault,) = faults_of(written(tmp_path, text + "models: {a: {aliases: [b, c]}, b: {}, c: {}}"))
    for name in ("the id a:1", "the id b:1", "http://a:1", "the name 'b'", "the name 'c'"):
        assert f"{name} appears twice" in fault


def test_true_and_numbers_are_told_apart_but_true_is_true(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "lanes: {spill: false}\nserver: {log_level: WARNING}"))
    assert config.lanes.spill is False
    assert config.server.log_level == "warning"


@pytest.mark.parametrize(
    ("variable", "text", "path", "value"),
    [
        (
            "LANEWAY_SERVER__REQUEST_ID_HEADERS",
            "a, b",
            ("server", "request_id_headers"),
            ("a", "b"),
        ),
        (HEADERS, '["a"]', ("server", "request_id_headers"), ("a",)),
        (HEADERS, "", ("server", "request_id_headers"), ()),
        (
            "LANEWAY_SERVER__CORS_ALLOWED_ORIGINS",
            "123",
            ("server", "cors_allowed_origins"),
            ("123",),
        ),
        ("LANEWAY_LANES__SPILL", "no", ("lanes", "spill"), False),
        ("LANEWAY_SERVER", '{"port": 7}', ("server", "port"), 7),
        ("laneway_server__port", "7", ("server", "port"), 7),
        ("LANEWAY_SERVER__TLS__CLIENT_CA_PATH", "x", (), "server.tls: client_ca_path needs"),
        ("LANEWAY_SERVER", "[]", (), "LANEWAY_SERVER: wanted is a JSON object"),
        ("LANEWAY_MODELS", "{", (), "LANEWAY_MODELS: wanted is a JSON object"),
        ("LANEWAY_MODELS", "[" * 100_000, (), "LANEWAY_MODELS: wanted is a JSON object"),
        (
            "LANEWAY_AUTH__API_KEYS",
            "[sk-secret]",
            (),
            "LANEWAY_AUTH__API_KEYS: wanted is a JSON list",
        ),
        ("LANEWAY_QEUE__DEPTH_MAX", "1", (), "is LANEWAY_QUEUE__DEPTH_MAX meant?"),
        ("LANEWAY_PORT", "1", (), "is LANEWAY_SERVER__PORT meant?"),
        ("LANEWAY_NONSENSE", "1", (), "LANEWAY_NONSENSE: no setting has this name"),
        ("LANEWAY_QUEUE__DEPHT_MAX", "1", (), "queue.depht_max: "),
        ("LANEWAY_QUEUE__DEPTH_MAX__X", "1", (), "queue.depth_max: "),
    ],
)
def test_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, path: tuple[str, ...], value: object
) -> None:
    monkeypatch.setenv(variable, text)
    if not path:
        with pytest.raises(BadConfig, match=re.escape(str(value))) as caught:
            load_config()
        assert "sk-secret" not in str(caught.value)
        return
    setting: object = load_config()
    for name in path:
        setting = getattr(setting, name)
    assert setting == value


def test_workers_come_from_the_environment_as_urls_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANEWAY_WORKERS", "http://a:1,http://b:1/")
    assert [worker.url for worker in load_config().workers] == ["http://a:1", "http://b:1"]
    monkeypatch.setenv("LANEWAY_WORKERS", '[{"url": "http://a:1", "cost": 2}]')
    assert load_config().workers[0].cost == 2


def test_variables_of_others_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "LANEWAY_ADMIN_KEY": "k",
        "LANEWAY_LOAD_SCENARIO": "x",
        "LANEWAY_SERVICE_HOST": "10.0.0.1",
        "LANEWAY_SERVICE_PORT_HTTP": "80",
        "LANEWAY_PORT": "tcp://10.0.0.1:80",
        "LANEWAY_PORT_80_TCP": "tcp://10.0.0.1:80",
        "LANEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
        "LANEWAY_METRICS_PORT": "tcp://10.0.0.1:80",
        "LANEWAY_METRICS_SERVICE_PORT": "80",
    }.items():
        monkeypatch.setenv(name, text)
    load_config()


def test_the_environment_s_faults_stand_beside_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANEWAY_QEUE__DEPTH_MAX", "1")
    faults = faults_of(written(tmp_path, "server: {port: x}"))
    assert [fault.partition(":")[0] for fault in faults] == [
        "LANEWAY_QEUE__DEPTH_MAX",
        "server.port",
    ]


def test_faults_are_said_without_the_terms_of_python(tmp_path: Path) -> None:
    text = """
server: {request_id_headers: 3, tls: 5, port: 1.5, log_level: loud, body_bytes_max: 1, host: 3}
workers: [{url: "http://a:1", lanes: short, worker_type: x, id: "b c", models: m}, 5, {}]
models: 3
policy: {name: magic, seed: x, weight_queue: 2, slow_start_s: .nan}
auth: {api_keys: abc, allow_open: maybe}
upstream: {ca_path: 3, idle_s: 0}
queue: 3
nope: 1
"""
    faults = dict(fault.split(": ", 1) for fault in faults_of(written(tmp_path, text)))
    assert faults["nope"] == "there is no such setting"
    assert faults["queue"] == faults["server.tls"] == faults["workers.1"] == "must be a mapping"
    assert faults["workers.0.lanes"] == faults["auth.api_keys"] == "must be a list"
    assert faults["workers.0.worker_type"] == "must be 'regular', 'prefill' or 'decode'"
    assert faults["workers.2.url"] == "is required"
    assert faults["upstream.idle_s"] == "must be above 0.0"
    told = "; ".join(faults.values()).lower()
    for term in (
        "tuple",
        "frozenset",
        "dict",
        "instance",
        "input",
        "pattern",
        "class",
        "str",
        "int",
    ):
        assert term not in told.replace("round_robin", ""), (term, told)


@pytest.mark.parametrize(
    ("kv", "bytes_per_token"),
    [
        ("{layers: 32, kv_heads: 8, head_dim: 128}", 131_072),  # Llama 3.1 8B
        ("{layers: 32, kv_heads: 8, head_dim: 128, value_bytes: 1}", 65_536),
        ("{layers: 61, kv_heads: 1, head_dim: 288}", 70_272),  # DeepSeek V3: 512 + 64 numbers
    ],
)
def test_the_size_of_a_token_is_known_by_every_name_of_a_model(
    tmp_path: Path, kv: str, bytes_per_token: float
) -> None:
    models = f"models: {{a: {{aliases: [b], kv: {kv}}}, c: {{}}}}"
    config = load_config(written(tmp_path, models))
    assert config.kv_bytes_per_token == {"a": bytes_per_token, "b": bytes_per_token}
