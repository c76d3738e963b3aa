"""The configuration in force: all or nothing, the last word on each setting, the way back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.config import BadConfig, Config
from router.config_overlay import patched
from router.config_source import ConfigSource, Loaded, validated
from router.config_versions import ConfigVersion, digest_of
from router.runtime.live_config import Author, LastKey, LiveConfig, NoSuchVersion
from router.tenant_settings import digest_of as digest_of_key

ADMIN = Author("api", "admin key-0123abcd")
FILE = Author("file", "laneway.yaml")


def live_of(document: dict[str, Any], **options: Any) -> LiveConfig:
    loaded = Loaded(validated(document), document, ConfigSource(environment={}))
    return LiveConfig(loaded, clock=lambda: 7.0, **options)


class Holder:
    """Takes every configuration over, or refuses one."""

    def __init__(self, *, refuses_depth: int | None = None) -> None:
        self.seen: list[int] = []
        self.refuses_depth = refuses_depth

    def on_config(self, config: Config) -> None:
        if config.queue.depth_max == self.refuses_depth:
            raise RuntimeError("cannot")
        self.seen.append(config.queue.depth_max)


def test_a_patch_is_in_force_at_once_and_its_version_is_told() -> None:
    live, holder = live_of({"queue": {"depth_max": 5}}), Holder()
    heard: list[ConfigVersion] = []
    live.on_config.append(holder.on_config)
    live.on_version.append(heard.append)
    proposal = live.patch({"queue": {"depth_max": 9}}, ADMIN)
    assert [str(change) for change in proposal.changes] == ["queue.depth_max: 5 -> 9"]
    assert (holder.seen, live.config.queue.depth_max) == ([9], 9)
    assert heard == [live.version]
    assert (live.version.number, live.version.who) == (2, "admin key-0123abcd")
    assert live.version.as_json()["at"] == "1970-01-01T00:00:07.000+00:00"
    assert live.overlay == {"queue": {"depth_max": 9}}
    assert live.counts == {("api", "applied"): 1}


def test_a_dry_run_says_what_would_change_and_changes_nothing() -> None:
    live, holder = live_of({}), Holder()
    live.on_config.append(holder.on_config)
    proposal = live.patch({"queue": {"depth_max": 9}}, ADMIN, dry_run=True)
    assert [change.path for change in proposal.changes] == ["queue.depth_max"]
    assert (holder.seen, live.version.number, live.overlay) == ([], 1, {})


def test_a_patch_that_says_what_is_in_force_makes_no_version() -> None:
    live = live_of({"queue": {"depth_max": 5}})
    assert live.patch({"queue": {"depth_max": 5}, "tenants": {"gone": None}}, ADMIN).changes == ()
    assert live.version.number == 1
    assert "gone" not in str(live.overlay), "words without effect would pile up"
    assert live.counts == {("api", "unchanged"): 1}


def test_null_brings_the_default_back_and_takes_an_entry_away() -> None:
    live = live_of({"queue": {"depth_max": 5}, "tenants": {"a": {"weight": 2}}})
    live.patch({"queue": {"depth_max": None}, "tenants": {"a": None, "b": {}}}, ADMIN)
    assert live.config.queue.depth_max == 1_000
    assert list(live.config.tenants) == ["b"]


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"queue": {"depth_max": -1}}, "queue.depth_max"),
        ({"queue": {"no_such": 1}}, "queue.no_such"),
        ({"nothing": {}}, "nothing"),
        ({"queue": []}, "queue"),
        ({"classes": {"p0": {"share_min": 0.9}}}, "classes"),
        ({"auth": {"api_keys": ["**********"]}}, "auth.api_keys.0"),
        ({"server": {"port": 1}}, "server.port"),
        ({"server": {"tls": {"cert_path": "/none", "key_path": "/none"}}}, "server.tls"),
        ({"policy": {"seed": 3}}, "policy.seed"),
    ],
)
def test_a_bad_patch_is_refused_whole_with_the_path(patch: dict[str, Any], path: str) -> None:
    live, holder = live_of({}), Holder()
    live.on_config.append(holder.on_config)
    with pytest.raises(BadConfig) as caught:
        live.patch({**patch, "lanes": {"spill": False}}, ADMIN)
    assert caught.value.faults[0].startswith(path), caught.value.faults
    assert (holder.seen, live.version.number, live.config.lanes.spill) == ([], 1, True)
    assert live.counts == {("api", "refused"): 1}


@pytest.mark.parametrize(
    ("value", "taken"),
    [(0, 0), (-1, None), ("10", 10), (1e3, 1000), (1.5, None), (True, None), (None, 1000)],
)
def test_a_limit_means_what_its_words_say(value: Any, taken: int | None) -> None:
    """Field case CF03: 0, -1, null and unset are told apart."""
    live = live_of({"queue": {"depth_max": 7}})
    if taken is None:
        with pytest.raises(BadConfig, match=r"queue\.depth_max"):
            live.patch({"queue": {"depth_max": value}}, ADMIN)
        taken = 7
    else:
        live.patch({"queue": {"depth_max": value}}, ADMIN)
    assert live.config.queue.depth_max == taken


def test_what_cannot_be_used_here_is_refused() -> None:
    live = live_of({}, check=lambda c: ["auth: closed"] if c.auth.api_keys else [])
    with pytest.raises(BadConfig, match="auth: closed"):
        live.patch({"auth": {"api_keys": ["k"]}}, ADMIN)


def test_if_one_holder_fails_all_keep_what_they_had() -> None:
    live, first, second = live_of({"queue": {"depth_max": 5}}), Holder(), Holder(refuses_depth=9)
    live.on_config += [first.on_config, second.on_config]
    with pytest.raises(BadConfig, match="failed to take it over"):
        live.patch({"queue": {"depth_max": 9}}, ADMIN)
    assert (first.seen, second.seen) == ([9, 5], [5])
    assert (live.config.queue.depth_max, live.version.number) == (5, 1)
    live.patch({"queue": {"depth_max": 8}}, ADMIN)
    assert (first.seen[-1], second.seen[-1]) == (8, 8)


def test_a_holder_that_cannot_go_back_does_not_keep_the_others_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    live, first, last = live_of({"queue": {"depth_max": 5}}), Holder(), Holder(refuses_depth=9)
    broken = Holder(refuses_depth=5)
    live.on_config += [first.on_config, broken.on_config, last.on_config]
    with pytest.raises(BadConfig, match="failed to take it over"):
        live.patch({"queue": {"depth_max": 9}}, ADMIN)
    assert (first.seen, last.seen) == ([9, 5], [5])
    assert "a holder failed to go back to version 1" in caplog.text
    assert live.counts == {("api", "refused"): 1}


# The last key.


def test_no_request_of_an_admin_takes_the_last_key_away() -> None:
    live = live_of({"auth": {"admin_keys": ["sk-admin"]}})
    live.patch({"auth": {"api_keys": ["sk-user"]}}, ADMIN)
    ways: list[Callable[[], object]] = [
        lambda: live.patch({"auth": {"api_keys": None}}, ADMIN),
        lambda: live.patch({"auth": {"api_keys": []}}, ADMIN, dry_run=True),
        lambda: live.apply({}, ADMIN),
        lambda: live.rollback(1, ADMIN),
        lambda: live.rollback(1, ADMIN, dry_run=True),
    ]
    for way in ways:
        with pytest.raises(LastKey):
            way()
        assert (live.config.has_user_keys, live.version.number) == (True, 2)
    assert live.counts["api", "refused"] == len(ways)
    moved = {"auth": {"api_keys": None}, "tenants": {"acme": {"keys": [digest_of_key("lw-a")]}}}
    live.patch(moved, ADMIN)
    assert live.config.has_user_keys
    live.apply({}, Author("cluster", "another router"))
    assert not live.config.has_user_keys, "there it was asked already, over its own file"


# The file and patches.


def test_the_last_word_on_each_setting_counts() -> None:
    live = live_of({"queue": {"depth_max": 5}})
    live.patch({"queue": {"depth_max": 9, "wait_s_max": 3}}, ADMIN)
    live.take({"queue": {"depth_max": 5}, "lanes": {"spill": False}}, FILE)
    assert (live.config.queue.depth_max, live.config.lanes.spill) == (9, False)
    live.take({"queue": {"depth_max": 6}}, FILE)
    assert (live.config.queue.depth_max, live.config.queue.wait_s_max) == (6, 3)
    assert live.overlay == {"queue": {"wait_s_max": 3}}
    live.apply({}, ADMIN)
    assert live.config.queue.wait_s_max == 30


def test_a_removed_tenant_is_not_back_because_the_file_changes_it() -> None:
    def file(**acme: Any) -> dict[str, Any]:
        return {"tenants": {"acme": {"degrade": False, **acme}, "other": {}}}

    live = live_of(file())
    live.patch({"tenants": {"acme": None}}, ADMIN)
    live.take(file(weight=2), FILE)
    live.take(file(weight=3, tier="premium"), FILE)
    assert (list(live.config.tenants), live.overlay) == (["other"], {"tenants": {"acme": None}})
    live.take({"tenants": {"other": {}}}, FILE)
    assert live.overlay == {}
    live.take(file(weight=4), FILE)  # a new one of this name
    assert live.config.tenants["acme"].weight == 4


async def test_a_file_is_validated_aside_and_a_patch_meanwhile_is_kept() -> None:
    checked_in: list[int] = []

    def check(config: Config) -> list[str]:
        checked_in.append(threading.get_ident())
        return ["lanes: cannot"] if not config.lanes.spill else []

    live = live_of({}, check=check)
    await live.take_aside({"queue": {"depth_max": 5}}, FILE)
    assert threading.get_ident() not in checked_in
    taking = asyncio.ensure_future(live.take_aside({"queue": {"depth_max": 6}}, FILE))
    await asyncio.sleep(0)
    live.patch({"queue": {"wait_s_max": 3}}, ADMIN)
    await taking
    assert (live.config.queue.depth_max, live.config.queue.wait_s_max) == (6, 3)
    assert live.overlay == {"queue": {"wait_s_max": 3}}
    with pytest.raises(BadConfig, match="lanes: cannot"):
        await live.take_aside({"lanes": {"spill": False}}, FILE)
    assert live.counts == {("file", "applied"): 2, ("api", "applied"): 1, ("file", "refused"): 1}
    assert live.version.digest == digest_of(live.config)


async def test_what_is_refused_aside_is_judged_again_by_what_came_meanwhile() -> None:
    """A patch that was bad beside the former settings may be good beside those of now."""
    begun, goes_on = threading.Event(), threading.Event()

    def check(config: Config) -> list[str]:
        if config.queue.depth_max == 9 and not begun.is_set():
            begun.set()
            goes_on.wait(10)
        return ["too long"] if config.queue.depth_max == 9 and config.lanes.spill else []

    live = live_of({}, check=check)
    patching = asyncio.ensure_future(live.patch_aside({"queue": {"depth_max": 9}}, ADMIN))
    await asyncio.to_thread(begun.wait, 10)
    live.patch({"lanes": {"spill": False}}, ADMIN)
    goes_on.set()
    await patching
    assert (live.config.queue.depth_max, live.config.lanes.spill) == (9, False)
    assert live.counts["api", "refused"] == 0
    with pytest.raises(BadConfig):
        await live.patch_aside({"lanes": {"spill": True}}, ADMIN)
    assert live.counts["api", "refused"] == 1


async def test_patches_and_rollbacks_are_validated_aside_and_none_is_lost() -> None:
    checked_in = list[int]()

    def check(_: Config) -> list[str]:
        checked_in.append(threading.get_ident())
        return []

    live = live_of({}, check=check)
    await live.patch_aside({"queue": {"depth_max": 5}}, ADMIN)
    await live.patch_aside({"queue": {"depth_max": 9}}, ADMIN, dry_run=True)
    await live.rollback_aside(1, ADMIN)
    await live.apply_aside(lambda: {"queue": {"depth_max": 7}}, ADMIN)
    assert threading.get_ident() not in checked_in
    await asyncio.gather(
        live.patch_aside({"queue": {"wait_s_max": 3}}, ADMIN),
        live.patch_aside({"lanes": {"spill": False}}, ADMIN),
    )
    assert live.overlay == {"queue": {"depth_max": 7, "wait_s_max": 3}, "lanes": {"spill": False}}
    assert live.counts == {("api", "applied"): 5, ("api", "unchanged"): 1}


def test_a_file_that_does_not_go_with_the_patches_is_refused_whole() -> None:
    live = live_of({})
    live.patch({"classes": {"p0": {"share_min": 0.5}, "p1": {"share_min": 0.4}}}, ADMIN)
    with pytest.raises(BadConfig, match="shares add up"):
        live.take({"classes": {"p2": {"share_min": 0.3}}, "queue": {"depth_max": 3}}, FILE)
    assert live.config.queue.depth_max == 1_000


def test_what_needs_a_restart_waits_and_the_rest_is_taken() -> None:
    live = live_of({"server": {"port": 1}})
    proposal = live.take({"server": {"port": 2}, "queue": {"depth_max": 3}}, FILE)
    assert [change.path for change in proposal.changes] == ["queue.depth_max"]
    assert [str(change) for change in live.waiting] == ["server.port: 1 -> 2"]
    assert live.config.server.port == 1
    live.patch({"queue": {"depth_max": 4}}, ADMIN)  # nothing of it is the patch's doing
    live.rollback(1, ADMIN)
    assert [change.path for change in live.waiting] == ["server.port"]
    live.take({"server": {"port": 1}}, FILE)
    assert live.waiting == ()


# Versions.


def test_an_earlier_version_comes_back_as_a_new_one() -> None:
    live = live_of({"queue": {"depth_max": 5}, "tenants": {"a": {"weight": 2}}})
    live.patch({"tenants": {"a": None}}, ADMIN)
    live.take({"queue": {"depth_max": 6}}, FILE)
    digest = live.version.digest
    live.rollback(1, ADMIN)
    assert (live.config.queue.depth_max, live.config.tenants["a"].weight) == (5, 2)
    assert live.version.number == 4
    assert live.version.digest == live.history[-1].digest
    live.rollback(3, ADMIN)
    assert (live.config.queue.depth_max, live.version.digest) == (6, digest)
    assert live.overlay == {}


def test_a_version_that_no_patch_can_say_is_refused() -> None:
    live = live_of({"classes": {"p3": {"wait_s_max": None}}})
    live.take({}, FILE)
    with pytest.raises(BadConfig, match="only the file"):
        live.rollback(1, ADMIN)
    assert live.config.classes.p3.wait_s_max == 600


def test_the_history_is_bounded() -> None:
    live = live_of({"live": {"history_max": 3}})
    for depth in range(10, 20):
        live.patch({"queue": {"depth_max": depth}}, ADMIN)
    assert [version.number for version in live.history] == [11, 10, 9]
    with pytest.raises(NoSuchVersion):
        live.rollback(8, ADMIN)
    live.patch({"live": {"history_max": 2}}, ADMIN)
    assert [version.number for version in live.history] == [12, 11]


GOOD = st.sampled_from(
    (
        {"queue": {"depth_max": 3}},
        {"queue": {"depth_max": None}},
        {"queue": {"wait_s_max": 2.5}, "lanes": {"spill": False}},
        {"tenants": {"a": {"weight": 2}}},
        {"tenants": {"a": None}},
        {"tenants": {"a": {"degrade": False}, "b": {}}},
        {"models": {"m": {"aliases": ["x"]}}},
        {"workers": [{"url": "http://a:1"}]},
        {"workers": []},
        {"classes": None},
    )
)
BAD = st.sampled_from(
    (
        {"queue": {"depth_max": -3}},
        {"tenants": {"a": {"weight": 0}}},
        {"models": {"m": {"fallback": "m"}}},
        {"workers": [{"url": "ftp://a"}]},
        {"server": {"port": 4}},
        {"none": 1},
        {"lanes": 1},
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(GOOD, st.none() | BAD, st.booleans()), max_size=12))
def test_any_row_of_good_and_bad_patches_leaves_the_last_good_configuration(
    steps: list[tuple[dict[str, Any], dict[str, Any] | None, bool]],
) -> None:
    base: dict[str, Any] = {"queue": {"depth_max": 7}, "tenants": {"c": {}}}
    live, document = live_of(base), base
    taken: list[Config] = []
    live.on_config.append(taken.append)
    for good, bad, dry_run in steps:
        if bad is not None:
            with pytest.raises(BadConfig):
                live.patch(patched(good, {}) | bad, ADMIN)
        live.patch(good, ADMIN, dry_run=dry_run)
        document = document if dry_run else patched(document, good)
        assert live.config.model_dump() == validated(document).model_dump()
        assert taken == [] or taken[-1] is live.config
        made = validated(patched(base, live.overlay))
        assert made.model_dump() == live.config.model_dump()
        assert live.version.number == 1 + len(taken)
