"""Merge patches: what they make of a document, and the least one between two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import BadConfig
from router.config_overlay import (
    check_patch,
    patch_between,
    patched,
    paths_of,
    rebased,
    without,
)
from router.yaml_text import DEPTH_MAX

NAMES = st.sampled_from(("a", "b", "c", "d"))
LEAVES = st.one_of(st.integers(0, 3), st.booleans(), st.lists(st.integers(0, 2), max_size=2))
DOCUMENTS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, inner), max_size=3),
    max_leaves=8,
)
PATCHES = st.recursive(
    st.dictionaries(NAMES, st.one_of(LEAVES, st.none()), max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(LEAVES, st.none(), inner), max_size=3),
    max_leaves=8,
)


# RFC 7396, appendix A, those whose target and patch are objects.
@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_patch_does_what_the_rfc_says(
    target: dict[str, Any], patch: dict[str, Any], result: dict[str, Any]
) -> None:
    assert patched(target, patch) == result


@given(DOCUMENTS, DOCUMENTS)
def test_the_patch_between_two_documents_makes_one_of_the_other(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    patch = patch_between(old, new)
    made = patched(old, patch)
    assert made == new
    assert patch_between(made, new) == {}


@given(DOCUMENTS, PATCHES)
def test_patching_again_changes_nothing_and_touches_no_argument(
    document: dict[str, Any], patch: dict[str, Any]
) -> None:
    before = repr((document, patch))
    once = patched(document, patch)
    assert patched(once, patch) == once
    assert repr((document, patch)) == before


@given(PATCHES, PATCHES)
def test_what_was_taken_from_a_patch_is_none_of_its_words_any_more(
    patch: dict[str, Any], taken: dict[str, Any]
) -> None:
    left = without(patch, taken)
    assert without(left, taken) == left
    assert {*paths_of(left)} <= {*paths_of(patch)}
    assert without(patch, {}) == patch
    assert without(patch, dict.fromkeys(patch, 1)) == {}


@given(PATCHES, PATCHES)
def test_a_change_is_laid_over_what_others_changed(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert rebased(before, before, after) == after
    assert rebased(after, before, before) == after


@given(DOCUMENTS, DOCUMENTS, PATCHES)
def test_what_a_patch_took_away_is_not_back_when_something_inside_it_changes(
    before: dict[str, Any], after: dict[str, Any], patch: dict[str, Any]
) -> None:
    taken = patch_between(before, after)
    left = without(patch, taken, before)
    assert without(left, taken, before) == left
    assert {*paths_of(left)} <= {*paths_of(patch)}
    seen = patched(after, left)
    for name, value in patch.items():
        if value is None and isinstance(before.get(name), dict):
            assert name not in seen or not isinstance(after[name], dict)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({"weight": 2}, {"tenants": {"acme": None}}),
        ({"keys": ["other"]}, {"tenants": {"acme": None}}),
        (None, {}),
    ],
)
def test_a_tenant_that_was_removed_stays_removed_until_the_file_removes_it(
    said: dict[str, Any] | None, left: dict[str, Any]
) -> None:
    file = {"tenants": {"acme": {"keys": ["k"]}}}
    removed, change = {"tenants": {"acme": None}}, {"tenants": {"acme": said}}
    assert without(removed, change, file) == left
    assert without(removed, {"tenants": {"acme": {"keys": ["k"]}}}, {"tenants": {}}) == {}


def test_what_others_took_away_is_not_back_by_a_change_inside_it() -> None:
    file = {"tenants": {"acme": {"keys": ["k"]}}}
    gone, heavy = {"tenants": {"acme": None}}, {"tenants": {"acme": {"weight": 3}}}
    assert rebased(gone, {}, heavy, file) == gone
    assert rebased(gone, gone, heavy, file) == heavy, "made again by who knew"
    assert rebased(gone, {}, heavy, {}) == heavy, "new where the file never had it"
    # One that only patches had:
    made = {"tenants": {"acme": {"keys": ["k"], "weight": 1}}}
    change = {"tenants": {"acme": {"keys": ["k"], "weight": 3}}}
    assert rebased({}, made, change, {}) == heavy, "without its keys"
    assert rebased(gone, made, change, {}) == gone
    assert rebased({}, made, {"tenants": {"acme": {"keys": ["k"]}}}, {}) == {}


def test_two_changes_of_one_patch_both_count() -> None:
    before = {"q": {"a": 1}, "gone": 1}
    theirs = {"q": {"a": 1, "b": 2}, "gone": 1, "new": None}
    ours = {"q": {"a": 3}, "t": {"x": None}}
    assert rebased(theirs, before, ours) == {
        "q": {"a": 3, "b": 2}, "new": None, "t": {"x": None},
    }  # fmt: skip


def test_true_is_no_1_and_1_is_no_true() -> None:
    assert patch_between({"a": 1}, {"a": True}) == {"a": True}


def test_the_mask_of_a_secret_is_no_secret() -> None:
    with pytest.raises(BadConfig) as caught:
        check_patch({"auth": {"admin_keys": ["k", "**********"]}, "x": {"y": "**********"}})
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["auth.admin_keys.1", "x.y"]


@pytest.mark.parametrize("wrap", [lambda inner: {"a": inner}, lambda inner: [inner]])
def test_a_patch_is_no_deeper_than_a_file(wrap: Callable[[Any], Any]) -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX - 1):
        value = wrap(value)
    check_patch({"lanes": value})
    for _ in range(1_000):
        value = wrap(value)
    with pytest.raises(BadConfig, match=r"^lanes: it is nested deeper than \d+ levels$"):
        check_patch({"lanes": value, "queue": {"depth_max": 1}})
