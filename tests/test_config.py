"""The configuration: its sources, its faults, and the shipped reference file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.config import BadConfig, Config, load_config
from router.config_reference import reference_yaml
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
        i for i, line in enumerate(lines) if line.startswith(("#   - ", "#   key-", "#   my-"))
    ]
    text = ""
    for name, start, end in zip(
        ("workers", "tenants", "models"), starts, [*starts[1:], len(lines)], strict=True
    ):
        text += "\n".join([f"{name}:", *(line[2:] for line in lines[start:end])]) + "\n"
    config = load_config(written(tmp_path, text))
    assert config.tenants["key-0123abcd"].degrade
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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.yaml: No such file" in faults_of(tmp_path / "none.yaml")[0]


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
        ("server: {tls: {cert_path: x}}", "server.tls"),
        ("server: {tls: {key_path: x}}", "server.tls"),
        ("server: {tls: {client_ca_path: x}}", "server.tls"),
        ("upstream: {cert_path: x}", "upstream"),
        ("upstream: {key_path: x}", "upstream"),
        ("auth: {api_keys: [same], admin_keys: [same]}", "auth"),
        ("auth: {api_keys: ['']}", "auth"),
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
