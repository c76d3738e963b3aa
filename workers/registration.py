"""Keeps one worker registered at one router, for as long as the worker lives.

The router forgets workers when it restarts, and an agent may start before its router. So the agent
registers until it is accepted, then asks now and then whether it is still known, and registers
again if it is not. Pauses between attempts grow, and vary at random, so that a hundred agents do
not come back to a restarted router in the same instant.

A registration holds for `ttl_s` after the worker's last sign of life, so that nothing remains of a
machine that is gone. When a router says that an operator removed the worker, the agent stays away
from it until the operator has added the worker again, or the agent itself is started anew.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from random import Random
from typing import Final
from urllib.parse import quote

import httpx
from pydantic import SecretStr

from router.contract import WorkerSpec, encode_spec

_log = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0  # deadline of one request to a router
_WHY_LENGTH_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationSettings:
    """How often a router is asked, in seconds."""

    check_s: float = 5.0  # between two questions whether the worker is still known
    retry_s: float = 0.5  # first pause after a failed attempt; doubles
    retry_s_max: float = 10.0
    ttl_s: float = 600.0  # a router forgets a worker that answered no poll for so long


class Registration:
    """One worker at one router. `run` never ends by itself; `withdraw` takes the worker out."""

    def __init__(
        self,
        router_url: str,
        spec: WorkerSpec,
        client: httpx.AsyncClient,
        *,
        admin_key: SecretStr | None,
        settings: RegistrationSettings,
        rng: Random,
    ) -> None:
        self.router_url = router_url
        self.registered = False
        self.removed = False  # by an operator: stay away
        self.trouble: str | None = None  # why it is not, as last seen
        self._spec = spec.model_copy(update={"ttl_s": None})
        self._leased = spec.model_copy(update={"ttl_s": spec.ttl_s or settings.ttl_s})
        self._client = client
        self._settings = settings
        self._rng = rng
        self._workers_url = f"{router_url}/workers"
        # By its URL: a configuration may know it under another id.
        self._worker_url = f"{self._workers_url}/{quote(spec.url, safe='')}"
        self._headers = {"content-type": "application/json"}
        if admin_key is not None:
            self._headers["authorization"] = f"Bearer {admin_key.get_secret_value()}"

    async def run(self) -> None:
        """Register, and stay registered, until cancelled."""
        pause_s = self._settings.retry_s
        while True:
            known = self.registered or self.removed
            trouble = await (self._check() if known else self._register())
            if trouble is None:
                pause_s = self._settings.retry_s
                await self._pause(self._settings.check_s)
            else:
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, self._settings.retry_s_max)

    async def withdraw(self, grace_s: float) -> None:
        """Ask the router to drain the worker within `grace_s`; one attempt, with a deadline."""
        self.registered = False
        try:
            answer = await self._send(
                "DELETE", f"{self._worker_url}?deadline_s={grace_s:g}&by=agent"
            )
        except httpx.HTTPError as exc:
            _log.warning("router %s: could not withdraw: %s", self.router_url, _text(exc))
            return
        level = logging.INFO if answer.is_success or answer.status_code == 404 else logging.WARNING
        _log.log(level, "router %s: withdrawn (%d)", self.router_url, answer.status_code)

    async def _register(self) -> str | None:
        """One attempt; returns what went wrong."""
        try:
            answer = await self._send("POST", self._workers_url, encode_spec(self._leased))
            if answer.status_code == 409:
                # Known already, from our former life or a configuration; what we say now holds.
                # But a worker that was registered for ever stays so.
                answer = await self._send("PUT", self._worker_url, encode_spec(self._spec))
        except httpx.HTTPError as exc:
            return self._failed(_text(exc))
        if answer.status_code == 410:
            self._failed("an operator removed this worker; `laneway workers add` brings it back")
            self.removed = True
            return None
        if not answer.is_success:
            return self._failed(f"{answer.status_code} {answer.text}")
        self.registered, self.trouble = True, None
        _log.info("router %s: registered as %s", self.router_url, self._spec.worker_id)
        return None

    async def _check(self) -> str | None:
        try:
            answer = await self._send("GET", self._worker_url)
        except httpx.HTTPError as exc:
            return self._failed(_text(exc))
        if self.removed and answer.is_success:
            self.removed = False
            return await self._register()
        if answer.status_code == 404:
            if self.removed:
                return None
            self.registered = False
            _log.warning("router %s: it has forgotten this worker", self.router_url)
            return await self._register()
        if not answer.is_success:
            return self._failed(f"{answer.status_code} {answer.text}")
        self.trouble = None
        return None

    def _failed(self, why: str) -> str:
        why = " ".join(why.split())[:_WHY_LENGTH_MAX]
        if why != self.trouble:
            _log.warning("router %s: %s", self.router_url, why)
        self.trouble = why
        return why

    async def _send(self, method: str, url: str, body: bytes = b"") -> httpx.Response:
        return await self._client.request(
            method, url, content=body, headers=self._headers, timeout=_ANSWER_S
        )

    async def _pause(self, pause_s: float) -> None:
        await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))


def _text(exc: httpx.HTTPError) -> str:
    return str(exc) or type(exc).__name__
