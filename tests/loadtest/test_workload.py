"""The load generator sends what it says: the traces' own figures, at the wished rate, by a seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, takewhile
from random import Random
from statistics import mean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.arrivals import WorkItem, at_speed, gamma_times, superposed, work
from loadtest.prompts import BYTES_PER_TOKEN, prompt_text
from loadtest.scenarios import SCENARIOS, lane_of
from loadtest.trace import BadTrace, Trace, TraceRow, expanded_blocks, parsed_trace, read_trace
from loadtest.workload import Flow, MaxTokensRule, RangeLengths, Tier, TraceLengths, Window

SEEDS = st.integers(0, 2**32)
# Rows, rate, mean input and output, share of outputs above 256, as published.
PUBLISHED = {
    "azure2023_conv": (19_366, 5.5, 1_155, 211, 0.337),
    "azure2023_code": (8_819, 2.6, 2_048, 28, 0.009),
    "mooncake_fast25_conversation": (12_031, 3.4, 12_035, 343, 0.65),
    "mooncake_fast25_synthetic": (3_993, 3.9, 15_325, 149, 0.24),
}


def until(horizon_s: float, *flows: Flow, seed: int = 1) -> list[WorkItem]:
    return list(takewhile(lambda item: item.at_s < horizon_s, work(flows, seed=seed)))


def ring(*arrivals: float, period_s: float) -> Trace:
    rows = tuple(TraceRow(at_s, n + 1, n + 1, (n,)) for n, at_s in enumerate(arrivals))
    return Trace("ring", rows, period_s)


# The traces.


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_extracts_have_the_published_figures(name: str) -> None:
    rows, rate, prompt, output, long_share = PUBLISHED[name]
    trace = read_trace(name)
    assert len(trace.rows) == rows
    assert trace.rate_per_s == pytest.approx(rate, rel=0.03)
    assert mean(row.prompt_tokens for row in trace.rows) == pytest.approx(prompt, rel=0.01)
    assert mean(row.output_tokens for row in trace.rows) == pytest.approx(output, rel=0.02)
    longer = sum(row.output_tokens > 256 for row in trace.rows) / rows
    assert longer == pytest.approx(long_share, abs=0.01)


def test_conversations_share_a_third_of_their_blocks() -> None:
    seen: set[int] = set()
    hits = total = 0
    for row in read_trace("mooncake_fast25_conversation").rows:
        hits += sum(block in seen for block in row.prefix_blocks)
        total += len(row.prefix_blocks)
        seen.update(row.prefix_blocks)
    assert hits / total == pytest.approx(0.366, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 50)), max_size=8))
def test_ranges_of_blocks_expand_to_the_list_they_stand_for(ranges: list[tuple[int, int]]) -> None:
    text = " ".join(f"{low}-{low + n}" if n else str(low) for low, n in ranges)
    listed = [block for low, n in ranges for block in range(low, low + n + 1)]
    assert list(expanded_blocks(text)) == listed


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-1", "1--2", "0-99999999999", "1.5", "\u0663"])
def test_other_text_is_no_range_of_blocks(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|invalid"):
        expanded_blocks(text)


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([("0", "1", "1"), ("x", "1", "1")], "line 3"),
        ([("0", "1", "1"), ("1", "-1", "1")], "line 3"),
        ([("2", "1", "1"), ("1", "1", "1")], "not in order"),
        ([("0", "1", "1"), ("1", "1")], "line 3"),
        ([("nan", "1", "1"), ("1", "1", "1")], "line 2"),
        ([("1", "1", "1")], "no two requests"),
        ([("0", "1", "1"), ("0", "1", "1")], "no two requests"),
    ],
)
def test_a_broken_trace_names_its_line(rows: list[tuple[str, str, str]], fault: str) -> None:
    columns = ("arrival_s", "input_tokens", "output_tokens")
    with pytest.raises(BadTrace, match=fault):
        parsed_trace("t", iter([columns, *rows]))


def test_a_trace_without_a_column_says_which() -> None:
    with pytest.raises(BadTrace, match="line 1: no column output_tokens"):
        parsed_trace("t", iter([("arrival_s", "input_tokens"), ("0", "1")]))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20), st.integers(0, 100))
def test_a_trace_played_from_anywhere_gives_each_row_once_a_lap(
    arrivals: list[int], offset: int
) -> None:
    trace = ring(*sorted(map(float, arrivals)), period_s=100.0)
    count = len(trace.rows)
    played = list(islice(trace.played_from(offset), 3 * count))
    for start in range(2 * count):
        lap = played[start : start + count]
        assert sorted(row.prompt_tokens for _, _, row in lap) == list(range(1, count + 1))
    assert all(a <= b for (a, *_), (b, *_) in pairwise(played))
    assert all(at_s >= 0 and (at_s + offset - row.arrival_s) % 100 == 0 for at_s, _, row in played)


# Superposition: more users, not faster ones.


@settings(max_examples=30)
@given(SEEDS, st.integers(1, 6))
def test_whole_copies_give_exactly_the_wished_rate_over_a_lap(seed: int, copies: int) -> None:
    trace = ring(0.0, 1.0, 1.5, 7.0, period_s=10.0)
    arrivals = superposed(trace, rate_per_s=copies * trace.rate_per_s, rng=Random(seed))
    within = list(takewhile(lambda arrival: arrival[0] < 30.0, arrivals))
    assert len(within) == 3 * 4 * copies
    assert all(a[0] <= b[0] for a, b in pairwise(within))


@settings(max_examples=30)
@given(SEEDS)
def test_copies_run_at_native_speed(seed: int) -> None:
    trace = ring(0.0, 1.0, 1.5, 7.0, period_s=10.0)
    times = [at for at, *_ in islice(superposed(trace, rate_per_s=0.4, rng=Random(seed)), 9)]
    gaps = [round(b - a, 9) for a, b in pairwise(times)]
    assert sorted(gaps[:4]) == sorted(gaps[4:8]) == [0.5, 1.0, 3.0, 5.5]


def test_a_part_of_a_copy_is_thinned_to_its_share() -> None:
    trace = read_trace("azure2023_conv")
    arrivals = superposed(trace, rate_per_s=trace.rate_per_s * 0.25, rng=Random(3))
    count = sum(1 for _ in takewhile(lambda arrival: arrival[0] < trace.period_s, arrivals))
    assert count == pytest.approx(len(trace.rows) * 0.25, rel=0.05)


def test_copies_and_laps_share_no_prefix_with_each_other() -> None:
    trace = ring(0.0, 4.0, period_s=10.0)
    arrivals = superposed(trace, rate_per_s=3 * trace.rate_per_s, rng=Random(1))
    blocks = [row.prefix_blocks[0] for _, _, row in takewhile(lambda a: a[0] < 40.0, arrivals)]
    assert len(blocks) == len(set(blocks)) == 24


@settings(max_examples=30)
@given(SEEDS, st.floats(0.1, 8))
def test_at_speed_is_the_same_ring_with_shorter_gaps(seed: int, speed: float) -> None:
    trace = ring(0.0, 1.0, 1.5, 7.0, period_s=10.0)
    arrivals = at_speed(trace, rate_per_s=speed * trace.rate_per_s, rng=Random(seed))
    times = [at for at, *_ in islice(arrivals, 9)]
    gaps = [round((b - a) * speed, 6) for a, b in pairwise(times)]
    assert sorted(gaps[:4]) == sorted(gaps[4:8]) == [0.5, 1.0, 3.0, 5.5]


def test_at_speed_keeps_what_requests_share_within_a_lap_only() -> None:
    trace = ring(0.0, 4.0, period_s=10.0)
    arrivals = at_speed(trace, rate_per_s=2 * trace.rate_per_s, rng=Random(1))
    blocks = [row.prefix_blocks[0] for _, _, row in islice(arrivals, 8)]
    assert len(set(blocks)) == 8  # each row has a block of its own, new on each lap
    assert not list(at_speed(trace, rate_per_s=0.0, rng=Random(1)))


def test_conversations_come_back_within_the_time_that_is_simulated() -> None:
    """Prompts whose second block was seen before; with copies at native speed half as many."""
    flow = SCENARIOS["prefixes"].flows[0]
    seen: set[int] = set()
    returned = total = 0
    for item in takewhile(lambda item: item.at_s < 120, work([flow], seed=21)):
        if len(item.prefix_blocks) > 1:
            total += 1
            returned += item.prefix_blocks[1] in seen
            seen.update(item.prefix_blocks)
    assert total == pytest.approx(5 * 120, rel=0.35)
    assert returned > 0.1 * total


# Whole workloads.


def test_equal_seeds_give_equal_requests_and_others_do_not() -> None:
    flow = Flow(rate_per_s=20)
    assert until(60, flow, seed=5) == until(60, flow, seed=5)
    assert until(60, flow, seed=5) != until(60, flow, seed=6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_sends_in_order_and_within_its_limits(name: str) -> None:
    items = until(90, *SCENARIOS[name].flows)
    assert [item.number for item in items] == list(range(len(items)))
    assert all(a.at_s <= b.at_s for a, b in pairwise(items))
    assert all(1 <= item.output_tokens <= item.max_tokens for item in items)
    assert all(item.prompt_tokens >= 1 and item.at_s >= 0 for item in items)


def test_the_mix_has_the_shares_of_the_benchmark() -> None:
    items = until(600, Flow(rate_per_s=95))
    assert len(items) / 600 == pytest.approx(95, rel=0.1)
    sources = Counter(item.source for item in items)
    assert sources["azure2023_conv"] / len(items) == pytest.approx(0.7, abs=0.04)
    tiers = Counter(item.tier for item in items)
    for tier, share in ((Tier.PREMIUM, 0.2), (Tier.STANDARD, 0.5), (Tier.FREE, 0.3)):
        assert tiers[tier] / len(items) == pytest.approx(share, abs=0.01)
    # Most clients ask for more than 256 tokens although only a quarter of answers need them.
    assert mean(item.max_tokens > 256 for item in items) == pytest.approx(0.64, abs=0.03)
    assert mean(item.output_tokens > 256 for item in items) == pytest.approx(0.25, abs=0.04)


def test_tenants_follow_zipf() -> None:
    tenants = Counter(item.tenant for item in until(600, Flow(rate_per_s=95)))
    weights = [rank**-0.8 for rank in range(1, 21)]
    assert len(tenants) == 20
    for rank in (1, 2, 5, 20):
        share = tenants[f"tenant-{rank:02}"] / tenants.total()
        assert share == pytest.approx(weights[rank - 1] / sum(weights), rel=0.1)


@given(st.integers(0, 5_000), SEEDS)
def test_a_tight_choice_is_a_power_of_two_above_the_output(output_tokens: int, seed: int) -> None:
    rule = MaxTokensRule(tight_share=1.0, round_figures=())
    tokens = rule.drawn(output_tokens, Random(seed))
    assert tokens.bit_count() == 1
    assert output_tokens <= tokens
    assert tokens < max(2, 4 * output_tokens)


def test_round_figures_are_chosen_by_share() -> None:
    rng = Random(7)
    drawn = Counter(MaxTokensRule().drawn(10, rng) for _ in range(20_000))
    assert drawn[1024] / 20_000 == pytest.approx(0.3, abs=0.02)
    assert drawn[4096] / 20_000 == pytest.approx(0.2, abs=0.02)
    assert drawn[16] + drawn[32] == 20_000 - drawn[1024] - drawn[4096]


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        MaxTokensRule(tight_share=0.9)
    with pytest.raises(ValueError, match="rate"):
        Flow(rate_per_s=-1)


def test_the_lanes_of_short_and_long_are_pure() -> None:
    assert {lane_of(item.max_tokens) for item in until(30, *SCENARIOS["short"].flows)} == {"short"}
    assert {lane_of(item.max_tokens) for item in until(60, *SCENARIOS["long"].flows)} == {"long"}
    assert len({lane_of(item.max_tokens) for item in until(30, *SCENARIOS["mixed"].flows)}) == 2


def test_a_window_opens_and_closes() -> None:
    once = Window(start_s=40, length_s=20)
    assert [once.holds(at) for at in (39.9, 40, 59.9, 60, 100)] == [False, True, True, False, False]
    assert once.is_over(60)
    again = Window(start_s=20, length_s=10, every_s=60)
    assert [again.holds(at) for at in (0, 19, 20, 31, 80, 89, 91)] == [
        *(False, False, True, False, True, True, False)
    ]
    assert not again.is_over(1e9)


def test_a_workload_whose_windows_all_end_ends() -> None:
    flow = Flow(rate_per_s=10, gamma_shape=0.5, window=Window(length_s=5))
    items = list(work([flow], seed=1))
    assert items
    assert items[-1].at_s < 5


def test_a_burst_multiplies_the_rate_for_its_time() -> None:
    times = [item.at_s for item in until(300, *SCENARIOS["burst"].flows)]
    inside = sum(at % 60 >= 20 and at % 60 < 30 for at in times) / 50
    outside = sum(not (at % 60 >= 20 and at % 60 < 30) for at in times) / 250
    assert inside / outside == pytest.approx(4, rel=0.25)


def test_a_scenario_at_another_rate_keeps_its_proportions() -> None:
    scenario = SCENARIOS["noisy"].at_rate(6)
    assert [flow.rate_per_s for flow in scenario.flows] == [6, 9]


@pytest.mark.parametrize("shape", [0.25, 0.5, 1.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness_of_their_shape(shape: float) -> None:
    times = list(islice(gamma_times(50, shape=shape, rng=Random(2)), 20_000))
    gaps = [b - a for a, b in pairwise(times)]
    spread = mean(gap**2 for gap in gaps) / mean(gaps) ** 2 - 1
    assert mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert spread == pytest.approx(1 / shape, rel=0.1)


def test_ranges_are_drawn_from_end_to_end() -> None:
    flow = Flow(rate_per_s=50, lengths=RangeLengths(prompt_tokens=(5, 9), output_tokens=(2, 4)))
    items = until(20, flow)
    assert {item.prompt_tokens for item in items} == {5, 6, 7, 8, 9}
    assert {item.output_tokens for item in items} == {2, 3, 4}


def test_rows_outside_the_wished_lengths_are_left_out_and_the_rate_stays() -> None:
    lengths = TraceLengths(output_tokens_min=257)
    items = until(300, Flow(rate_per_s=8, lengths=lengths))
    assert min(item.output_tokens for item in items) >= 257
    assert len(items) / 300 == pytest.approx(8, rel=0.2)
    with pytest.raises(ValueError, match="no row"):
        read_trace("azure2023_code").where(lambda _: False)


# Prompts.


def item(**changes: object) -> WorkItem:
    fields = {
        "number": 1,
        "at_s": 0.0,
        "source": "t",
        "prompt_tokens": 2_000,
        "output_tokens": 1,
        "max_tokens": 1,
        "tier": Tier.FREE,
        "tenant": "t",
        "prefix_blocks": (),
        **changes,
    }
    return WorkItem(**fields)  # type: ignore[arg-type]


@given(st.integers(1, 200_000))
@settings(max_examples=30)
def test_a_prompt_has_the_wished_length(tokens: int) -> None:
    assert len(prompt_text(item(prompt_tokens=tokens), seed=1)) == tokens * BYTES_PER_TOKEN


def test_prompts_share_text_exactly_where_they_share_blocks() -> None:
    one = prompt_text(item(prefix_blocks=(1, 2, 3, 4)), seed=1)
    two = prompt_text(item(prefix_blocks=(1, 2, 9, 4), number=2), seed=2)
    assert one[: 2 * 2048] == two[: 2 * 2048]
    assert one[2 * 2048 : 2 * 2048 + 4] != two[2 * 2048 : 2 * 2048 + 4]


def test_prompts_without_blocks_differ_from_the_beginning() -> None:
    texts = [prompt_text(item(number=number), seed=1)[:16] for number in range(50)]
    assert len(set(texts)) == 50
    assert median(map(len, texts)) == 16
