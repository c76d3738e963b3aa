"""Records on their way to observers: all of them, in their order, and some at a time."""

from __future__ import annotations

import pytest

from router.core.types import RequestRecord
from router.records import Records
from tests.test_access_log import RECORD


def test_observers_get_all_records_in_their_order_a_batch_at_a_time() -> None:
    records, batches = Records(), list[list[RequestRecord]]()
    records.observers.append(batches.append)
    made = [RequestRecord(**{f: getattr(RECORD, f) for f in RECORD.__slots__}) for _ in range(1000)]
    for one in made:
        records.add(one)
    assert all(len(batch) > 1 for batch in batches)
    assert sum(map(len, batches)) > 900, "few wait"
    records.hand_on()
    assert [one for batch in batches for one in batch] == made
    before = len(batches)
    records.hand_on()
    assert len(batches) == before, "none twice, and no empty batch"


def test_an_observer_that_fails_takes_records_from_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records, seen = Records(), list[RequestRecord]()

    def fail(batch: list[RequestRecord]) -> None:
        raise ZeroDivisionError

    records.observers += [fail, seen.extend]
    records.add(RECORD)
    records.hand_on()
    assert seen == [RECORD]
    assert "1 finished requests could not be" in caplog.text
