"""Requests that a core before this one dispatched: charged as if they were its own, once."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from router.config import Config
from router.contract import Lane, LoadReport, WorkerId, WorkerSpec
from router.core.adoption import Run
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Finish
from router.core.types import Endpoint, Failure, Outcome, RequestSpec, Ticket, TicketState
from router.errors import Reason

NOW = 1000.0
HERE, GONE = WorkerId("w:1"), WorkerId("w:2")
REPORT = LoadReport(running_requests=0, queued_requests=0, kv_used_tokens=0, kv_total_tokens=10**6)


def core() -> Dispatcher:
    made = Dispatcher(Config(), rng=Random(1))
    made.on_worker_joined(WorkerSpec(url="http://w:1", models=("m",)), now=NOW - 1)
    return made


RUNS = st.builds(
    Run,
    worker_id=st.sampled_from((HERE, GONE)),
    lane=st.sampled_from(Lane),
    attempts=st.integers(1, 3),
    arrived_at=st.floats(NOW - 100, NOW - 50),
    dispatched_at=st.floats(NOW - 50, NOW - 20),
    first_token_at=st.none() | st.floats(NOW - 20, NOW),
    output_tokens=st.integers(0, 5000),
)
SPECS = st.builds(
    RequestSpec,
    request_id=st.just("r"),
    endpoint=st.sampled_from((Endpoint.CHAT, Endpoint.EMBEDDINGS)),
    model=st.sampled_from(("m", "unknown", None)),
    stream=st.booleans(),
    prompt_bytes=st.integers(0, 10**6),
    max_tokens=st.none() | st.integers(1, 10**4),
)


@given(st.lists(st.tuples(SPECS, RUNS), max_size=8), st.randoms(use_true_random=False))
def test_what_is_adopted_is_charged_and_given_back(
    runs: list[tuple[RequestSpec, Run]], rng: Random
) -> None:
    dispatcher = core()
    tickets = [adopt(dispatcher, spec, run) for spec, run in runs]
    here = [ticket for ticket in tickets if ticket.worker_id == HERE]
    (view,) = dispatcher.snapshot(now=NOW).workers
    assert view.streams == len(here)
    assert view.waiting == sum(ticket.state is TicketState.DISPATCHED for ticket in here)
    assert view.kv_reserved_tokens == sum(ticket.kv_tokens for ticket in here)
    dispatcher.on_report(HERE, REPORT, now=NOW)
    dispatcher.take_effects()
    rng.shuffle(tickets)
    for ticket in tickets:
        end(dispatcher, ticket, rng)
    finishes = [e for e in dispatcher.take_effects() if isinstance(e, Finish)]
    assert len(finishes) == len(tickets)
    (view,) = dispatcher.snapshot(now=NOW).workers
    assert (view.streams, view.waiting, view.pending_tokens, view.kv_reserved_tokens) == (0,) * 4
    assert dispatcher.snapshot(now=NOW).lanes[Lane.SHORT].running == 0
    assert dispatcher.snapshot(now=NOW).lanes[Lane.LONG].running == 0


def adopt(dispatcher: Dispatcher, spec: RequestSpec, run: Run) -> Ticket:
    ticket = dispatcher.adopted_ticket(spec, run, owner=None)
    dispatcher.resume(ticket, now=NOW)
    return ticket


def end(dispatcher: Dispatcher, ticket: Ticket, rng: Random) -> None:
    if rng.random() < 0.5:
        dispatcher.on_first_token(ticket, now=NOW + 1)
        dispatcher.on_tokens(ticket, ticket.output_seen_tokens + 10, now=NOW + 1)
    outcome = rng.choice((Outcome.SUCCESS, Outcome.ABORTED, Outcome.FAILED))
    dispatcher.on_finished(ticket, outcome, now=NOW + 2)


def test_the_record_tells_the_whole_time() -> None:
    dispatcher = core()
    spec = RequestSpec("r", Endpoint.CHAT, "m", stream=True)
    run = Run(HERE, Lane.LONG, 2, NOW - 9, NOW - 8, NOW - 7, 40)
    ticket = adopt(dispatcher, spec, run)
    dispatcher.on_finished(ticket, Outcome.SUCCESS, now=NOW + 1)
    (record,) = [e.record for e in dispatcher.take_effects() if isinstance(e, Finish)]
    assert (record.arrived_at, record.dispatched_at, record.first_token_at) == (991, 992, 993)
    assert (record.attempts, record.output_tokens, record.worker_id) == (2, 40, HERE)
    assert record.lane is Lane.LONG


def test_an_attempt_that_fails_is_repeated_like_any_other() -> None:
    dispatcher = core()
    dispatcher.on_worker_joined(WorkerSpec(url="http://w:2", models=("m",)), now=NOW)
    for worker in (HERE, GONE):
        dispatcher.on_report(worker, REPORT, now=NOW)
    spec = RequestSpec("r", Endpoint.CHAT, "m")
    run = Run(HERE, Lane.LONG, 1, NOW - 9, NOW - 8, None, 0)
    ticket = adopt(dispatcher, spec, run)
    failure = Failure(reason=Reason.UPSTREAM_ERROR)
    assert dispatcher.on_attempt_failed(ticket, failure, now=NOW + 1)
    dispatcher.on_timer(now=NOW + 60)
    sent = [e.ticket for e in dispatcher.take_effects() if isinstance(e, Dispatch)]
    assert sent == [ticket]
    assert ticket.worker_id == GONE
