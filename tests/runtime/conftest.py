"""Redis servers: one for a module, empty for each of its tests, and one of a test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import redis_servers
from tests.redis_servers import Server


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    with shared_server.admin() as admin:
        admin.flushall()
    return shared_server


@pytest.fixture
def own_server() -> Iterator[Server]:
    with redis_servers.single() as server:
        yield server
