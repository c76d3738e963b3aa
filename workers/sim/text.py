"""Text that looks like words and costs nothing: a seeded ring of tokens.

Each sequence reads the ring from its own offset, so token k of an answer is always the same and any
slice of it can be cut out without keeping what was sent. Tokens are plain ASCII without quotes or
backslashes: they may stand in JSON as they are.
"""

from __future__ import annotations

from random import Random
from typing import Final

_WORDS: Final = """
the of and to in is that it for as was with on be at by this had not are but from or have an they
which one you were her all she there would their we him been has when who will more no if out so
said what up its about into than them can only other new some could time these two may then do
first any my now such like our over man me even most made after also did many before must through
back years where much your way well down should because each just those people how too little state
good very make world still own see men work long get here between both life being under never day
same another know while last might us great old year off come since against go came right used take
"""
TOKENS: Final = (*(f" {word}" for word in _WORDS.split()), ".", ",", " model", " token", " worker")
_ID_FIRST: Final = 1000  # token ids of real vocabularies begin with bytes and specials
_RING: Final = 4096


class TokenRing:
    """The words of one worker."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self._ids = [random.randrange(len(TOKENS)) for _ in range(_RING)]
        self._texts = [TOKENS[number] for number in self._ids] * 2

    def text(self, offset: int, first: int, count: int) -> bytes:
        """Return tokens `first` to `first + count` of the sequence that begins at `offset`."""
        start = (offset + first) % _RING
        pieces = self._texts[start : start + min(count, _RING)]
        whole = count // _RING
        if whole:
            pieces = pieces * whole + self._texts[start : start + count % _RING]
        return "".join(pieces).encode()

    def ids(self, offset: int, first: int, count: int) -> list[int]:
        """Return the ids of the same tokens."""
        begin = offset + first
        return [_ID_FIRST + self._ids[at % _RING] for at in range(begin, begin + count)]
