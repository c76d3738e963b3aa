"""Which workers have seen the beginning of a prompt: a bounded index of chained block hashes.

A prompt is hashed in blocks, each hash covering all text before it, so equal hashes mean equal
prefixes. The index maps a hash to the workers that were sent it, one bit each. What a worker has
seen long ago its engine has evicted, so each worker remembers a bounded number of blocks in two
generations: when the young one is full it becomes the old one and the old one dies. A block that is
used again returns to the young. The dead are cleared a few at a time, so no call takes long.

A block is never there without those before it: it is added with them, or behind them, and the dead
are cleared from the last one added. So both questions begin at the end of a prompt, and a prompt
that is known to its end costs no more than a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

# Bytes of prompt text per block; `prompts` hashes in these.
BLOCK_BYTES: Final = 512

# Workers' bits with the leading blocks that they have all seen, most blocks first.
Depths = list[tuple[int, int]]


class PrefixIndex:
    """Blocks by worker; a worker is known by its bit, an int with one bit set."""

    def __init__(self, worker_blocks_max: int) -> None:
        self._blocks_max = worker_blocks_max
        self._holders: dict[int, int] = {}  # block hash -> bits
        self._memories: dict[int, _Memory] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def resize(self, worker_blocks_max: int) -> None:
        """Change how many blocks are remembered per worker; fewer starts afresh."""
        if worker_blocks_max < self._blocks_max:
            self._holders.clear()
            self._memories.clear()
        self._blocks_max = worker_blocks_max

    def depths(self, prefix: Sequence[int]) -> Depths:
        """Which workers have seen how many leading blocks of `prefix`, at least one."""
        if not prefix:
            return []
        held = self._holders.get
        first = held(prefix[0], 0)
        if first == held(prefix[-1], 0):  # and so all between: a deeper block has no other holders
            return [(first, len(prefix))] if first else []
        found: Depths = []
        live, depth = first, 0
        for bits in map(held, prefix):
            if bits != live:
                still = live & (bits or 0)
                found.append((live & ~still, depth))
                live = still
                if not live:
                    break
            depth += 1
        if live:
            found.append((live, depth))
        found.reverse()
        return found

    def add(self, bit: int, prefix: Sequence[int]) -> None:
        """The worker of `bit` was sent a prompt that begins with `prefix`."""
        if not prefix or not self._blocks_max:
            return
        memory = self._memories.get(bit)
        if memory is None:
            memory = self._memories[bit] = _Memory()
        young = memory.young
        # Whoever remembers a block remembers all before it, so what is new stands at the end.
        known = len(prefix)
        while known and prefix[known - 1] not in young:
            known -= 1
        # Before they are added, or each generation could be one prompt too large.
        if 2 * (len(young) + len(prefix) - known) > self._blocks_max:
            self._clear(memory, bit, len(memory.dead))
            memory.dead, memory.old, memory.young = memory.old, young, {}
            young, known = memory.young, 0
        holders = self._holders
        for block in prefix[known:]:
            young[block] = None
            bits = holders.get(block, 0)
            if not bits & bit:
                holders[block] = bits | bit
        if memory.dead:
            # Twice as many as were added, so the dead are gone before the next generation dies.
            self._clear(memory, bit, 2 * (len(prefix) - known))

    def forget(self, bit: int) -> None:
        """The worker of `bit` lost its cache or is gone."""
        memory = self._memories.pop(bit, None)
        if memory is not None:
            for blocks in (memory.young, memory.old, memory.dead):
                for block in blocks:
                    self._drop(block, bit)

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
