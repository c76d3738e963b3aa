"""The prefix index against a plain dictionary of sets."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.prefix import (
    BLOCK_BYTES,
    STRIDE_BYTES,
    WHOLE_BLOCKS,
    WHOLE_BYTES,
    Block,
    PrefixIndex,
    _generation,
    blocks_of,
    bytes_of,
)

# Chained: a prompt's blocks name its whole beginning, as the hashes of the edge do.
PROMPTS = st.lists(st.integers(0, 2), max_size=6).map(
    lambda path: tuple(hash(tuple(path[: i + 1])) for i in range(len(path)))
)
STEPS = st.lists(st.tuples(st.integers(0, 3), PROMPTS), max_size=60)
# Prompts of a few families, each as far as it goes: 100 blocks are 64 and 36 strides.
LONG_STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(1, 100), st.integers(50, 2_000)),
    max_size=60,
)


def depths_by_bit(index: PrefixIndex, prompt: tuple[int, ...]) -> dict[int, int]:
    found = {}
    for bits, depth in index.depths(prompt):
        for slot in range(8):
            if bits >> slot & 1:
                found[slot] = depth
    return found


def bits_of(index: PrefixIndex, block: Block) -> int:
    """Who has it."""
    return sum(bits for bits, _ in index.depths([block]))


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
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 500), max_size=20, unique=True)),
        max_size=80,
    )
)
def test_a_worker_never_remembers_more_than_its_bound(
    steps: list[tuple[int, list[int]]],
) -> None:
    index = PrefixIndex(40)
    for slot, prompt in steps:
        index.add(1 << slot, prompt)
        for bit in range(4):
            held = sum(bits_of(index, block) >> bit & 1 for block in index._holders)
            # Of the oldest generation a prompt may be too much, of the dead, and the last one.
            assert held <= 40 + 3 * 20
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
            held = [bits_of(index, block) for block in one]
            assert all(later & ~before == 0 for before, later in pairwise(held))
            counted = {s: sum(bits >> s & 1 for bits in held) for s in range(8)}
            assert depths_by_bit(index, one) == {s: n for s, n in counted.items() if n}


@given(LONG_STEPS)
def test_a_stride_counts_as_much_as_it_covers(steps: list[tuple[int, int, int, int]]) -> None:
    index = PrefixIndex(2_000)
    weights = [1] * WHOLE_BLOCKS + [STRIDE_BYTES // BLOCK_BYTES] * 36
    most = sum(weights)
    for slot, family, length, room in steps:
        index.add(1 << slot, [1_000 * family + at for at in range(length)], room)
        memory = index._memories[1 << slot]
        for generation in [memory.young, *memory.grown]:
            living = [
                cast("int", block)
                for block, holder in index._holders.items()
                if _generation(holder, 1 << slot) is generation
            ]
            assert generation.weight == sum(weights[block % 1_000] for block in living)
            assert set(living) <= set(generation.blocks)
        # An eighth or a prompt may be too much, and the prompt that came last.
        kept = sum(generation.weight for generation in (memory.young, *memory.grown))
        assert kept <= 2_000 + max(most, 2_000 // 8) + most
    for slot in range(2):
        index.forget(1 << slot)
    assert len(index) == 0


@given(st.integers(0, 1 << 20))
def test_blocks_and_strides_cover_all_text_but_a_rest(size: int) -> None:
    blocks = blocks_of(size)
    assert bytes_of(blocks) <= size < bytes_of(blocks + 1)
    longest = BLOCK_BYTES if size < WHOLE_BYTES else STRIDE_BYTES
    assert bytes_of(blocks + 1) - bytes_of(blocks) == longest


def test_what_is_used_again_is_kept_and_what_is_not_is_forgotten() -> None:
    index = PrefixIndex(20)
    index.add(1, [1, 2])
    index.add(1, [7, 8])
    for number in range(100, 200):
        index.add(1, [1, 2, number])
    assert index.depths([1, 2]) == [(1, 2)]
    assert index.depths([7, 8]) == []


@pytest.mark.parametrize(
    ("length", "room"), [(1, 100), (3, 100), (9, 100), (30, 100), (70, 1_200), (164, 9_000)]
)
def test_what_was_used_least_recently_is_forgotten_first(length: int, room: int) -> None:
    index = PrefixIndex(10_000)
    prompts = [[1_000 * number + block for block in range(length)] for number in range(200)]
    weight = bytes_of(length) // BLOCK_BYTES
    for number, prompt in enumerate(prompts):
        index.add(1, prompt, room)
        index.add(1, prompts[0], room)  # always used again
        known = [bool(index.depths(one)) for one in prompts[number:0:-1]]  # the last one first
        fitting = (room - weight) // weight
        assert all(known[:fitting])
        # An eighth more, what is not cleared yet, and the prompts that came last.
        most = room + 2 * room / 8 + 2 * weight
        assert not any(known[int(most / weight) :])
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
    assert sum(len(generation.blocks) for generation in memory.dead) <= 64


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


@given(
    st.lists(
        st.tuples(st.sampled_from(("add", "forget", "resize")), st.integers(0, 3), PROMPTS),
        max_size=60,
    ),
    PROMPTS,
)
def test_as_long_as_the_version_stands_hits_are_the_same(
    steps: list[tuple[str, int, tuple[int, ...]]], asked: tuple[int, ...]
) -> None:
    index = PrefixIndex(20)
    known = index.version, index.depths(asked)
    for what, slot, prompt in steps:
        if what == "add":
            index.add(1 << slot, prompt, room=8 + slot)
        elif what == "forget":
            index.forget(1 << slot)
        else:
            index.resize(10 + slot)
        now = index.version, index.depths(asked)
        assert now[0] != known[0] or now[1] == known[1]
        known = now


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
