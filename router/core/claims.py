"""The class of a request: what its client claims, and what it may have.

A client names a class by the header HEADER, as P0 to P3 or as the tier that stands for it. What it
may have ends at a ceiling, its tenant's or the general one. A claim above that is cut and not
refused: the request is good, only less urgent than its sender would like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from router.core.types import Priority
from router.model_settings import ModelSettings
from router.qos_settings import ClassesSettings
from router.tenant_settings import CLASS_OF_TIER, TenantSettings, TierName

HEADER: Final = "x-laneway-priority"
WORDS: Final[Mapping[str, Priority]] = {
    "p0": Priority.P0,
    "p1": Priority.P1,
    "p2": Priority.P2,
    "p3": Priority.P3,
    "premium": Priority.P0,
    "standard": Priority.P1,
    "free": Priority.P2,
    "offline": Priority.P3,
}


class Grant(NamedTuple):
    """The class that a request gets."""

    priority: Priority
    clamped: bool  # it claimed a more urgent one


def claim_of(text: str) -> Priority | None:
    """The class that `text` names, in whatever case; None when it names none."""
    return WORDS.get(text.strip().lower())


def granted(
    tenant: TenantSettings | None,
    claim: Priority | None,
    classes: ClassesSettings,
    tier: TierName | None = None,
) -> Grant:
    """The class of a request that claims `claim`, or none, for a tenant with these settings.

    A `tier` that a trusted proxy says counts as the tenant's own, up to the ceiling that the tenant
    was set.
    """
    ceiling, default = classes.ceiling, classes.default
    if tenant is not None:
        paid = tenant.tier and CLASS_OF_TIER[tenant.tier]
        ceiling = tenant.ceiling or paid or ceiling
        default = tenant.priority or paid or default
    if tier is not None:
        default = CLASS_OF_TIER[tier]
        ceiling = max(default, tenant.ceiling or default) if tenant is not None else default
    wanted = Priority[default] if claim is None else claim
    priority = max(wanted, Priority[ceiling])
    return Grant(priority, claim is not None and priority is not claim)


def allowed(tenant: TenantSettings, models: Mapping[str, ModelSettings]) -> frozenset[str] | None:
    """The names of models that a tenant may ask for, aliases included; None: any."""
    if not tenant.models:
        return None
    wanted = set(tenant.models)
    for name, settings in models.items():
        names = {name, *settings.aliases}
        if wanted & names:
            wanted |= names
    return frozenset(wanted)
