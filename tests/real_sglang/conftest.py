"""Fixtures: real SGLang servers for the whole session, routers for a module or a single test.

The log of every process is kept in pytest's temporary folder, and the ends of the logs are shown
with each failing test.
"""

import json
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import pytest

from . import kit
from .cluster import Router, SGLangServer
from .service import Service, stop_all

Pair: TypeAlias = tuple[SGLangServer, SGLangServer]
StartServer: TypeAlias = Callable[..., SGLangServer]
# Limits of the pair: enough for what the tests send at once, and few enough to be filled by a test.
RUNNING_MAX: Final = 16
QUEUED_MAX: Final = 16
_ENDINGS: Final = (signal.SIGTERM, signal.SIGHUP)
_SERVICES = pytest.StashKey[list[Service]]()


class StartRouter(Protocol):
    """Starts a router in front of `servers`, with flags and the content of a configuration file."""

    def __call__(
        self, *servers: SGLangServer, flags: tuple[str, ...] = (), config: Any = None
    ) -> Router: ...


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SERVICES] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections += [
            (f"end of the log of {service.name}, {service.log}", service.log_tail())
            for service in item.config.stash[_SERVICES]
        ]
    return report


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes keep logs and temporary files. A short path: it holds sockets."""
    return tmp_path_factory.mktemp("sglang", numbered=False)


@pytest.fixture(scope="session")
def services(pytestconfig: pytest.Config) -> Iterator[list[Service]]:
    """All services of the session that run; what is left at its end is stopped together.

    In sessions of their own they would outlive a test run that is told to end, so that ends here
    as it does by Ctrl-C.
    """
    running = pytestconfig.stash[_SERVICES]
    before = {number: signal.signal(number, signal.default_int_handler) for number in _ENDINGS}
    yield running
    stop_all(running)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def start_server(folder: Path, services: list[Service]) -> StartServer:
    """Return the function that begins to start a server of the given name and flags."""
    kit.install()

    def start(name: str, *flags: str) -> SGLangServer:
        server = SGLangServer(name, *flags, folder=folder)
        services.append(server.service)
        server.start()
        return server

    return start


@pytest.fixture(scope="session")
def started_pair(start_server: StartServer) -> Pair:
    limits = (
        *("--max-running-requests", str(RUNNING_MAX)),
        *("--max-queued-requests", str(QUEUED_MAX)),
    )
    return start_server("first", *limits), start_server("second", *limits)


@pytest.fixture
def pair(started_pair: Pair) -> Pair:
    """Two equal servers, ready and idle."""
    for server in started_pair:
        server.reset()
    return started_pair


@pytest.fixture
def start_router(folder: Path, services: list[Service]) -> Iterator[StartRouter]:
    """Return the function that starts a router for this test."""
    started: list[Router] = []

    def start(*servers: SGLangServer, flags: tuple[str, ...] = (), config: Any = None) -> Router:
        if config is not None:
            path = folder / f"{uuid.uuid4().hex}.yaml"
            path.write_text(json.dumps(config))  # YAML, too
            flags = (*flags, "--config", str(path))
        router = Router(*flags, worker_urls=[server.url for server in servers], folder=folder)
        services.append(router.service)
        started.append(router)
        router.start()
        return router

    yield start
    stop_all([router.service for router in started])
    for router in started:
        services.remove(router.service)


@pytest.fixture
def router(pair: Pair, start_router: StartRouter) -> Router:
    """A router with its default settings in front of the pair."""
    return start_router(*pair)
