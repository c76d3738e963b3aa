"""The core in virtual time: an event heap, simple servers, and random faults, over seeds.

A server prefills one prompt at a time and then streams; it answers polls, and it may be down for a
while: then polls fail and what runs on it breaks. Whoever is refused or failed is not lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from random import Random

import pytest

from router.config import Config
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Finish, Preempt, Probe, Refuse
from router.core.types import (
    Endpoint,
    Failure,
    Outcome,
    RequestRecord,
    RequestSpec,
    Ticket,
    TicketState,
    Usage,
)
from router.errors import Reason

PREFILL_S_PER_TOKEN = 3e-5
STEP_S = 0.01
RUN_S = 60.0


class Server:
    """Prefills first come first served, then streams each answer at one speed."""

    def __init__(self, name: str, sim: Simulation) -> None:
        self.id = WorkerId(name)
        self._sim = sim
        self._prompts: deque[Ticket] = deque()
        self._busy = False
        self.running: dict[int, Ticket] = {}
        self.up = True

    def send(self, ticket: Ticket) -> None:
        """A request arrives; a server that is down refuses the connection."""
        if not self.up:
            failure = Failure(reason=Reason.UPSTREAM_UNREACHABLE)
            self._sim.after(0.001, partial(self._sim.attempt_failed, ticket, failure))
            return
        self._prompts.append(ticket)
        self.running[ticket.number] = ticket
        self._next_prompt()

    def report(self) -> LoadReport:
        """What a poll shows."""
        held = sum(t.prompt_tokens + t.output_seen_tokens for t in self.running.values())
        return LoadReport(
            running_requests=len(self.running) - len(self._prompts),
            queued_requests=len(self._prompts),
            queued_uncached_tokens=sum(ticket.prompt_tokens for ticket in self._prompts),
            kv_used_tokens=held,
        )

    def crash(self) -> None:
        """Everything on it breaks; a stream in the middle, others before their first byte."""
        self.up, self._busy = False, False
        self._prompts.clear()
        broken, self.running = list(self.running.values()), {}
        for ticket in broken:
            if ticket.state is TicketState.STREAMING:
                self._sim.ended(ticket, Outcome.FAILED)
            else:
                self._sim.attempt_failed(ticket, Failure(reason=Reason.UPSTREAM_PROTOCOL))

    def drop(self, ticket: Ticket) -> None:
        """The client of `ticket` left."""
        self.running.pop(ticket.number, None)

    def _next_prompt(self) -> None:
        if self._prompts and not self._busy:
            self._busy = True
            self._sim.after(
                self._prompts[0].prompt_tokens * PREFILL_S_PER_TOKEN,
                partial(self._prefilled, self._prompts[0]),
            )

    def _prefilled(self, ticket: Ticket) -> None:
        if not self._prompts or self._prompts[0] is not ticket:
            return  # it crashed meanwhile
        self._busy = False
        self._prompts.popleft()
        if self.running.get(ticket.number) is ticket:
            self._sim.core.on_first_token(ticket, now=self._sim.now)
            self._step(ticket, ticket.attempts, 0)
        self._next_prompt()

    def _step(self, ticket: Ticket, attempt: int, done: int) -> None:
        """Ten more tokens; progress is reported as the relay does, not for each chunk."""
        if self.running.get(ticket.number) is not ticket or ticket.attempts != attempt:
            return
        wanted = self._sim.lengths[ticket.number]
        self._sim.core.on_tokens(ticket, done, now=self._sim.now)
        if done >= wanted:
            del self.running[ticket.number]
            self._sim.ended(ticket, Outcome.SUCCESS, output=wanted)
        else:
            more = min(10, wanted - done)
            self._sim.after(more * STEP_S, partial(self._step, ticket, attempt, done + more))


class Simulation:
    """A dispatcher, its servers and its clients on one event heap."""

    def __init__(self, seed: int, *, servers: int, rate_per_s: float, **sections: object) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.replay_command = f"pytest 'tests/sim/test_smoke.py' -k '[{seed}]'"
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = 0
        self.core = Dispatcher(Config.model_validate(sections), rng=Random(seed + 1))
        self.servers = {WorkerId(f"w{n}"): Server(f"w{n}", self) for n in range(servers)}
        self.tickets: list[Ticket] = []
        self.lengths: dict[int, int] = {}
        self.dispatched: list[Ticket] = []
        self.queued: dict[int, float] = {}
        self.records: list[RequestRecord] = []
        self.refused: list[Ticket] = []
        for number, server in enumerate(self.servers.values()):
            lanes = [Lane.SHORT, Lane.LONG] if number % 3 else [Lane.SHORT]
            spec = WorkerSpec(
                url=f"http://{server.id}:1",
                id=server.id,
                models=("m",),
                lanes=frozenset(lanes),
                kv_total_tokens=60_000,
                concurrency_max=16,
            )
            self.core.on_worker_joined(spec, now=0.0)
        # The servers answer their first polls before the first client comes.
        self.after(0.5, partial(self._arrive, rate_per_s))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` called `delay_s` from now."""
        self._entries += 1
        heappush(self._heap, (self.now + delay_s, self._entries, call))

    def run(self) -> None:
        """Until the last client has its answer."""
        self._execute()
        while len(self.records) < len(self.tickets) or self.now < RUN_S:
            at, _, call = self._heap[0]
            due = self.core.next_deadline()
            if due is not None and due < at:
                self.now = max(self.now, due)
                self.core.on_timer(now=self.now)
            else:
                heappop(self._heap)
                self.now = at
                call()
            self._execute()

    def attempt_failed(self, ticket: Ticket, failure: Failure) -> None:
        """The relay saw an attempt fail before its first byte."""
        if ticket.state is TicketState.DISPATCHED:
            self.core.on_attempt_failed(ticket, failure, now=self.now)

    def ended(self, ticket: Ticket, outcome: Outcome, *, output: int = 0) -> None:
        """The relay saw the end."""
        usage = Usage(prompt_tokens=ticket.prompt_tokens, output_tokens=output)
        self.core.on_finished(ticket, outcome, now=self.now, usage=usage)

    def _arrive(self, rate_per_s: float) -> None:
        if self.now >= RUN_S:
            return
        rng = self.rng
        spec = RequestSpec(
            request_id=f"r{len(self.tickets)}",
            endpoint=Endpoint.CHAT,
            model="m",
            stream=True,
            prompt_bytes=rng.choice((400, 4_000, 16_000)),
            max_tokens=rng.choice((64, 256, 400)),
        )
        ticket = self.core.on_request(spec, owner=None, now=self.now)
        self.tickets.append(ticket)
        self.lengths[ticket.number] = rng.randint(1, spec.max_tokens or 1)
        if rng.random() < 0.05:
            self.after(rng.expovariate(1.0), partial(self._leave, ticket))
        self.after(rng.expovariate(rate_per_s), partial(self._arrive, rate_per_s))

    def _leave(self, ticket: Ticket) -> None:
        if ticket.worker_id is not None:
            self.servers[ticket.worker_id].drop(ticket)
        self.core.on_finished(ticket, Outcome.ABORTED, now=self.now)

    def _execute(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                match effect:
                    case Dispatch(ticket):
                        assert ticket.worker_id is not None
                        self.dispatched.append(ticket)
                        self.servers[ticket.worker_id].send(ticket)
                    case Refuse(ticket, _):
                        self.refused.append(ticket)
                    case Finish(record):
                        self.records.append(record)
                    case Probe(worker_id):
                        self.after(0.005, partial(self._polled, self.servers[worker_id]))
                    case Preempt():
                        raise AssertionError("it is off")
                    case _:
                        pass  # log lines

    def _polled(self, server: Server) -> None:
        if server.up:
            self.core.on_report(server.id, server.report(), now=self.now)
        else:
            self.core.on_probe_failed(server.id, "no answer", now=self.now)

    def crash_and_recover(self, server: Server, *, at: float, for_s: float) -> None:
        """Let `server` be down between two moments."""

        def recover() -> None:
            server.up = True

        self.after(at, server.crash)
        self.after(at + for_s, recover)

    def check_books(self) -> None:
        """Everybody has one end, and nothing is held any more."""
        names = [record.request_id for record in self.records]
        assert len(names) == len(set(names)) == len(self.tickets), self.replay_command
        assert all(t.state is TicketState.FINISHED for t in self.tickets), self.replay_command
        snapshot = self.core.snapshot(now=self.now)
        for view in snapshot.workers:
            held = (view.streams, view.waiting, view.pending_tokens, view.kv_reserved_tokens)
            assert held == (0, 0, 0, 0), self.replay_command
        assert all(lane.queued == lane.running == 0 for lane in snapshot.lanes.values())


def first_attempts(sim: Simulation, lane: Lane) -> list[int]:
    """Ticket numbers of a lane in order of their first dispatch."""
    numbers = dict.fromkeys(t.number for t in sim.dispatched if t.lane is lane)
    return list(numbers)


@pytest.mark.parametrize("seed", range(5))
def test_a_light_load_is_served_whole_and_hardly_waits(seed: int) -> None:
    sim = Simulation(seed, servers=4, rate_per_s=20.0)
    sim.run()
    sim.check_books()
    left = [r for r in sim.records if r.outcome is not Outcome.SUCCESS]
    assert {r.outcome for r in left} <= {Outcome.ABORTED}, sim.replay_command
    waits_s = [r.dispatched_at - r.arrived_at for r in sim.records if r.dispatched_at is not None]
    assert max(waits_s) < 1.0, sim.replay_command  # a prompt may have to let another one pass
    assert sum(waits_s) / len(waits_s) < 0.02, sim.replay_command


@pytest.mark.parametrize("seed", range(5))
def test_an_overload_waits_in_order_and_loses_nobody(seed: int) -> None:
    sim = Simulation(
        seed,
        servers=3,
        rate_per_s=60.0,
        queue={"depth_max": 40, "wait_s_max": 8.0, "order": "fifo", "lookahead_max": 1},
        lanes={"spill": False},
        pacing={"enabled": False},
    )
    sim.run()
    sim.check_books()
    for lane in Lane:
        order = first_attempts(sim, lane)
        assert order == sorted(order), sim.replay_command
    reasons = {r.reason for r in sim.records if r.outcome is Outcome.REFUSED}
    assert reasons <= {Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT}, sim.replay_command
    assert sim.refused, sim.replay_command
    late = [r for r in sim.records if r.outcome is Outcome.REFUSED]
    assert all(r.finished_at - r.arrived_at <= 8.0 + 1e-6 for r in late), sim.replay_command


@pytest.mark.parametrize("seed", range(5))
def test_servers_that_crash_and_come_back_lose_nobody(seed: int) -> None:
    sim = Simulation(
        seed,
        servers=4,
        rate_per_s=40.0,
        breaker={"open_s": 2.0},
        queue={"give_up_after_targets": 0},
        retry={"budget_tokens_max": 1000.0},
    )
    servers = list(sim.servers.values())
    sim.crash_and_recover(servers[1], at=10.0, for_s=15.0)
    sim.crash_and_recover(servers[2], at=30.0, for_s=1.5)
    sim.run()
    sim.check_books()
    failed = [r for r in sim.records if r.outcome is Outcome.FAILED]
    # Only what streamed when its server crashed is beyond help.
    assert all(r.first_token_at is not None for r in failed), sim.replay_command
    assert any(r.attempts > 1 for r in sim.records if r.outcome is Outcome.SUCCESS)
    after = [r for r in sim.records if r.arrived_at > 45.0]
    assert {r.worker_id for r in after} >= {"w1", "w2"}, sim.replay_command


@pytest.mark.parametrize("policy", ["least_work", "weighted", "round_robin", "power_of_two"])
def test_every_policy_shares_a_steady_load(policy: str) -> None:
    sim = Simulation(1, servers=6, rate_per_s=30.0, policy={"name": policy})
    sim.run()
    sim.check_books()
    served = dict.fromkeys(sim.servers, 0)
    for record in sim.records:
        assert record.worker_id is not None
        served[record.worker_id] += 1
    assert max(served.values()) <= 3 * min(served.values()), served
