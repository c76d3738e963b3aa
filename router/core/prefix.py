"""Which workers have seen the beginning of a prompt: a bounded index of chained block hashes.

A prompt is hashed in blocks, each hash going on from the one before it, so equal hashes mean equal
prefixes. The first 64 are short and hashed whole. Behind them come strides, 16 times as long, of
which one byte in 64 is hashed: what is put in or left out moves all that follows and shows; other
words of the same length show surely from 64 bytes on. So what is cached of a long prompt is an
estimate, but a close one.

The index knows of a hash which workers were sent it, one bit each. An engine evicts what was used
least recently, and so does the index: each worker remembers about as much text as its memory holds,
in eight generations. When the youngest has its eighth the next one begins, and the oldest dies. A
block that is used again belongs to the youngest. The dead are cleared a few at a time, so no call
takes long.

A block is never there without those before it: it is added with them, or behind them, and the dead
are cleared from the last one added. So both questions begin at the end of a prompt, and a prompt
that is known to its end costs no more than a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

# Text is counted in blocks of so many bytes; `prompts` hashes so many of them whole, then strides.
BLOCK_BYTES: Final = 512
WHOLE_BLOCKS: Final = 64
WHOLE_BYTES: Final = WHOLE_BLOCKS * BLOCK_BYTES
STRIDE_BYTES: Final = 8192
# Of each so many bytes of a stride the last one is hashed.
SAMPLED_BYTES: Final = 64
_STRIDE_WEIGHT: Final = STRIDE_BYTES // BLOCK_BYTES  # a stride counts as so many blocks
_GENERATIONS: Final = 8
# Blocks that are used again leave nearly empty generations behind, which are not kept for ever.
_GENERATIONS_MAX: Final = 32

# Workers' bits with the leading blocks that they have all seen, most blocks first.
Depths = list[tuple[int, int]]
# A block's hash: an int, but one that nobody counts with. Called one, it would be taken out of its
# object and put into a new one at each look-up of the compiled code, and every dict keep its own.
Block = object


def blocks_of(size: int) -> int:
    """How many whole blocks and strides so many bytes of text have."""
    if size < WHOLE_BYTES:
        return size // BLOCK_BYTES
    return WHOLE_BLOCKS + (size - WHOLE_BYTES) // STRIDE_BYTES


def bytes_of(blocks: int) -> int:
    """How many bytes of text the first so many blocks and strides of a prompt cover."""
    if blocks <= WHOLE_BLOCKS:
        return blocks * BLOCK_BYTES
    return WHOLE_BYTES + (blocks - WHOLE_BLOCKS) * STRIDE_BYTES


class PrefixIndex:
    """Blocks by worker; a worker is known by its bit, an int with one bit set."""

    def __init__(self, worker_blocks_max: int) -> None:
        self._blocks_max = worker_blocks_max
        self.version = 0  # moves whenever `depths` may answer otherwise than before
        self._holders: dict[Block, _Holder] = {}
        self._memories: dict[int, _Memory] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def resize(self, worker_blocks_max: int) -> None:
        """Change how many blocks' worth is remembered per worker; less starts afresh."""
        if worker_blocks_max < self._blocks_max:
            self.version += 1
            self._holders.clear()
            self._memories.clear()
        self._blocks_max = worker_blocks_max

    def depths(self, prefix: Sequence[Block]) -> Depths:
        """Which workers have seen how many leading blocks of `prefix`, at least one."""
        if not prefix:
            return []
        holders = self._holders
        first, last = holders.get(prefix[0]), holders.get(prefix[-1])
        if first is None:
            return []
        # A deeper block has no other holders, so those between have the same as both ends.
        if last is not None and last.bits == first.bits:
            return [(first.bits, len(prefix))]
        found: Depths = []
        live, depth = first.bits, 0
        for block in prefix:
            bits = _bits(holders.get(block))
            if bits != live:
                still = live & bits
                found.append((live & ~still, depth))
                live = still
                if not live:
                    break
            depth += 1
        if live:
            found.append((live, depth))
        found.reverse()
        return found

    def add(self, bit: int, prefix: Sequence[Block], room: int | None = None) -> None:
        """The worker of `bit` was sent a prompt that begins with `prefix`.

        Its memory holds text for about `room` blocks; None: nobody knows.
        """
        if not prefix or not self._blocks_max:
            return
        memory = self._memories.get(bit)
        if memory is None:
            memory = self._memories[bit] = _Memory(bit)
        young = memory.young
        known = self._known(prefix, young)
        if known == len(prefix):
            return
        self.version += 1
        if room is None or room > self._blocks_max:
            room = self._blocks_max
        added = _weight(known, len(prefix))
        # Before they are added, or each generation could be one prompt too large.
        if _GENERATIONS * (young.weight + added) > room:
            self._turn(memory, room)
            young, known, added = memory.young, 0, _weight(0, len(prefix))
        fresh = list(prefix[known:])
        self._put(young, fresh, known)
        young.blocks += fresh
        young.weight += added
        if memory.dead:
            # Twice as much as was added, so the dead are gone before the next generation dies.
            self._clear(memory, 2 * added)

    def forget(self, bit: int) -> None:
        """The worker of `bit` lost its cache or is gone."""
        memory = self._memories.pop(bit, None)
        if memory is not None:
            self.version += 1
            for generation in (memory.young, *memory.grown, *memory.dead):
                self._drop(generation, generation.blocks)

    def _put(self, young: _Generation, fresh: list[Block], known: int) -> None:
        """These blocks, behind `known` others of their prompt, belong to `young` from now on."""
        holders, bit = self._holders, young.bits
        for at, block in enumerate(fresh):
            holder = holders.setdefault(block, young)
            if holder is young:
                continue  # nobody had it; or hashes collide in one prompt, and it counts twice
            before = _generation(holder, bit)
            if before is not None:
                before.weight -= 1 if known + at < WHOLE_BLOCKS else _STRIDE_WEIGHT
            if isinstance(holder, _Shared):
                holder.put(young)
            elif before is None:
                holders[block] = _Shared(holder, young)
            else:
                holders[block] = young

    def _known(self, prefix: Sequence[Block], young: _Generation) -> int:
        """How many leading blocks belong to `young`: whoever has a block has all before it."""
        holders, bit = self._holders, young.bits
        last_holder = holders.get(prefix[-1])
        if last_holder is young or _generation(last_holder, bit) is young:
            return len(prefix)
        first, last = 0, len(prefix) - 1
        while first < last:
            middle = (first + last) // 2
            if _generation(holders.get(prefix[middle]), bit) is young:
                first = middle + 1
            else:
                last = middle
        return first

    def _turn(self, memory: _Memory, room: int) -> None:
        """Begin a generation; of those before it as many die as `room` asks for."""
        self._clear(memory, sum([len(generation.blocks) for generation in memory.dead]))
        memory.grown.append(memory.young)
        memory.young = _Generation(memory.young.bits)
        living = sum([generation.weight for generation in memory.grown])
        while memory.grown and (
            living - memory.grown[0].weight >= room or len(memory.grown) > _GENERATIONS_MAX
        ):
            oldest = memory.grown.popleft()
            living -= oldest.weight
            memory.dead.append(oldest)
        memory.dead.reverse()  # the last of them is cleared first

    def _clear(self, memory: _Memory, count: int) -> None:
        """Clear so many blocks of the dead, the last one added first."""
        dead = memory.dead
        while dead and count > 0:
            generation = dead[-1]
            blocks = generation.blocks[-count:]
            del generation.blocks[-count:]
            count -= len(blocks)
            self._drop(generation, blocks)
            if not generation.blocks:
                dead.pop()

    def _drop(self, generation: _Generation, blocks: list[Block]) -> None:
        """Take away those of `blocks` that still belong to `generation`."""
        holders, bit = self._holders, generation.bits
        for block in blocks:
            holder = holders.get(block)
            if holder is generation:
                del holders[block]
            elif isinstance(holder, _Shared) and holder.by_bit.get(bit) is generation:
                holders[block] = holder.without(bit)


def _weight(known: int, blocks: int) -> int:
    """What the first `blocks` of a prompt count, without those that are `known`."""
    return (bytes_of(blocks) - bytes_of(known)) // BLOCK_BYTES


class _Generation:
    """Blocks in the order in which they were last used, and what those not used since count."""

    __slots__ = ("bits", "blocks", "weight")

    def __init__(self, bit: int) -> None:
        self.bits = bit  # of its worker
        self.blocks: list[Block] = []
        self.weight = 0


class _Shared:
    """A block that several workers have: the generation of each, and the bits of all."""

    __slots__ = ("bits", "by_bit")

    def __init__(self, one: _Generation, other: _Generation) -> None:
        self.bits = one.bits | other.bits
        self.by_bit = {one.bits: one, other.bits: other}

    def put(self, generation: _Generation) -> None:
        """Its worker has the block, and this is where."""
        self.bits |= generation.bits
        self.by_bit[generation.bits] = generation

    def without(self, bit: int) -> _Holder:
        """Who has it when the worker of `bit` has it no more."""
        del self.by_bit[bit]
        self.bits &= ~bit
        if len(self.by_bit) == 1:
            return next(iter(self.by_bit.values()))
        return self


_Holder = _Generation | _Shared


def _bits(holder: _Holder | None) -> int:
    return 0 if holder is None else holder.bits


def _generation(holder: _Holder | None, bit: int) -> _Generation | None:
    """Where the worker of `bit` has a block, if it does."""
    if isinstance(holder, _Shared):
        return holder.by_bit.get(bit)
    return holder if holder is not None and holder.bits == bit else None


class _Memory:
    """The blocks of one worker, by generation."""

    __slots__ = ("dead", "grown", "young")

    def __init__(self, bit: int) -> None:
        self.young = _Generation(bit)
        self.grown: deque[_Generation] = deque()  # the oldest first
        self.dead: list[_Generation] = []  # to be cleared from the end
