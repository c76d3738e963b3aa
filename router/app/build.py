"""Wires the objects of one router, runs them and takes them apart again."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import signal
import socket
import ssl
import sys
import time
from dataclasses import dataclass
from functools import partial
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Final, Literal

import uvicorn
import uvloop
from starlette.types import ASGIApp

from router.access_log import AccessLog, write_fd
from router.api.auth import Authenticator
from router.api.services import Lifecycle, Services
from router.api.surface import Surface, cors_headers, surface
from router.app.live import connect
from router.app.preflight import connections_possible, live_faults, warnings
from router.app.process import (
    CannotServe,
    bound_socket,
    check,
    say_warnings,
    set_up_log,
    use_all_files,
)
from router.app.server import Server
from router.app.together import (
    act_together,
    host_of_others,
    redis_of,
    shared_patches,
    shared_usage,
)
from router.config import Config, TlsSettings
from router.config_source import Loaded
from router.contract import WorkerId
from router.core.dispatcher import Dispatcher
from router.core.effects import WorkerChanged
from router.errors import Reason
from router.metrics import Metrics
from router.metrics_tenants import TenantCollector
from router.records import Records
from router.release import VERSION
from router.runtime.config_sync import ConfigSync
from router.runtime.config_watch import ConfigWatch
from router.runtime.config_workers import ConfiguredWorkers
from router.runtime.driver import Driver
from router.runtime.edge import Edge
from router.runtime.front import ROUTES, Front, OnRefused
from router.runtime.live_config import LiveConfig
from router.runtime.prober import Prober
from router.runtime.registry import Registry
from router.runtime.server import protocol_for
from router.runtime.upstream import Upstreams
from router.usage import UsageTable

if TYPE_CHECKING:
    from router.runtime.redis_link import RedisLink

_log = logging.getLogger(__name__)

# Requests leave no cycles behind, so what collections would look at is nearly all in use.
_GC_ALLOCATIONS: Final = 20_000
# glibc's malloc gives memory back as soon as 128 kB are free, and of large blocks at once, and then
# the next body pays for each of its pages anew. So it may keep some. (The numbers are mallopt's.)
_TRIM_THRESHOLD: Final = (-1, 32 * 2**20)
_MMAP_THRESHOLD: Final = (-3, 4 * 2**20)
# With TLS it keeps less than the 256 kB that uvloop takes for each connection to read into: else
# these stand where other things were before, and so in memory that is really there. By itself such
# a block takes only the pages that were ever read into.
_TLS_TRIM_THRESHOLD: Final = (-1, 192 * 2**10)
_TLS_MMAP_THRESHOLD: Final = (-3, 256 * 2**10)
# Requests that are not inference have this long to end once the inference has.
_LAST_REQUESTS_S: Final = 5
# How long the start waits for what the other routers know.
_FIRST_WITHIN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One router, wired but not serving yet."""

    config: Config
    driver: Driver
    services: Services
    watch: ConfigWatch
    patches: ConfigSync | None
    prober: Prober
    access_log: AccessLog | None
    registry: Registry
    listed: ConfiguredWorkers
    surface: Surface
    protocol: type[asyncio.Protocol]
    on_refused: OnRefused  # hears of requests that the core never knew

    async def start(self) -> None:
        """Begin to watch time, to poll workers and to write the log.

        Returns, after a second or two at most, with the patches that all routers share in force,
        and the workers that they know: a key that was taken away by one must not be good again for
        the time after a restart, nor may a request be refused for want of workers that are there.
        """
        if self.access_log is not None:
            self.access_log.start()
        self.driver.start()
        self.registry.start()
        self.watch.start()
        if self.services.shared_usage is not None:
            self.services.shared_usage.start()
        if self.patches is not None:
            await self.patches.start()
        await self.registry.met(within_s=_FIRST_WITHIN_S)

    async def stop(self) -> None:
        """Stop polling, close connections to workers, write the last lines of the log."""
        await self.watch.aclose()
        for shared in (self.patches, self.services.shared_usage):
            if shared is not None:
                await shared.aclose()
        await self.registry.aclose()
        await self.prober.aclose()
        self.driver.stop()
        if self.driver.buckets is not None:
            await self.driver.buckets.aclose()
        if self.access_log is not None:
            await self.access_log.close()


def build(
    config: Config,
    loaded: Loaded | None = None,
    *,
    redis: RedisLink | None = None,
    router_id: bytes | None = None,
) -> App:
    """Wire a router, inside the loop that will run it, together with the others in `redis`.

    Without `loaded` nothing is read again. `router_id` is that of all its processes, if several.
    """
    loaded = loaded or Loaded.of(config)
    driver = _driver(config, router_id or new_router_id())
    access_log, metrics = _observers(config, driver)
    prober = _prober(config, driver, metrics)
    lifecycle = Lifecycle(version=VERSION, started_at=time.time())
    authenticator = Authenticator(config.auth, config.tenants)
    front = front_of(config, driver, authenticator, partial(_note_refusal, metrics, access_log))
    live = LiveConfig(loaded, check=live_faults, warn=warnings)
    registry = act_together(driver, redis, lifecycle, live, metrics)
    usage = _usage(driver, metrics)
    services = Services(
        live=live,
        driver=driver,
        upstreams=driver.upstreams,
        metrics=metrics,
        lifecycle=lifecycle,
        authenticator=authenticator,
        registry=registry,
        usage=usage,
        shared_usage=shared_usage(usage, redis, registry),
    )
    routes = surface(services, inference_paths=[p.decode() for p in ROUTES], new_id=front.ids)
    # The workers of the list come last: they join a router that is set up for them.
    listed = ConfiguredWorkers(config, driver, registry)
    connect(live, metrics, (driver.upstreams, authenticator, front, routes, prober, driver, listed))
    return App(
        config=config,
        driver=driver,
        services=services,
        watch=ConfigWatch(live, loaded),
        patches=shared_patches(live, redis, registry),
        prober=prober,
        access_log=access_log,
        registry=registry,
        listed=listed,
        surface=routes,
        protocol=protocol_for(front),
        on_refused=front.on_refused,
    )


def new_router_id() -> bytes:
    """Return what marks all that one router sends."""
    return SystemRandom().randbytes(8).hex().encode()


def _driver(config: Config, router_id: bytes) -> Driver:
    """What decides, and executes it."""
    loop = asyncio.get_running_loop()
    seed = config.policy.seed
    rng = Random(SystemRandom().getrandbits(64) if seed is None else seed)
    upstreams = Upstreams(config.upstream, loop=loop, router_id=router_id)
    # Reservations of limits must not have the ids of a core before this one, but tell the router.
    core_id = b"%b.%b" % (router_id, new_router_id())
    dispatcher = Dispatcher(config, rng=rng, router_id=core_id.decode())
    return Driver(config, dispatcher, upstreams, loop=loop)


def _observers(config: Config, driver: Driver) -> tuple[AccessLog | None, Metrics]:
    """What hears of every finished request."""
    records = Records()
    driver.on_record.append(records.add)
    access_log = None
    if config.server.access_log:
        write = write_fd(sys.stdout.fileno())
        access_log = AccessLog(write, records, wall_clock=time.time, clock=time.monotonic)
    metrics = Metrics(
        records,
        version=VERSION,
        snapshot=driver.snapshot,
        log_lines_dropped=lambda: 0 if access_log is None else access_log.dropped,
    )
    return access_log, metrics


def _usage(driver: Driver, metrics: Metrics) -> UsageTable:
    """What counts who uses how much."""
    reserving = driver.dispatcher.reserving
    usage = UsageTable(
        metrics.records,
        known=lambda: driver.config.tenant_names,
        limits=lambda: reserving.limits,
    )
    metrics.registry.register(TenantCollector(usage))
    return usage


def _prober(config: Config, driver: Driver, metrics: Metrics) -> Prober:
    """What polls the driver's workers."""
    prober = Prober(config, driver.upstreams, CountedEvents(driver, metrics))
    driver.probe = prober.probe
    driver.on_worker_spec.append(prober.watch)
    driver.on_worker_changed.append(partial(_forget, prober))
    return prober


def front_of(
    config: Config, driver: Edge, authenticator: Authenticator, on_refused: OnRefused
) -> Front:
    """What the connections of the listening side share."""
    return Front(
        config=config,
        driver=driver,
        authenticate=authenticator.caller,
        trusts=authenticator.trusts,
        proxied=authenticator.proxied,
        on_refused=on_refused,
        cors=cors_headers,
        connections_possible=connections_possible(),
    )


def _note_refusal(
    metrics: Metrics, access_log: AccessLog | None, reason: Reason, request_id: str, target: bytes
) -> None:
    """Count and log a request that was refused before the core knew of it."""
    metrics.refused_at_edge(reason)
    if access_log is not None:
        access_log.refused_at_edge(reason, request_id, target)


def _forget(prober: Prober, change: WorkerChanged) -> None:
    """Poll no worker that is gone."""
    if change.new is None:
        prober.forget(change.worker_id)


def run(config: Config, loaded: Loaded | None = None) -> None:
    """Serve until a signal ends it. Raises CannotServe when it cannot even begin."""
    if config.relays.count:
        from router.app.supervisor import run_relays  # noqa: PLC0415 - which builds on this module

        run_relays(config, loaded)
        return
    check(config)
    set_up_log(config.server.log_level)
    use_all_files()
    say_warnings(config)
    listener = bound_socket(config.server.host, config.server.port)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(config, loaded, listener))
        except asyncio.CancelledError as exc:
            raise CannotServe("ended before all answers did", exit_status=1) from exc


async def _serve(config: Config, loaded: Loaded | None, listener: socket.socket) -> None:
    async with redis_of(config.redis) as redis:
        await _served(build(config, loaded, redis=redis), listener)
    _log.info("stopped")


async def _served(app: App, listener: socket.socket) -> None:
    config = app.config
    server = Server(
        uvicorn_config(config, app.surface, app.protocol),
        driver=app.driver,
        lifecycle=app.services.lifecycle,
    )
    app.registry.address = address_for_others(config, listener)
    assert app.driver.buckets is not None
    await app.driver.buckets.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app.watch.read_again)
    await app.start()
    settle_memory(tls=config.server.tls.cert_path is not None)
    _log.info(
        "laneway %s listens on %s (policy %s, %d workers)",
        VERSION, url_of(config, listener), config.policy.name, len(config.workers),
    )  # fmt: skip
    try:
        await server.serve(sockets=[listener])
    finally:
        await app.stop()


def settle_memory(*, tls: bool) -> None:
    """Once all is made: what is here now stays to the end, and need not be looked at again.

    `tls` is whether clients speak TLS with this process.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_ALLOCATIONS)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # not every C library has one
        mallopt(*(_TLS_TRIM_THRESHOLD if tls else _TRIM_THRESHOLD))
        mallopt(*(_TLS_MMAP_THRESHOLD if tls else _MMAP_THRESHOLD))


def url_of(config: Config, listener: socket.socket) -> str:
    """Where clients find the router."""
    scheme = "https" if config.server.tls.cert_path else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def address_for_others(config: Config, listener: socket.socket) -> str:
    """Where other machines may find the router."""
    scheme = "https" if config.server.tls.cert_path else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{host_of_others(host)}:{port}"


def uvicorn_config(
    settings: Config,
    app: ASGIApp,
    protocol: type[asyncio.Protocol] | Literal["httptools"],
    *,
    plain: bool = False,
) -> uvicorn.Config:
    """How a process serves HTTP. `plain`: to our own processes, without TLS."""
    server = settings.server
    tls = TlsSettings() if plain else server.tls
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(server.keep_alive_s)),
        timeout_graceful_shutdown=_LAST_REQUESTS_S,
        ssl_certfile=tls.cert_path,
        ssl_keyfile=tls.key_path,
        ssl_ca_certs=None if tls.client_ca_path is None else str(tls.client_ca_path),
        ssl_cert_reqs=ssl.CERT_NONE if tls.client_ca_path is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as exc:
        raise CannotServe(f"server.tls: {exc}", exit_status=2) from exc
    return config


class CountedEvents:
    """Hands the prober's events on to the driver, and counts the polls that failed."""

    def __init__(self, driver: Driver, metrics: Metrics) -> None:
        self._metrics = metrics
        self._driver = driver
        self.on_report = driver.on_report
        self.on_worker_described = driver.on_worker_described

    def on_report_missing(self, worker_id: WorkerId, why: str) -> None:
        """A worker lives, but its load could not be read."""
        self._metrics.polls_without_report += 1
        self._driver.on_report_missing(worker_id, why)

    def on_probe_failed(self, worker_id: WorkerId, why: str) -> None:
        """A worker did not answer."""
        self._metrics.polls_unanswered += 1
        self._driver.on_probe_failed(worker_id, why)
