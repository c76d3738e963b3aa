"""Seeded open-loop requests: when they arrive, how long they are, whose they are.

A workload is one or more flows side by side. A flow takes its lengths from the public traces or
from ranges; its arrivals are the traces' own or a Gamma renewal process. To reach a wished rate
the trace is not compressed, which would turn independent users into one crowd: copies of it, each
turned round the ring by a random offset, are laid over each other at native speed, and the last,
partial copy is thinned.

The traces name no tier, tenant or max_tokens; they are drawn per request and independently of each
other. Everything is drawn from one seed, so equal flows and seeds give equal requests, and the
load test and the simulator see the same. Requests come as an endless iterator in order of arrival;
nothing here waits for an answer, as real users do not. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, count
from random import Random
from typing import Final, assert_never

from loadtest.trace import Trace, TraceRow, read_trace

TENANTS: Final = 20
TENANT_ZIPF_EXPONENT: Final = 0.8


class Tier(StrEnum):
    """Service tiers. Their shares of requests are in TIER_SHARES; offline is never drawn."""

    PREMIUM = "premium"
    STANDARD = "standard"
    FREE = "free"
    OFFLINE = "offline"


TIER_SHARES: Final = {Tier.PREMIUM: 0.2, Tier.STANDARD: 0.5, Tier.FREE: 0.3}
# Targets of the tiers: seconds to the first token, mean seconds per further token.
TTFT_TARGET_S: Final = {
    Tier.PREMIUM: 0.1,
    Tier.STANDARD: 0.5,
    Tier.FREE: 2.0,
    Tier.OFFLINE: 30.0,
}
TPOT_TARGET_S: Final = {
    Tier.PREMIUM: 0.05,
    Tier.STANDARD: 0.075,
    Tier.FREE: 0.15,
    Tier.OFFLINE: 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
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
    prefix_blocks: tuple[int, ...] = ()  # equal numbers, equal 512-token blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTokensRule:
    """How clients choose max_tokens: some tightly, the others one of a few round figures.

    A tight choice is the next power of two at or above the output times a factor of 1 to 2.
    """

    tight_share: float = 0.5
    round_figures: tuple[tuple[float, int], ...] = ((0.3, 1024), (0.2, 4096))  # share, tokens
    tokens_max: int | None = None

    def __post_init__(self) -> None:
        shares = self.tight_share + sum(share for share, _ in self.round_figures)
        if not math.isclose(shares, 1.0):
            raise ValueError(f"shares add up to {shares}, not to 1")

    def drawn(self, output_tokens: int, rng: Random) -> int:
        """Return the max_tokens of a request whose answer would have `output_tokens`."""
        tokens = self._choice(output_tokens, rng)
        return tokens if self.tokens_max is None else min(tokens, self.tokens_max)

    def _choice(self, output_tokens: int, rng: Random) -> int:
        point = rng.random() - self.tight_share
        for share, tokens in self.round_figures:
            if 0 <= point < share:
                return tokens
            point -= share
        wish = max(1.0, output_tokens * rng.uniform(1, 2))
        return int(2 ** math.ceil(math.log2(wish)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLengths:
    """Lengths of public traces, by share; only rows whose output is within bounds."""

    shares: tuple[tuple[str, float], ...] = (("azure2023_conv", 0.7), ("azure2023_code", 0.3))
    output_tokens_min: int = 0
    output_tokens_max: int = 1_000_000

    def trace(self, name: str) -> Trace:
        """The rows of trace `name` that count."""
        low, high = self.output_tokens_min, self.output_tokens_max
        return read_trace(name).where(lambda row: low <= row.output_tokens <= high)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeLengths:
    """Lengths drawn evenly from ranges, ends included."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a flow sends: from `start_s` for `length_s`, and again each `every_s` if that is set."""

    start_s: float = 0.0
    length_s: float = math.inf
    every_s: float | None = None

    def holds(self, at_s: float) -> bool:
        """Whether a request may arrive at `at_s`."""
        since_s = at_s - self.start_s
        if since_s >= 0 and self.every_s is not None:
            since_s %= self.every_s
        return 0 <= since_s < self.length_s

    def is_over(self, at_s: float) -> bool:
        """Whether nothing can arrive at or after `at_s`."""
        return self.every_s is None and at_s >= self.start_s + self.length_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Requests of one kind. `rate_per_s` is the mean while the window is open.

    `gamma_shape` None: the traces' own arrivals. Otherwise gaps are Gamma distributed: shape 1 is
    Poisson, below 1 burstier (0.5 and 0.25 imitate BurstGPT); ranges without a shape are Poisson.
    `tier` and `tenant`, when set, hold for all requests of the flow.
    """

    rate_per_s: float
    lengths: TraceLengths | RangeLengths = TraceLengths()
    max_tokens: MaxTokensRule = MaxTokensRule()
    gamma_shape: float | None = None
    window: Window = Window()
    tier: Tier | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rate_per_s < math.inf:
            raise ValueError(f"a rate of {self.rate_per_s} requests per second")


def work(flows: Sequence[Flow], *, seed: int | str) -> Iterator[WorkItem]:
    """Yield the requests of all `flows` in order of arrival; endless unless every window ends."""
    streams = [
        _arrivals(flow, Random(f"{seed}/arrivals/{index}")) for index, flow in enumerate(flows)
    ]
    rng = Random(f"{seed}/attributes")
    merged = heapq.merge(*map(_keyed, streams, count()))
    for number, (at_s, index, _, source, row) in enumerate(merged):
        flow = flows[index]
        max_tokens = flow.max_tokens.drawn(row.output_tokens, rng)
        yield WorkItem(
            number=number,
            at_s=at_s,
            source=source,
            prompt_tokens=max(1, row.prompt_tokens),
            output_tokens=max(1, min(row.output_tokens, max_tokens)),
            max_tokens=max_tokens,
            tier=flow.tier or _tier(rng),
            tenant=flow.tenant or _tenant(rng),
            prefix_blocks=row.prefix_blocks,
        )


_Arrival = tuple[float, str, TraceRow]


def _keyed(
    stream: Iterator[_Arrival], index: int
) -> Iterator[tuple[float, int, int, str, TraceRow]]:
    """Add what decides between arrivals at one moment: flow, then order within the flow."""
    for number, (at_s, source, row) in enumerate(stream):
        yield at_s, index, number, source, row


def _arrivals(flow: Flow, rng: Random) -> Iterator[_Arrival]:
    """Arrivals of one flow, inside its window."""
    for arrival in _endless(flow, rng):
        if flow.window.is_over(arrival[0]):
            return
        if flow.window.holds(arrival[0]):
            yield arrival


def _endless(flow: Flow, rng: Random) -> Iterator[_Arrival]:
    lengths = flow.lengths
    match lengths:
        case RangeLengths():
            rows = _drawn_rows(lengths, rng)
            times = gamma_times(flow.rate_per_s, shape=flow.gamma_shape or 1.0, rng=rng)
            return ((at_s, "ranges", row) for at_s, row in zip(times, rows, strict=False))
        case TraceLengths() if flow.gamma_shape is not None:
            times = gamma_times(flow.rate_per_s, shape=flow.gamma_shape, rng=rng)
            picked = _picked_rows(lengths, rng)
            return ((at_s, name, row) for at_s, (name, row) in zip(times, picked, strict=False))
        case TraceLengths():
            parts = [
                superposed(lengths.trace(name), rate_per_s=flow.rate_per_s * share, rng=rng)
                for name, share in lengths.shares
            ]
            return heapq.merge(*parts, key=lambda arrival: arrival[0])
        case _:
            assert_never(lengths)


def superposed(trace: Trace, *, rate_per_s: float, rng: Random) -> Iterator[_Arrival]:
    """Yield arrivals of `trace` at `rate_per_s`: turned copies of it at native speed.

    Each copy stands for other users, so its prefix blocks are its own, and new on each lap.
    """
    wanted = rate_per_s / trace.rate_per_s
    copies = math.ceil(wanted - 1e-6)  # a copy that keeps nearly nothing would be sought for ever
    blocks = trace.blocks
    parts = [
        _copy(
            trace,
            offset_s=rng.uniform(0, trace.period_s),
            keep_share=min(1.0, wanted - index),
            rng=Random(rng.random()),
            block_bases=count(index * blocks, copies * blocks),
        )
        for index in range(copies)
    ]
    return heapq.merge(*parts, key=lambda arrival: arrival[0])


def _copy(
    trace: Trace, *, offset_s: float, keep_share: float, rng: Random, block_bases: Iterator[int]
) -> Iterator[_Arrival]:
    lap, base = -1, 0
    for at_s, now_lap, row in trace.played_from(offset_s):
        if now_lap != lap:
            lap, base = now_lap, next(block_bases)
        if keep_share < 1.0 and rng.random() >= keep_share:
            continue
        if row.prefix_blocks and base:
            blocks = tuple(base + block for block in row.prefix_blocks)
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


def _drawn_rows(lengths: RangeLengths, rng: Random) -> Iterator[TraceRow]:
    while True:
        yield TraceRow(
            0.0, rng.randint(*lengths.prompt_tokens), rng.randint(*lengths.output_tokens)
        )


def _picked_rows(lengths: TraceLengths, rng: Random) -> Iterator[tuple[str, TraceRow]]:
    """Rows at random, each trace by its share; their blocks are shared as in the trace."""
    names = [name for name, _ in lengths.shares]
    bounds = list(accumulate(share for _, share in lengths.shares))
    rows = {name: lengths.trace(name).rows for name in names}
    while True:
        (name,) = rng.choices(names, cum_weights=bounds)
        yield name, rng.choice(rows[name])


_TIERS: Final = tuple(TIER_SHARES)
_TIER_BOUNDS: Final = tuple(accumulate(TIER_SHARES.values()))
_TENANT_NAMES: Final = tuple(f"tenant-{rank:02}" for rank in range(1, TENANTS + 1))
_TENANT_BOUNDS: Final = tuple(
    accumulate(rank**-TENANT_ZIPF_EXPONENT for rank in range(1, TENANTS + 1))
)


def _tier(rng: Random) -> Tier:
    return rng.choices(_TIERS, cum_weights=_TIER_BOUNDS)[0]


def _tenant(rng: Random) -> str:
    return rng.choices(_TENANT_NAMES, cum_weights=_TENANT_BOUNDS)[0]
