"""What refused requests are told."""

from __future__ import annotations

import pytest

from router.core.bucket import Charge, DecidedBy, Rule, Scope, Verdict
from router.core.refusals import over_limit

RULE = Rule("t", Scope.TENANT_COST, 1.0, 10.0)


@pytest.mark.parametrize(
    ("wait_s", "told_s", "text"),
    [
        (None, 1.0, "try again in 1 s"),
        (0.2, 1.0, "try again in 1 s"),
        (17.5, 17.5, "try again in 18 s"),
        (3600.0, 3600.0, "try again in 3600 s"),
        (4e9, 3600.0, "it has room again in more than an hour"),
    ],
)
def test_a_limit_tells_no_longer_wait_than_an_hour(
    wait_s: float | None, told_s: float, text: str
) -> None:
    verdict = Verdict(False, Scope.TENANT_COST, wait_s, False, (), DecidedBy.REDIS)
    refusal = over_limit("acme", (Charge(RULE, 1.0),), verdict)
    assert refusal.retry_after_s == told_s
    assert refusal.message.endswith(text)
