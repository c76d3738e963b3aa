"""Several routers that share a limit in virtual time, and tenants that always want more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from router.core.bucket import DecidedBy
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Refuse, Reserve, Settle
from router.core.ledger import Ledger
from router.core.peers import PeerLine
from router.core.types import Outcome, Ticket, Usage
from tests.core.builders import Bench, plain_config, request_spec

PER_REQUEST = {"request_units": 1.0, "prompt_token_units": 0.0, "output_token_units": 0.0}


class World:
    """Routers whose store is a round trip away, and who hear of each other five times a second.

    Each request runs for `runs_s`; then its tenant sends the next one to the same router.
    """

    def __init__(
        self,
        routers: int,
        *,
        runs_s: float = 0.01,
        trip_s: float = 0.001,
        exchange_s: float = 0.2,
        seed: int = 1,
        **sections: Any,
    ) -> None:
        config = plain_config(**sections)
        self.now = 0.0
        self.rng = Random(seed)
        self.ledger = Ledger(DecidedBy.REDIS, now=0.0)
        self.routers: list[Bench] = []
        for number in range(routers):
            made = Bench(Dispatcher(config, rng=Random(number), router_id=f"r{number}"))
            made.join("w1", concurrency_max=100_000, kv_total_tokens=10**9)
            self.routers.append(made)
        self.dead: set[int] = set()  # these do nothing more, and their last word stays
        self.full: set[str] = set()  # these tenants send nothing more
        self.granted: Counter[str] = Counter()  # by tenant
        self.refused = self.asks = self.asked = self.ended = 0
        self.waited_s_max = 0.0  # of those that were refused
        self.silent = False  # nobody hears of another any more
        self._runs_s, self._trip_s, self._exchange_s = runs_s, trip_s, exchange_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._armed: list[float] = [float("inf")] * routers
        self._said: dict[int, tuple[PeerLine, ...]] = {}
        self.told = 0  # lines, in all exchanges
        for number in range(routers):
            self.at(exchange_s * self.rng.random(), partial(self._exchange, number))

    def at(self, moment: float, call: Callable[[], None]) -> None:
        """Have something done."""
        heappush(self._events, (moment, next(self._numbers), call))

    def wants(
        self, router: int, tenant: str, at_once: int, *, after_s: float = 0.0, **fields: Any
    ) -> None:
        """A tenant always has so many requests under way at a router, from now on; each next one
        comes so long after the one before.
        """
        for _ in range(at_once):
            self._send(router, tenant, after_s, fields)

    def run(self, seconds: float) -> Counter[str]:
        """Let time pass; returns what each tenant was granted meanwhile."""
        self.granted = Counter()
        ends_at = self.now + seconds
        while self._events and self._events[0][0] <= ends_at:
            self.now, _, call = heappop(self._events)
            call()
        self.now = ends_at
        return self.granted

    def _send(self, number: int, tenant: str, after_s: float, fields: dict[str, Any]) -> None:
        if number in self.dead or tenant in self.full:
            return
        core = self.routers[number].core
        spec = request_spec(tenant=tenant, **fields)
        again = partial(self._send, number, tenant, after_s, fields)
        owner = (lambda: self.at(self.now + after_s, again)) if after_s else again
        self.asked += 1
        core.on_request(spec, owner=owner, now=self.now)
        self._execute(number)

    def _execute(self, number: int) -> None:
        core = self.routers[number].core
        for effect in core.take_effects():
            if isinstance(effect, Reserve):
                self.asks += 1
                self.at(self.now + self._trip_s / 2, partial(self._decide, number, effect))
            elif isinstance(effect, Settle):
                self.ledger.settle(effect.settlement, self.now)
            elif isinstance(effect, Dispatch):
                self.granted[effect.ticket.spec.tenant] += 1
                self.at(self.now + self._runs_s, partial(self._ended, number, effect.ticket))
            elif isinstance(effect, Refuse):
                self.refused += 1
                self.ended += 1
                self.waited_s_max = max(self.waited_s_max, self.now - effect.ticket.arrived_at)
                self.at(self.now + 0.01, effect.ticket.owner)  # type: ignore[arg-type]
        due = core.next_deadline()
        if due is not None and due < self._armed[number]:
            self._armed[number] = due
            self.at(max(due, self.now), partial(self._wake, number))

    def _wake(self, number: int) -> None:
        self._armed[number] = float("inf")
        if number in self.dead:
            return
        self.routers[number].core.on_timer(now=self.now)
        self._execute(number)

    def _decide(self, number: int, effect: Reserve) -> None:
        verdict = self.ledger.reserve(effect.ask, self.now)

        def decided() -> None:
            self.routers[number].core.on_reserved(effect.ticket, verdict, now=self.now)
            self._execute(number)

        if number not in self.dead:
            self.at(self.now + self._trip_s / 2, decided)

    def _ended(self, number: int, ticket: Ticket) -> None:
        send = ticket.owner
        core, usage = self.routers[number].core, Usage(prompt_tokens=100, output_tokens=20)
        self.ended += 1
        core.on_finished(ticket, Outcome.SUCCESS, now=self.now, usage=usage)
        self._execute(number)
        send()  # type: ignore[operator]

    def _exchange(self, number: int) -> None:
        if number in self.dead or self.silent:
            return
        peering = self.routers[number].core.peering
        self._said[number] = peering.lines(self.now)
        self.told += len(self._said[number])
        told = {f"r{n}": lines for n, lines in self._said.items() if n != number and lines}
        peering.on_lines(told, now=self.now)
        gap_s = self._exchange_s * self.rng.uniform(0.9, 1.1)
        self.at(self.now + gap_s, partial(self._exchange, number))


def jain(parts: Sequence[float]) -> float:
    """Jain's index of fairness: 1 where all are equal, 1/n where one has all."""
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))
