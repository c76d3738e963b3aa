"""Redis servers: one for a module, or one of each kind, empty for each test; one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import redis_servers
from tests.redis_servers import BINARIES, Server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    with shared_server.admin() as admin:
        admin.flushall()
    return shared_server


@pytest.fixture(scope="module", params=BINARIES, ids=lambda path: Path(path).name)
def shared_server_of_each_kind(request: pytest.FixtureRequest) -> Iterator[Server]:
    with redis_servers.single(binary=request.param) as server:
        yield server


@pytest.fixture
def server_of_each_kind(shared_server_of_each_kind: Server) -> Server:
    with shared_server_of_each_kind.admin() as admin:
        admin.flushall()
    return shared_server_of_each_kind


@pytest.fixture
def own_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server
