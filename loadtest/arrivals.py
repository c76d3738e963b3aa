"""Seeded open-loop requests: when they arrive, how long they are, whose they are.

To reach a wished rate a trace is not compressed, which would turn independent users into one crowd:
copies of it, each turned round the ring by a random offset, are laid over each other at native
speed, and the last, partial copy is thinned. Only a flow `at_speed` is one copy, played faster.

Everything is drawn from one seed, so equal flows and seeds give equal requests, and the load test
and the simulator see the same. Tier, tenant and max_tokens are drawn per request and independently
of each other. Requests come as an endless iterator in order of arrival; nothing here waits for an
answer, as real users do not. Pure. What is endless is written with `yield`, as design.md asks.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, count
from random import Random
from typing import Final

from loadtest.trace import Trace, TraceRow
from loadtest.workload import (
    TENANT_ZIPF_EXPONENT,
    TENANTS,
    TIER_SHARES,
    Flow,
    RangeLengths,
    Tier,
    TraceLengths,
)

_TIERS: Final = list(TIER_SHARES)
_TIER_BOUNDS: Final = list(accumulate(TIER_SHARES.values()))
_TENANT_NAMES: Final = [f"tenant-{rank:02}" for rank in range(1, TENANTS + 1)]
_TENANT_BOUNDS: Final = list(
    accumulate(rank**-TENANT_ZIPF_EXPONENT for rank in range(1, TENANTS + 1))
)


@dataclass(slots=True, init=False)
class WorkItem:
    """One request to send."""

    number: int  # order of arrival, from 0
    at_s: float  # since the start of the workload
    source: str  # name of the trace, or "ranges"
    prompt_tokens: int
    output_tokens: int  # what a model would generate; never above max_tokens
    max_tokens: int
    tier: Tier
    tenant: str
    prefix_blocks: tuple[int, ...]  # equal numbers, equal 512-token blocks

    def __init__(
        self,
        *,
        number: int,
        at_s: float,
        source: str,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
        tier: Tier,
        tenant: str,
        prefix_blocks: tuple[int, ...] = (),
    ) -> None:
        self.number = number
        self.at_s = at_s
        self.source = source
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.tier = tier
        self.tenant = tenant
        self.prefix_blocks = prefix_blocks


Arrival = tuple[float, str, TraceRow]  # the moment, the source, the lengths


def work(flows: Sequence[Flow], *, seed: int | str) -> Iterator[WorkItem]:
    """Yield the requests of all `flows` in order of arrival; endless unless every window ends."""
    streams = [
        _arrivals(flow, Random(f"{seed}/arrivals/{index}")) for index, flow in enumerate(flows)
    ]
    rng = Random(f"{seed}/attributes")
    for number, (index, (at_s, source, row)) in enumerate(_merged(streams)):
        flow = flows[index]
        max_tokens = flow.max_tokens.drawn(row.output_tokens, rng)
        yield WorkItem(
            number=number,
            at_s=at_s,
            source=source,
            prompt_tokens=max(1, row.prompt_tokens),
            output_tokens=max(1, min(row.output_tokens, max_tokens)),
            max_tokens=max_tokens,
            tier=flow.tier or _TIERS[_drawn(_TIER_BOUNDS, rng)],
            tenant=flow.tenant or _TENANT_NAMES[_drawn(_TENANT_BOUNDS, rng)],
            prefix_blocks=row.prefix_blocks,
        )


def _merged(streams: Sequence[Iterator[Arrival]]) -> Iterator[tuple[int, Arrival]]:
    """The arrivals of all streams in their order, with the index of each one's stream.

    Of equal moments the lower index goes first, as `heapq.merge` has it, at half the time.
    """
    heap: list[tuple[float, int, Arrival]] = []
    for index, stream in enumerate(streams):
        first = next(stream, None)
        if first is not None:
            heap.append((first[0], index, first))
    heapify(heap)
    while heap:
        _, index, arrival = heap[0]
        yield index, arrival
        following = next(streams[index], None)
        if following is None:
            heappop(heap)
        else:
            heapreplace(heap, (following[0], index, following))


def _laid_over(streams: Sequence[Iterator[Arrival]]) -> Iterator[Arrival]:
    """The arrivals of all streams in their order."""
    for _, arrival in _merged(streams):
        yield arrival


def _arrivals(flow: Flow, rng: Random) -> Iterator[Arrival]:
    """Arrivals of one flow, inside its window."""
    window = flow.window
    for arrival in _endless(flow, rng):
        if window.is_over(arrival[0]):
            return
        if window.holds(arrival[0]):
            yield arrival


def _endless(flow: Flow, rng: Random) -> Iterator[Arrival]:
    lengths = flow.lengths
    if isinstance(lengths, RangeLengths):
        return _of_ranges(flow, lengths, rng)
    if flow.gamma_shape is not None:
        return _of_rows(flow, lengths, flow.gamma_shape, rng)
    copies: list[Iterator[Arrival]] = []
    for name, share in lengths.shares:
        trace, rate_per_s = lengths.trace(name), flow.rate_per_s * share
        if flow.at_speed:
            copies.append(at_speed(trace, rate_per_s=rate_per_s, rng=rng))
        else:
            copies += _copies(trace, rate_per_s, rng)
    return _laid_over(copies)


def superposed(trace: Trace, *, rate_per_s: float, rng: Random) -> Iterator[Arrival]:
    """Yield arrivals of `trace` at `rate_per_s`: turned copies of it at native speed.

    Each copy stands for other users, so its prefix blocks are its own, and new on each lap.
    """
    return _laid_over(_copies(trace, rate_per_s, rng))


def _copies(trace: Trace, rate_per_s: float, rng: Random) -> list[Iterator[Arrival]]:
    wanted = rate_per_s / trace.rate_per_s
    copies = math.ceil(wanted - 1e-6)  # a copy that keeps nearly nothing would be sought for ever
    blocks = trace.blocks
    return [
        _copy(
            trace,
            offset_s=rng.uniform(0, trace.period_s),
            keep_share=min(1.0, wanted - index),
            rng=Random(rng.random()),
            block_bases=count(index * blocks, copies * blocks),
        )
        for index in range(copies)
    ]


def at_speed(trace: Trace, *, rate_per_s: float, rng: Random) -> Iterator[Arrival]:
    """Yield arrivals of `trace`, from a random moment on, so fast that they are `rate_per_s`.

    What its requests share stays as it is, counted in requests; on each lap the blocks are new.
    None at rate 0.
    """
    if rate_per_s <= 0:
        return
    speed = rate_per_s / trace.rate_per_s
    copy = _copy(
        trace,
        offset_s=rng.uniform(0, trace.period_s),
        keep_share=1.0,
        rng=rng,
        block_bases=count(0, trace.blocks),
    )
    for at_s, name, row in copy:
        yield at_s / speed, name, row


def _copy(
    trace: Trace, *, offset_s: float, keep_share: float, rng: Random, block_bases: Iterator[int]
) -> Iterator[Arrival]:
    lap, base = -1, 0
    for at_s, now_lap, row in trace.played_from(offset_s):
        if now_lap != lap:
            lap, base = now_lap, next(block_bases)
        if keep_share < 1.0 and rng.random() >= keep_share:
            continue
        if row.prefix_blocks and base:
            blocks = tuple([base + block for block in row.prefix_blocks])
            yield at_s, trace.name, TraceRow(at_s, row.prompt_tokens, row.output_tokens, blocks)
        else:
            yield at_s, trace.name, row


def gamma_times(rate_per_s: float, *, shape: float, rng: Random) -> Iterator[float]:
    """Yield arrival times with Gamma gaps of mean 1 / `rate_per_s`; none at rate 0."""
    if rate_per_s <= 0:
        return
    at_s = 0.0
    while True:
        at_s += rng.gammavariate(shape, 1 / (shape * rate_per_s))
        yield at_s


def _of_ranges(flow: Flow, lengths: RangeLengths, rng: Random) -> Iterator[Arrival]:
    for at_s in gamma_times(flow.rate_per_s, shape=flow.gamma_shape or 1.0, rng=rng):
        prompt_tokens = rng.randint(*lengths.prompt_tokens)
        yield at_s, "ranges", TraceRow(0.0, prompt_tokens, rng.randint(*lengths.output_tokens))


def _of_rows(flow: Flow, lengths: TraceLengths, shape: float, rng: Random) -> Iterator[Arrival]:
    """Rows at random, each trace by its share; their blocks are shared as in the trace."""
    names = [name for name, _ in lengths.shares]
    bounds = list(accumulate(share for _, share in lengths.shares))
    rows = {name: lengths.trace(name).rows for name in names}
    for at_s in gamma_times(flow.rate_per_s, shape=shape, rng=rng):
        name = names[_drawn(bounds, rng)]
        yield at_s, name, rng.choice(rows[name])


def _drawn(bounds: list[float], rng: Random) -> int:
    """An index at random, by weights that `bounds` sums up: as `Random.choices` draws it."""
    return bisect(bounds, rng.random() * bounds[-1], 0, len(bounds) - 1)
