"""What each tenant used: requests, tokens and cost units, since the start and of late.

Fed with the records of finished requests, a batch at a time. The table is bounded: tenants that the
configuration knows have an entry of their own, all others share one. Layer 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from router.core.types import Outcome, RequestRecord
from router.errors import Reason

WINDOW_MINUTES: Final = 60
TENANTS_MAX: Final = 20_000
OTHERS: Final = "other"
_MINUTE_S: Final = 60.0
_REFUSED: Final = Outcome.REFUSED
# Records that are counted together.
_BATCH: Final = 64


@dataclass(slots=True)
class Amounts:
    """What was used."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_units: float = 0.0
    refused: int = 0

    def add(self, record: RequestRecord, units: float) -> None:
        """Count a request that is over."""
        self.requests += 1
        self.refused += record.outcome is _REFUSED
        if record.dispatched_at is not None:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens or 0
            self.output_tokens += record.output_tokens
            self.cost_units += units

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.cost_units + other.cost_units,
            self.refused + other.refused,
        )


class TenantUsage:
    """One tenant's entry: the minute in which its last request ended, and those before."""

    __slots__ = ("_before", "_minute", "_minutes", "_this", "outcomes", "refusals")

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[Reason] = Counter()
        self._before = Amounts()
        self._this = Amounts()
        self._minute = -1
        self._minutes: deque[tuple[int, Amounts]] = deque(maxlen=WINDOW_MINUTES)

    @property
    def total(self) -> Amounts:
        """What it used since the start."""
        return self._before + self._this

    def add(self, record: RequestRecord, units: float) -> None:
        """Count a request that is over."""
        minute = int(record.finished_at // _MINUTE_S)
        if minute != self._minute:
            self._before += self._this
            self._minutes.append((self._minute, self._this))
            self._this, self._minute = Amounts(), minute
        self._this.add(record, units)
        self.outcomes[record.outcome] += 1
        if record.outcome is _REFUSED and record.reason is not None:
            self.refusals[record.reason] += 1

    def recent(self, now: float, minutes: int) -> Amounts:
        """What it used in this minute and the `minutes` before it."""
        since = int(now // _MINUTE_S) - minutes
        amounts = Amounts()
        for minute, used in (*self._minutes, (self._minute, self._this)):
            if minute >= since:
                amounts += used
        return amounts


class UsageTable:
    """Usage by tenant. `known` are those with entries of their own, `units` prices a record."""

    def __init__(
        self, *, known: Callable[[], frozenset[str]], units: Callable[[RequestRecord], float]
    ) -> None:
        self._known = known
        self._units = units
        self._records: list[RequestRecord] = []
        self._tenants: dict[str, TenantUsage] = {}

    def record(self, record: RequestRecord) -> None:
        """Take the record of a finished request."""
        self._records.append(record)
        if len(self._records) >= _BATCH:
            self._count()

    def of(self, tenant: str) -> TenantUsage | None:
        """The entry of a tenant; None: it has not used anything."""
        self._count()
        return self._tenants.get(tenant)

    def tenants(self) -> Mapping[str, TenantUsage]:
        """All entries."""
        self._count()
        return self._tenants

    def _count(self) -> None:
        if not self._records:
            return
        known, units = self._known(), self._units
        for record in self._records:
            name = record.tenant if record.tenant in known else OTHERS
            entry = self._tenants.get(name)
            if entry is None:
                if len(self._tenants) >= TENANTS_MAX:
                    self._forget(known)
                entry = self._tenants[name] = TenantUsage()
            entry.add(record, units(record))
        self._records.clear()

    def _forget(self, known: Iterable[str]) -> None:
        """Let go of tenants that the configuration does not know any more."""
        kept = {*known, OTHERS}
        self._tenants = {name: one for name, one in self._tenants.items() if name in kept}
