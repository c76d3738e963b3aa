"""What the simulator tells its router of a prompt's beginning is what the edge would."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import WorkItem
from loadtest.prompts import prompt_text
from loadtest.sim.laneway import MODEL, prefix_of
from loadtest.trace import BLOCK_TOKENS
from loadtest.workload import Tier
from router.prompts import measured


def item(tokens: int, kept: int) -> WorkItem:
    """A prompt whose first `kept` blocks all such prompts have."""
    count = -(-tokens // BLOCK_TOKENS)
    blocks = tuple(at if at < kept else 1_000 * tokens + at for at in range(count))
    return WorkItem(
        number=1,
        at_s=0.0,
        tenant="t",
        tier=Tier.FREE,
        source="trace",
        prompt_tokens=tokens,
        output_tokens=8,
        max_tokens=8,
        prefix_blocks=blocks,
    )


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(st.integers(1, 60_000), st.integers(1, 60_000), st.integers(0, 120), st.integers(1, 300))
def test_prompts_share_as_many_blocks_as_their_texts_do(
    first: int, second: int, kept: int, blocks_max: int
) -> None:
    items = item(first, kept), item(second, kept)
    told = [prefix_of(one, blocks_max) for one in items]
    seen = [measured(prompt_text(one, seed=1), MODEL, blocks_max)[1] for one in items]
    assert [len(prefix) for prefix in told] == [len(prefix) for prefix in seen]
    assert shared(*told) == shared(*seen)
