"""Which workers have seen the beginning of a prompt: a bounded index of chained block hashes.

A prompt is hashed in blocks, each hash covering all text before it, so equal hashes mean equal
prefixes. The index maps a hash to the workers that were sent it, one bit each. An engine evicts
what was used least recently, and so does the index: each worker remembers about as many blocks as
its memory holds, in eight generations. When the youngest has its eighth the next one begins, and
the oldest dies. A block that is used again belongs to the youngest. The dead are cleared a few at a
time, so no call takes long.

A block is never there without those before it: it is added with them, or behind them, and the dead
are cleared from the last one added. So both questions begin at the end of a prompt, and a prompt
that is known to its end costs no more than a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

# Bytes of prompt text per block; `prompts` hashes in these.
BLOCK_BYTES: Final = 512
_GENERATIONS: Final = 8
# Blocks that are used again leave nearly empty generations behind, which are not kept for ever.
_GENERATIONS_MAX: Final = 32

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

    def add(self, bit: int, prefix: Sequence[int], room: int | None = None) -> None:
        """The worker of `bit` was sent a prompt that begins with `prefix`.

        Its memory holds about `room` blocks; None: nobody knows.
        """
        if not prefix or not self._blocks_max:
            return
        memory = self._memories.get(bit)
        if memory is None:
            memory = self._memories[bit] = _Memory()
        young, born = memory.young, memory.born
        # Whoever remembers a block remembers all before it, so what is new stands at the end.
        known = len(prefix)
        while known and born.get(prefix[known - 1]) is not young:
            known -= 1
        if room is None or room > self._blocks_max:
            room = self._blocks_max
        # Before they are added, or each generation could be one prompt too large.
        if _GENERATIONS * (young.living + len(prefix) - known) > room:
            self._turn(memory, bit, room)
            young, known = memory.young, 0
        holders = self._holders
        for block in prefix[known:]:
            before = born.get(block)
            if before is None:
                holders[block] = holders.get(block, 0) | bit
            elif before is young:  # twice in one prompt: hashes collide
                continue
            else:
                before.living -= 1
            born[block] = young
            young.blocks.append(block)
            young.living += 1
        if memory.dead:
            # Twice as many as were added, so the dead are gone before the next generation dies.
            self._clear(memory, bit, 2 * (len(prefix) - known))

    def forget(self, bit: int) -> None:
        """The worker of `bit` lost its cache or is gone."""
        memory = self._memories.pop(bit, None)
        if memory is not None:
            for block in memory.born:
                self._drop(block, bit)

    def _turn(self, memory: _Memory, bit: int, room: int) -> None:
        """Begin a generation; of those before it as many die as `room` asks for."""
        self._clear(memory, bit, len(memory.dead))
        memory.grown.append(memory.young)
        memory.young = _Generation()
        living = len(memory.born)
        dead: list[_Generation] = []
        while memory.grown and (
            living - memory.grown[0].living >= room or len(memory.grown) > _GENERATIONS_MAX
        ):
            oldest = memory.grown.popleft()
            living -= oldest.living
            dead.append(oldest)
        for generation in reversed(dead):  # the last of them is cleared first
            memory.dead += [(block, generation) for block in generation.blocks]

    def _clear(self, memory: _Memory, bit: int, count: int) -> None:
        dead, born = memory.dead, memory.born
        for _ in range(min(count, len(dead))):
            block, generation = dead.pop()
            if born.get(block) is generation:
                del born[block]
                self._drop(block, bit)

    def _drop(self, block: int, bit: int) -> None:
        rest = self._holders.get(block, 0) & ~bit
        if rest:
            self._holders[block] = rest
        else:
            self._holders.pop(block, None)


class _Generation:
    """Blocks in the order in which they were last used, and how many were not used again since."""

    __slots__ = ("blocks", "living")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.living = 0


class _Memory:
    """The blocks of one worker, each with the generation that it belongs to."""

    __slots__ = ("born", "dead", "grown", "young")

    def __init__(self) -> None:
        self.born: dict[int, _Generation] = {}
        self.young = _Generation()
        self.grown: deque[_Generation] = deque()  # the oldest first
        self.dead: list[tuple[int, _Generation]] = []  # to be cleared from the end
