"""The SGLang server beside an agent: polled here, so that routers need not know its release.

A poll asks /ready and the best load answer that the server has. What was last read stays, with an
age that grows, until it is read again; a report never looks fresher than it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, Final

import httpx
from msgspec.structs import replace
from pydantic import SecretStr

from router.contract import LoadReport, MalformedReport
from router.load_formats import SGLANG_FORMATS, LoadFormat, parse

_log = logging.getLogger(__name__)

_ANSWER_S: Final = 2.0  # deadline of one request; a frozen engine hangs older servers
_NO_SUCH_ROUTE: Final = frozenset((404, 405, 501))


class LocalServer:
    """Polls one server and remembers what it said."""

    def __init__(self, url: str, client: httpx.AsyncClient, *, api_key: SecretStr | None) -> None:
        self.ready = False
        self.first_ready = asyncio.Event()
        self._polled = asyncio.Event()
        self._url = url
        self._client = client
        self._headers: dict[str, str] = {}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key.get_secret_value()}"
        self._format: LoadFormat | None = None
        self._report: LoadReport | None = None
        self._read_at = 0.0
        self._gone_at: float | None = None  # when the last poll found the port closed
        self._trouble: str | None = None

    def report(self, gpu_figures: Mapping[str, Any]) -> LoadReport:
        """What is known now; its age counts from the moment of the engine's own figures."""
        report = self._report or LoadReport()
        if self._report is not None:
            age_s = (self._report.age_s or 0.0) + self._now() - self._read_at
            report = replace(report, age_s=age_s)
        return replace(report, ready=self.ready, **gpu_figures)

    async def idle_after(self, moment_at: float) -> None:
        """Wait until, at a moment later than this, nothing ran or waited or no server was there."""
        while not self._was_idle_after(moment_at):
            await self._polled.wait()
            self._polled.clear()

    def _was_idle_after(self, moment_at: float) -> bool:
        if self._gone_at is not None:
            return self._gone_at > moment_at
        report = self._report
        return (
            report is not None
            and report.running_requests == 0
            and report.queued_requests == 0
            and self._read_at - (report.age_s or 0.0) > moment_at
        )

    async def run(self, interval_s: float) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(interval_s)

    async def poll(self) -> None:
        """Ask once. What went wrong is logged when it changes."""
        trouble = await self._read()
        if trouble != self._trouble:
            if trouble is None:
                _log.info("server %s: its load is known", self._url)
            else:
                _log.warning("server %s: %s", self._url, trouble)
        self._trouble = trouble
        self._polled.set()
        if self.ready:
            self.first_ready.set()

    async def _read(self) -> str | None:
        """Update `ready` and the report; returns what is wrong.

        The load is read from a server that is not ready, too: it may be draining.
        """
        self._gone_at = None
        try:
            answer = await self._get("/ready")
        except httpx.HTTPError as exc:
            self.ready = False
            if isinstance(exc, httpx.ConnectError):
                self._gone_at = self._now()
            return f"GET /ready: {str(exc) or type(exc).__name__}"
        try:
            trouble, answered = await self._read_load()
        except httpx.HTTPError as exc:
            trouble, answered = f"its load: {str(exc) or type(exc).__name__}", False
        if answer.status_code in _NO_SUCH_ROUTE:  # an older server: it lives when it answers
            self.ready = answered
            return trouble
        self.ready = answer.is_success
        return trouble if self.ready else f"GET /ready: {answer.status_code}"

    async def _read_load(self) -> tuple[str | None, bool]:
        """What is wrong with the load answers, and whether the server answered at all."""
        trouble, alive = "no load answer", False
        for source in SGLANG_FORMATS if self._format is None else (self._format,):
            answer = await self._get(source.target)
            alive = alive or answer.status_code != 503
            if answer.status_code != 200:
                trouble = f"GET {source.target}: {answer.status_code}"
                continue
            try:
                self._report = parse(source, answer.content)
            except MalformedReport as exc:
                trouble = f"GET {source.target}: {exc}"
                continue
            self._read_at = self._now()
            self._format = source
            return None, True
        self._format = None  # look at all of them the next time
        return trouble, alive

    async def _get(self, target: str) -> httpx.Response:
        return await self._client.get(self._url + target, headers=self._headers, timeout=_ANSWER_S)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
