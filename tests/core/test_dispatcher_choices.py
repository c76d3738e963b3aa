"""Who gets which request: balance, lanes, what was learnt, and the same again for the same seed."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.contract import Lane, LoadReport, WorkerId
from router.core.dispatcher import Dispatcher
from router.core.peers import PeerLoad
from router.core.prefix import blocks_of
from router.core.types import (
    Endpoint,
    Outcome,
    Priority,
    TicketState,
    Usage,
    WorkerState,
)
from router.errors import Reason
from tests.core.builders import (
    Bench,
    bench,
    config,
    runs,
    waits,
    worker_spec,
)

# Balance.


@pytest.mark.parametrize("policy", ["least_work", "weighted", "round_robin", "least_in_flight"])
@pytest.mark.parametrize("seed", range(5))
def test_a_burst_between_two_polls_is_spread_evenly(policy: str, seed: int) -> None:
    b = bench("w1", "w2", "w3", seed=seed, policy={"name": policy})
    for step in range(60):
        b.now = 0.1 * step / 60
        b.ask()
    assert all(15 <= count <= 25 for count in b.streams().values()), b.streams()


def test_full_workers_are_skipped_while_one_has_room_then_requests_wait() -> None:
    b = bench()
    b.join("w1", "w2", "w3", report=LoadReport(kv_used_tokens=400_000))
    b.join("w4", report=LoadReport(kv_used_tokens=200_000))
    made = [b.ask(prompt_bytes=40_000) for _ in range(20)]
    assert [ticket.worker_id for ticket in made] == ["w4"] * 16 + [None] * 4
    assert waits(made[-1])


def test_a_report_of_a_full_pool_is_believed_although_we_sent_nothing() -> None:
    b = bench()
    b.join("w1", report=LoadReport(kv_used_tokens=396_000))
    b.join("w2", report=LoadReport(kv_used_tokens=120_000))
    assert all(b.ask(max_tokens=1000).worker_id == "w2" for _ in range(20))
    b.report("w2", kv_used_tokens=399_000)
    assert b.ask(max_tokens=1000).state is TicketState.QUEUED


def test_without_a_kv_figure_a_worker_gets_no_more_than_its_share_of_requests() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=None, report=LoadReport(queued_requests=0))
    b.join("w2", report=LoadReport(queued_requests=0, kv_used_tokens=160_000))
    for _ in range(50):
        b.ask(max_tokens=1000)
    assert b.streams()["w1"] <= 25


def test_a_worker_whose_load_answers_fail_is_not_preferred() -> None:
    b = bench()
    b.join("w1", report=None)
    b.core.on_report_missing(WorkerId("w1"), "HTML", now=0.0)
    b.join("w2", report=LoadReport(kv_used_tokens=120_000))
    assert b.view("w1").state is WorkerState.ACTIVE
    for _ in range(100):
        b.ask()
    assert b.streams()["w1"] <= 55
    assert b.view("w1").why_unknown == "HTML"


def test_a_closed_gate_opens_when_the_reports_that_closed_it_go_stale() -> None:
    b = bench(probe={"stale_after_s": 3.0})
    b.join("w1", report=LoadReport(kv_used_tokens=400_000, queued_requests=1_000))
    waiting = b.ask()
    assert waits(waiting)
    b.pass_to(5.0)
    assert runs(waiting)


def test_a_worker_with_many_waiting_is_left_out() -> None:
    b = bench("w1")
    b.report("w1", queued_requests=64)
    assert runs(b.ask())
    b.report("w1", queued_requests=65)
    held = b.ask()
    assert waits(held)
    b.report("w1", queued_requests=0)
    assert runs(held)


def test_a_worker_that_others_filled_and_queue_at_is_left_out() -> None:
    b = bench()
    b.join("w1", "w2", concurrency_max=16)
    b.report("w1", running_requests=16, queued_requests=4)
    assert all(b.ask().worker_id == "w2" for _ in range(8))
    b.report("w1", running_requests=0, queued_requests=0)
    b.core.on_worker_left(WorkerId("w2"), now=0.0)
    assert b.ask().worker_id == "w1"


def test_a_worker_is_shown_with_the_kv_tokens_that_it_reported() -> None:
    b = bench("w1")
    b.ask(prompt_bytes=4_000)
    b.report("w1", kv_used_tokens=73)
    (view,) = b.core.snapshot(now=0.0).workers
    assert (view.kv_used_tokens, view.kv_reserved_tokens > 1_000) == (73, True)


def test_higher_priority_is_filled_first() -> None:
    b = bench()
    b.join("w1", priority=1, concurrency_max=3)
    b.join("w2")
    assert [b.ask().worker_id for _ in range(5)] == ["w1"] * 3 + ["w2"] * 2


def test_twice_the_cost_gets_about_half_the_work() -> None:
    b = bench("w1", policy={"name": "least_in_flight"})
    b.join("w2", cost=2.0)
    for _ in range(90):
        b.ask()
    assert b.streams() == {"w1": 60, "w2": 30}


def test_a_repeated_prompt_goes_where_its_prefix_is() -> None:
    b = bench("w1", "w2", "w3", "w4")
    prefix = tuple(range(100, 108))
    first = b.ask(prompt_bytes=4_096, prefix=prefix)
    b.end(first)
    for _ in range(10):
        made = b.ask(prompt_bytes=4_096, prefix=prefix)
        assert made.worker_id == first.worker_id
        assert made.hit_tokens > 900
        b.end(made)


def test_a_prefix_does_not_draw_all_the_load_to_one_worker() -> None:
    b = bench("w1", "w2", "w3", "w4")
    prefix = tuple(range(100, 108))
    for _ in range(200):
        b.ask(prompt_bytes=8_192, prefix=prefix)
    assert max(b.streams().values()) <= 120


# Lanes.


def two_lanes(**sections: Any) -> Bench:
    made = bench(**sections)
    made.join("s", lanes=["short"])
    made.join("l", lanes=["long"])
    return made


def test_each_lane_has_its_workers() -> None:
    b = two_lanes()
    assert b.ask(max_tokens=256).worker_id == "s"
    assert b.ask(max_tokens=257).worker_id == "l"


def test_short_requests_spill_when_their_own_workers_make_them_wait() -> None:
    b = two_lanes()
    made = [b.ask(prompt_bytes=16_000) for _ in range(12)]
    spilled = [ticket for ticket in made if ticket.spilled]
    assert spilled
    assert {ticket.worker_id for ticket in spilled} == {"l"}
    assert made[0].worker_id == "s"
    assert all(ticket.lane is Lane.SHORT for ticket in made)


def test_nothing_spills_when_that_is_switched_off() -> None:
    b = two_lanes(lanes={"spill": False})
    assert {b.ask(prompt_bytes=16_000).worker_id for _ in range(12)} == {"s"}


def test_long_requests_spill_only_into_an_idle_short_lane() -> None:
    b = two_lanes()
    for _ in range(4):
        b.ask(prompt_bytes=16_000, max_tokens=1000)
    assert b.streams()["l"] < 4
    busy = two_lanes()
    for _ in range(2):
        busy.ask(prompt_bytes=16_000)
    for _ in range(4):
        busy.ask(prompt_bytes=16_000, max_tokens=1000)
    assert busy.streams() == {"s": 2, "l": 4}


@pytest.mark.parametrize(("tokens", "left"), [(100, "l"), (1000, "s")])
def test_a_lane_without_a_live_worker_uses_the_other(tokens: int, left: str) -> None:
    b = two_lanes()
    b.core.on_worker_left(WorkerId("s" if left == "l" else "l"), now=0.0)
    made = b.ask(max_tokens=tokens)
    assert (made.worker_id, made.spilled) == (left, True)


def test_a_lane_without_a_live_worker_is_unavailable_when_spill_is_off() -> None:
    b = two_lanes(lanes={"spill": False})
    b.core.on_worker_left(WorkerId("s"), now=0.0)
    assert b.refusal(b.ask(max_tokens=100)).reason is Reason.NO_WORKERS


def test_halves_of_a_disaggregated_pair_are_not_sent_whole_requests() -> None:
    b = bench()
    b.join("p", worker_type="prefill")
    b.join("d", worker_type="decode")
    assert b.refusal(b.ask()).reason is Reason.NO_WORKERS


# Learning.


def test_settled_usage_corrects_the_prompt_estimate() -> None:
    b = bench("w1")
    for _ in range(200):
        made = b.ask(prompt_bytes=4_000)
        usage = Usage(prompt_tokens=2_000, output_tokens=10)
        b.core.on_finished(made, Outcome.SUCCESS, now=b.now, usage=usage)
    assert 1_950 <= b.ask(prompt_bytes=4_000).prompt_tokens <= 2_050


def test_without_max_tokens_history_decides_the_lane() -> None:
    b = bench("w1")
    assert b.ask(max_tokens=None).lane is Lane.LONG
    for _ in range(50):
        made = b.ask(max_tokens=None)
        usage = Usage(prompt_tokens=100, output_tokens=40)
        b.core.on_finished(made, Outcome.SUCCESS, now=b.now, usage=usage)
    assert b.ask(max_tokens=None).lane is Lane.SHORT


def test_names_in_requests_leave_no_trace() -> None:
    b = bench("w1", catalog={"unknown": "any"})
    for number in range(100):
        b.end(b.ask(model=f"made-up-{number}"))
    assert len(b.core._costs) == 1
    assert len(b.core._pools._pools) <= 2


def test_embeddings_are_short_and_reserve_only_their_prompt() -> None:
    b = bench("w1")
    made = b.ask(endpoint=Endpoint.EMBEDDINGS, max_tokens=None, stream=False)
    assert (made.lane, made.output_tokens, made.kv_tokens) == (Lane.SHORT, 0, 100)


# Determinism.


def trace_of(seed: int) -> list[str]:
    core = Dispatcher(config(), rng=Random(seed))
    b = Bench(core)
    b.join("w1", "w2", "w3", "w4")
    rng = Random(7)
    running = []
    for step in range(300):
        b.pass_to(step * 0.05)
        running.append(b.ask(prompt_bytes=rng.randrange(100, 9_000)))
        if rng.random() < 0.9:
            b.end(running.pop(rng.randrange(len(running))))
    return [str(ticket.worker_id) for ticket in b.dispatched] + [str(e) for e in b.probes]


def test_the_same_seed_decides_the_same() -> None:
    assert trace_of(3) == trace_of(3)
    assert trace_of(3) != trace_of(4)


def test_what_snapshot_shows_is_frozen() -> None:
    b = bench("w1")
    before = b.core.snapshot(now=0.0)
    b.ask()
    assert before.workers[0].streams == 0
    assert b.core.snapshot(now=0.0).workers[0].streams == 1
    assert b.core.snapshot(now=0.0).lanes[Lane.SHORT].running == 1


def test_models_lists_every_worker_that_is_not_ejected() -> None:
    b = bench("w1", "w2")
    assert b.core.models() == {"m": ["w1", "w2"]}
    for _ in range(3):
        b.core.on_probe_failed(WorkerId("w1"), "no answer", now=1.0)
    assert b.core.models() == {"m": ["w2"]}


def test_news_of_strangers_is_dropped() -> None:
    b = bench()
    b.report("nobody")
    b.core.on_probe_failed(WorkerId("nobody"), "no answer", now=0.0)
    b.core.on_drain(WorkerId("nobody"), now=0.0, deadline_s=1.0)
    b.core.on_worker_left(WorkerId("nobody"), now=0.0)
    b.core.on_worker_updated(worker_spec("nobody"), now=0.0)
    assert b.core.worker_ids == []


def test_a_record_names_the_model_as_workers_do_and_no_text_of_a_client() -> None:
    b = bench(models={"m": {"aliases": ["alias"]}}, catalog={"unknown": "any"})
    b.join("w1", models=())
    b.end(b.ask(model="junk"))
    b.join("w2")
    for name in ("m", "alias", "junk", None):
        b.end(b.ask(model=name))
    assert [(r.model, r.served_model) for r in b.records] == [
        ("junk", None), ("m", "m"), ("alias", "m"), ("junk", None), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(("lane", "max_tokens"), [("long", 5_000), ("short", 10)])
def test_what_its_own_lane_can_never_hold_goes_to_the_other(lane: str, max_tokens: int) -> None:
    other = {"long": "short", "short": "long"}[lane]
    b = bench()
    b.join("small", lanes=[lane], kv_total_tokens=10_000)
    b.join("large", lanes=[other], kv_total_tokens=400_000)
    b.ask()  # so that the other lane is not idle
    made = b.ask(prompt_bytes=80_000, max_tokens=max_tokens)
    assert (made.worker_id, made.spilled) == ("large", True)
    b.join("unknown", lanes=[lane], kv_total_tokens=None)
    assert b.ask(prompt_bytes=80_000, max_tokens=max_tokens).worker_id == "unknown"


def test_what_no_lane_can_hold_is_too_large_also_where_lanes_do_not_spill() -> None:
    b = bench(lanes={"spill": False})
    b.join("small", lanes=["long"], kv_total_tokens=10_000)
    b.join("large", lanes=["short"], kv_total_tokens=400_000)
    made = b.ask(prompt_bytes=80_000, max_tokens=5_000)
    assert b.refusal(made).reason is Reason.TOO_LARGE


def test_a_prompt_waits_for_the_worker_that_has_it_cached_when_that_is_sooner() -> None:
    b = bench("w1", "w2", pacing={"enabled": True}, policy={"slow_start_s": 0.0})
    prefix = tuple(range(blocks_of(80_000)))  # 20,000 tokens: half a second of prefill
    first = b.ask(prompt_bytes=80_000, prefix=prefix)
    home = first.worker_id
    b.core.on_first_token(first, now=0.6)
    b.now = 0.6
    busy = [b.ask(prompt_bytes=20_000) for _ in range(2)]  # each has as much waiting as it may
    assert {ticket.worker_id for ticket in busy} == {"w1", "w2"}
    later = b.ask(prompt_bytes=80_400, prefix=prefix)
    assert waits(later)
    for ticket in busy:
        if ticket.worker_id == home:
            b.core.on_first_token(ticket, now=0.7)
    b.take()
    assert runs(later)
    assert later.worker_id == home


@pytest.mark.parametrize(
    ("wait_ratio", "ahead_bytes", "waiting"),
    [
        (8.0, 160_000, True),  # a second longer for 0.7 s that are spared
        (1.0, 160_000, False),
        (8.0, 400_000, False),  # longer than two seconds, the target that it can meet here
        (0.0, 30_000, False),
    ],
)
def test_a_prompt_waits_for_its_prefix_as_long_as_that_is_worth_and_it_is_in_time(
    wait_ratio: float, ahead_bytes: int, waiting: bool
) -> None:
    pacing = {"enabled": True, "elephant_s": 600.0}
    b = bench("w1", pacing=pacing, prefix={"wait_ratio": wait_ratio})
    prefix = tuple(range(blocks_of(80_000)))  # 20,000 tokens: 0.7 s of prefill
    b.core.on_first_token(b.ask(prompt_bytes=80_000, prefix=prefix), now=0.6)
    b.now = 0.6
    assert runs(b.ask(prompt_bytes=ahead_bytes))
    b.join("w2")
    made = b.ask(prompt_bytes=80_400, prefix=prefix)
    assert made.worker_id == (None if waiting else "w2")


PREFIX = tuple(range(blocks_of(80_000)))  # 20,000 tokens: 0.7 s of prefill


def with_a_busy_holder(**sections: Any) -> Bench:
    """`PREFIX` is cached on w1, where others' prompts wait, of a second; w2 is idle."""
    b = bench("w1", pacing={"enabled": True, "elephant_s": 600.0}, **sections)
    b.end(b.ask(prompt_bytes=80_000, prefix=PREFIX))
    b.join("w2")
    b.report("w1", queued_requests=1, queued_uncached_tokens=30_000, kv_used_tokens=0)
    return b


@pytest.mark.parametrize("priority", Priority)
def test_no_prompt_waits_for_ever_for_a_worker_that_stays_busy(priority: Priority) -> None:
    b = with_a_busy_holder()
    made = b.ask(prompt_bytes=80_400, prefix=PREFIX, priority=priority)
    assert waits(made)
    while waits(made):
        b.pass_to(b.now + 0.5)
        b.report("w1", queued_requests=1, queued_uncached_tokens=30_000, kv_used_tokens=0)
    assert made.worker_id == "w2"
    assert b.now <= 8 * 0.7 + 0.5


def test_a_beginning_that_many_share_spreads_to_idle_workers() -> None:
    b = with_a_busy_holder()
    made = [b.ask(prompt_bytes=100_000, prefix=PREFIX) for _ in range(12)]  # 0.2 s each, cached
    assert waits(made[0])
    assert "w2" in [ticket.worker_id for ticket in made]


def test_a_prompt_that_is_cached_is_short() -> None:
    """For its target and for its place in line, as it is for the worker."""
    b = bench("w1", lanes={"short_concurrency_max": 1})
    b.end(b.ask(prompt_bytes=80_000, prefix=PREFIX))
    running = b.ask()
    other = b.ask(prompt_bytes=80_400, prefix=tuple(-n for n in PREFIX))
    cached = b.ask(prompt_bytes=80_400, prefix=PREFIX)
    assert waits(other)
    assert waits(cached)
    assert (cached.ttft_target_s, other.ttft_target_s) == (0.5, 2.0)
    b.end(running)
    assert runs(cached), "its prefill takes a tenth of a second, the other's one of 0.7"
    assert waits(other)


@pytest.mark.parametrize("lookahead_max", [1, 16])
def test_who_rather_waits_for_its_prefix_keeps_nobody_from_an_idle_worker(
    lookahead_max: int,
) -> None:
    b = bench("w1", pacing={"enabled": True}, queue={"lookahead_max": lookahead_max})
    size = blocks_of(80_000)
    prompts = [tuple(range(1_000 * n, 1_000 * n + size)) for n in range(lookahead_max + 1)]
    for prefix in prompts:
        b.now += 1.0
        b.end(b.ask(prompt_bytes=80_000, prefix=prefix))
    b.join("w2")
    b.report("w1", queued_requests=1, queued_uncached_tokens=10_000, kv_used_tokens=0)
    made = [b.ask(prompt_bytes=80_400, prefix=prefix) for prefix in prompts]
    assert all(map(waits, made))
    assert b.ask(prompt_bytes=100_000).worker_id == "w2"
    assert not any(ticket.skips for ticket in made)


def test_no_prompt_waits_for_a_worker_that_others_streams_fill() -> None:
    b = bench()
    b.join("w1", concurrency_max=8)
    b.end(b.ask(prompt_bytes=80_000, prefix=PREFIX))
    b.join("w2")
    b.core.peering.on_replicas(["r0", "r1", "r2"], own="r0", now=b.now)
    b.core.peering.on_loads({WorkerId("w1"): PeerLoad(streams=8)}, now=b.now)
    assert b.ask(prompt_bytes=80_400, prefix=PREFIX).worker_id == "w2"


@pytest.mark.parametrize("size", [32_768, 131_072])
def test_what_a_worker_holds_is_as_much_as_its_memory(size: int) -> None:
    b = bench()
    b.join("small", kv_total_tokens=40_000 * size // 32_768)
    blocks = blocks_of(size)
    prompts = [tuple(range(1_000 * n, 1_000 * n + blocks)) for n in range(20)]
    for prefix in prompts:
        b.end(b.ask(prompt_bytes=size, prefix=prefix))
    known = [bool(b.core._prefixes.depths(prefix)) for prefix in prompts]
    assert known[-5:] == [True] * 5
    assert not any(known[:13])


@pytest.mark.parametrize(
    ("size", "more", "tokens"), [(4_096, 512, 1_024), (200_000, 5_000, 49_152)]
)
def test_hits_are_the_tokens_that_whole_blocks_cover(size: int, more: int, tokens: int) -> None:
    b = bench("w1")
    prefix = tuple(range(blocks_of(size + more)))
    b.end(b.ask(prompt_bytes=size, prefix=prefix[: blocks_of(size)]))
    made = b.ask(prompt_bytes=size + more, prefix=prefix)
    assert made.hit_tokens * (size + more) // made.prompt_tokens == pytest.approx(4 * tokens, abs=4)


@pytest.mark.parametrize("prefill_s", [1e-6, 5e-6, 3e-5])
def test_no_prompt_waits_for_an_idle_worker_that_has_it_cached(prefill_s: float) -> None:
    """Where the policy sees no difference it may choose another; then that one gets it."""
    b = bench("w1", "w2", "w3", pacing={"enabled": True}, policy={"slow_start_s": 0.0})
    for worker in b.core._fleet.workers.values():
        worker.rates.prefill_s = prefill_s
    for family in range(40):
        prefix = tuple(range(1_000 * family, 1_000 * family + 2))
        for _ in range(4):
            b.now += 1.0
            made = b.ask(prompt_bytes=1_250, prefix=prefix)
            assert runs(made)
            b.end(made)
