"""The prefix index against a plain dictionary of sets."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.prefix import PrefixIndex

# Chained: a prompt's blocks name its whole beginning, as the hashes of the edge do.
PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(
    lambda path: tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
)
STEPS = st.lists(st.tuples(st.integers(0, 3), PROMPTS), max_size=60)


def depths_by_bit(index: PrefixIndex, prompt: tuple[int, ...]) -> dict[int, int]:
    found = {}
    for bits, depth in index.depths(prompt):
        for slot in range(8):
            if bits >> slot & 1:
                found[slot] = depth
    return found


@given(STEPS, PROMPTS)
def test_while_nothing_is_evicted_hits_are_exact(
    steps: list[tuple[int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    index = PrefixIndex(10_000)
    seen: dict[int, set[int]] = {}
    for slot, prompt in steps:
        index.add(1 << slot, prompt)
        seen.setdefault(slot, set()).update(prompt)
    expected = {}
    for slot, blocks in seen.items():
        depth = 0
        while depth < len(asked) and asked[depth] in blocks:
            depth += 1
        if depth:
            expected[slot] = depth
    assert depths_by_bit(index, asked) == expected


@given(
    st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 500), max_size=20)), max_size=80)
)
def test_a_worker_never_remembers_more_than_its_bound(
    steps: list[tuple[int, list[int]]],
) -> None:
    index = PrefixIndex(40)
    for slot, prompt in steps:
        index.add(1 << slot, prompt)
        for bit in range(4):
            held = sum(1 for bits in index._holders.values() if bits >> bit & 1)
            # One prompt may be added before room is made for it.
            assert held <= 40 + 20
    for bit in range(4):
        index.forget(1 << bit)
    assert len(index) == 0


@given(STEPS, PROMPTS, st.sampled_from((4, 12, 30)))
def test_whoever_remembers_a_block_remembers_all_before_it(
    steps: list[tuple[int, tuple[int, ...]]], asked: tuple[int, ...], blocks_max: int
) -> None:
    index = PrefixIndex(blocks_max)
    prompts = [asked, *(prompt for _, prompt in steps)]
    for slot, prompt in steps:
        index.add(1 << slot, prompt)
        for one in prompts:
            held = [index._holders.get(block, 0) for block in one]
            assert all(later & ~before == 0 for before, later in pairwise(held))
            counted = {s: sum(bits >> s & 1 for bits in held) for s in range(8)}
            assert depths_by_bit(index, one) == {s: n for s, n in counted.items() if n}


def test_what_is_used_again_is_kept_and_what_is_not_is_forgotten() -> None:
    index = PrefixIndex(20)
    index.add(1, [1, 2])
    index.add(1, [7, 8])
    for number in range(100, 200):
        index.add(1, [1, 2, number])
    assert index.depths([1, 2]) == [(1, 2)]
    assert index.depths([7, 8]) == []


@pytest.mark.parametrize("length", [1, 3, 9, 30])
def test_what_was_used_least_recently_is_forgotten_first(length: int) -> None:
    index = PrefixIndex(1_000)
    prompts = [[1_000 * number + block for block in range(length)] for number in range(200)]
    for number, prompt in enumerate(prompts):
        index.add(1, prompt, 100)
        index.add(1, prompts[0], 100)  # always used again
        known = [bool(index.depths(one)) for one in prompts[number:0:-1]]  # the last one first
        fitting = (100 - length) // length
        assert all(known[:fitting])
        # An eighth more, what is not cleared yet, and the prompts that came last.
        most = 100 + 2 * 100 / 8 + 2 * length
        assert not any(known[int(most / length) :])
        assert len(index) <= most
        assert index.depths(prompts[0]) == [(1, length)]


def test_prompts_in_turns_leave_nothing_behind() -> None:
    index = PrefixIndex(64)
    prompts = [list(range(100 * n, 100 * n + 20)) for n in range(3)]
    for number in range(3_000):
        index.add(1, prompts[number % 3])
    memory = index._memories[1]
    held = [memory.young, *memory.grown]
    assert len(index) == 60
    assert sum(len(generation.blocks) for generation in held) <= 64 * 20
    assert len(memory.dead) <= 64


def test_deepest_first_and_each_worker_once() -> None:
    index = PrefixIndex(100)
    index.add(1, [10, 20, 30])
    index.add(2, [10, 20])
    index.add(4, [10])
    assert index.depths([10, 20, 30, 40]) == [(1, 3), (2, 2), (4, 1)]
    assert index.depths([99]) == []
    assert index.depths([]) == []


def test_a_worker_that_is_forgotten_has_no_hits_and_others_keep_theirs() -> None:
    index = PrefixIndex(100)
    index.add(1, [10, 20])
    index.add(2, [10, 20])
    index.forget(1)
    assert index.depths([10, 20]) == [(2, 2)]


def test_no_room_means_no_memory() -> None:
    index = PrefixIndex(0)
    index.add(1, [10, 20])
    assert len(index) == 0


def test_less_room_starts_afresh() -> None:
    index = PrefixIndex(100)
    index.add(1, [10])
    index.resize(200)
    assert len(index) == 1
    index.resize(50)
    assert len(index) == 0
