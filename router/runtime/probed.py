"""One worker as the prober asks it: is it ready, what is its load, what is it.

Every question is a GET with the worker's own key, ends by a moment `until` on the loop's clock, and
has three bad ends: `Dead` (it is not alive), `NoReport` (it is, but did not say what was asked) and
UpstreamFailed (the network; what that means depends on who was asked). Nothing is ever guessed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from router.contract import LoadReport, MalformedReport, WorkerSpec
from router.errors import STATUS, Reason
from router.load_formats import (
    LoadFormat,
    WorkerDescription,
    describe_model_info,
    describe_models,
    describe_server_info,
    merged,
    parse,
)
from router.runtime.loops import LEADS_BACK, leads_back
from router.runtime.upstream import Answer, UpstreamFailed, Upstreams

_log = logging.getLogger(__name__)

_BODY_BYTES_MAX: Final = 4 * 2**20  # /metrics with all histograms of many ranks stays below
_NO_SUCH_ROUTE: Final = frozenset((404, 405, 501))
_KEY_REFUSED: Final = frozenset((401, 403))
_READY: Final = "/ready"
_DESCRIPTIVE: Final = ("/v1/models", "/server_info")
_LOOP: Final = STATUS[Reason.LOOP_DETECTED]


class Dead(Exception):
    """The worker is not alive; the text says why."""


class NotReady(Dead):
    """The worker says in our own form that it is not: whatever else it answers, it is none."""


class NoReport(Exception):
    """The worker is alive, its load is unknown; the text says why."""


class RouteMissing(NoReport):
    """The worker is alive and does not have the route that was asked for."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a load answer comes from."""

    format: LoadFormat
    base_url: str


class ProbedWorker:
    """The questions. `agent` is where an agent beside the worker answers, if it has one.

    They have connections of their own: those for requests may all be taken by running answers.
    """

    def __init__(self, spec: WorkerSpec, upstreams: Upstreams) -> None:
        self.spec = spec
        self.has_ready = True  # until it answers otherwise
        self.agent: Source | None = None
        if spec.health_url is not None:
            base_url = spec.health_url.removesuffix(LoadFormat.LANEWAY.target)
            self.agent = Source(LoadFormat.LANEWAY, base_url)
        self._upstreams = upstreams
        self._headers: list[tuple[bytes, bytes]] = []
        if spec.api_key is not None:
            key = spec.api_key.get_secret_value().encode()
            self._headers.append((b"authorization", b"Bearer " + key))

    def reached_as(self, spec: WorkerSpec) -> bool:
        """Whether a worker of this spec is asked in the same place and with the same key."""
        mine = self.spec
        same_place = (mine.url, mine.health_url) == (spec.url, spec.health_url)
        return same_place and mine.api_key == spec.api_key

    def source(self, load_format: LoadFormat) -> Source:
        """The worker's own answer in this format."""
        return Source(load_format, self.spec.url)

    def load_requests(self, source: Source) -> list[bytes]:
        """The requests that ask whether the worker is ready and for its load.

        One does both where our own answer tells readiness, too, or there is no such route.
        """
        asks_both = source.format is not LoadFormat.LANEWAY and self.has_ready
        targets = (_READY, source.format.target) if asks_both else (source.format.target,)
        return self._requests(source.base_url, targets)

    def descriptive_requests(self) -> list[bytes]:
        """The requests that ask an SGLang server of today what it is."""
        return self._requests(self.spec.url, _DESCRIPTIVE)

    def _requests(self, base_url: str, targets: tuple[str, ...]) -> list[bytes]:
        pool, path = self._upstreams.origin(base_url), urlsplit(base_url).path
        lines = b"".join((pool.after_target, *(b"%b: %b\r\n" % line for line in self._headers)))
        return [b"GET %b%b\r\n" % ((path + target).encode(), lines) for target in targets]

    async def is_ready(self, until: float) -> bool:
        """Whether the worker says that it is ready; False where it has no such route.

        Raises Dead when it is not ready or does not answer.
        """
        if not self.has_ready:
            return False
        try:
            answer = await self._get(_READY, until)
        except UpstreamFailed as exc:
            raise Dead(f"GET /ready: {exc}") from exc
        if answer.status in _NO_SUCH_ROUTE:
            self.has_ready = False
        elif answer.status == _LOOP:
            raise Dead("it is this router itself: remove it")
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
        answer = await self._ask(source.base_url, source.format.target, until)
        what = f"GET {source.format.target}: {answer.status}"
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
            raise NoReport(f"GET {source.format.target}: {exc}") from exc
        if report.ready is False:
            if leads_back(self._upstreams.router_id, report):
                raise NotReady(LEADS_BACK)
            raise NotReady(f"GET {source.format.target}: not ready")
        return report

    async def described_models(self, until: float) -> WorkerDescription:
        """What the worker serves; empty when it does not say.

        Raises Dead when it refuses our key: it would refuse every request.
        """
        described = describe_models(await self._body("/v1/models", until, needs_key=True))
        for target in ("/model_info", "/get_model_info"):
            if not described.models:
                described = merged(described, describe_model_info(await self._body(target, until)))
        return described

    async def described_server(self, until: float) -> WorkerDescription:
        """What /server_info says: it asks the engine, so it can hang until the deadline."""
        body = await self._body("/server_info", until)
        return describe_server_info(body or await self._body("/get_server_info", until))

    async def _body(self, target: str, until: float, *, needs_key: bool = False) -> bytes:
        """The body of a good answer, else nothing: all that is described is optional."""
        try:
            answer = await self._get(target, until)
        except UpstreamFailed as exc:
            _log.debug("worker %s: GET %s: %s", self.spec.worker_id, target, exc)
            return b""
        if needs_key and answer.status in _KEY_REFUSED:
            raise Dead(f"GET {target}: {answer.status}: its api_key is another one")
        return answer.body if answer.status == 200 else b""

    async def _get(self, target: str, until: float) -> Answer:
        return await self._ask(self.spec.url, target, until)

    async def _ask(self, base_url: str, target: str, until: float) -> Answer:
        return await self._upstreams.origin(base_url).request(
            "GET",
            urlsplit(base_url).path + target,
            headers=self._headers,
            deadline_s=max(0.001, until - asyncio.get_running_loop().time()),
            body_bytes_max=_BODY_BYTES_MAX,
        )
