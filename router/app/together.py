"""What one router shares with others: its Redis, the limits and the registry there.

Only a router that has a Redis loads the client and what is built on it: 10 MB of memory.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from router.api.services import Lifecycle
from router.app.process import CannotServe
from router.metrics import Metrics
from router.metrics_cluster import ClusterCollector
from router.metrics_limits import LimitsCollector
from router.redis_settings import RedisSettings
from router.runtime.config_sync import ConfigSync
from router.runtime.driver import Driver
from router.runtime.leased_buckets import LeasedBuckets
from router.runtime.live_config import LiveConfig
from router.runtime.local_buckets import LocalBuckets
from router.runtime.registry import Registry
from router.runtime.registry_store import RegistryStore
from router.runtime.usage_sync import UsageSync
from router.usage import UsageTable

if TYPE_CHECKING:
    from router.runtime.redis_link import RedisLink

_NAME_CHARS_MAX: Final = 100


@asynccontextmanager
async def redis_of(settings: RedisSettings) -> AsyncIterator[RedisLink | None]:
    """The connection to Redis, closed at the end; None without. Raises CannotServe."""
    if settings.mode == "none":
        yield None
        return
    from router.runtime.embedded_valkey import CannotEmbed, EmbeddedValkey  # noqa: PLC0415
    from router.runtime.redis_link import RedisLink  # noqa: PLC0415

    embedded = EmbeddedValkey() if settings.mode == "embedded" else None
    if embedded is not None:
        try:
            await embedded.start()
        except CannotEmbed as exc:
            raise CannotServe(str(exc), exit_status=1) from exc
    link = RedisLink(settings, embedded_url=None if embedded is None else embedded.url)
    try:
        yield link
    finally:
        await link.aclose()
        if embedded is not None:
            await embedded.stop()


def act_together(
    driver: Driver, link: RedisLink | None, lifecycle: Lifecycle, live: LiveConfig, metrics: Metrics
) -> Registry:
    """Give `driver` its limits, and the registry that goes with them: on `link` if there is one."""
    registry = _registry_of(driver, link, lifecycle, live)
    metrics.registry.register(ClusterCollector(registry.view))
    driver.buckets = LocalBuckets() if link is None else _redis_buckets(driver, link, registry)
    metrics.registry.register(LimitsCollector(driver.buckets.view))
    return registry


def _redis_buckets(driver: Driver, link: RedisLink, registry: Registry) -> LeasedBuckets:
    from router.runtime.redis_buckets import RedisBuckets  # noqa: PLC0415

    loop, settings = asyncio.get_running_loop(), driver.config.limits
    buckets = RedisBuckets(link, settings, loop=loop)
    leased = LeasedBuckets(buckets, settings, name=driver.dispatcher.router_id, loop=loop)

    def on_replicas(routers: int) -> None:
        buckets.away.replicas = leased.replicas = routers

    registry.on_replicas.append(on_replicas)
    return leased


def _registry_of(
    driver: Driver, link: RedisLink | None, lifecycle: Lifecycle, live: LiveConfig
) -> Registry:
    config = driver.config
    store = None
    if link is not None:
        prefix = config.redis.key_prefix
        store = RegistryStore(link, prefix=prefix)
    return Registry(
        driver,
        config.cluster,
        store=store,
        name=replica_name(),
        version=lifecycle.version,
        started_at=lifecycle.started_at,
        is_draining=lambda: lifecycle.draining,
        config_version=lambda: live.version.digest,
    )


def shared_patches(
    live: LiveConfig, link: RedisLink | None, registry: Registry
) -> ConfigSync | None:
    """What keeps the patches of the configuration the same at all routers.

    None without Redis, or with one that is this router's alone and ends with it.
    """
    if link is None or link.settings.mode == "embedded":
        return None
    patches = ConfigSync(live, link, prefix=link.settings.key_prefix)
    registry.before_exchange.append(patches.go_along)
    return patches


def shared_usage(usage: UsageTable, link: RedisLink | None, registry: Registry) -> UsageSync | None:
    """What tells the other routers what tenants used here. None where there can be no others."""
    if link is None or link.settings.mode == "embedded":
        return None
    return UsageSync(usage, link, name=registry.name, time_ms=registry.time_ms)


def host_of_others(bound: str) -> str:
    """The host under which other machines may reach a listener bound to this address."""
    if bound in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{bound}]" if ":" in bound else bound


def replica_name() -> str:
    """A name for this router that no other has: the host's, and some digits of chance."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:_NAME_CHARS_MAX]
    return f"{host or 'router'}-{token_hex(3)}"
