"""When a lane may use the other's workers."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from router.core.lanes import long_spills, short_spills
from tests.core.builders import ticket, worker


@pytest.mark.parametrize(
    ("own_s", "other_s", "spills"),
    [
        (0.10, 0.00, False),  # no need
        (0.25, 0.00, False),
        (0.26, 0.25, True),
        (0.26, 0.26, False),  # no gain
        (0.26, 0.30, False),
        (inf, 5.0, True),  # own workers are full
    ],
)
def test_short_requests_leave_when_they_wait_too_long(
    own_s: float, other_s: float, spills: bool
) -> None:
    assert short_spills(own_s, other_s, wait_s_max=0.25) is spills


@pytest.mark.parametrize(
    ("own_s", "fields", "prompt_tokens", "spills"),
    [
        (1.0, {}, 1_000, True),
        (inf, {}, 1_000, True),  # own workers are full
        (0.05, {}, 1_000, False),  # less than twice as fast there (27 ms)
        (1.0, {"pend_tokens": 1_100}, 1_000, True),  # 29 ms wait there
        (1.0, {"pend_tokens": 1_200}, 1_000, False),  # 31 ms
        (inf, {"pend_tokens": 1_200}, 1_000, False),
        (1.0, {"kv_reserved_tokens": 238_000}, 1_000, True),
        (1.0, {"kv_reserved_tokens": 240_000}, 1_000, False),  # 60 % full
        (1.0, {"kv_total_tokens": None}, 1_000, False),  # unknown is not safe
        (1.0, {"unknown": True}, 1_000, False),
        (9.0, {}, 20_000, False),  # an elephant: alone longer than 250 ms
    ],
)
def test_long_requests_leave_only_where_nobody_feels_it(
    own_s: float, fields: dict[str, Any], prompt_tokens: int, spills: bool
) -> None:
    other = worker()
    other.refresh(0.0)
    for name, value in fields.items():
        setattr(other, name, value)
    asked = ticket(prompt_tokens=prompt_tokens, kv_tokens=prompt_tokens + 256)
    assert long_spills(own_s, other, asked, 0, wait_s_max=0.25, now=0.0) is spills
