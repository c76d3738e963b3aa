"""The engine model: timings against the published figures, rules against a naive twin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.reference_engine import Job, ReferenceEngine
from workers.engine import Engine
from workers.engine_model import (
    Admission,
    EngineProfile,
    EngineRequest,
    EngineSettings,
    Event,
    EventKind,
)
from workers.profiles import load_profiles

PROFILES = load_profiles()
H100 = PROFILES["h100-8b"]
# Small enough that chunks, full pools and retractions are common.
TINY = EngineProfile(
    base_ms=1.0,
    weights_ms=3.1,
    compute_ms_per_token=0.0317,
    knee=1.3,
    head_ms=0.2,
    overhead_ms=0.3,
    kv_read_us_per_token=7.3,
    attention_ms_per_mtoken2=211.0,
    kv_total_tokens=1_000,
    chunk_tokens=100,
)


def request(
    name: str, *, prompt: int = 100, output: int = 10, max_new: int | None = None, **kwargs: object
) -> EngineRequest:
    most = output if max_new is None else max_new
    fields = {"id": name, "prompt_tokens": prompt, "output_tokens": output, "max_new_tokens": most}
    return EngineRequest(**fields, **kwargs)  # type: ignore[arg-type]


def run_out(engine: Engine) -> list[Event]:
    """Advance until the engine is idle; return all events."""
    events: list[Event] = []
    while (at := engine.next_event_at()) < math.inf:
        events += engine.advance(at)
    return events


def only(events: Sequence[Event], kind: EventKind) -> list[Event]:
    return [event for event in events if event.kind is kind]


# -- timings ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "batch", "step_ms"),
    [
        ("h100-8b", 1, 7.0),
        ("h100-8b", 64, 11.0),
        ("h100-8b", 256, 24.3),
        ("a100-8b", 1, 11.1),
        ("a100-8b", 64, 18.2),
        ("a100-8b", 256, 45.7),
        ("h100-70b-tp8", 1, 11.7),
        ("h100-70b-tp8", 128, 18.1),
    ],
)
def test_a_decode_step_lasts_what_the_tables_say(profile: str, batch: int, step_ms: float) -> None:
    assert PROFILES[profile].decode_ms(batch, batch * 1000) == pytest.approx(step_ms, rel=0.015)


@pytest.mark.parametrize(
    ("profile", "prompt", "prefill_ms"),
    [
        ("h100-8b", 1024, 27),
        ("h100-8b", 8192, 221),
        ("h100-8b", 32768, 1353),
        ("a100-8b", 1024, 76),
        ("a100-8b", 8192, 666),
        ("a100-8b", 32768, 3836),
        ("h100-70b-tp8", 3932, 188),
    ],
)
def test_a_prompt_is_prefilled_in_the_published_time(
    profile: str, prompt: int, prefill_ms: float
) -> None:
    engine = Engine(PROFILES[profile])
    engine.submit(request("a", prompt=prompt, output=1), now=5.0)
    first = only(run_out(engine), EventKind.FIRST_TOKEN)[0]
    assert (first.at - 5.0) * 1000 == pytest.approx(prefill_ms, rel=0.015)


def test_the_offline_throughput_is_that_of_the_published_check() -> None:
    """H100, 8B, 1024 in and 256 out, all at once: about 5,190 output tokens a second."""
    engine = Engine(H100)
    for number in range(1_000):
        engine.submit(request(str(number), prompt=1024, output=256), now=0.0)
    end = run_out(engine)[-1].at
    assert 256_000 / end == pytest.approx(5_190, rel=0.15)


def test_streams_stall_while_a_long_prompt_is_prefilled() -> None:
    engine = Engine(H100)
    engine.submit(request("stream", output=2_000), now=0.0)
    engine.advance(1.0)
    stream = next(iter(engine._live.values()))
    before = engine.generated_tokens(stream)
    engine.submit(request("long", prompt=32_768, output=1), now=1.0)
    engine.advance(2.0)
    assert engine.generated_tokens(stream) <= before + 1
    engine.advance(3.0)
    assert engine.generated_tokens(stream) > before + 50


def test_slow_factor_and_pause_stretch_steps_and_take_effect_at_a_boundary() -> None:
    engine = Engine(H100)
    engine.submit(request("a", prompt=1000, output=1_001), now=0.0)
    engine.advance(0.5)
    engine.set_speed(slow_ratio=2.0, pause_s=0.1, now=0.5)
    engine.advance(engine.next_step_at())  # the running step keeps its length
    started = engine.next_step_at()
    engine.advance(started)
    assert engine.next_step_at() - started == pytest.approx(0.1 + 2 * 0.007, rel=0.02)


def test_a_paused_engine_starts_no_step() -> None:
    engine = Engine(H100)
    engine.submit(request("a", output=1_000), now=0.0)
    engine.advance(0.5)
    engine.set_paused(True, now=0.5)
    engine.advance(0.6)
    made = engine.figures().generated_tokens_total
    engine.advance(60.0)
    assert engine.figures().generated_tokens_total == made
    assert engine.next_event_at() == math.inf
    engine.set_paused(False, now=60.0)
    assert only(run_out(engine), EventKind.FINISHED)


def test_decode_moments_let_a_reader_fit_step_time_against_batch_size() -> None:
    """As SGLang sums them: n, sum b, sum t, sum b*b, sum b*t (microseconds), sum of tokens."""
    engine = Engine(H100)
    for batch in (1, 16, 64):
        for number in range(batch):
            engine.submit(request(f"{batch}-{number}", prompt=8, output=200), now=engine._now + 1)
        run_out(engine)
    n, b, t, bb, bt, tokens = engine.figures().decode_moments
    slope_us = (n * bt - b * t) / (n * bb - b * b)
    expected = (H100.decode_ms(64, 64 * 108) - H100.decode_ms(1, 108)) / 63 * 1000
    assert slope_us == pytest.approx(expected, rel=0.25)
    assert tokens == b == (1 + 16 + 64) * 199


# -- rules --------------------------------------------------------------------------------


def test_a_full_queue_refuses_as_the_limit_says() -> None:
    engine = Engine(H100, EngineSettings(max_running_requests=1, max_queued_requests=2))
    engine.submit(request("running"), now=0.0)
    engine.advance(0.0)
    answers = [engine.submit(request(name), now=0.001) for name in "abc"]
    assert answers == [Admission.ACCEPTED, Admission.ACCEPTED, Admission.QUEUE_FULL]


def test_a_burst_onto_an_idle_engine_counts_against_the_queue() -> None:
    engine = Engine(H100, EngineSettings(max_queued_requests=2))
    answers = [engine.submit(request(name), now=0.0) for name in "abc"]
    assert answers[2] is Admission.QUEUE_FULL


def test_a_prompt_beyond_the_pool_is_too_long_and_the_output_is_cut_to_the_pool() -> None:
    engine = Engine(TINY)
    assert engine.submit(request("a", prompt=999), now=0.0) is Admission.TOO_LONG
    most = request("b", prompt=900, output=5_000)
    assert engine.submit(most, now=0.0) is Admission.ACCEPTED
    run_out(engine)
    assert most.kept_tokens == 98


def test_output_zero_is_a_prefill_only() -> None:
    engine = Engine(H100)
    engine.submit(request("embedding", output=0), now=0.0)
    assert [event.kind for event in run_out(engine)] == [EventKind.FINISHED]


def test_priorities_order_the_queue_and_evict_the_worst() -> None:
    engine = Engine(
        H100,
        EngineSettings(
            max_running_requests=1, max_queued_requests=3, enable_priority_scheduling=True
        ),
    )
    engine.submit(request("running", priority=5), now=0.0)
    engine.advance(0.0)
    for name, priority in (("none", None), ("five", 5), ("nine", 9)):
        engine.submit(request(name, priority=priority), now=0.0)
    assert engine.submit(request("low", priority=None), now=0.0) is Admission.QUEUE_FULL
    assert engine.submit(request("eight", priority=8), now=0.0) is Admission.ACCEPTED
    events = run_out(engine)
    assert [e.request.id for e in only(events, EventKind.EVICTED)] == ["none"]
    finished = [e.request.id for e in only(events, EventKind.FINISHED)]
    assert finished == ["running", "nine", "eight", "five"]


def test_a_far_higher_priority_preempts_and_the_victim_goes_on_later() -> None:
    engine = Engine(H100, EngineSettings(max_running_requests=1, enable_priority_scheduling=True))
    engine.submit(request("low", output=500, priority=0), now=0.0)
    engine.advance(1.0)
    engine.submit(request("near", output=5, priority=10), now=1.0)
    engine.submit(request("far", output=5, priority=11), now=1.0)
    events = run_out(engine)
    assert [e.request.id for e in only(events, EventKind.RETRACTED)] == ["low"]
    assert [e.request.id for e in only(events, EventKind.FINISHED)] == ["far", "near", "low"]
    assert only(events, EventKind.FINISHED)[-1].request.kept_tokens == 500


def test_low_values_first_reverses_the_order() -> None:
    settings_ = EngineSettings(
        max_running_requests=1,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=True,
    )
    engine = Engine(H100, settings_)
    for name, priority in (("none", None), ("fifty", 50), ("five", 5), ("ten", 10)):
        engine.submit(request(name, priority=priority), now=0.0)
    finished = [e.request.id for e in only(run_out(engine), EventKind.FINISHED)]
    assert finished == ["five", "ten", "fifty", "none"]


@pytest.mark.parametrize("at", [0.0, 0.001, 0.3])
def test_an_abort_frees_everything_whether_queued_prefilling_or_running(at: float) -> None:
    engine = Engine(H100, EngineSettings(max_running_requests=1))
    engine.submit(request("first", prompt=1_000, output=1_000), now=0.0)
    engine.submit(request("second", output=1), now=0.0)
    engine.advance(at)
    assert engine.abort("first", now=at)
    assert engine.abort("second", now=at)
    assert not engine.abort("third", now=at)
    events = run_out(engine)
    assert [e.request.id for e in only(events, EventKind.ABORTED)] in (
        ["first", "second"],
        ["second", "first"],
    )
    assert only(events, EventKind.FINISHED) == []
    assert engine.figures().kv_used_tokens == 0


def test_aborting_twice_ends_it_once() -> None:
    engine = Engine(H100)
    engine.submit(request("a", output=1_000), now=0.0)
    engine.advance(0.5)
    engine.abort("a", now=0.5)
    engine.abort("a", now=0.5)
    assert len(only(run_out(engine), EventKind.ABORTED)) == 1


# -- prefix cache -------------------------------------------------------------------------


def test_a_second_prompt_with_the_same_prefix_computes_only_the_rest() -> None:
    engine = Engine(H100)
    blocks = tuple(range(10))
    engine.submit(request("a", prompt=640, output=1, blocks=blocks), now=0.0)
    run_out(engine)
    assert engine.figures().kv_used_tokens == 0
    assert engine.figures().kv_evictable_tokens == 640
    again = request("b", prompt=700, output=1, blocks=blocks)
    engine.submit(again, now=1.0)
    run_out(engine)
    assert again.cached_tokens == 640
    assert engine.figures().prefill_tokens_total == 640 + 60


def test_a_whole_hit_still_computes_one_block() -> None:
    engine = Engine(H100)
    last = request("none")
    for name in "ab":
        last = request(name, prompt=640, output=1, blocks=tuple(range(10)))
        engine.submit(last, now=engine._now + 1)
        run_out(engine)
    assert last.cached_tokens == 576


def test_cached_prefixes_yield_to_running_requests() -> None:
    engine = Engine(TINY, EngineSettings(prefix_block_tokens=50))
    engine.submit(request("a", prompt=600, output=1, blocks=tuple(range(12))), now=0.0)
    run_out(engine)
    engine.submit(request("b", prompt=700, output=2, blocks=tuple(range(100, 114))), now=9.0)
    run_out(engine)
    figures = engine.figures()
    assert figures.kv_used_tokens + figures.kv_evictable_tokens <= TINY.kv_total_tokens
    # Deepest blocks go first, so a shorter prefix of the first prompt is still there.
    third = request("c", prompt=600, output=1, blocks=tuple(range(12)))
    engine.submit(third, now=99.0)
    run_out(engine)
    assert 0 < third.cached_tokens < 600


def test_flush_forgets_prefixes_only_when_nothing_is_live() -> None:
    engine = Engine(H100)
    engine.submit(request("a", prompt=640, output=1, blocks=tuple(range(10))), now=0.0)
    assert not engine.flush_cache(now=0.0)
    run_out(engine)
    assert engine.flush_cache(now=9.0)
    assert engine.figures().kv_evictable_tokens == 0


# -- properties ---------------------------------------------------------------------------

JOBS = st.lists(
    st.tuples(
        st.integers(0, 400),  # arrival, ms
        st.integers(1, 500),  # prompt
        st.integers(1, 300),  # output
        st.integers(0, 300),  # how much max_new_tokens exceeds it
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(JOBS, st.integers(1, 12))
def test_closed_form_runs_equal_the_same_rules_taken_step_by_step(
    raw: list[tuple[int, int, int, int]], max_running: int
) -> None:
    # Arrivals off any round figure, so that none falls within rounding of a step boundary.
    jobs = [
        Job(f"r{n}", ms / 1000 + n * 1e-5 * math.pi, prompt, output, output + more)
        for n, (ms, prompt, output, more) in enumerate(raw)
        if prompt + output + more <= TINY.kv_total_tokens - 2
    ]
    jobs.sort(key=lambda job: job.arrives_at)
    twin = ReferenceEngine(TINY, max_running)
    engine = Engine(TINY, EngineSettings(max_running_requests=max_running))
    events: list[Event] = []
    for job in jobs:
        events += engine.advance(job.arrives_at)
        engine.submit(
            request(job.name, prompt=job.prompt, output=job.output, max_new=job.max_new),
            now=job.arrives_at,
        )
    events += run_out(engine)
    twin.run(jobs)
    key = lambda e: (round(e[2], 6), e[0], e[1])  # noqa: E731
    ours = sorted(((e.kind.name, e.request.id, e.at) for e in events), key=key)
    theirs = sorted(twin.events, key=key)
    assert [(k, n) for k, n, _ in ours] == [(k, n) for k, n, _ in theirs]
    assert [at for *_, at in ours] == pytest.approx([at for *_, at in theirs], abs=1e-6)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "abort", "advance", "slow", "pause"]),
        st.integers(0, 60),  # ms since the last action
        st.integers(1, 600),  # prompt
        st.integers(0, 200),  # output
        st.integers(0, 3),  # which family of prefixes, or priority
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.booleans(), st.sampled_from([None, 3]))
def test_whatever_happens_kv_is_conserved_and_everybody_ends_once(
    actions: list[tuple[str, int, int, int, int]], priorities: bool, queue: int | None
) -> None:
    engine = Engine(
        TINY,
        EngineSettings(
            max_running_requests=6,
            max_queued_requests=queue,
            enable_priority_scheduling=priorities,
            prefix_block_tokens=16,
        ),
    )
    now, accepted, events = 0.0, [], []
    for number, (action, ms, prompt, output, family) in enumerate(actions):
        now += ms / 1000
        if action == "submit":
            blocks = tuple(family * 1_000 + i for i in range(prompt // 16))
            new = request(
                f"r{number}", prompt=prompt, output=output, max_new=output + 50, blocks=blocks
            )
            new.priority = family * 20 if priorities else None
            if engine.submit(new, now=now) is Admission.ACCEPTED:
                accepted.append(new.id)
        elif action == "abort" and accepted:
            engine.abort(accepted[prompt % len(accepted)], now=now)
        elif action == "slow":
            engine.set_speed(slow_ratio=1 + family, now=now)
        elif action == "pause":
            engine.set_paused(family == 0, now=now)
        events += engine.advance(now)
        check_pool(engine)
    engine.set_paused(False, now=now)
    while (at := engine.next_event_at()) < math.inf:
        events += engine.advance(at)
        check_pool(engine)
    ends = {EventKind.FINISHED, EventKind.ABORTED, EventKind.EVICTED}
    assert Counter(e.request.id for e in events if e.kind in ends) == Counter(accepted)
    assert [e.at for e in events] == sorted(e.at for e in events)
    for event in only(events, EventKind.FINISHED):
        assert event.request.kept_tokens == event.request.output_tokens
    figures = engine.figures()
    assert (figures.kv_used_tokens, figures.context_tokens) == (0, 0)
    assert (figures.running_requests, figures.waiting_requests) == (0, 0)
    assert figures.waiting_uncached_tokens == 0


def check_pool(engine: Engine) -> None:
    figures = engine.figures()
    assert min(figures.kv_used_tokens, figures.kv_evictable_tokens) >= 0
    assert figures.kv_used_tokens + figures.kv_evictable_tokens <= figures.kv_total_tokens
