"""What the engine is made of: profiles, formulas, requests, events, KV pool, waiting queue.

Pure like `engine`, which holds the scheduler; neither imports anything else of ours. Times inside
formulas are milliseconds, as in the published tables; everything else is seconds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

# SGLang budgets at most this much output per request (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
CLIP_TOKENS: Final = 4096
_NO_PRIORITY_RANK: Final = 2**63  # a request without a priority comes last

# Sums over decode steps of b requests and t microseconds: of 1, b, t, b * b, b * t, and of tokens.
# From their differences a reader fits step time against batch size.
Moments = tuple[float, float, float, float, float, float]


def added(one: Moments, two: Moments) -> Moments:
    """Both together."""
    a, b, c, d, e, f = one
    g, h, i, j, k, m = two
    return (a + g, b + h, c + i, d + j, e + k, f + m)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Speed and size of one engine (model and GPUs), by the formulas of its methods."""

    scale_ratio: float = 1.0  # s
    base_ms: float  # t0
    weights_ms: float  # w: reading the weights, the floor of a small batch
    compute_ms_per_token: float  # c
    knee: float  # k: how sharply weights-bound turns into compute-bound
    head_ms: float
    overhead_ms: float
    kv_read_us_per_token: float  # kappa
    attention_ms_per_mtoken2: float  # alpha: per million token pairs
    reduce_ms: float = 0.0  # a: latency of one all-reduce; 0 without tensor parallelism
    reduce_ms_per_mb: float = 0.0  # b
    reduces_per_step: int = 160
    reduce_bytes_per_token: int = 16384
    kv_total_tokens: int
    chunk_tokens: int = 8192

    def linear_ms(self, tokens: int) -> float:
        """Time of everything but attention for a batch of `tokens` tokens."""
        k = self.knee
        bound: float = (self.weights_ms**k + (self.compute_ms_per_token * tokens) ** k) ** (1 / k)
        megabytes = tokens * self.reduce_bytes_per_token / 1e6
        reduce = self.reduces_per_step * (self.reduce_ms + self.reduce_ms_per_mb * megabytes)
        layers = self.scale_ratio * (self.base_ms + bound)
        return layers + self.head_ms + self.overhead_ms + reduce

    def decode_ms(self, batch: int, context_tokens: int) -> float:
        """One decode step of `batch` requests that hold `context_tokens` together."""
        return self.linear_ms(batch) + self.kv_read_us_per_token * context_tokens / 1000

    def prefill_ms(self, chunks: Iterable[tuple[int, int]]) -> float:
        """One prefill batch; each chunk is (tokens present before it, tokens computed in it)."""
        tokens, pairs = 0, 0.0
        for present, computed in chunks:
            tokens += computed
            pairs += computed * (present + computed / 2)
        return self.linear_ms(tokens) + self.attention_ms_per_mtoken2 * pairs / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The scheduling flags of a server that matter here, by SGLang's names and defaults."""

    max_running_requests: int = 2048
    max_queued_requests: int | None = None
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    prefix_block_tokens: int = 64  # length of the block behind each hash of a request


class Admission(Enum):
    """What became of a submitted request."""

    ACCEPTED = auto()
    QUEUE_FULL = auto()
    TOO_LONG = auto()  # prompt or prompt plus output exceed the KV pool: it could never run


class EventKind(Enum):
    """What happened to a request."""

    FIRST_TOKEN = auto()
    RETRACTED = auto()  # lost its KV, queued again; it keeps the tokens it has
    FINISHED = auto()
    ABORTED = auto()
    EVICTED = auto()  # thrown out of the full queue by a higher priority


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()
    OVER = auto()


_WAITING: Final = State.WAITING  # members of enums are found slowly


class EngineRequest:
    """One sequence to generate: what the caller asks for, and where it stands.

    `output_tokens` is how many tokens it will generate; the scheduler knows only `max_new_tokens`.
    `blocks` are chained hashes of the whole blocks of the prompt. Attributes below the blank line
    are written by the engine only.
    """

    __slots__ = (
        "abort_wanted",
        "blocks",
        "cached_tokens",
        "done_tokens",
        "finish_step",
        "finished_at",
        "first_token_at",
        "held_blocks",
        "id",
        "ignore_eos",
        "joined_step",
        "kept_tokens",
        "limit_step",
        "max_new_tokens",
        "number",
        "output_tokens",
        "priority",
        "private_tokens",
        "prompt_tokens",
        "queued_tokens",
        "rank",
        "retractions",
        "started_at",
        "state",
        "submitted_at",
        "target_tokens",
    )

    def __init__(
        self,
        *,
        id: str,
        prompt_tokens: int,
        output_tokens: int,
        max_new_tokens: int,
        priority: int | None = None,
        ignore_eos: bool = False,
        blocks: Sequence[int] = (),
    ) -> None:
        self.id = id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_new_tokens = max_new_tokens
        self.priority = priority
        self.ignore_eos = ignore_eos  # the scheduler then expects all of max_new_tokens
        self.blocks = blocks

        self.submitted_at = 0.0
        self.started_at: float | None = None  # first prefill began
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.cached_tokens = 0  # prefix hit of the first prefill
        self.retractions = 0
        self.state = _WAITING
        self.rank = 0  # place by priority; smaller runs first
        self.number = 0  # order of arrival in the queue
        self.kept_tokens = 0  # outputs known while not running
        self.queued_tokens = 0  # uncached tokens counted while waiting
        self.target_tokens = 0  # this prefill: prompt plus kept outputs
        self.done_tokens = 0  # of them present in KV
        self.held_blocks = 0  # leading blocks locked in the prefix cache
        self.private_tokens = 0  # KV outside the prefix cache, as of `joined_step`
        self.joined_step = 0  # step counter when decoding began
        self.finish_step = 0
        self.limit_step = 0  # step counter at which max_new_tokens would be reached
        self.abort_wanted = False

    @property
    def output_budget(self) -> int:
        """Output that admission sets aside for it when it is prefilled."""
        return min(max(self.max_new_tokens - self.kept_tokens, 0), CLIP_TOKENS)


class Event:
    """One thing that happened to `request` at `at` seconds of the caller's clock."""

    __slots__ = ("at", "kind", "request")

    def __init__(self, kind: EventKind, request: EngineRequest, at: float) -> None:
        self.kind = kind
        self.request = request
        self.at = at


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What SGLang's load answer tells of an engine. Totals count since the start."""

    running_requests: int
    waiting_requests: int
    waiting_tokens: int  # prompt tokens of the queue
    waiting_uncached_tokens: int  # prefill work left, the rest of a chunked prompt included
    retracted_waiting: int
    kv_used_tokens: int
    kv_evictable_tokens: int
    kv_total_tokens: int
    new_token_ratio: float
    context_tokens: int  # tokens that running requests attend to
    prefill_tokens_total: int  # computed, cached ones excluded
    cached_tokens_total: int
    prefill_busy_us_total: float
    generated_tokens_total: int
    retractions_total: int
    decode_moments: Moments


class KvPool:
    """Tokens of KV: private to a request, in locked prefix blocks, in evictable ones, or free.

    A request locks the whole path to its last block and releases it deepest block first, so the
    least recently used evictable block is never the parent of another one.
    """

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        self.total_tokens = total_tokens
        self.block_tokens = block_tokens
        self.private_tokens = 0
        self._locks: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used_tokens(self) -> int:
        """Tokens that requests hold, shared blocks counted once."""
        return self.private_tokens + len(self._locks) * self.block_tokens

    @property
    def evictable_tokens(self) -> int:
        """Tokens of prefix blocks that nobody uses."""
        return len(self._idle) * self.block_tokens

    @property
    def free_tokens(self) -> int:
        """Tokens that are free or can be made free by eviction."""
        return self.total_tokens - self.private_tokens - len(self._locks) * self.block_tokens

    def match(self, blocks: Sequence[int], limit: int) -> int:
        """Return how many of the first `limit` leading blocks are present."""
        count = 0
        for block in blocks[:limit]:
            if block not in self._locks and block not in self._idle:
                break
            count += 1
        return count

    def evictable_among(self, blocks: Sequence[int]) -> int:
        """Return how many tokens of `blocks` are evictable now."""
        return sum(block in self._idle for block in blocks) * self.block_tokens

    def lock(self, blocks: Sequence[int]) -> None:
        """Use `blocks`; those not present are added."""
        locks, idle = self._locks, self._idle
        for block in blocks:
            locks[block] = locks.get(block, 0) + 1
            idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Give up `blocks`, locked before; without users they become evictable."""
        for block in reversed(blocks):
            self._locks[block] -= 1
            if not self._locks[block]:
                del self._locks[block]
                self._idle[block] = None

    def grow(self, tokens: int) -> None:
        """Add private tokens, evicting least recently used blocks where there is no room."""
        self.private_tokens += tokens
        while self._idle and self.evictable_tokens > self.free_tokens:
            self._idle.popitem(last=False)

    def flush(self) -> None:
        """Forget all evictable blocks."""
        self._idle.clear()


class DecodeRun:
    """Undisturbed decode steps of `batch` requests.

    The first lasts `step_s`, each later one `growth_s` longer.
    """

    __slots__ = ("batch", "growth_s", "step_s")

    def __init__(self, batch: int, step_s: float, growth_s: float) -> None:
        self.batch = batch
        self.step_s = step_s
        self.growth_s = growth_s

    def duration_s(self, steps: int) -> float:
        """Seconds that the first `steps` steps take together."""
        return steps * self.step_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_in(self, elapsed_s: float) -> float:
        """Return the inverse of `duration_s`, in fractions of a step."""
        first = self.step_s - self.growth_s / 2
        root = math.sqrt(first * first + 2 * self.growth_s * max(0.0, elapsed_s))
        return 2 * elapsed_s / (first + root)

    def moments(self, steps: int) -> Moments:
        """What the first `steps` steps add to the engine's decode moments."""
        tokens = steps * self.batch
        us = self.duration_s(steps) * 1e6
        return (steps, tokens, us, tokens * self.batch, self.batch * us, tokens)


class Outlook:
    """Output that running requests may still produce, kept as sums: asking costs O(1).

    Requests with more than CLIP_TOKENS to go are rare and counted one by one.
    """

    def __init__(self) -> None:
        self._sums = {False: [0, 0], True: [0, 0]}  # by ignore_eos: sum of limit_step, count
        self._long: dict[str, EngineRequest] = {}

    def add(self, request: EngineRequest) -> None:
        """Count a request that begins to decode."""
        left = request.max_new_tokens - request.kept_tokens
        request.limit_step = request.joined_step + left
        if left > CLIP_TOKENS:
            self._long[request.id] = request
        else:
            sums = self._sums[request.ignore_eos]
            sums[0] += request.limit_step
            sums[1] += 1

    def remove(self, request: EngineRequest) -> None:
        """Count it no longer."""
        if self._long.pop(request.id, None) is None:
            sums = self._sums[request.ignore_eos]
            sums[0] -= request.limit_step
            sums[1] -= 1

    def expected(self, step: int, ratio: float) -> float:
        """Return the sum of `expected_of` over all."""
        (limits, count), (fixed_limits, fixed_count) = self._sums.values()
        total = (limits - count * step) * ratio + (fixed_limits - fixed_count * step)
        return total + sum(self.expected_of(r, step, ratio) for r in self._long.values())

    def expected_of(self, request: EngineRequest, step: int, ratio: float) -> float:
        """Return the output admission expects of it from `step` on: all of it if it ignores EOS."""
        left = min(request.limit_step - step, CLIP_TOKENS)
        return left if request.ignore_eos else left * ratio


class PrefillBatch:
    """A prefill batch while it is formed."""

    __slots__ = ("budget_tokens", "chunks", "promised_tokens")

    def __init__(self, budget_tokens: int, promised_tokens: float) -> None:
        self.budget_tokens = budget_tokens  # what still fits into the chunk
        # Output that running requests and this batch are expected to need.
        self.promised_tokens = promised_tokens
        self.chunks: list[tuple[EngineRequest, int]] = []

    def add(self, request: EngineRequest) -> int:
        """Give `request` what is left of the chunk, as far as it needs it; return its tokens.

        Output is set aside for it with the last chunk of its prompt.
        """
        left = request.target_tokens - request.done_tokens
        tokens = min(self.budget_tokens, left)
        self.budget_tokens -= tokens
        self.promised_tokens += request.output_budget if tokens == left else 0
        self.chunks.append((request, tokens))
        return tokens


class WaitingQueue:
    """Requests that wait for their prefill, by priority where that is enabled, then by arrival."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._entries: list[tuple[int, int, EngineRequest]] = []
        self._arrivals = 0
        self.uncached_tokens = 0  # prefill work as estimated on arrival

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[EngineRequest]:
        return (request for _, _, request in self._entries)

    @property
    def first(self) -> EngineRequest:
        """The next one to start."""
        return self._entries[0][2]

    @property
    def is_full(self) -> bool:
        """Whether one more would exceed max_queued_requests."""
        limit = self._settings.max_queued_requests
        return limit is not None and len(self._entries) >= limit

    def rank(self, request: EngineRequest) -> int:
        """Place by priority; a smaller rank runs first."""
        if not self._settings.enable_priority_scheduling:
            return 0
        if request.priority is None:
            return _NO_PRIORITY_RANK
        low_first = self._settings.schedule_low_priority_values_first
        return request.priority if low_first else -request.priority

    def pop_worse_than(self, request: EngineRequest) -> EngineRequest | None:
        """Take out the last one, if its priority is below that of `request`."""
        if not self._entries or self.rank(request) >= self._entries[-1][0]:
            return None
        return self._removed(len(self._entries) - 1)

    def add(self, request: EngineRequest, uncached_tokens: int) -> None:
        """Append `request` among its equals."""
        self._arrivals += 1
        request.state = _WAITING
        request.number = self._arrivals
        request.rank = self.rank(request)
        request.queued_tokens = uncached_tokens
        self.uncached_tokens += uncached_tokens
        insort(self._entries, (request.rank, request.number, request))

    def remove(self, request: EngineRequest) -> None:
        """Take out `request`, which waits here."""
        self._removed(bisect_left(self._entries, (request.rank, request.number)))

    def _removed(self, index: int) -> EngineRequest:
        request = self._entries.pop(index)[2]
        self.uncached_tokens -= request.queued_tokens
        return request
