"""The driver between the core and the store of the limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from router.core.bucket import Ask, Settlement, Verdict
from router.core.types import Outcome, TicketState
from router.errors import Reason
from router.runtime.local_buckets import LocalBuckets
from tests.api.cluster import Exchange, cluster

ABORTED = (Outcome.ABORTED, None, None)
LIMITS = {"tenant": {"concurrency": 1}, "wait_s_max": 10}


class Late(LocalBuckets):
    """Answers when the test lets it; settlements are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.asks: list[tuple[Ask, Callable[[Verdict], None]]] = []
        self.settled: list[Settlement] = []

    def reserve(self, ask: Ask, decided: Callable[[Verdict], None]) -> None:
        self.asks.append((ask, decided))

    def answer(self) -> None:
        super().reserve(*self.asks.pop(0))

    def settle(self, settlement: Settlement) -> None:
        self.settled.append(settlement)
        super().settle(settlement)


class Broken(LocalBuckets):
    """Fails."""

    def reserve(self, ask: Ask, decided: Callable[[Verdict], None]) -> None:
        raise RuntimeError("a fault in the store")


async def test_a_request_waits_for_a_store_that_answers_later() -> None:
    async with cluster(limits=LIMITS, catalog={"unknown": "any"}) as router:
        store = router.driver.buckets = Late()
        await router.add("http://h:1", concurrency_max=4)
        first, second = Exchange(router), Exchange(router)
        assert first.ticket.state is second.ticket.state is TicketState.RESERVING
        store.answer()
        store.answer()
        assert first.ticket.state is not TicketState.RESERVING
        assert second.ticket.state is TicketState.RESERVING
        router.driver.abort(first.ticket)
        router.driver.finished(first.ticket, *ABORTED)
        assert len(store.settled) == 1
        store.answer()
        assert second.ticket.state is not TicketState.RESERVING


async def test_a_client_that_left_gives_back_what_comes_late() -> None:
    async with cluster(limits=LIMITS, catalog={"unknown": "any"}) as router:
        store = router.driver.buckets = Late()
        await router.add("http://h:1")
        one = Exchange(router)
        router.driver.finished(one.ticket, *ABORTED)
        assert store.settled == []
        store.answer()
        assert len(store.settled) == 1
        assert router.driver.snapshot().limits.held == 0


async def test_a_store_that_fails_costs_the_request_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(limits=LIMITS, catalog={"unknown": "any"}) as router:
        router.driver.buckets = Broken()
        await router.add("http://h:1")
        one = Exchange(router)
        assert one.cuts == [Reason.INTERNAL]
        assert "an effect failed: Reserve" in caplog.text
        router.driver.buckets = LocalBuckets()
        other = Exchange(router)
        assert other.ticket.state is not TicketState.RESERVING


@pytest.mark.patches
async def test_a_verdict_that_cannot_be_taken_ends_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(limits=LIMITS, catalog={"unknown": "any"}) as router:
        store = router.driver.buckets = Late()
        await router.add("http://h:1", concurrency_max=4)
        one, other = Exchange(router), Exchange(router)
        lines = router.driver.dispatcher.reserving._lines
        with monkeypatch.context() as planted:
            planted.setattr(type(lines), "leave", None)
            store.answer()
        assert one.cuts == [Reason.INTERNAL]
        assert "an event of a request failed" in caplog.text
        router.driver.finished(one.ticket, *ABORTED)
        assert len(store.settled) == 1
        store.answer()
        assert other.ticket.state is not TicketState.RESERVING
