"""Says what tenants and limits of a configuration mean, for `laneway check-config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from router.config import Config
from router.core.claims import granted
from router.core.limits import lends_to_tenants, tenant_limits
from router.core.types import Priority
from router.limit_settings import AwayPolicy, AwaySettings
from router.quota_settings import PoolLimits, TenantLimits
from router.tenant_settings import TenantSettings

_TENANTS_MAX: Final = 20
_AWAY: Final[Mapping[AwayPolicy, str]] = {
    "local": "by each router's part of these limits",
    "open": "without limits",
    "closed": "503",
}


def tenants_meaning(config: Config) -> Iterator[str]:
    """Lines on who calls, and what each may have."""
    tenants = config.tenants
    if not tenants:
        return
    yield f"tenants     {len(tenants)}"
    for name, settings in list(tenants.items())[:_TENANTS_MAX]:
        yield f"  tenant {name}: {'; '.join(_tenant(config, name, settings))}"
    if len(tenants) > _TENANTS_MAX:
        yield f"  and {len(tenants) - _TENANTS_MAX} more"
    if proxies := config.auth.trusted_proxies:
        yield f"  named by {config.auth.tenant_header} of {', '.join(map(str, proxies))}"


def limits_meaning(config: Config) -> Iterator[str]:
    """Lines on what limits let in."""
    limits, cost = config.limits, config.limits.cost
    lines = [f"  {line}" for line in _limits(config)]
    if not lines and not any(_tenant_limits(config, name) for name in config.tenants):
        yield "limits      none"
        return
    yield (
        f"limits      a cost unit is {_tokens(cost.prompt_token_units)} prompt tokens or "
        f"{_tokens(cost.output_token_units)} output tokens of a model of factor 1"
    )
    yield from lines
    if lends_to_tenants(config):
        yield f"  the cluster has room {_room(config)}"
    if limits.wait_s_max:
        yield f"  what they refuse may wait {limits.wait_s_max:g} s, then 429"
    else:
        yield "  what they refuse is 429 at once"
    if limits.degrade and config.degrade.enabled:
        yield f"  before a cost limit refuses, max_tokens is cut to {config.degrade.tokens_cap}"
    if config.redis.mode != "none":
        yield f"  while Redis is away: {'; '.join(_away(limits.away))}"


def _tenant(config: Config, name: str, settings: TenantSettings) -> Iterator[str]:
    if settings.disabled:
        yield "disabled, all its requests are 403"
    keys = len(settings.keys)
    yield f"{keys} key{'' if keys == 1 else 's'}" if keys else "no key"
    usual = granted(settings, None, config.classes).priority
    most = granted(settings, Priority.P0, config.classes).priority
    yield f"{usual.name} unless claimed, up to {most.name}"
    if settings.models:
        yield f"only {', '.join(settings.models)}"
    if settings.weight != 1:
        yield f"weight {settings.weight:g}"
    yield from _tenant_limits(config, name)


def _tenant_limits(config: Config, name: str) -> list[str]:
    return list(_words(tenant_limits(config.tenants, name, config.limits.tenant)))


def _words(limits: PoolLimits) -> Iterator[str]:
    if isinstance(limits, TenantLimits) and limits.requests_per_minute is not None:
        burst = limits.requests_burst
        saved = "" if burst is None else f" ({burst} at once after a pause)"
        yield f"{limits.requests_per_minute:g} requests a minute{saved}"
    if limits.cost_per_s is not None:
        rate = limits.cost_per_s
        most = limits.cost_burst or 60 * rate
        yield f"{rate:g} cost units/s{_ceiling(limits)}, one request up to {most:g}"
    if limits.concurrency is not None:
        yield f"{limits.concurrency} requests at once"


def _ceiling(limits: PoolLimits) -> str:
    if not isinstance(limits, TenantLimits) or limits.cost_ceiling_per_s is None:
        return ""
    return f" guaranteed, up to {limits.cost_ceiling_per_s:g} while the cluster has room"


def _room(config: Config) -> str:
    room = (
        f"while saturation is below {config.limits.borrow_below:g} and half is left of what a "
        "request shares with others"
    )
    return room if config.limits.cluster.cost_per_s is None else f"{room}, or all of it"


def _limits(config: Config) -> Iterator[str]:
    limits = config.limits
    pools = [
        ("any other tenant", limits.tenant),
        *((f"model {model}", pool) for model, pool in limits.models.items()),
        ("lane short", limits.lanes.short),
        ("lane long", limits.lanes.long),
        *(
            (f"class {priority.name} at most", pool)
            for priority, pool in zip(Priority, limits.classes.by_priority, strict=True)
        ),
        ("the cluster", limits.cluster),
    ]
    for name, pool in pools:
        if words := list(_words(pool)):
            yield f"{name}: {'; '.join(words)}"
    yield from _classes(config)


def _classes(config: Config) -> Iterator[str]:
    cluster = config.limits.cluster
    if cluster.cost_per_s is None:
        return
    for priority, share in zip(Priority, cluster.shares.by_priority, strict=True):
        if share is None:
            yield f"class {priority.name}: from what P2 has"
            continue
        ceiling = config.limits.classes.by_priority[priority].cost_per_s
        most = min(cluster.cost_per_s, ceiling or cluster.cost_per_s)
        more = f", {most:g} while the others leave it" if cluster.shares.borrow else ""
        yield f"class {priority.name}: {share * cluster.cost_per_s:g} cost units/s guaranteed{more}"


def _away(settings: AwaySettings) -> Iterator[str]:
    for policy, words in _AWAY.items():
        if of := [p.name for p in Priority if settings.by_priority[p] == policy]:
            yield f"{', '.join(of)} {words}"


def _tokens(units: float) -> str:
    return f"{1 / units:,.0f}" if units else "any number of"
