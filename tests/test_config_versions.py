"""What is shown of a configuration and of its changes, and what tells two apart."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.config import Config
from router.config_versions import (
    FIXED,
    as_running,
    changes_between,
    digest_of,
    fixed_changes,
    shown,
)


def config(**settings: Any) -> Config:
    return Config.model_validate(settings)


def lines(old: Config, new: Config) -> list[str]:
    return [str(change) for change in changes_between(old, new)]


def test_a_change_is_told_by_the_path_of_its_setting() -> None:
    old = config(queue={"depth_max": 10}, tenants={"a": {"weight": 2}, "b": {"degrade": False}})
    new = config(queue={"depth_max": 20}, tenants={"a": {"weight": 3}}, lanes={"spill": False})
    assert lines(old, new) == [
        "lanes.spill: true -> false",
        "queue.depth_max: 10 -> 20",
        "tenants.a.weight: 2.0 -> 3.0",
        'tenants.b: {"degrade":false} -> nothing',
    ]
    assert changes_between(new, new) == ()


def test_workers_are_told_apart_by_their_ids() -> None:
    first, second = {"url": "http://a:1", "priority": 1}, {"url": "http://b:1"}
    old, new = config(workers=[first, second]), config(workers=[{"url": "http://a:1"}])
    changes = {change.path: change for change in changes_between(old, new)}
    assert str(changes["workers.a:1.priority"]) == "workers.a:1.priority: 1 -> 0"
    assert changes["workers.b:1"].as_json() == {
        "path": "workers.b:1", "old": {"url": "http://b:1"},
    }  # fmt: skip
    assert len(changes) == 2


def test_no_secret_is_ever_shown() -> None:
    old = config(
        auth={"api_keys": ["sk-first"], "admin_keys": ["sk-admin"]},
        workers=[{"url": "http://a:1", "api_key": "sk-worker"}],
    )
    new = config(
        auth={"api_keys": ["sk-first", "sk-second"], "admin_keys": ["sk-admin"]},
        workers=[{"url": "http://a:1", "api_key": "sk-other"}],
    )
    text = orjson.dumps([shown(old), shown(new)]).decode() + str(lines(old, new))
    for secret in ("sk-first", "sk-second", "sk-admin", "sk-worker", "sk-other"):
        assert secret not in text
    changes = {change.path: change for change in changes_between(old, new)}
    assert set(changes) == {"auth.api_keys", "workers.a:1.api_key"}
    assert [len(changes["auth.api_keys"].old), len(changes["auth.api_keys"].new)] == [1, 2]
    assert changes["auth.api_keys"].old[0] == changes["auth.api_keys"].new[0]


def test_a_password_in_an_address_is_hidden() -> None:
    assert shown("redis://user:secret@host:6379/0") == "redis://**********@host:6379/0"
    assert shown("http://10.0.0.7:30000/a@b") == "http://10.0.0.7:30000/a@b"


def test_the_digest_is_that_of_the_settings_and_their_secrets() -> None:
    assert digest_of(config()) == digest_of(config(queue={"depth_max": 1_000}))
    assert digest_of(config()) != digest_of(config(queue={"depth_max": 1_001}))
    keys = [config(auth={"api_keys": [key]}) for key in ("a", "b")]
    assert digest_of(keys[0]) != digest_of(keys[1])
    workers = [config(workers=[{"url": "http://a:1", "api_key": key}]) for key in ("a", "b")]
    assert digest_of(workers[0]) != digest_of(workers[1])


@pytest.mark.parametrize("path", FIXED)
def test_every_fixed_setting_exists(path: str) -> None:
    setting: object = config()
    for name in path.split("."):
        setting = getattr(setting, name)


def test_fixed_settings_stay_as_they_run() -> None:
    running = config(server={"port": 1}, queue={"depth_max": 1})
    wanted = config(server={"port": 2, "body_timeout_s": 9}, queue={"depth_max": 2})
    taken = as_running(wanted, running)
    assert (taken.server.port, taken.server.body_timeout_s, taken.queue.depth_max) == (1, 9, 2)
    assert [str(change) for change in fixed_changes(changes_between(taken, wanted))] == [
        "server.port: 1 -> 2"
    ]
