"""The driver between the core and the store of the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.core.bucket import Ask, Charge, Rule, Settlement, Verdict
from router.core.types import Outcome, Priority, TicketState, Usage
from router.errors import Reason
from router.runtime.leased_buckets import LeasedBuckets
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


async def test_what_leases_let_in_after_the_store_denied_it_is_one_decision() -> None:
    tenants: dict[str, Any] = {"acme": {}, "beta": {}}
    limits = {"tenant": {"concurrency": 1000}, "lanes": {"short": {"concurrency": 60}}}
    async with cluster(limits=limits, tenants=tenants, catalog={"unknown": "any"}) as router:
        store, driver = LocalBuckets(), router.driver
        settings, loop = driver.config.limits, asyncio.get_running_loop()
        driver.buckets = leased = LeasedBuckets(store, settings, name="r", loop=loop)
        await router.add("http://h:1", concurrency_max=100)
        for _ in range(12):
            Exchange(router, tenant="acme")
        (lease,) = leased._leases.values()
        held = int(lease.free[1])
        assert held > 0
        rest: list[Verdict] = []
        store.reserve(taking(lease.rules[1], 48 - held), rest.append)
        assert rest[0].granted
        for _ in range(held):
            Exchange(router, tenant="beta")
        shown = (await router.client.get("/admin/state")).json()["limits"]
        assert (shown["granted"], shown["refused"]) == (12 + held, {})
        text = (await router.client.get("/metrics")).text
        assert 'verdict="denied"' not in text
        await leased.aclose()


def taking(rule: Rule, amount: float) -> Ask:
    return Ask("other", (Charge(rule, amount),), Priority.P1, 600.0)


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


async def test_a_deadline_in_a_line_is_kept_whoever_else_waits() -> None:
    """Who joins others has no word of the store that would set the timer."""
    async with cluster(limits=LIMITS, catalog={"unknown": "any"}) as router:
        router.driver.buckets = LocalBuckets()
        await router.add("http://h:1", concurrency_max=4)
        Exchange(router)
        Exchange(router)
        soon = Exchange(router, wait_s_max=0.02).ticket
        assert soon.state is TicketState.RESERVING
        assert router.driver._timer_at <= soon.queue_deadline_at


async def test_who_waits_for_units_asks_again_soon_after_some_came_back() -> None:
    """Also when they came from a request that ended well, which sets no timer otherwise."""
    cost = {"request_units": 0, "prompt_token_units": 0, "output_token_units": 1}
    tenant = {"cost_per_s": 10, "cost_burst": 130}
    limits = {"tenant": tenant, "cost": cost, "wait_s_max": 60, "degrade": False}
    async with cluster(limits=limits, catalog={"unknown": "any"}) as router:
        router.driver.buckets = LocalBuckets()
        await router.add("http://h:1", concurrency_max=4)
        one, other = Exchange(router), Exchange(router)
        assert other.ticket.state is TicketState.RESERVING
        used = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1)
        router.driver.finished(one.ticket, Outcome.SUCCESS, None, used)
        wanted_at = router.driver.dispatcher.next_deadline()
        assert wanted_at is not None
        assert router.driver._timer_at <= wanted_at
