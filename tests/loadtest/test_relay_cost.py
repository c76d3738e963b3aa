"""What a request costs in bytecodes: a bound that an accident on the hot path would break.

The figures are exact for one version of Python, so a hundredth of room is plenty. Who needs more on
purpose raises them, and says in docs/performance.md for what.
"""

from __future__ import annotations

import pytest

from loadtest.relay_cost import CHUNKS, measured


@pytest.mark.parametrize(
    ("kind", "bytecodes_max", "calls_max"),
    [
        ("plain", 5_520, 126),
        ("limited", 8_400, 204),
        ("large", 6_010, 126),
        ("stream", 15_700, 425),
        ("burst", 7_250, 190),
    ],
)
async def test_a_request_costs_no_more_than_it_did(
    kind: str, bytecodes_max: int, calls_max: int
) -> None:
    cost = await measured(kind)
    assert cost.bytecodes <= bytecodes_max
    assert cost.calls <= calls_max


async def test_a_chunk_costs_little_beside_a_request() -> None:
    stream, plain = await measured("stream"), await measured("plain")
    assert (stream.bytecodes - plain.bytecodes) / CHUNKS <= 165
    assert (stream.calls - plain.calls) / CHUNKS <= 5
