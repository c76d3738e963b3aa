"""Which workers have seen the beginning of a prompt: a bounded index of chained block hashes.

A prompt is hashed in blocks, each hash covering all text before it, so equal hashes mean equal
prefixes. The index maps a hash to the workers that were sent it, one bit each. What a worker has
seen long ago its engine has evicted, so each worker remembers a bounded number of blocks in two
generations: when the young one is full it becomes the old one and the old one dies. A block that is
used again returns to the young. The dead are cleared a few at a time, so no call takes long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

# Bytes of prompt text per block; the edge hashes in these.
BLOCK_BYTES: Final = 512

_NONE: Final[Mapping[int, int]] = {}


class PrefixIndex:
    """Blocks by worker; workers are known by small numbers, `slot`s."""

    def __init__(self, worker_blocks_max: int) -> None:
        self._blocks_max = worker_blocks_max
        self._holders: dict[int, int] = {}  # block hash -> bits of slots
        self._memories: dict[int, _Memory] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def resize(self, worker_blocks_max: int) -> None:
        """Change how many blocks are remembered per worker; fewer starts afresh."""
        if worker_blocks_max < self._blocks_max:
            self._holders.clear()
            self._memories.clear()
        self._blocks_max = worker_blocks_max

    def hits(self, prefix: Sequence[int]) -> Mapping[int, int]:
        """Leading blocks of `prefix` by slot, for the slots that have seen at least one."""
        holders = self._holders
        if not prefix or prefix[0] not in holders:
            return _NONE
        found: dict[int, int] = {}
        live = -1
        for depth, block in enumerate(prefix):
            still = live & holders.get(block, 0)
            if depth and still != live:
                _note(found, live & ~still, depth)
            live = still
            if not live:
                return found
        _note(found, live, len(prefix))
        return found

    def add(self, slot: int, prefix: Sequence[int]) -> None:
        """The worker in `slot` was sent a prompt that begins with `prefix`."""
        if not prefix or not self._blocks_max:
            return
        memory = self._memories.get(slot)
        if memory is None:
            memory = self._memories[slot] = _Memory()
        holders, bit = self._holders, 1 << slot
        for block in prefix:
            bits = holders.get(block, 0)
            if not bits & bit:
                holders[block] = bits | bit
        memory.young.update(dict.fromkeys(prefix))
        # Twice as many as were added, so the dead are gone before the next generation dies.
        self._clear(memory, bit, 2 * len(prefix))
        if 2 * len(memory.young) > self._blocks_max:
            self._clear(memory, bit, len(memory.dead))
            memory.dead, memory.old, memory.young = memory.old, memory.young, {}

    def forget(self, slot: int) -> None:
        """The worker in `slot` lost its cache or is gone."""
        memory = self._memories.pop(slot, None)
        if memory is not None:
            for blocks in (memory.young, memory.old, memory.dead):
                for block in blocks:
                    self._drop(block, 1 << slot)

    def _clear(self, memory: _Memory, bit: int, count: int) -> None:
        dead, old, young = memory.dead, memory.old, memory.young
        for _ in range(min(count, len(dead))):
            block = dead.popitem()[0]
            if block not in old and block not in young:
                self._drop(block, bit)

    def _drop(self, block: int, bit: int) -> None:
        rest = self._holders.get(block, 0) & ~bit
        if rest:
            self._holders[block] = rest
        else:
            self._holders.pop(block, None)


class _Memory:
    """The blocks of one worker, as dicts without values: ordered, where sets are not."""

    __slots__ = ("dead", "old", "young")

    def __init__(self) -> None:
        self.young: dict[int, None] = {}
        self.old: dict[int, None] = {}
        self.dead: dict[int, None] = {}


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        found[low.bit_length() - 1] = depth
        bits ^= low
