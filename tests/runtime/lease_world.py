"""Some routers with leases before one store, in time that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from router.core.bucket import AMPLE_RATIO, Ask, DecidedBy, Kind, Level, Rule, Settlement, Verdict
from router.core.ledger import Ledger
from router.limit_settings import LimitsSettings
from router.runtime.bucket_store import Decided
from router.runtime.leased_buckets import LeasedBuckets
from router.runtime.local_buckets import LocalBuckets
from tests.runtime.limit_world import ask, used

LIMITS = LimitsSettings()  # as it ships
BATCH_S = LIMITS.batch_s


class VirtualLoop(asyncio.AbstractEventLoop):
    """Timers in time that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, Callable[[], object]]] = []

    def call_later(  # type: ignore[override] # without a context
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        self._timers.append((self.now + delay, partial(callback, *args)))
        return asyncio.TimerHandle(self.now + delay, callback, args, self)

    def get_debug(self) -> bool:
        return False

    def go(self, seconds: float) -> None:
        self.now += seconds
        due = [callback for at, callback in self._timers if at <= self.now]
        self._timers = [timer for timer in self._timers if timer[0] > self.now]
        for callback in due:
            callback()


class Late(LocalBuckets):
    """A store that several routers share: it decides, in order, when the test lets it."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self._ledger = ledger
        self.queue: list[Callable[[], None]] = []

    def reserve(self, ask: Ask, decided: Decided) -> None:
        self.queue.append(partial(super().reserve, ask, decided))

    def settle(self, settlement: Settlement) -> None:
        self.queue.append(partial(super().settle, settlement))

    def answer(self) -> None:
        queue, self.queue = self.queue, []
        for each in queue:
            each()


@dataclass
class Shared:
    """Some routers with leases, and one store behind them."""

    rules: tuple[Rule, ...]
    loop: VirtualLoop = field(default_factory=VirtualLoop)
    running: list[tuple[LeasedBuckets, Ask]] = field(default_factory=list)
    used: float = 0.0
    granted: float = 0.0
    denied: list[float] = field(default_factory=list)
    by_lease: int = 0

    def __post_init__(self) -> None:
        self.ledger = Ledger(DecidedBy.MEMORY, now=self.loop.now)
        self.levels: tuple[Level, ...] = ()  # of the last that was granted
        self.stores = [Late(self.ledger, lambda: self.loop.now) for _ in range(3)]
        self.routers = [
            LeasedBuckets(store, LIMITS, name=f"r{n}", loop=self.loop, clock=lambda: self.loop.now)
            for n, store in enumerate(self.stores)
        ]
        for router in self.routers:
            router.replicas = len(self.routers)

    def reserve(self, router: LeasedBuckets, amount: float, *more: Rule) -> None:
        rules = (*self.rules, *more)
        one = ask(*((r, 1.0 if r.kind is Kind.PERMITS else amount) for r in rules))
        one.borrows = AMPLE_RATIO

        def answered(verdict: Verdict) -> None:
            if verdict.granted:
                self.running.append((router, one))
                self.granted += amount
                self.by_lease += verdict.by is DecidedBy.LEASE
                self.levels = verdict.levels
            else:
                self.denied.append(amount)

        router.reserve(one, answered)

    def end(self, number: int, ratio: float) -> None:
        router, one = self.running.pop(number % len(self.running))
        router.settle(used(one, *(charge.amount * ratio for charge in one.charges)))
        self.used += one.charges[0].amount * ratio

    def answer(self) -> None:
        for store in self.stores:
            store.answer()

    def settle_down(self) -> None:
        """All requests end, and nobody asks any more."""
        for _ in range(12):
            self.answer()
            while self.running:
                self.end(0, 1.0)
            self.loop.go(BATCH_S)
        self.answer()

    @property
    def taken(self) -> float:
        return self.used + sum(one.charges[0].amount for _, one in self.running)

    def left(self, rule: Rule) -> float:
        look = ask((rule, 0.0))
        return self.ledger.reserve(look, self.loop.now).levels[0].remaining


def warmed(*rules: Rule, requests: int = 12, amount: float = 10.0) -> Shared:
    """A world whose first router has a lease with something left in it."""
    world = Shared(rules)
    for _ in range(requests):
        world.reserve(world.routers[0], amount)
        world.answer()
    (lease,) = world.routers[0]._leases.values()
    assert min(lease.free) > 0
    return world
