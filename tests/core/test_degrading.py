"""Overload through the dispatcher: whom the ladders touch, and what becomes of a ticket."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from router.config import Config
from router.contract import Lane
from router.core.degrade import Act, Level
from router.core.effects import LevelChanged
from router.core.types import Endpoint, Outcome, Priority, Ticket, TicketState
from router.errors import Reason
from tests.core.builders import Bench, bench, request_spec

P0, P1, P2, P3 = Priority
# One stream at a time, and a level as soon as a threshold is passed.
QUICK = {"rise_s": 0.0, "fall_s": 2.0}


def patience(priority: Priority, wait_s_max: float) -> dict[str, Any]:
    """The classes, one of them with a patience of its own."""
    settings = Config().classes.by_priority[priority]
    return {f"p{priority:d}": {**settings.model_dump(), "wait_s_max": wait_s_max}}


def crowded(*, ratio: float = 1.5, waits: Priority = P3, **sections: Any) -> Bench:
    """A model whose one place is taken, while a request has waited most of its patience.

    One of P3 has waited `ratio` of its target.
    """
    classes = patience(waits, 35.0 * ratio)
    made = bench(**{"degrade": QUICK, "classes": classes, **sections})
    made.join("w1", concurrency_max=1)
    made.ask()
    made.ask(priority=waits)
    made.pass_to(30.0 * ratio)
    return made


def level(made: Bench, model: str = "m") -> Level:
    ladders = made.core.snapshot(now=made.now).degrade.ladders
    return next(ladder.level for ladder in ladders if ladder.model == model)


def act(ticket: Ticket) -> Act | None:
    return None if ticket.degraded is None else ticket.degraded.act


@pytest.mark.parametrize(("ratio", "expected"), [(0.4, 0), (0.85, 1), (0.95, 2), (1.5, 3)])
def test_the_wait_of_the_oldest_raises_the_level(ratio: float, expected: int) -> None:
    assert level(crowded(ratio=ratio)) == expected


def test_a_full_memory_raises_the_level() -> None:
    made = bench(degrade=QUICK)
    made.join("w1", kv_total_tokens=1_000)
    made.ask(prompt_bytes=4 * 700, max_tokens=150)
    made.ask(prompt_bytes=4 * 300, max_tokens=150, priority=P3)
    made.pass_to(0.3)
    assert level(made) is Level.CUT


@pytest.mark.parametrize("duties", [(0.3, 0.9, 0.8), (0.9, 0.8, 0.3)])
def test_the_worker_that_has_least_time_for_prefill_raises_the_level(
    duties: tuple[float, ...],
) -> None:
    made = bench("w1", "w2", "w3", degrade=QUICK, pacing={"enabled": True})
    for worker, duty in zip(made.core._fleet.workers.values(), duties, strict=True):
        worker.pace.duty, worker.valid_until = duty, inf
    ticket = made.core.new_ticket(request_spec(), owner=None, now=0.0)
    assert made.core._degrading.saturation_for(ticket, 0.0) == pytest.approx(0.7)


def test_changes_of_the_level_are_told() -> None:
    made = crowded()
    made.end(made.dispatched[0])
    made.end(made.dispatched[1])
    made.pass_to(60.0)
    moves = [e for e in made.effects if isinstance(e, LevelChanged)]
    assert {move.domain for move in moves} == {"m"}
    assert moves[-1].change.new is Level.NORMAL
    assert made.core.snapshot(now=60.0).degrade.changes[-1] == ("m", moves[-1].change)


def test_nothing_is_looked_at_while_nothing_waits() -> None:
    made = crowded()
    made.end(made.dispatched[0])
    made.end(made.dispatched[1])
    made.pass_to(70.0)
    assert made.core._degrading._ladders == {}
    assert not made.core._degrading._ticking


def test_a_request_that_does_not_fit_is_cut() -> None:
    made = crowded(ratio=0.85)
    assert level(made) is Level.CUT
    ticket = made.ask(priority=P2, max_tokens=2_000)
    assert ticket.degraded is not None
    assert ticket.degraded.header == "max_tokens=256; level=1"
    assert (ticket.output_tokens, ticket.lane, ticket.pool.lane) == (256, Lane.SHORT, Lane.SHORT)
    assert ticket.kv_tokens == ticket.prompt_tokens + 256
    assert ticket.cost == pytest.approx((ticket.prompt_tokens + 2 * 256) / 1000)
    assert ticket.state is TicketState.QUEUED
    assert ticket.spec.max_tokens == 2_000


def test_a_cut_stops_at_the_floor() -> None:
    made = crowded(degrade={**QUICK, "tokens_cap": 100, "tokens_floor": 90, "shed_p2_above": 9.0})
    assert level(made) is Level.SHED_P3
    assert made.ask(priority=P2, max_tokens=2_000).output_tokens == 90


@pytest.mark.parametrize(
    "untouched",
    [
        {"priority": P0},
        {"priority": P1},
        {"max_tokens": 256},
        {"structured": True},
        {"fixed": True},
        {"tenant": "spared"},
        {"endpoint": Endpoint.EMBEDDINGS, "max_tokens": None},
        {"endpoint": Endpoint.COMPLETIONS, "max_tokens": None},  # SGLang's 16 tokens are less
    ],
)
def test_these_are_not_cut(untouched: dict[str, Any]) -> None:
    made = crowded(ratio=0.85, tenants={"spared": {"degrade": False}})
    ticket = made.ask(**{"priority": P2, "max_tokens": 2_000, **untouched})
    assert ticket.state is TicketState.QUEUED
    assert ticket.degraded is None


def test_an_answer_without_limit_is_given_one() -> None:
    made = crowded(ratio=0.85)
    ticket = made.ask(priority=P2, max_tokens=None)
    assert ticket.degraded is not None
    assert ticket.degraded.max_tokens == 256


def test_structured_output_is_cut_where_that_is_allowed() -> None:
    made = crowded(ratio=0.85, degrade={**QUICK, "structured": True})
    assert act(made.ask(priority=P2, max_tokens=2_000, structured=True)) is Act.CUT


def test_a_request_that_fits_is_never_touched() -> None:
    made = crowded()
    made.join("w2", concurrency_max=1)
    first = made.ask(priority=P0)  # takes the new place, or the one who waited did
    made.join("w3", concurrency_max=8)
    ticket = made.ask(priority=P3, max_tokens=2_000)
    assert first.degraded is None
    assert (ticket.state, ticket.degraded) == (TicketState.DISPATCHED, None)


def test_a_request_that_fits_is_not_touched_though_a_larger_one_waits() -> None:
    """Nobody was served for long, so nothing says that it would be in time, had it to wait."""
    made = bench(degrade=QUICK)
    made.join("w1", concurrency_max=2, kv_total_tokens=10_000)
    made.ask(prompt_bytes=4 * 6_000)
    large = made.ask(priority=P3, prompt_bytes=4 * 6_000)
    made.pass_to(45.0)
    assert level(made) is Level.SHED_P2
    ticket = made.ask(priority=P3, max_tokens=2_000)
    assert (ticket.state, ticket.degraded) == (TicketState.DISPATCHED, None)
    assert large.state is TicketState.QUEUED


def test_a_request_that_will_be_in_time_is_not_touched_though_it_waits() -> None:
    """One large request waits for memory; small ones come and go beside it."""
    made = bench(degrade=QUICK)
    made.join("w1", concurrency_max=2, kv_total_tokens=10_000)
    made.ask(prompt_bytes=4 * 6_000)
    large = made.ask(prompt_bytes=4 * 6_000)
    running = made.ask(priority=P2, max_tokens=1_000)
    for turn in range(1, 60):
        waiting = made.ask(priority=P2, max_tokens=1_000)
        assert waiting.state is TicketState.QUEUED
        made.pass_to(turn / 20)
        made.end(running)
        assert waiting.state is TicketState.DISPATCHED, turn
        running = waiting
    assert large.state is TicketState.QUEUED
    assert level(made) is Level.SHED_P2
    touched = [record for record in made.records if record.degraded is not None]
    assert touched == []
    assert act(made.ask(priority=P2, max_tokens=1_000)) is None


def two_tenants(priority: Priority, **queue: Any) -> tuple[Bench, list[Ticket]]:
    """One sends ten times what the worker serves, another, whose tickets return, a fifth of it."""
    classes = patience(P3, 40.0)
    made = bench(degrade=QUICK, queue={"depth_max": 100_000, **queue}, classes=classes)
    made.join("w1", concurrency_max=4)
    quiet: list[Ticket] = []
    for turn in range(400):
        made.pass_to(turn / 10)
        for ticket in [t for t in made.dispatched if t.state is TicketState.DISPATCHED][:1]:
            made.end(ticket)
        for number in range(10):
            made.ask(priority=priority, tenant="noisy", request_id=f"{turn}-{number}")
        if turn % 5 == 0:
            quiet.append(made.ask(priority=priority, tenant="quiet"))
    assert level(made) >= (Level.SHED_P2 if priority is P2 else Level.SHED_P3)
    assert sum(r.reason is Reason.SHED and r.tenant == "noisy" for r in made.records) > 300
    return made, quiet


@pytest.mark.parametrize("priority", [P2, P3])
def test_a_tenant_whose_turn_comes_in_time_pays_for_no_other(priority: Priority) -> None:
    made, quiet = two_tenants(priority)
    assert not any(r.reason is Reason.SHED and r.tenant == "quiet" for r in made.records)
    waits_s = [t.dispatched_at - t.arrived_at for t in quiet if t.dispatched_at is not None]
    assert len(waits_s) >= len(quiet) - 4
    assert max(waits_s) < 2.0


def test_where_tenants_take_no_turns_all_of_a_class_would_be_late() -> None:
    made, _ = two_tenants(P2, order="dynamic")
    assert any(r.reason is Reason.SHED and r.tenant == "quiet" for r in made.records)


def test_the_lowest_class_is_refused_first() -> None:
    made = crowded(ratio=0.95)
    assert level(made) is Level.SHED_P3
    shed = made.ask(priority=P3)
    refusal = made.refusal(shed)
    assert refusal.reason is Reason.SHED
    assert (refusal.retry_after_s or 0) >= 1
    assert made.records[-1].degraded is Act.REFUSE
    assert made.records[-1].outcome is Outcome.REFUSED
    assert made.ask(priority=P2).state is TicketState.QUEUED


def test_who_would_be_served_though_late_is_held() -> None:
    """Nobody of P2 has waited for long, so that nothing says that it would time out."""
    made = crowded(queue={"give_up_after_targets": 0})
    assert level(made) is Level.SHED_P2
    ticket = made.ask(priority=P2, max_tokens=2_000)
    assert (ticket.state, act(ticket)) == (TicketState.QUEUED, Act.CUT)
    made.pass_to(made.now + 0.74 * 30.0)
    assert act(made.ask(priority=P2, max_tokens=2_000)) is Act.CUT
    made.pass_to(made.now + 0.02 * 30.0)
    assert act(made.ask(priority=P2, max_tokens=2_000)) is Act.REFUSE


def test_a_client_that_waits_but_a_moment_has_nobody_refused() -> None:
    made = crowded()
    assert made.ask(priority=P2, wait_s_max=1.0).state is TicketState.QUEUED
    made.pass_to(made.now + 0.9)
    assert made.ask(priority=P2).state is TicketState.QUEUED


def test_a_refused_request_evicts_nobody_from_a_full_queue() -> None:
    made = crowded(queue={"depth_max": 2})
    waiting = made.ask(priority=P3, structured=True, tenant="a")
    assert made.refusal(waiting).reason is Reason.SHED
    assert made.core.snapshot(now=made.now).lanes[Lane.SHORT].queued == 1


def test_with_the_ladder_off_everybody_waits() -> None:
    made = crowded(degrade={"enabled": False})
    assert made.ask(priority=P3, max_tokens=2_000).state is TicketState.QUEUED
    assert level(made) is Level.NORMAL
    assert made.core._degrading._ladders == {}


def test_switched_off_while_on_it_lets_everybody_pass() -> None:
    made = crowded()
    settings = made.core._config.model_copy(
        update={"degrade": made.core._config.degrade.model_copy(update={"enabled": False})}
    )
    made.core.on_config(settings, now=made.now)
    made.pass_to(made.now + 0.5)
    assert made.ask(priority=P3).state is TicketState.QUEUED


# The smaller model.

FALLBACK = {"m": {"fallback": "small"}}


def with_fallback(**fields: Any) -> Bench:
    made = crowded(models=FALLBACK)
    made.join("w2", **{"models": ("small",), "concurrency_max": 1, **fields})
    return made


def test_a_request_goes_to_the_fallback() -> None:
    made = with_fallback()
    ticket = made.ask(priority=P2, max_tokens=2_000)
    assert ticket.degraded is not None
    assert ticket.degraded.header == "model=small; max_tokens=64; level=3"
    assert (ticket.state, ticket.worker_id) == (TicketState.DISPATCHED, "w2")
    assert ticket.pool.model == "small"
    made.end(ticket)
    assert made.records[-1].degraded is Act.OTHER_MODEL


def test_the_fallback_goes_by_the_name_that_its_workers_use() -> None:
    made = crowded(models={"m": {"fallback": "alias"}, "small": {"aliases": ["alias"]}})
    made.join("w2", models=("small",))
    ticket = made.ask(priority=P2)
    assert ticket.degraded is not None
    assert ticket.degraded.model == "small"


@pytest.mark.parametrize(
    "fields",
    [
        {"models": ("other",)},  # nobody serves it
        {"kv_total_tokens": 100},  # it could never hold the request
        {"report": None},  # its worker is not live yet
    ],
)
def test_without_a_usable_fallback_it_is_refused(fields: dict[str, Any]) -> None:
    made = with_fallback(**fields)
    assert act(made.ask(priority=P3, max_tokens=2_000)) is Act.REFUSE


def test_a_saturated_fallback_gets_nothing_more() -> None:
    made = with_fallback()
    made.ask(model="small")
    made.ask(model="small")
    made.pass_to(made.now + 2.0)
    assert level(made, "small") is Level.SHED_P2
    assert act(made.ask(priority=P3)) is Act.REFUSE


@pytest.mark.parametrize(
    ("models", "expected"),
    [((), Act.OTHER_MODEL), (("m", "small"), Act.OTHER_MODEL), (("m",), Act.REFUSE)],
)
def test_nobody_goes_to_a_fallback_that_its_tenant_may_not_use(
    models: tuple[str, ...], expected: Act
) -> None:
    made = crowded(models=FALLBACK, tenants={"t": {"models": models}})
    made.join("w2", models=("small",))
    assert act(made.ask(priority=P3, tenant="t")) is expected


def test_a_cut_for_a_limit_is_kept_on_the_way_to_the_fallback() -> None:
    """A P1 answer is not cut by the ladder itself, however high it stands."""
    made = crowded(models=FALLBACK, degrade={**QUICK, "fallback_from": 1})
    made.join("w2", models=("small",))
    ticket = made.core.new_ticket(
        request_spec(priority=P1, max_tokens=2_000), owner=None, now=made.now
    )
    assert made.core._degrading.shorten(ticket)
    assert made.core._degrading.act_on(ticket, fits=False) is Act.OTHER_MODEL
    assert ticket.degraded is not None
    assert (ticket.degraded.model, ticket.degraded.max_tokens) == ("small", 256)
    assert (ticket.pool.model, ticket.output_tokens) == ("small", 256)


def test_urgent_requests_stay_with_their_model() -> None:
    made = with_fallback()
    assert made.ask(priority=P1).degraded is None


def test_the_overload_of_one_model_costs_no_other() -> None:
    made = crowded()
    made.join("w2", models=("other",), concurrency_max=1)
    made.ask(model="other")
    waiting = made.ask(model="other", priority=P3, max_tokens=2_000)
    assert (waiting.state, waiting.degraded) == (TicketState.QUEUED, None)


def test_a_cut_answer_teaches_nothing_of_lengths() -> None:
    made = crowded(ratio=0.85)
    costs = made.core._costs.of("m").outputs
    ticket = made.ask(priority=P2, max_tokens=2_000)
    made.end(made.dispatched[0])
    before = costs._total
    assert ticket.state is TicketState.DISPATCHED
    made.end(ticket)
    assert costs._total == before
