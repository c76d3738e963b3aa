"""Settings of Redis (or Valkey): where it is, who we are there, how long it may take.

A part of `router.config`, which holds all other sections. Layer 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from router.strict import Strict

RedisMode = Literal["none", "embedded", "single", "sentinel", "cluster"]
_SCHEMES: Final = ("redis", "rediss", "unix")


def _address(url: str) -> str:
    """Check that `url` is an address and nothing more: secrets and options have fields."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"not an address: {exc}") from exc
    if parts.scheme not in _SCHEMES:
        raise ValueError("an address begins with redis://, rediss:// (TLS) or unix:///")
    if parts.username or parts.password:
        raise ValueError("user and password have settings of their own")
    if parts.query or parts.fragment:
        raise ValueError("options do not belong into the address")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.strip("/"):
            raise ValueError("a socket is written unix:///path/to/socket")
    elif not parts.hostname or port == 0 or parts.path.strip("/"):
        raise ValueError("an address is redis://host:port; the database has a setting of its own")
    return url


class RedisTlsSettings(Strict):
    """Certificates for addresses that begin with rediss://."""

    ca_path: Path | None = Field(
        None, description="CA of the server's certificate (PEM); empty: the system's."
    )
    cert_path: Path | None = Field(
        None, description="Client certificate shown to it (PEM); needs key_path."
    )
    key_path: Path | None = Field(None, description="Its private key (PEM).")
    check_hostname: bool = Field(True, description="The certificate must be for the host's name.")

    @model_validator(mode="after")
    def _complete(self) -> RedisTlsSettings:
        if (self.cert_path is None) != (self.key_path is None):
            raise ValueError("cert_path and key_path go together")
        return self


class RedisSettings(Strict):
    """Redis or Valkey, 7 or newer: what routers share. Without one, each stands alone."""

    mode: RedisMode = Field(
        "none",
        description="none: limits in this process; embedded: a Valkey of our own; or how the "
        "servers at urls are run.",
    )
    urls: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        (),
        max_length=64,
        description="redis://host:port, rediss:// for TLS, unix:///path. single: one; sentinel: "
        "the Sentinels; cluster: some of its nodes.",
    )
    user: str | None = Field(None, min_length=1, max_length=256, description="ACL user.")
    password: SecretStr | None = Field(None, description="Its password.")
    database: int = Field(0, ge=0, le=1_000_000, description="Database; a cluster has only 0.")
    sentinel_master: str = Field(
        "mymaster", min_length=1, max_length=256, description="Name of the master at Sentinel."
    )
    sentinel_user: str | None = Field(
        None, min_length=1, max_length=256, description="ACL user at the Sentinels themselves."
    )
    sentinel_password: SecretStr | None = Field(None, description="Its password.")
    tls: RedisTlsSettings = Field(RedisTlsSettings(), description="Certificates of rediss://.")
    key_prefix: str = Field(
        "laneway",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
        description="Begins every key; clusters of routers that share a Redis differ in it.",
    )
    timeout_s: float = Field(
        0.25,
        gt=0,
        le=60,
        description="Deadline of a command beside the path of requests, in seconds.",
    )
    connect_timeout_s: float = Field(
        0.25, gt=0, le=60, description="Deadline to connect, in seconds."
    )
    connections_max: int = Field(
        16,
        ge=2,
        le=1000,
        description="Connections of this router to a server; "
        "more than 2 only to nodes of a cluster.",
    )
    retry_s: float = Field(
        0.1, gt=0, le=60, description="Until it is tried again when it is away; doubles."
    )
    retry_s_max: float = Field(
        1.0, gt=0, le=600, description="Longest time until it is tried again, in seconds."
    )

    @model_validator(mode="after")
    def _fits_its_mode(self) -> RedisSettings:
        remote = self.mode in ("single", "sentinel", "cluster")
        if remote and not self.urls:
            raise ValueError(f"mode {self.mode} needs urls")
        if not remote and self.urls:
            raise ValueError(f"urls are set, but mode is {self.mode}")
        if self.mode == "single" and len(self.urls) > 1:
            raise ValueError("mode single has one address in urls")
        schemes = {url.partition(":")[0] for url in self.urls}
        if len(schemes) > 1:
            raise ValueError("urls are all redis:// or all rediss://")
        if "unix" in schemes and self.mode != "single":
            raise ValueError(f"mode {self.mode} has no unix:// addresses")
        if self.mode == "cluster" and self.database:
            raise ValueError("a cluster has only database 0")
        if self.user is not None and self.password is None:
            raise ValueError("user needs a password")
        if self.retry_s_max < self.retry_s:
            raise ValueError("retry_s_max is below retry_s")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether connections to the servers at `urls` are encrypted."""
        return any(url.startswith("rediss:") for url in self.urls)
