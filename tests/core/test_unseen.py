"""Plain answers, of which nothing is seen: what is reserved for them where nobody says more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import LoadReport, WorkerId
from router.core.adoption import catch_up
from router.core.types import Endpoint, Failure, Outcome, Ticket, Usage
from router.core.unseen import STRIDE_TOKENS
from router.core.worker import Worker
from router.errors import Reason
from tests.core.builders import Bench, bench, request_spec, runs, ticket, waits, worker

SILENT = LoadReport(running_requests=0, queued_requests=0)  # says nothing of KV memory
STEP_S = 0.0065  # of one stream, about
LONG = 4_096  # tokens of answer


def quiet(*names: str, kv_total_tokens: int = 400_000) -> Bench:
    """Workers that never say how much KV memory is in use."""
    b = bench()
    b.join(*names, report=SILENT, kv_total_tokens=kv_total_tokens)
    return b


def plain(b: Bench, **fields: object) -> Ticket:
    return b.ask(**{"stream": False, "max_tokens": LONG, **fields})


def reserved(b: Bench, *, after_s: float, name: str = "w1") -> int:
    b.now += after_s
    return b.view(name).kv_reserved_tokens


def test_the_reservation_stays_ahead_of_the_answer_up_to_what_it_may_have() -> None:
    b = quiet("w1")
    made = plain(b)
    seen = [reserved(b, after_s=1.0) for _ in range(60)]
    for second, tokens in enumerate(seen, 1):
        assert tokens >= 100 + min(LONG, (second - 0.1) / STEP_S * 0.99)
        assert tokens <= 100 + max(256, second / STEP_S + 2 * STRIDE_TOKENS)
    assert seen[-1] == 100 + LONG
    b.end(made)
    assert reserved(b, after_s=0.0) == 0


def test_nothing_more_is_sent_than_the_answers_that_run_may_come_to_need() -> None:
    b = quiet("w1", kv_total_tokens=10_000)  # of which 9,200 may be used
    for _ in range(9):
        assert runs(plain(b))
    reserved(b, after_s=5.0)
    assert runs(plain(b))
    assert reserved(b, after_s=1.0) > 9_200 - 356, "ten have some 900 tokens each by now"
    assert waits(plain(b))


def test_samples_grow_apart_and_share_their_prompt() -> None:
    b = quiet("w1")
    plain(b, samples=3)
    assert reserved(b, after_s=0.0) == 100 + 3 * 256
    assert reserved(b, after_s=60.0) == 100 + 3 * LONG


def test_what_asks_for_no_limit_grows_as_long_as_it_runs_but_not_beyond_the_pool() -> None:
    b = quiet("w1", kv_total_tokens=20_000)
    plain(b, max_tokens=None)
    assert 1_400 < reserved(b, after_s=10.0) < 1_800
    assert reserved(b, after_s=600.0) == 20_000
    several = quiet("w1", kv_total_tokens=20_000)
    plain(several, max_tokens=None, samples=2)
    assert reserved(several, after_s=600.0) == 20_000
    limited = quiet("w1")
    plain(limited, max_tokens=None, endpoint=Endpoint.COMPLETIONS)  # 16 tokens by itself
    assert reserved(limited, after_s=60.0) == 116


def test_nothing_grows_before_its_prompt_was_prefilled_and_streams_are_seen() -> None:
    b = quiet("w1")
    plain(b, prompt_bytes=399_996)  # 100,000 tokens: 8.6 s
    assert reserved(b, after_s=8.0) == 100_000 + 256
    assert reserved(b, after_s=8.0) > 100_000 + 1_000
    b = quiet("w1")
    b.core.on_first_token(b.ask(max_tokens=LONG), now=b.now)
    assert reserved(b, after_s=60.0) == 100 + 256


def test_where_the_worker_says_what_is_in_use_nothing_is_guessed_until_it_stops() -> None:
    b = bench("w1", probe={"stale_after_s": 5.0})
    plain(b)
    assert reserved(b, after_s=4.9) == 100 + 256
    assert reserved(b, after_s=0.2) > 100 + 700, "its figures are stale"


def test_another_attempt_begins_with_what_the_first_one_began_with() -> None:
    b = quiet("w1", "w2")
    made = plain(b)
    first = made.worker_id
    reserved(b, after_s=20.0)
    assert made.kv_tokens > 100 + 2_000
    assert b.core.on_attempt_failed(made, Failure(reason=Reason.UPSTREAM_ERROR), now=b.now)
    assert made.kv_tokens == 100 + 256
    b.pass_to(b.now + 1.0)
    assert (made.worker_id != first, made.kv_tokens) == (True, 100 + 256)
    assert b.view(str(first)).kv_reserved_tokens == 0
    b.end(made)
    assert b.view(str(made.worker_id)).kv_reserved_tokens == 0


def test_another_attempt_at_the_same_worker_grows_as_one_that_is_the_first() -> None:
    """One that was preempted may go back to where it came from."""
    one, other = worker(known_until=-1.0), worker(known_until=-1.0)
    again = _sent(one, 1, samples=1, now=0.0)
    _refresh(one, 1.0)
    one.release(again)
    one.charge(again, now=1.0)
    first = _sent(other, 2, samples=1, now=1.0)
    for now in (1.5, 2.0, 3.0, 4.0, 5.0, 6.0):
        _refresh(one, now)
        _refresh(other, now)
        assert again.kv_tokens == first.kv_tokens
    one.release(again)
    one.charge(again, now=6.0)
    one.release(again)
    one.charge(again, now=10.0)
    _refresh(one, 10.001)
    assert again.pending, "what was expected of its attempts before says nothing of this one"


def test_a_plain_answer_that_came_before_it_was_expected_leaves_nothing_to_look_at() -> None:
    one = worker()
    one.release(_sent(one, 1, samples=1, now=0.0))
    _refresh(one, 1.0)
    assert one.valid_until >= 1.2
    assert not one.silent


def _refresh(one: Worker, now: float) -> None:
    one.valid_until = -1.0
    one.refresh(now)


def test_how_long_answers_were_tells_how_fast_the_next_ones_grow() -> None:
    b = quiet("w1")
    for _ in range(40):
        made = plain(b)
        b.now += 20.0
        usage = Usage(output_tokens=1_000)  # a step takes 20 ms there
        b.core.on_finished(made, Outcome.SUCCESS, usage=usage, now=b.now)
    plain(b)
    assert 100 + 900 < reserved(b, after_s=20.0) < 100 + 1_300
    made = plain(quick := quiet("w1"))
    for _ in range(5):
        quick.now += 2.0
        quick.core.on_finished(made, Outcome.SUCCESS, usage=Usage(output_tokens=800), now=quick.now)
        made = plain(quick)
    assert reserved(quick, after_s=2.0) >= 100 + 760, "faster ones are believed sooner"


@pytest.mark.parametrize("usage", [None, Usage(), Usage(output_tokens=4)])
def test_an_answer_without_figures_or_of_a_few_tokens_tells_nothing(usage: Usage | None) -> None:
    b = quiet("w1")
    made = plain(b)
    b.now += 20.0
    b.core.on_finished(made, Outcome.SUCCESS, usage=usage, now=b.now)
    plain(b)
    assert reserved(b, after_s=10.0) > 100 + 1_400


def test_a_worker_whose_steps_are_short_for_its_many_streams_is_looked_at_like_any() -> None:
    """2 ms for 256 streams, each of which was thought to take 20 us: nothing is left for none."""
    b = bench("w1")
    for steps in (1_000.0, 3_000.0):
        b.now += 1.0
        streams, us = 256.0, 2_000.0
        moments = (steps, steps * streams, steps * us, steps * streams**2, steps * streams * us)
        said = LoadReport(running_requests=0, kv_used_tokens=0, decode_moments=moments)
        b.core.on_report(WorkerId("w1"), said, now=b.now)
    made = plain(b)
    assert reserved(b, after_s=1.0) == 100 + 256
    b.end(made)
    assert reserved(b, after_s=0.0) == 0


def test_one_that_a_core_before_sent_is_as_far_as_its_time_says() -> None:
    one = worker(known_until=-1.0)
    made = ticket(
        spec=request_spec(stream=False, max_tokens=LONG), output_tokens=LONG, dispatched_at=80.0
    )
    one.charge(made, now=100.0)
    catch_up(made, one, 0, now=100.0)
    assert made.pending, "for all that is known it may still be"
    one.valid_until = -1.0
    one.refresh(100.2)
    assert made.kv_tokens > 100 + 0.9 * 20 / STEP_S
    one.release(made)
    assert (one.kv_reserved_tokens, one.kv_held_tokens, one.kv_held_tokens_max) == (0, 0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("send", "end", "pass")), st.integers(0, 7), st.floats(0.0, 30.0)
        ),
        max_size=60,
    )
)
def test_what_grew_is_given_back_once_and_nothing_is_remembered_for_ever(
    steps: list[tuple[str, int, float]],
) -> None:
    one, now, number = worker(known_until=-1.0), 0.0, 0
    running: list[Ticket] = []
    for what, which, seconds in steps:
        number += 1
        if what == "send":
            running.append(_sent(one, number, samples=which % 3 + 1, now=now))
        elif what == "end" and running:
            one.release(running.pop(which % len(running)))
        else:
            now += seconds
        one.valid_until = -1.0
        one.refresh(now)
        assert one.kv_reserved_tokens == sum(made.kv_tokens for made in running)
        assert one.kv_held_tokens_max == one.kv_reserved_tokens
        assert one.plain == len(running)
        assert all(
            made.kv_tokens <= 100 + made.spec.samples * made.output_tokens for made in running
        )
    assert len(one.growing) <= 2 * len(running) + 17 + number
    for made in running:
        one.release(made)
    assert one.kv_reserved_tokens == one.kv_held_tokens_max == one.plain == 0


def _sent(one: Worker, number: int, *, samples: int, now: float) -> Ticket:
    made = ticket(
        number,
        spec=request_spec(stream=False, samples=samples, max_tokens=1_000),
        output_tokens=1_000,
        kv_tokens=100 + 256 * samples,
        dispatched_at=now,
    )
    one.charge(made, now=now)
    return made
