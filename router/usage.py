"""What each tenant used: requests, tokens and cost units, since the start and of late.

Fed with the records of finished requests. Nearly all of them ended well, and those are only summed,
by tenant, model and class; a sum is priced and put into its tenant's entry when its minute is over
or somebody asks. The table is bounded: tenants that the configuration knows have an entry of their
own, all others share one. Layer 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from router.core.limits import Limits
from router.core.types import Outcome, Priority, RequestRecord
from router.errors import Reason
from router.records import Records

WINDOW_MINUTES: Final = 60
TENANTS_MAX: Final = 20_000
OTHERS: Final = "other"
_MINUTE_S: Final = 60.0
# Sums of a minute; so many names of models in one minute are not met in life.
_SUMS_MAX: Final = 10_000
_SUCCESS: Final = Outcome.SUCCESS
_MINUTE: Final = itemgetter(0)
_REFUSED: Final = Outcome.REFUSED

_Key = tuple[str, str | None, Priority]  # tenant, model, class


@dataclass(slots=True)
class Amounts:
    """What was used."""

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_units: float = 0.0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.requests + other.requests,
            self.refused + other.refused,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.cost_units + other.cost_units,
        )

    def row(self) -> list[float]:
        """The figures, in their order."""
        return [
            self.requests, self.refused, self.prompt_tokens, self.cached_tokens,
            self.output_tokens, self.cost_units,
        ]  # fmt: skip

    @staticmethod
    def of_row(row: Sequence[float]) -> Amounts:
        """What `row` wrote. Raises ValueError and TypeError."""
        *counts, cost_units = row
        requests, refused, prompt, cached, output = map(int, counts)
        return Amounts(requests, refused, prompt, cached, output, float(cost_units))


class TenantUsage:
    """One tenant's entry; `total` is since the start."""

    __slots__ = ("_minutes", "outcomes", "refusals", "total")

    def __init__(self) -> None:
        self.total = Amounts()
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[Reason] = Counter()
        self._minutes: deque[tuple[int, Amounts]] = deque(maxlen=WINDOW_MINUTES + 1)

    def add(self, minute: int, amounts: Amounts, outcome: Outcome) -> None:
        """Count requests that ended so in a minute."""
        self.total += amounts
        self.outcomes[outcome] += amounts.requests
        if self._minutes and self._minutes[-1][0] == minute:
            amounts += self._minutes.pop()[1]
        self._minutes.append((minute, amounts))

    def merge(self, other: TenantUsage) -> None:
        """Add what the same tenant used at another router."""
        self.total += other.total
        self.outcomes.update(other.outcomes)
        self.refusals.update(other.refusals)
        minutes: dict[int, Amounts] = dict(self._minutes)
        for minute, amounts in other._minutes:
            minutes[minute] = minutes.get(minute, Amounts()) + amounts
        self._minutes.clear()
        self._minutes.extend(sorted(minutes.items(), key=_MINUTE))

    def as_json(self, now: float) -> dict[str, Any]:
        """What another router may read; minutes are named by how many there were since."""
        this = int(now // _MINUTE_S)
        return {
            "total": self.total.row(),
            "outcomes": {outcome.value: count for outcome, count in self.outcomes.items()},
            "refusals": {reason.value: count for reason, count in self.refusals.items()},
            "minutes": [
                [this - minute, *amounts.row()]
                for minute, amounts in self._minutes
                if minute >= this - WINDOW_MINUTES
            ],
        }

    @staticmethod
    def of_json(document: Mapping[str, Any], now: float) -> TenantUsage:
        """What `as_json` wrote when it was `now` here. Raises ValueError, TypeError, KeyError."""
        usage, this = TenantUsage(), int(now // _MINUTE_S)
        usage.total = Amounts.of_row(document["total"])
        for name, count in document["outcomes"].items():
            usage.outcomes[Outcome(name)] = int(count)
        for name, count in document["refusals"].items():
            usage.refusals[Reason(name)] = int(count)
        for ago, *row in document["minutes"]:
            usage._minutes.append((this - int(ago), Amounts.of_row(row)))
        return usage

    def recent(self, now: float, minutes: int) -> Amounts:
        """What it used in this minute and the `minutes` before it."""
        since = int(now // _MINUTE_S) - minutes
        return sum((used for minute, used in self._minutes if minute >= since), Amounts())


class UsageTable:
    """Usage by tenant. `known` are those with entries of their own, `limits` say what all costs."""

    def __init__(
        self, records: Records, *, known: Callable[[], frozenset[str]], limits: Callable[[], Limits]
    ) -> None:
        self._known = known
        self._limits = limits
        self.records = records
        self._tenants: dict[str, TenantUsage] = {}
        self._minute = 0
        self._ends_at = 0.0  # of the minute that `_sums` are of
        self._sums: dict[_Key, list[int]] = {}  # requests, prompt, cached and output tokens
        records.observers.append(self._count)

    def of(self, tenant: str) -> TenantUsage | None:
        """The entry of a tenant; None: it has not used anything."""
        return self.tenants().get(tenant)

    def tenants(self) -> Mapping[str, TenantUsage]:
        """All entries."""
        self.records.hand_on()
        self._fold()
        return self._tenants

    def _count(self, records: list[RequestRecord]) -> None:
        sums = self._sums
        for record in records:
            if record.finished_at >= self._ends_at or len(sums) >= _SUMS_MAX:
                self._fold()
                self._minute = int(record.finished_at // _MINUTE_S)
                self._ends_at = (self._minute + 1) * _MINUTE_S
            if record.outcome is not _SUCCESS:
                self._count_other(record)
                continue
            key = (record.tenant, record.served_model, record.priority)
            one = sums.get(key)
            if one is None:
                one = sums[key] = [0, 0, 0, 0]
            one[0] += 1
            one[1] += record.prompt_tokens
            one[2] += record.cached_tokens or 0
            one[3] += record.output_tokens

    def _count_other(self, record: RequestRecord) -> None:
        amounts = Amounts(1, int(record.outcome is _REFUSED))
        if record.dispatched_at is not None:
            amounts.prompt_tokens = record.prompt_tokens
            amounts.cached_tokens = record.cached_tokens or 0
            amounts.output_tokens = record.output_tokens
            amounts.cost_units = self._limits().units(record)
        entry = self._entry(record.tenant, self._known())
        entry.add(self._minute, amounts, record.outcome)
        if record.outcome is _REFUSED and record.reason is not None:
            entry.refusals[record.reason] += 1

    def _fold(self) -> None:
        """Put the sums of a minute into the entries of their tenants."""
        known, price = self._known(), self._limits().price
        for (tenant, model, priority), (count, prompt, cached, output) in self._sums.items():
            units = price(model, priority, count, prompt - cached, output)
            amounts = Amounts(count, 0, prompt, cached, output, units)
            self._entry(tenant, known).add(self._minute, amounts, _SUCCESS)
        self._sums.clear()

    def _entry(self, tenant: str, known: frozenset[str]) -> TenantUsage:
        name = tenant if tenant in known else OTHERS
        entry = self._tenants.get(name)
        if entry is None:
            if len(self._tenants) >= TENANTS_MAX:
                self._forget(known)
            entry = self._tenants[name] = TenantUsage()
        return entry

    def _forget(self, known: Iterable[str]) -> None:
        """Let go of tenants that the configuration does not know any more."""
        kept = {*known, OTHERS}
        self._tenants = {name: one for name, one in self._tenants.items() if name in kept}
