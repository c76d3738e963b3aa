"""Settings of who may call: keys, and whose word on that counts.

A part of `router.config`. Layer 0.
"""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import (
    AfterValidator,
    Field,
    IPvAnyNetwork,
    PlainSerializer,
    SecretStr,
    model_validator,
)

from router.contract import visible_key
from router.qos_settings import Section

Key = Annotated[SecretStr, AfterValidator(visible_key)]
Network = Annotated[IPvAnyNetwork, PlainSerializer(str)]
_HEADER_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")
# Those that mean something to HTTP, or carry a key.
_TAKEN_HEADERS: Final = frozenset((
    "authorization", "x-api-key", "api-key", "host", "connection", "content-length", "content-type",
    "transfer-encoding", "expect", "x-forwarded-for", "x-request-id", "x-laneway-priority",
    "x-laneway-wait-s",
))  # fmt: skip


def _header_name(text: str) -> str:
    name = text.strip().lower()
    if not _HEADER_NAME.fullmatch(name) or name in _TAKEN_HEADERS:
        raise ValueError("must be the name of a header that has no other meaning")
    return name


HeaderName = Annotated[str, AfterValidator(_header_name)]


class AuthSettings(Section):
    """Who may call. Without keys the router serves loopback only, unless allow_open."""

    api_keys: tuple[Key, ...] = Field(
        (), max_length=10_000, description="Bearer keys for inference; empty: none needed."
    )
    admin_keys: tuple[Key, ...] = Field(
        (), max_length=100, description="Bearer keys for admin routes; user keys never open them."
    )
    allow_open: bool = Field(
        False, description="Listen beyond loopback although a set of keys is empty."
    )
    pass_credentials: bool = Field(
        False, description="Clients' Authorization goes on to workers that have no api_key."
    )
    metrics_open: bool = Field(True, description="/metrics needs no key; false: an admin key.")
    allow_anonymous: bool = Field(
        False, description="Who shows no key is tenant anonymous, although there are keys."
    )
    trusted_proxies: tuple[Network, ...] = Field(
        (),
        max_length=256,
        description="Addresses and networks (10.0.0.0/8) whose tenant and tier headers count.",
    )
    tenant_header: HeaderName = Field(
        "x-laneway-tenant", description="Header by which a trusted proxy names the tenant."
    )
    tier_header: HeaderName = Field(
        "x-user-tier", description="Header by which it names the tier: premium, standard, free."
    )

    @model_validator(mode="after")
    def _keys_are_apart(self) -> AuthSettings:
        if set(self.api_keys) & set(self.admin_keys):
            raise ValueError("a key is in api_keys and in admin_keys; user keys never open admin")
        return self

    @model_validator(mode="after")
    def _headers_are_apart(self) -> AuthSettings:
        if self.tenant_header == self.tier_header:
            raise ValueError("tenant_header and tier_header are the same")
        return self
