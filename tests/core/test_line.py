"""Lines of waiting tickets, and the work that goes before a place, against the plain definition."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.line import Line
from router.core.pools import Pool
from router.core.types import Ticket
from tests.core.builders import ticket
from tests.core.flow_rig import P1, Queue

LONG = Pool("m", Lane.LONG)


def made(number: int, place_at: float, prefill_s: float) -> Ticket:
    return ticket(number, place_at=place_at, prefill_s=prefill_s)


@given(st.randoms(use_true_random=False), st.integers(0, 700), st.floats(0.1, 0.9))
def test_a_line_is_what_a_sorted_list_would_be(rng: Random, count: int, leaving: float) -> None:
    line, model = Line("t", 0.0), list[Ticket]()
    for number in range(1, count + 1):
        model.append(made(number, float(rng.randrange(60)), rng.choice((0.0, 0.003, 1.5))))
        line.add(model[-1])
        if rng.random() < leaving:
            gone = model.pop(0 if rng.random() < 0.5 else rng.randrange(len(model)))
            line.drop(gone)
        if number % 97 == 0 or number == count:
            _agree(line, sorted(model, key=lambda each: (each.place_at, each.number)))


def _agree(line: Line, model: list[Ticket]) -> None:
    assert list(line.tickets) == model
    assert line.count == len(model)
    assert line.work_s == pytest.approx(sum(each.prefill_s for each in model), abs=1e-9)
    for place_at in (-1.0, 0.0, 20.0, 20.5, 59.0, 99.0):
        before = sum(each.prefill_s for each in model if each.place_at <= place_at)
        assert line.work_before_s(place_at) == pytest.approx(before, abs=1e-9)
    skipped = {each.number for each in model[: len(model) // 2]}
    assert line.first(skipped) is next(iter(model[len(skipped) :]), None)
    if model:
        assert (line.first_number, line.last) == (model[0].number, model[-1])


@given(
    st.randoms(use_true_random=False),
    st.integers(0, 150),
    st.integers(1, 90),
    st.sampled_from((0.01, 0.3, 5.0, 1e9)),
)
def test_the_work_before_a_request_is_that_of_all_that_fair_queueing_serves_before_it(
    rng: Random, waiting: int, tenants: int, most_s: float
) -> None:
    q = Queue()
    there = [_pushed(q, rng, tenants) for _ in range(waiting)]
    asking = rng.choice(there) if there and rng.random() < 0.3 else _made(q, rng, tenants)
    domain = q.flow._domain(q.pool)
    found = domain.work_before_s(asking, place_at := rng.uniform(0.0, 30.0), most_s)
    plain = _work_before_s(asking, there, place_at)
    if plain <= most_s:
        assert found == pytest.approx(plain, abs=1e-9)
    else:
        assert found > most_s * (1 - 1e-9)


def _made(q: Queue, rng: Random, tenants: int) -> Ticket:
    q.now += rng.random()
    return q.make(
        P1,
        tenant=f"t{rng.randrange(tenants)}",
        pool=rng.choice((q.pool, LONG)),
        prefill_s=rng.choice((0.0, 0.002, 0.05, 0.4)),
    )


def _pushed(q: Queue, rng: Random, tenants: int) -> Ticket:
    one = _made(q, rng, tenants)
    q.flow.push(one, now=q.now)
    return one


def _work_before_s(asking: Ticket, there: list[Ticket], place_at: float) -> float:
    """By the definition: one ticket after the other, of at most 64 lines of others."""
    lines: dict[tuple[Lane, str], list[Ticket]] = {}
    pools = dict.fromkeys(each.lane for each in there)
    for lane in pools:
        for each in there:
            if each.lane is lane:
                lines.setdefault((lane, each.spec.tenant), []).append(each)
    own = lines.get((asking.lane, asking.spec.tenant), [])
    own_s = sum(e.prefill_s for e in own if e is not asking and e.place_at <= place_at)
    most_s, others_s = own_s + asking.prefill_s, 0.0
    for (_, tenant), line in list(lines.items())[:64]:
        if tenant != asking.spec.tenant:
            others_s += min(most_s, sum(each.prefill_s for each in line))
    return own_s + others_s * max(1.0, len(lines) / 64)
