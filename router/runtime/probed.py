"""One worker as the prober asks it: is it ready, what is its load, what is it.

Every question is a GET with the worker's own key, ends by a moment `until` on the loop's clock, and
has three bad ends: `Dead` (it is not alive), `NoReport` (it is, but did not say what was asked) and
UpstreamFailed (the network; what that means depends on who was asked). Nothing is ever guessed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from router.contract import LoadReport, MalformedReport, WorkerSpec
from router.errors import Reason
from router.load_formats import (
    LoadFormat,
    WorkerDescription,
    describe_model_info,
    describe_models,
    describe_server_info,
    merged,
    parse,
)

_log = logging.getLogger(__name__)

_BODY_BYTES_MAX: Final = 4 * 2**20  # /metrics with all histograms of many ranks stays below
_NO_SUCH_ROUTE: Final = frozenset((404, 405, 501))


@dataclass(frozen=True, slots=True)
class Answer:
    """placeholder"""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class UpstreamFailed(Exception):
    """placeholder"""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ProbeClient(Protocol):
    """Keep-alive connections to one address."""

    async def request(  # noqa: PLR0917
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        deadline_s: float,
        body_bytes_max: int,
    ) -> Answer:
        """placeholder"""
        ...

    def close(self) -> None:
        """placeholder"""
        ...


Connect = Callable[[str], ProbeClient]


class Dead(Exception):
    """The worker is not alive; the text says why."""


class NoReport(Exception):
    """The worker is alive, its load is unknown; the text says why."""


class RouteMissing(NoReport):
    """The worker is alive and does not have the route that was asked for."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a load answer comes from."""

    format: LoadFormat
    client: ProbeClient
    target: str


class ProbedWorker:
    """The questions. `agent` is where an agent beside the worker answers, if it has one."""

    def __init__(self, spec: WorkerSpec, connect: Connect) -> None:
        self.spec = spec
        self.has_ready = True  # until it answers otherwise
        self._client = connect(spec.url)
        self._base_path = urlsplit(spec.url).path
        self.agent = _agent_source(spec.health_url, connect)
        key = spec.api_key.get_secret_value() if spec.api_key is not None else None
        self._headers: list[tuple[bytes, bytes]] = [(b"accept", b"*/*")]
        if key is not None:
            self._headers.append((b"authorization", b"Bearer " + key.encode()))

    def source(self, load_format: LoadFormat) -> Source:
        """The worker's own answer in this format."""
        return Source(load_format, self._client, self._base_path + load_format.target)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        if self.agent is not None:
            self.agent.client.close()

    async def is_ready(self, until: float) -> bool:
        """Whether the worker says that it is ready; False where it has no such route.

        Raises Dead when it is not ready or does not answer.
        """
        if not self.has_ready:
            return False
        try:
            answer = await self._get("/ready", until)
        except UpstreamFailed as exc:
            raise Dead(f"GET /ready: {exc}") from exc
        if answer.status in _NO_SUCH_ROUTE:
            self.has_ready = False
        elif not 200 <= answer.status < 300:
            raise Dead(f"GET /ready: {answer.status}")
        return self.has_ready

    async def check_life(self, until: float) -> None:
        """Raise Dead unless the worker is ready or, without such a route, answers at all."""
        if await self.is_ready(until):
            return
        try:
            answer = await self._get("/v1/models", until)
        except UpstreamFailed as exc:
            raise Dead(f"GET /v1/models: {exc}") from exc
        if answer.status == 503:
            raise Dead("GET /v1/models: 503")

    async def load(self, source: Source, until: float) -> LoadReport:
        """Return one load answer. Raises UpstreamFailed, NoReport, or Dead for "not ready"."""
        answer = await self._ask(source.client, source.target, until)
        what = f"GET {source.target}: {answer.status}"
        ours = source.format is LoadFormat.LANEWAY
        if answer.status == 503 and (ours or not self.has_ready):
            raise Dead(what)
        if answer.status in _NO_SUCH_ROUTE:
            raise RouteMissing(what)
        if answer.status != 200:
            raise NoReport(what)
        try:
            report = parse(source.format, answer.body)
        except MalformedReport as exc:
            raise NoReport(f"GET {source.target}: {exc}") from exc
        if report.ready is False:
            raise Dead(f"GET {source.target}: not ready")
        return report

    async def described_models(self, until: float) -> WorkerDescription:
        """What the worker serves; empty when it does not say."""
        described = describe_models(await self._body("/v1/models", until))
        for target in ("/model_info", "/get_model_info"):
            if not described.models:
                described = merged(described, describe_model_info(await self._body(target, until)))
        return described

    async def described_server(self, until: float) -> WorkerDescription:
        """What /server_info says: it asks the engine, so it can hang until the deadline."""
        body = await self._body("/server_info", until)
        return describe_server_info(body or await self._body("/get_server_info", until))

    async def _body(self, target: str, until: float) -> bytes:
        """The body of a good answer, else nothing: all that is described is optional."""
        try:
            answer = await self._get(target, until)
        except UpstreamFailed as exc:
            _log.debug("worker %s: GET %s: %s", self.spec.worker_id, target, exc)
            return b""
        return answer.body if answer.status == 200 else b""

    async def _get(self, path: str, until: float) -> Answer:
        return await self._ask(self._client, self._base_path + path, until)

    async def _ask(self, client: ProbeClient, target: str, until: float) -> Answer:
        remaining_s = max(0.001, until - asyncio.get_running_loop().time())
        return await client.request("GET", target, self._headers, b"", remaining_s, _BODY_BYTES_MAX)


def _agent_source(health_url: str | None, connect: Connect) -> Source | None:
    if health_url is None:
        return None
    path = urlsplit(health_url).path
    target = path if path.endswith("/health") else path + LoadFormat.LANEWAY.target
    return Source(LoadFormat.LANEWAY, connect(health_url), target)
