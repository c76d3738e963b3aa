"""Text of a wished length for a request: unique, or sharing prefix blocks as its trace does.

Token counts become bytes by a fixed ratio, 4 unless a tokenizer is known to differ; the text is
plain English words, so real tokenizers come out near it. Pure: equal requests, equal text.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Final

from loadtest.arrivals import WorkItem
from loadtest.trace import BLOCK_TOKENS

BYTES_PER_TOKEN: Final = 4.0
_WORDS: Final = (
    *("router", "worker", "token", "lane", "queue", "memory", "engine", "stream", "answer"),
    *("waits", "sends", "keeps", "grows", "fills", "short", "long", "first", "free", "busy"),
    *("the", "a", "and", "of", "in", "to", "with", "without", "before", "after", "under"),
)
_POOL_BYTES: Final = 1 << 18


def prompt_text(
    item: WorkItem, *, seed: int | str, bytes_per_token: float = BYTES_PER_TOKEN
) -> str:
    """Return about `item.prompt_tokens` tokens of text.

    With prefix blocks the text is theirs, cut to length: two requests share as much text as they
    share leading blocks. Without, it begins with the request's own number and shares nothing.
    """
    length = max(1, int(item.prompt_tokens * bytes_per_token))
    if item.prefix_blocks:
        block_bytes = int(BLOCK_TOKENS * bytes_per_token)
        blocks = (_block(number, block_bytes) for number in item.prefix_blocks)
        return _filled("".join(blocks), length)
    return _filled(f"[{seed}/{item.number}] ", length)


def _filled(head: str, length: int) -> str:
    missing = length - len(head)
    if missing <= 0:
        return head[:length]
    pool = _pool()
    return head + (pool * (missing // len(pool) + 1))[:missing]


@lru_cache(maxsize=4096)
def _block(number: int, length: int) -> str:
    head = f"[{number}] "
    start = Random(number).randrange(_POOL_BYTES - length)
    return (head + _pool()[start : start + length])[:length]


@lru_cache(maxsize=1)
def _pool() -> str:
    rng = Random("words")
    words: list[str] = []
    size = 0
    while size < _POOL_BYTES:
        word = rng.choice(_WORDS)
        words.append(word)
        size += len(word) + 1
    return " ".join(words)[:_POOL_BYTES].ljust(_POOL_BYTES)
