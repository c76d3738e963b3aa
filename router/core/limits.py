"""Which limits a request draws on, and how much: rules from the configuration, amounts from tokens.

A request costs, in cost units,

    model's factor x class's weight x (units per request + prompt tokens x w_in + output x w_out)

Beforehand the prompt is an estimate and the output is max_tokens, or a quantile of what its model
usually answers if that is less. At the end what was really used is charged: cached prompt tokens
cost nothing, an answer that broke off costs the part that was made, one that never began nothing.
Source: docs/limits.md (POLICY A1, A2, B2.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from router.config import Config
from router.contract import Lane
from router.core.bucket import Charge, Family, Kind, Level, Rule, Scope
from router.core.claims import granted
from router.core.cost import CostModel
from router.core.types import PREFILL_ONLY, Outcome, Priority, RequestRecord, Ticket
from router.quota_settings import BURST_S, CLUSTER_BURST_S, PoolLimits, TenantLimits
from router.tenant_settings import ANONYMOUS, TenantSettings

_MINUTE_S: Final = 60.0
_RULES_MAX: Final = 20_000
# A member of an enum is found slowly; this one is read for each request.
_SUCCESS: Final = Outcome.SUCCESS


@dataclass(slots=True, init=False)
class Reservation:
    """What a ticket was granted: the ask's charges, and where its limits stood then."""

    id: str
    charges: tuple[Charge, ...]
    levels: tuple[Level, ...]  # none where the store could not look
    borrowed: bool = False  # above the tenant's guarantee

    def __init__(
        self,
        id: str,
        charges: tuple[Charge, ...],
        levels: tuple[Level, ...],
        borrowed: bool = False,
    ) -> None:
        self.id = id
        self.charges = charges
        self.levels = levels
        self.borrowed = borrowed


class Limits:
    """The rules of one configuration."""

    def __init__(self, config: Config, costs: CostModel) -> None:
        limits = config.limits
        self._costs = costs
        # Read for each request, and attributes of settings are found slowly.
        self._request_units = limits.cost.request_units
        self._prompt_token_units = limits.cost.prompt_token_units
        self._output_token_units = limits.cost.output_token_units
        self._output_quantile = limits.cost.output_quantile
        self._warm_up_s = limits.warm_up_s
        self._weights = [c.cost_weight for c in config.classes.by_priority]
        self._factors: dict[str | None, float] = {
            name: settings.cost_factor
            for model, settings in config.models.items()
            for name in (model, *settings.aliases)
        }
        self._tenants, self._known, self._default = (
            config.tenants,
            config.tenant_names,
            limits.tenant,
        )
        self._by_tenant = lru_cache(_RULES_MAX)(self._tenant_rules)
        self._drawn = lru_cache(_RULES_MAX)(self._all_drawn)
        self._by_model = {
            name: rules
            for model, settings in limits.models.items()
            if (rules := self._pool_rules(f"model:{model}", Scope.MODEL, settings))
            for name in _names(model, config)
        }
        self._by_lane = {
            lane: self._pool_rules(f"lane:{lane}", Scope.LANE, settings)
            for lane, settings in ((Lane.SHORT, limits.lanes.short), (Lane.LONG, limits.lanes.long))
        }
        ceilings = [
            self._pool_rules(f"class:{priority.name.lower()}:ceiling", Scope.CLASS, settings)
            for priority, settings in zip(Priority, limits.classes.by_priority, strict=True)
        ]
        shares = self._cluster_rules(config)
        self._by_priority = [(*a, *b) for a, b in zip(shares, ceilings, strict=True)]
        general = [*self._by_lane.values(), *self._by_priority, *self._by_model.values()]
        self._general = {rule.key: rule for rules in general for rule in rules}
        self.active = any(general) or _limits_tenants(config)
        self.lends_to_tenants = lends_to_tenants(config)
        self.cluster_lends = limits.cluster.cost_per_s is not None

    def charges(self, ticket: Ticket) -> tuple[Charge, ...]:
        """What `ticket` draws on, as is known before it runs; empty: no limit concerns it."""
        spec, model = ticket.spec, ticket.pool.model
        drawn = self._drawn(spec.tenant, model, ticket.lane, spec.priority)
        if not drawn:
            return ()
        output_tokens = self.output_tokens(ticket) * spec.samples
        units = self.price(model, spec.priority, 1, ticket.prompt_tokens, output_tokens)
        return tuple([Charge(one.rule, units) if one.rule.is_cost else one for one in drawn])

    def output_tokens(self, ticket: Ticket) -> int:
        """Output tokens per sequence that a ticket is charged beforehand."""
        if ticket.spec.endpoint in PREFILL_ONLY:
            return 0
        usual = self._costs.of(ticket.pool.model).outputs.quantile(self._output_quantile)
        return ticket.output_tokens if usual is None else min(ticket.output_tokens, usual)

    def rule(self, key: str, tenant: str) -> Rule | None:
        """The rule of that key, of all that may concern a tenant's requests; None: it is gone."""
        rule = self._general.get(key)
        if rule is None:
            rules = self._by_tenant(self._known_name(tenant))
            rule = next((each for each in rules if each.key == key), None)
        return rule

    def settled(
        self, ticket: Ticket, reservation: Reservation, record: RequestRecord
    ) -> tuple[Charge, ...]:
        """What `ticket`, which is over, really used of what it reserved."""
        units = 0.0
        if (used := _used_tokens(record)) is not None:
            prompt_tokens, output_tokens = used
            if output_tokens is None:
                output_tokens = self.output_tokens(ticket) * ticket.spec.samples
            units = self.price(ticket.pool.model, record.priority, 1, prompt_tokens, output_tokens)
        counted = 1.0 if used is not None or _left_by_client(record) else 0.0
        charges = []
        for charge in reservation.charges:
            amount = units if charge.rule.is_cost else counted
            charges.append(charge if charge.amount == amount else Charge(charge.rule, amount))
        return tuple(charges)

    def units(self, record: RequestRecord) -> float:
        """Cost units that a request used that is over, whether or not any limit concerns it."""
        if (used := _used_tokens(record)) is None:
            return 0.0
        prompt_tokens, output_tokens = used
        return self.price(
            record.served_model, record.priority, 1, prompt_tokens, output_tokens or 0
        )

    def price(
        self,
        model: str | None,
        priority: Priority,
        requests: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> float:
        """Cost units of requests with so many tokens in all."""
        plain = (
            self._request_units * requests
            + self._prompt_token_units * prompt_tokens
            + self._output_token_units * output_tokens
        )
        return self._factors.get(model, 1.0) * self._weights[priority] * plain

    # Rules.

    def _all_drawn(
        self, tenant: str, model: str, lane: Lane, priority: Priority
    ) -> tuple[Charge, ...]:
        """What concerns a request, with what is charged where its cost does not count."""
        rules = (
            *self._by_tenant(self._known_name(tenant)),
            *self._by_model.get(model, ()),
            *self._by_lane[lane],
            *self._by_priority[priority],
        )
        return tuple([Charge(rule, 1.0) for rule in rules])

    def _known_name(self, tenant: str) -> str:
        return tenant if tenant in self._known else ANONYMOUS

    def _tenant_rules(self, name: str) -> tuple[Rule, ...]:
        limits = tenant_limits(self._tenants, name, self._default)
        rules = self._pool_rules(
            f"tenant:{name}", Scope.TENANT_COST, limits, permits=Scope.TENANT_CONCURRENCY
        )
        if (per_minute := limits.requests_per_minute) is None:
            return rules
        burst = limits.requests_burst or max(1.0, per_minute)
        requests = Rule(
            f"tenant:{name}:requests",
            Scope.TENANT_REQUESTS,
            per_minute / _MINUTE_S,
            burst,
            warm_up_s=self._warm_up_s,
        )
        return (requests, *rules)

    def _pool_rules(
        self, key: str, scope: Scope, limits: PoolLimits, *, permits: Scope | None = None
    ) -> tuple[Rule, ...]:
        rules = []
        if isinstance(limits, TenantLimits) and limits.cost_ceiling_per_s is not None:
            rules.append(self._guarantee(key, scope, limits, limits.cost_ceiling_per_s))
        elif limits.cost_per_s is not None:
            rules.append(self._cost_rule(f"{key}:cost", scope, limits, BURST_S))
        if limits.concurrency is not None:
            held = f"{key}:concurrency"
            rules.append(Rule(held, permits or scope, 0.0, limits.concurrency, Kind.PERMITS))
        return tuple(rules)

    def _cost_rule(self, key: str, scope: Scope, limits: PoolLimits, burst_s: float) -> Rule:
        rate = limits.cost_per_s
        assert rate is not None
        burst = limits.cost_burst or burst_s * rate
        # Who sets no burst wants a rate, not a bound on prompts: a large request passes when the
        # bucket is full, and what it took too much is waited for afterwards.
        most = limits.cost_burst or max(burst, _MINUTE_S * rate)
        return Rule(
            key, scope, rate, burst, debt_max=burst, warm_up_s=self._warm_up_s, amount_max=most,
            lends=scope is not Scope.TENANT_COST,
        )  # fmt: skip

    def _guarantee(self, key: str, scope: Scope, limits: PoolLimits, ceiling_per_s: float) -> Rule:
        """A guaranteed rate, and above it what is missing to the ceiling, as many seconds of it."""
        within = self._cost_rule(f"{key}:cost", scope, limits, BURST_S)
        ratio = ceiling_per_s / within.rate_per_s - 1
        burst = ratio * within.burst
        above = Rule(
            f"{key}:borrowed", scope, ratio * within.rate_per_s, burst, debt_max=burst,
            warm_up_s=self._warm_up_s, amount_max=max(burst, within.amount_max),
        )  # fmt: skip
        return replace(within, above=above)

    def _cluster_rules(self, config: Config) -> list[tuple[Rule, ...]]:
        """The rules of the cluster and its classes, by priority."""
        limits = config.limits.cluster
        general: list[Rule] = []
        if limits.concurrency is not None:
            key = "cluster:concurrency"
            general.append(Rule(key, Scope.CLUSTER, 0.0, limits.concurrency, Kind.PERMITS))
        if limits.cost_per_s is None:
            return [tuple(general) for _ in Priority]
        whole = self._cost_rule("cluster:cost", Scope.CLUSTER, limits, CLUSTER_BURST_S)
        shares = limits.shares
        members = {p: s for p, s in zip(Priority, shares.by_priority, strict=True) if s is not None}
        if shares.borrow:
            family = Family(whole, tuple((_class_key(p), share) for p, share in members.items()))
            parts = family.rules
        else:
            general.append(whole)
            parts = {_class_key(p): _part(whole, _class_key(p), s) for p, s in members.items()}
        return [(parts[_class_key(p if p in members else Priority.P2)], *general) for p in Priority]


def tenant_limits(
    tenants: Mapping[str, TenantSettings], name: str, default: TenantLimits
) -> TenantLimits:
    """The limits of a tenant: its own, and where those are empty the general ones."""
    settings = tenants.get(name)
    if settings is None:
        return default
    own = settings.limits
    if not own.inherit:
        return own
    given = own.model_dump(exclude={"inherit"})
    known = default.model_dump()
    # A burst and a ceiling belong to their rate: they are inherited with it or not at all.
    for rate, *others in _RATES:
        if given[rate] is None:
            given |= {name: known[name] for name in (rate, *others)}
    given["concurrency"] = given["concurrency"] or known["concurrency"]
    return TenantLimits(**given)


def lends_to_tenants(config: Config) -> bool:
    """Whether some tenant may get more than it is guaranteed."""
    return any(limits.cost_ceiling_per_s is not None for limits in _all_tenants(config))


def guaranteed_per_s(config: Config) -> dict[Priority, float]:
    """Cost units per second that tenants are guaranteed, by the class that is theirs unless they
    claim another. Who is only capped is guaranteed nothing.
    """
    found = dict.fromkeys(Priority, 0.0)
    if not lends_to_tenants(config):
        return found
    for name in config.tenant_names:
        settings = config.tenants.get(name)
        if name == ANONYMOUS and settings is None and config.has_user_keys:
            continue  # nobody is
        limits = tenant_limits(config.tenants, name, config.limits.tenant)
        if limits.cost_ceiling_per_s is None or (settings is not None and settings.disabled):
            continue
        assert limits.cost_per_s is not None
        found[granted(settings, None, config.classes).priority] += limits.cost_per_s
    return found


def _used_tokens(record: RequestRecord) -> tuple[int, int | None] | None:
    """Uncached prompt tokens and output tokens (None: nobody knows) of a request; None: it used
    nothing that counts.
    """
    outcome, output_tokens = record.outcome, record.output_tokens
    if outcome is not _SUCCESS:
        made = record.first_token_at is not None or output_tokens > 0
        if (
            record.dispatched_at is None
            or outcome in _NEVER_CHARGED
            or (outcome is Outcome.FAILED and not made)
        ):
            return None
    prompt_tokens = max(0, record.prompt_tokens - (record.cached_tokens or 0))
    if record.usage_known or output_tokens > 0 or record.endpoint in PREFILL_ONLY:
        return prompt_tokens, output_tokens
    # Of a stream each event was seen; what a plain answer was long that never came, nobody knows.
    return prompt_tokens, 0 if record.stream and outcome is not _SUCCESS else None


def _left_by_client(record: RequestRecord) -> bool:
    return record.outcome is Outcome.ABORTED and record.reason is None


_RATES: Final = (
    ("cost_per_s", "cost_burst", "cost_ceiling_per_s"),
    ("requests_per_minute", "requests_burst"),
)
_NEVER_CHARGED: Final = frozenset((Outcome.CLIENT_ERROR, Outcome.REFUSED))


def _all_tenants(config: Config) -> list[TenantLimits]:
    return [config.limits.tenant, *(tenant.limits for tenant in config.tenants.values())]


def _limits_tenants(config: Config) -> bool:
    return any(
        limit is not None
        for limits in _all_tenants(config)
        for limit in (limits.cost_per_s, limits.requests_per_minute, limits.concurrency)
    )


def _names(model: str, config: Config) -> set[str]:
    """Every name of a model that has `model` among its names."""
    names = {model}
    for name, settings in config.models.items():
        known = {name, *settings.aliases}
        if model in known:
            names |= known
    return names


def _class_key(priority: Priority) -> str:
    return f"class:{priority.name.lower()}:cost"


def _part(whole: Rule, key: str, share: float) -> Rule:
    """A class's part of the cluster's rule, of which it gets no more."""
    return Rule(
        key, Scope.CLASS, whole.rate_per_s * share, whole.burst * share,
        debt_max=whole.debt_max * share, warm_up_s=whole.warm_up_s, amount_max=whole.amount_max,
        lends=True,
    )  # fmt: skip
