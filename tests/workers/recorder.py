"""A router-shaped recorder: the part of the admin API that agents use, and a memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from router.contract import WorkerSpec
from tests.runtime.scripted_worker import Scripted, ScriptedWorker


@dataclass
class Router:
    """`known` holds what is registered, by URL; `asked` every (method, target)."""

    admin_key: str | None = None
    known: dict[str, WorkerSpec] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    refuse: int | None = None  # answer everything with this status
    removed: set[str] = field(default_factory=set)  # by an operator
    worker: ScriptedWorker = field(default_factory=lambda: ScriptedWorker({}))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.worker.handler = self.answer

    @property
    def url(self) -> str:
        return self.worker.url

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():
                self._news.clear()
                await self._news.wait()

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Scripted:
        self.asked.append((method, target))
        self._news.set()
        if self.refuse is not None:
            return Scripted(self.refuse, {"error": {"message": "no"}})
        if self.admin_key and headers.get("authorization") != f"Bearer {self.admin_key}":
            return Scripted(401)
        if method == "POST":
            spec = WorkerSpec.model_validate_json(body)
            if spec.url in self.known:
                return Scripted(409)
            if spec.url in self.removed:
                return Scripted(410)
            self.known[spec.url] = spec
            return Scripted(202, {"id": spec.worker_id})
        url = unquote(target.partition("?")[0].removeprefix("/workers/"))
        if url not in self.known:
            return Scripted(404)
        if method == "PUT":
            self.known[url] = WorkerSpec.model_validate_json(body)
        if method == "DELETE":
            del self.known[url]
            return Scripted(202)
        return Scripted(200)


@asynccontextmanager
async def running(worker: ScriptedWorker) -> AsyncIterator[ScriptedWorker]:
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


@asynccontextmanager
async def running_router(**changes: Any) -> AsyncIterator[Router]:
    router = Router(**changes)
    async with running(router.worker):
        yield router
