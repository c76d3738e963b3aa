"""Settings of tenants: who they are, what they may have, and how they are told apart.

A part of `router.config`. A tenant's keys are written as SHA-256 digests, so that a configuration
gives no key away: `laneway keys new` makes a key and says its digest. Layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from router.auth_settings import AuthSettings
from router.qos_settings import PriorityName, Section
from router.quota_settings import OwnTenantLimits

TierName = Literal["premium", "standard", "free", "offline"]
CLASS_OF_TIER: Final[Mapping[TierName, PriorityName]] = {
    "premium": "P0",
    "standard": "P1",
    "free": "P2",
    "offline": "P3",
}
DIGEST_PREFIX: Final = "sha256:"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:-]{0,127}")


def _plain_name(name: str) -> str:
    """Take what can stand in paths of the admin API, headers, log lines and names of buckets."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            "a tenant's name has up to 128 letters, digits and . _ @ + : - and begins with a "
            "letter or digit"
        )
    return name


TenantName = Annotated[str, AfterValidator(_plain_name)]


def _key_digest(text: str) -> str:
    """Take `sha256:` and 64 hexadecimal digits; the text itself, a key perhaps, is not repeated."""
    digest = text.strip().lower()
    if not _DIGEST.fullmatch(digest):
        raise ValueError(
            "must be sha256: and 64 hexadecimal digits, the digest that `laneway keys new` prints; "
            "never a key itself"
        )
    return digest


KeyDigest = Annotated[str, AfterValidator(_key_digest)]


class TenantSettings(Section):
    """One tenant."""

    keys: tuple[KeyDigest, ...] = Field(
        (), max_length=100, description="Digests of its keys, of which `laneway keys new` makes."
    )
    disabled: bool = Field(False, description="Its requests are refused, 403.")
    tier: TierName | None = Field(
        None, description="What it pays for: the class of its requests, and the most it may claim."
    )
    priority: PriorityName | None = Field(
        None, description="Class of its requests that name none; empty: its tier's or the default."
    )
    ceiling: PriorityName | None = Field(
        None,
        description="The most urgent class it may claim; empty: its tier's or the general one.",
    )
    weight: float = Field(
        1.0, gt=0, le=1000, description="Its part beside other tenants of a class that wait too."
    )
    degrade: bool = Field(True, description="Its requests may be changed under overload.")
    models: tuple[Annotated[str, StringConstraints(min_length=1, max_length=512)], ...] = Field(
        (), max_length=1000, description="Models that it may use, others are 403; empty: all."
    )
    limits: OwnTenantLimits = Field(OwnTenantLimits(), description="What it may use.")

    @model_validator(mode="after")
    def _within_its_ceiling(self) -> TenantSettings:
        most = self.ceiling or (self.tier and CLASS_OF_TIER[self.tier])
        if self.priority is not None and most is not None and self.priority < most:
            raise ValueError(f"priority {self.priority} is above {most}, the most it may claim")
        return self


ANONYMOUS: Final = "anonymous"  # the tenant of whoever shows no key


def digest_of(key: str) -> str:
    """How a key is written in a configuration."""
    return DIGEST_PREFIX + sha256(key.encode()).hexdigest()


def name_of(digest: str) -> str:
    """The tenant that a key of `auth.api_keys` is, by its digest."""
    return f"key-{digest.removeprefix(DIGEST_PREFIX)[:8]}"


def repeated_keys(auth: AuthSettings, tenants: Mapping[str, TenantSettings]) -> Iterator[str]:
    """A line for each key that stands for two: nobody could say whose request it brings."""
    owners: dict[str, str] = {}
    for path, digests in _keys(auth, tenants):
        for digest in digests:
            if (other := owners.setdefault(digest, path)) != path:
                yield f"{path}: the key {digest[:15]}... is in {other} too"


def _keys(
    auth: AuthSettings, tenants: Mapping[str, TenantSettings]
) -> Iterator[tuple[str, Iterable[str]]]:
    for name, keys in (("admin_keys", auth.admin_keys), ("api_keys", auth.api_keys)):
        yield f"auth.{name}", [digest_of(key.get_secret_value()) for key in keys]
    for name, tenant in tenants.items():
        yield f"tenants.{name}.keys", tenant.keys
