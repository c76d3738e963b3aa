"""When the sweep of an edge looks at its clients."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.config import Config
from router.core.dispatcher import Dispatcher
from router.core.types import Outcome, Refusal, TicketState
from router.errors import Reason
from router.runtime.driver import NO_VERDICT, Driver
from router.runtime.upstream import Upstreams


class Client:
    """Counts the looks at it."""

    def __init__(self, seen: Counter[Client]) -> None:
        self._seen = seen

    def sweep(self, now: float) -> None:
        self._seen[self] += 1

    def rules_changed(self) -> None:
        """Judge nothing."""

    def break_off(self) -> None:
        raise AssertionError("a look failed")


def edge() -> Driver:
    config, loop = Config(), asyncio.get_running_loop()
    upstreams = Upstreams(config.upstream, loop=loop)
    return Driver(config, Dispatcher(config, rng=Random(1)), upstreams, loop=loop)


def sweep(driver: Driver) -> None:
    if driver._sweeper is not None:
        driver._sweeper.cancel()
    driver._sweep()


@pytest.mark.parametrize("count", [4, 5, 7, 9, 1000])
async def test_all_clients_are_looked_at_in_four_sweeps_a_quarter_in_each(count: int) -> None:
    driver, seen = edge(), Counter[Client]()
    driver.clients.update(Client(seen) for _ in range(count))
    for _ in range(4):
        before = seen.total()
        sweep(driver)
        assert seen.total() - before <= -(-count // 4)
    driver.stop()
    assert seen.keys() == driver.clients


async def test_a_client_that_left_is_not_looked_at_and_one_that_came_is_next_time() -> None:
    driver, seen = edge(), Counter[Client]()
    first, second, late = (Client(seen) for _ in range(3))
    driver.clients.update((first, second))
    sweep(driver)
    (left,) = {first, second} - set(seen)
    driver.clients.discard(left)
    driver.clients.add(late)
    sweep(driver)
    assert seen[left] == 0
    for _ in range(2):
        sweep(driver)
    driver.stop()
    assert seen[late] >= 1


class Owner:
    """An exchange that counts the looks at it."""

    ticket: Any = None

    def __init__(self) -> None:
        self.looks = 0

    def sweep(self, now: float) -> None:
        self.looks += 1

    def dispatch(self) -> None:
        """Send nothing."""

    def refuse(self, refusal: Refusal) -> None:
        """Answer nothing."""

    def judged(self, *, again: bool) -> None:
        """No attempt fails."""

    def preempt(self) -> bool:
        return False

    def cut(self, reason: Reason, message: str) -> None:
        raise AssertionError("a look failed")


async def test_exchanges_that_moved_are_looked_at_next_and_the_others_within_four_sweeps() -> None:
    driver = edge()
    owners = [Owner() for _ in range(400)]
    driver.running.update(owners)
    busy, over = owners[0], Owner()
    for sweeps in range(1, 5):
        driver.moved += [busy, over]
        sweep(driver)
        assert (busy.looks, over.looks) == (sweeps, 0)
        assert sum(owner.looks for owner in owners[1:]) <= 100 * sweeps
    driver.stop()
    assert all(owner.looks == 1 for owner in owners[1:])


@pytest.mark.parametrize(("count", "sweeps"), [(500, 1), (1_000, 2), (10_000, 4)])
async def test_of_many_that_moved_all_are_looked_at_within_a_second(
    count: int, sweeps: int
) -> None:
    driver = edge()
    owners = [Owner() for _ in range(count)]
    driver.running.update(owners)
    driver.moved += owners
    quarter = -(-count // 4)
    for _ in range(sweeps):
        before = sum(owner.looks for owner in owners)
        sweep(driver)
        assert sum(owner.looks for owner in owners) - before <= max(512, quarter) + quarter
    driver.stop()
    assert not driver.moved
    assert all(owner.looks for owner in owners)


class Stream(Owner):
    """An exchange whose answer moves all the time."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self._moved = False

    def move(self) -> None:
        if not self._moved:
            self._moved = True
            self._driver.moved.append(self)

    def sweep(self, now: float) -> None:
        super().sweep(now)
        self._moved = False


@pytest.mark.parametrize("count", [600, 1_000, 5_000])
async def test_streams_that_move_all_the_time_are_noted_once_each(count: int) -> None:
    driver = edge()
    streams = [Stream(driver) for _ in range(count)]
    driver.running.update(streams)
    for _ in range(20):
        for stream in streams:
            stream.move()
        assert len(driver.moved) <= count
        sweep(driver)
    driver.stop()
    assert all(stream.looks >= 5 for stream in streams)


async def test_exchanges_that_are_over_keep_nobody_waiting_and_are_kept_no_longer() -> None:
    driver = edge()
    over = [Owner() for _ in range(5_000)]
    busy = Owner()
    driver.running.add(busy)
    driver.moved += [*over, busy]
    sweep(driver)
    driver.stop()
    assert busy.looks == 1
    assert not driver.moved


class Paced:
    """Stands for a core that at each news holds up who waits until a moment."""

    def __init__(self) -> None:
        self.effects: list[Any] = []
        self.waits: dict[int, object] = {}
        self.reserving = SimpleNamespace(in_line={})
        self.until: float | None = None

    def next_deadline(self) -> float | None:
        return self.until

    def _hold(self, *_args: Any, now: float, **_more: Any) -> None:
        self.until = now + 0.01

    on_first_token = on_finished = on_reserved = _hold


NEWS: dict[str, Callable[[Driver, Any], None]] = {
    "first token": lambda driver, ticket: driver.first_token(ticket),
    "end": lambda driver, ticket: driver.finished(ticket, Outcome.SUCCESS, None, None),
    "grant": lambda driver, ticket: driver._reserved(ticket, NO_VERDICT),
}


@pytest.mark.patches
@pytest.mark.parametrize("news", NEWS.values(), ids=NEWS)
@pytest.mark.parametrize("anybody_waits", [True, False])
async def test_who_is_held_up_by_good_news_of_another_is_looked_at_in_time(
    news: Callable[[Driver, Any], None], anybody_waits: bool
) -> None:
    config, loop, core = Config(), asyncio.get_running_loop(), Paced()
    upstreams = Upstreams(config.upstream, loop=loop)
    driver = Driver(config, cast("Dispatcher", core), upstreams, loop=loop)
    if anybody_waits:
        core.waits[1] = object()
    news(driver, SimpleNamespace(state=TicketState.STREAMING, owner=None))
    driver.stop()
    assert driver._timer_at == (core.until if anybody_waits else math.inf)
