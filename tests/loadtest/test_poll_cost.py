"""What a poll costs in bytecodes: a bound that an accident on its way would break."""

from __future__ import annotations

import pytest

from loadtest.poll_cost import measured


@pytest.mark.parametrize(
    ("kind", "bytecodes_max", "calls_max"), [("agent", 1_250, 36), ("SGLang", 1_620, 47)]
)
def test_a_poll_costs_no_more_than_it_did(kind: str, bytecodes_max: int, calls_max: int) -> None:
    cost, by_function = measured(kind)
    assert cost.bytecodes <= bytecodes_max
    assert cost.calls <= calls_max
    assert "runtime.prober.Prober._begin" not in by_function, "all took the quick way"
