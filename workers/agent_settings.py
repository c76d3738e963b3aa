"""What an agent needs to know, and how the command line's few words become that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from router.contract import WorkerSpec, normalized_url
from workers.addresses import means_here, own_host_towards
from workers.registration import RegistrationSettings

# An agent listens this far above its server's port, unless told otherwise.
_PORT_DISTANCE: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """What an agent needs to know.

    `server_url` is the SGLang server as seen from here; `spec` is the worker as routers shall see
    it, its `health_url` being this agent's own address and its `api_key` the server's.
    """

    server_url: str
    spec: WorkerSpec
    router_urls: tuple[str, ...]
    listen_host: str = "0.0.0.0"
    listen_port: int = 0
    admin_key: SecretStr | None = None  # of the routers
    poll_interval_s: float = 0.5
    drain_grace_s: float = 180.0
    registration: RegistrationSettings = field(default_factory=RegistrationSettings)


def agent_settings(
    *,
    server_url: str,
    router_urls: Iterable[str],
    public_url: str | None = None,
    listen_host: str = "0.0.0.0",
    listen_port: int | None = None,
    admin_key: SecretStr | None = None,
    drain_grace_s: float = 180.0,
    worker: Mapping[str, Any] | None = None,
) -> AgentSettings:
    """Fill in what was not said.

    `public_url` is where routers reach the server: by default `server_url` itself or, when that is
    a loopback address, this host's address on the way to the first router. `worker` holds further
    fields of the registration (lanes, labels, api_key, ...).

    Raises ValueError (pydantic's ValidationError is one) for what cannot be used.
    """
    server = normalized_url(server_url)
    routers = tuple(normalized_url(url) for url in router_urls)
    public = normalized_url(public_url) if public_url else _public(server, routers)
    port = listen_port if listen_port is not None else _port_beside(server)
    parts = urlsplit(public)
    host = parts.netloc.rpartition(":")[0]
    spec = WorkerSpec.model_validate(
        {"url": public, "health_url": f"http://{host}:{port}", **(worker or {})}
    )
    return AgentSettings(
        server_url=server,
        spec=spec,
        router_urls=routers,
        listen_host=listen_host,
        listen_port=port,
        admin_key=admin_key,
        drain_grace_s=drain_grace_s,
    )


def _port_beside(url: str) -> int:
    port = urlsplit(url).port or 80
    return port + _PORT_DISTANCE if port + _PORT_DISTANCE < 65_536 else port - _PORT_DISTANCE


def _public(server_url: str, router_urls: tuple[str, ...]) -> str:
    """`server_url` with this host's own address in place of a loopback one."""
    parts = urlsplit(server_url)
    if not router_urls or not means_here(parts.hostname or ""):
        return server_url
    try:
        host = own_host_towards(router_urls[0])
    except ValueError as exc:
        raise ValueError(f"{exc}: give the public URL") from exc
    return f"{parts.scheme}://{host}:{parts.port}{parts.path}"
