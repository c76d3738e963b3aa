"""When a request is sent: at once, or when the pump finds that its turn and a worker's room came.

Whatever frees room calls `pump`: an end, a first token, a report, a worker's prefill credit that is
back. It goes through the waiting tickets in the order of flow control and sends those that fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.adoption import catch_up
from router.core.effects import Dispatch, Effect
from router.core.elephants import Elephants
from router.core.openings import LOOK_S, Openings, Stuck, Version, somebody_has_room
from router.core.placement import Placement
from router.core.pools import Pool, Pools
from router.core.preempting import Preempting
from router.core.prefix import PrefixIndex
from router.core.shadow import Shadow
from router.core.timers import Timers
from router.core.types import Ticket, TicketState
from router.core.waiting import Round, WaitingRoom
from router.core.worker import Worker

_DISPATCHED: Final = TicketState.DISPATCHED


class Scheduler:
    """Sends tickets to workers. Times are the driver's monotonic seconds."""

    def __init__(
        self,
        config: Config,
        *,
        rng: Random,
        pools: Pools,
        prefixes: PrefixIndex,
        room: WaitingRoom,
        timers: Timers,
        effects: list[Effect],
    ) -> None:
        self._pools = pools
        self._room = room
        self._waits = room.flow.waits
        self._lane_dispatches = room.dispatches
        self._timers = timers
        self._effects = effects
        self.elephants = Elephants(config)
        self.came = self.elephants.came  # a request, whatever becomes of it
        self._placement = Placement(config, rng=rng, prefixes=prefixes, elephants=self.elephants)
        self.shadow = Shadow(config.policy) if config.policy.shadow else None
        self._stuck: dict[str, Stuck] = {}  # by domain, while nothing that waits there fits
        self._looks_again = False  # a timer for that is set
        self.running = dict.fromkeys(Lane, 0)
        self.uncached_s = self._placement.uncached_s
        self.cached_tokens = self._placement.cached_tokens
        self.preempting = Preempting(config, running=self.running, effects=effects)
        self._permits = config.lanes.permits
        self.dispatches = self.spills = 0

    def configure(self, config: Config) -> None:
        """Take over new settings."""
        self._placement.configure(config)
        self.elephants.configure(config)
        self.preempting.configure(config)
        self._stuck.clear()
        self._permits = config.lanes.permits
        if self.shadow is None or self.shadow.settings != config.policy:
            self.shadow = Shadow(config.policy) if config.policy.shadow else None

    def serve(self, domains: Iterable[str]) -> None:
        """Membership moved: these are the domains that there are now."""
        self.elephants.serve(domains)
        self._stuck.clear()

    def fits(self, ticket: Ticket, now: float) -> bool:
        """Whether a worker has room for `ticket`, whoever else waits for it."""
        if not self._permitted(ticket.lane):
            return False
        pool = self._pools.fresh(ticket.pool)
        return self._placement.choose(ticket, pool, now=now) is not None

    def sent_at_once(self, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` was sent, as its turn and a worker's room are there; else it is out."""
        pool = self._pools.fresh(ticket.pool)
        need = ticket.kv_tokens, self._placement.prompt_tokens_min(ticket)
        if not (self._permitted(ticket.lane) and somebody_has_room(pool, ticket.rank, need, now)):
            return False
        self._room.flow.push(ticket, now=now)
        self.pump(now)
        return not self._room.flow.take_out(ticket, now=now)

    def place(self, ticket: Ticket, now: float) -> bool:
        """Send `ticket` if its lane has a permit left and a worker has room for it."""
        if self._permits and not self._permitted(ticket.lane):
            return False
        worker = self._placement.choose(ticket, self._pools.fresh(ticket.pool), now=now)
        if worker is None:
            return False
        if self.shadow is not None:
            hits = self._placement.hits(ticket)
            self.shadow.look(ticket, worker, self._placement.seen, hits, now=now)
        if self._waits:
            self._room.flow.serve(ticket, now=now)
        ticket.state = _DISPATCHED
        ticket.dispatched_at = now
        ticket.attempts += 1
        # Next to each other: whatever fails from here on, who is charged is sent, or is given back.
        worker.charge(ticket, now=now)
        lane = ticket.lane
        self.running[lane] += 1
        self._effects.append(Dispatch(ticket))
        if worker.valid_until <= now:  # its credit is used up
            worker.refresh(now)
            self._await_pace(worker, now)
        self._placement.sent(ticket, worker)
        self._lane_dispatches[lane].add(1, now)
        self.dispatches += 1
        if ticket.spilled:
            self.spills += 1
        if self.preempting.enabled:
            self.preempting.sent(ticket)
        return True

    def resume(self, ticket: Ticket, worker: Worker | None, now: float) -> None:
        """Go on with what runs on `worker` already; None: that is gone, and nobody is charged."""
        if worker is not None:
            seen_tokens, ticket.output_seen_tokens = ticket.output_seen_tokens, 0
            worker.charge(ticket, now=now)
            self.running[ticket.lane] += 1
            catch_up(ticket, worker, seen_tokens, now=now)
            self._placement.sent(ticket, worker)

    def release(self, ticket: Ticket) -> Worker | None:
        """Give back what `ticket` was charged, once; returns who has it back."""
        worker = ticket.worker
        if worker is not None:
            worker.release(ticket)
            self.running[ticket.lane] -= 1
        return worker

    def _permitted(self, lane: Lane) -> bool:
        """Whether one more request of `lane` may run."""
        if not self._permits:
            return True
        most = self._permits.get(lane)
        return most is None or self.running[lane] < most

    def pump(self, now: float, worker: Worker | None = None) -> None:
        """Send what waits and has room now, in the order of flow control.

        With `worker`, only that one has news; without, all may have, or somebody came to wait.
        """
        flow = self._room.flow
        fits = self._heed(flow.take_newcomers(), now) if flow.newcomers else False
        if not self._waits:
            return
        if worker is not None:
            self._await_pace(worker, now)
            if not (fits or self._permits or worker.is_open(now) or self._concerns_others(worker)):
                return
        for group in flow.groups([self._pools.fresh(pool) for pool in flow.pools]):
            # A permit that an end gave back may be used by other models and workers.
            concerned = worker is None or self._permits or _serves(worker, group)
            if fits or (concerned and not self._is_stuck(group, worker, now)):
                self._fill(group, now)

    def _fill(self, group: list[Pool], now: float) -> None:
        """One round of offers of what waits for a group of pools."""
        openings = Openings(self.elephants, now)
        stuck = Stuck(group, now)
        last = self._stuck.get(group[0].domain)
        floors = None if last is None else last.floors(group, self._version())
        turn = Round(self._room.flow, self._open_ones(group, openings))
        while (ticket := turn.next(now)) is not None:
            if self._shut_for(ticket, openings):
                turn.close(ticket.pool)
                stuck.shut(ticket.pool, ticket.rank)
                continue
            prompt_tokens = self._placement.prompt_tokens_min(ticket)
            if self._may_fit(ticket, prompt_tokens, openings) and self.place(ticket, now):
                assert ticket.worker is not None
                openings.used(ticket.worker)
                turn.served(ticket)
                turn.keep(self._open_ones(turn.pools, openings))
                if floors is not None and not openings.fit_any(floors):
                    stuck.cover(floors)
                    break
            else:
                turn.passed(ticket, choosy=self._placement.rather_waits(ticket, now))
                self._add(stuck, ticket, prompt_tokens)
        turn.end()
        for pool in group:
            if not self._permitted(pool.lane):
                stuck.lanes.add(pool.lane)
            elif not openings.of(pool):
                stuck.shut(pool)
        stuck.complete, stuck.version = stuck.complete or turn.complete, self._version()
        for pool in group:
            self._stuck[pool.domain] = stuck

    def _may_fit(self, ticket: Ticket, prompt_tokens: int, openings: Openings) -> bool:
        """Whether it is worth an attempt: most of those that wait are told apart by less."""
        pool = ticket.pool
        if not openings.fit(pool, ticket.rank, (ticket.kv_tokens, prompt_tokens)):
            return False
        cached = ticket.prompt_tokens - prompt_tokens
        is_elephant = self._placement.is_elephant(ticket, pool, cached)
        return not is_elephant or openings.elephant_may_start(pool)

    def _open_ones(self, pools: list[Pool], openings: Openings) -> list[Pool]:
        """Those of `pools` for which something may be sent."""
        return [pool for pool in pools if self._permitted(pool.lane) and openings.of(pool)]

    def _is_stuck(self, group: list[Pool], worker: Worker | None, now: float) -> bool:
        """Whether a round over `group` would send nothing, as the last one after all it sent."""
        stuck = self._stuck.get(group[0].domain)
        if stuck is None or stuck.pools != group or not stuck.is_exact(self._version()):
            return False
        if stuck.lanes and any(map(self._permitted, stuck.lanes)):
            return False
        if worker is not None:
            return stuck.holds_for(worker, self.elephants, now)
        if now < (look_at := stuck.looked_at + LOOK_S):
            if not self._looks_again:  # perhaps nothing else happens soon
                self._looks_again = True
                self._timers.call_at(look_at, self._look_again)
            return True
        return stuck.holds(self.elephants, now)

    def _look_again(self, now: float) -> None:  # noqa: ARG002
        self._looks_again = False  # a timer of the core ends in `pump`

    def _concerns_others(self, worker: Worker) -> bool:
        return any(stuck.concerns_others(worker) for stuck in self._stuck.values())

    def _version(self) -> Version:
        return self._pools.version, self.dispatches, self._room.flow.version

    def _heed(self, newcomers: Sequence[Ticket], now: float) -> bool:
        """Who came to wait needs room, too; tells whether there is some for one of them."""
        fits = False
        for ticket in newcomers:
            if ticket.number not in self._waits:
                continue
            pool = self._pools.fresh(ticket.pool)
            prompt_tokens = self._placement.prompt_tokens_min(ticket)
            stuck = self._stuck.get(pool.domain)
            if stuck is not None:
                self._add(stuck, ticket, prompt_tokens)
            need = ticket.kv_tokens, prompt_tokens
            fits = fits or somebody_has_room(pool, ticket.rank, need, now)
        return fits

    def _add(self, stuck: Stuck, ticket: Ticket, prompt_tokens: int) -> None:
        whole = prompt_tokens == ticket.prompt_tokens  # a cached elephant may be none
        elephant = whole and self.elephants.is_one(ticket.prefill_whole_s)
        floor_tokens = self._placement.prompt_tokens_floor(ticket)
        stuck.add(ticket, prompt_tokens, floor_tokens, elephant=elephant)

    def _shut_for(self, ticket: Ticket, openings: Openings) -> bool:
        """Whether its pool takes neither `ticket` nor anything that is to be offered after it.

        Nothing is less paced than P0; a class that is owed its turn may be offered before it.
        """
        if openings.of(ticket.pool, ticket.rank):
            return False
        return ticket.rank == 0 or not self._room.flow.urgent_wait

    def _await_pace(self, worker: Worker, now: float) -> None:
        """Look again when the worker's prefill credit is back."""
        if worker.pace_timer:
            return
        back_at = inf
        for at in worker.paced_until:
            if now < at < back_at:
                back_at = at
        if back_at < inf:
            worker.pace_timer = True
            self._timers.call_at(back_at, partial(self._paced, worker))

    def _paced(self, worker: Worker, now: float) -> None:
        worker.pace_timer = False
        if worker.is_open(now):
            self.pump(now, worker)
        self._await_pace(worker, now)


def _serves(worker: Worker, pools: list[Pool]) -> bool:
    """Whether `worker` is in any of `pools`."""
    return any(worker.id in pool.members for pool in pools)
