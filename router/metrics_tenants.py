"""Series by tenant: requests, tokens and cost units, made from the table of usage. Layer 2.

Labels are names of tenants that the configuration knows, at most `TENANTS_MAX` of them; the rest
share "other".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from router.usage import OTHERS, Amounts, TenantUsage, UsageTable

TENANTS_MAX: Final = 200


class TenantCollector(Collector):
    """Makes the series when Prometheus asks."""

    def __init__(self, usage: UsageTable) -> None:
        self._usage = usage

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        requests = CounterMetricFamily(
            "laneway_tenant_requests",
            "Requests that ended, by tenant.",
            labels=("tenant", "outcome"),
        )
        tokens = CounterMetricFamily(
            "laneway_tenant_tokens", "Tokens of dispatched requests.", labels=("tenant", "kind")
        )
        units = CounterMetricFamily(
            "laneway_tenant_cost_units", "What they cost, in the limits' units.", labels=("tenant",)
        )
        for name, entries in self._labelled():
            used = sum((entry.total for entry in entries), Amounts())
            outcomes = sum((entry.outcomes for entry in entries), Counter())
            for outcome, count in outcomes.items():
                requests.add_metric((name, outcome.value), count)
            tokens.add_metric((name, "prompt"), used.prompt_tokens)
            tokens.add_metric((name, "cached"), used.cached_tokens)
            tokens.add_metric((name, "output"), used.output_tokens)
            units.add_metric((name,), used.cost_units)
        yield from (requests, tokens, units)

    def _labelled(self) -> Iterable[tuple[str, list[TenantUsage]]]:
        """The first tenants that came by their names, all others together."""
        table = dict(self._usage.tenants())
        others = [table.pop(OTHERS)] if OTHERS in table else []
        names = list(table)
        yield from ((name, [table[name]]) for name in names[:TENANTS_MAX])
        if others := [*others, *(table[name] for name in names[TENANTS_MAX:])]:
            yield OTHERS, others
