"""Workers of the configuration: they join, change and leave as its list does.

Only what the list says anew is done. A worker that came by the admin API or by its agent is never
touched, and what an operator did to one of the list (removed it, changed it) stands until the list
says something else about that very worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from router.config import Config
from router.contract import WorkerId, WorkerSpec
from router.core.effects import WorkerChanged
from router.core.snapshot import WorkerView
from router.core.types import WorkerState
from router.errors import Refused
from router.runtime.driver import Driver
from router.runtime.registry import Registry

_log = logging.getLogger(__name__)


class ConfiguredWorkers:
    """Keeps a driver's workers as the configuration lists them."""

    def __init__(self, config: Config, driver: Driver, registry: Registry | None = None) -> None:
        self._config = config
        self._driver = driver
        self._registry = registry
        self._telling: set[asyncio.Task[None]] = set()
        self._leaving: set[WorkerId] = set()  # as soon as the registry is told
        self._ours = {spec.worker_id for spec in config.workers}  # those that joined from the list
        self._returning: dict[WorkerId, WorkerSpec] = {}  # to join when they have left
        driver.on_worker_changed.append(self._changed)

    def __contains__(self, worker_id: WorkerId) -> bool:
        """Whether it is here because the list names it."""
        return worker_id in self._ours

    def on_config(self, config: Config) -> None:
        """Take over a new list."""
        old = {spec.worker_id: spec for spec in self._config.workers}
        new = {spec.worker_id: spec for spec in config.workers}
        self._config = config
        for worker_id, spec in old.items():
            if worker_id not in new or new[worker_id].url != spec.url:
                self._leave(spec, at_once=worker_id in new)
        changed = [spec for worker_id, spec in new.items() if old.get(worker_id) != spec]
        if changed:
            views = self._driver.snapshot().workers
            by_name = {name: view for view in views for name in (view.spec.url, view.id)}
            for spec in changed:
                known = by_name.get(spec.worker_id) or by_name.get(spec.url)
                self._join_or_update(spec, known)

    def _leave(self, spec: WorkerSpec, *, at_once: bool) -> None:
        worker_id = spec.worker_id
        self._returning.pop(worker_id, None)
        if worker_id not in self._ours:
            return
        # If its id goes on with another address, what runs there comes to its end.
        grace_s = 0.0 if at_once else self._config.server.shutdown_grace_s
        if self._registry is not None and self._registry.holds(worker_id):
            self._leaving.add(worker_id)
            self._tell(self._registry.remove(spec, drain_s=grace_s, barred=False), worker_id)
        elif at_once:
            self._driver.on_worker_left(worker_id)
        else:
            self._driver.on_drain(worker_id, deadline_s=grace_s)

    def _tell(self, said: Coroutine[Any, Any, bool], worker_id: WorkerId) -> None:
        task = asyncio.get_running_loop().create_task(self._told(said, worker_id))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _told(self, said: Coroutine[Any, Any, bool], worker_id: WorkerId) -> None:
        try:
            await said
        except Refused as exc:
            _log.warning("what the configuration says of worker %s can't be: %s", worker_id, exc)
        finally:
            self._leaving.discard(worker_id)

    def _join_or_update(self, spec: WorkerSpec, known: WorkerView | None) -> None:
        if known is None:
            self._join(spec)
        elif known.id not in self._ours:
            _log.warning(
                "worker %s of the configuration is registered otherwise, as %s at %s, and stays so",
                spec.worker_id, known.id, known.spec.url,
            )  # fmt: skip
        elif (
            known.state is WorkerState.DRAINING
            or known.id in self._leaving
            or known.id != spec.worker_id
        ):
            # Under its old name, or on its way out: it is gone first.
            self._returning[spec.worker_id] = spec
        elif self._registry is not None and self._registry.holds(known.id):
            self._tell(self._registry.change(spec), known.id)
        else:
            self._driver.on_worker_updated(spec)

    def _join(self, spec: WorkerSpec) -> None:
        self._ours.add(spec.worker_id)
        self._driver.on_worker_joined(spec)

    def _changed(self, change: WorkerChanged) -> None:
        if change.new is not None:
            return
        self._ours.discard(change.worker_id)
        if self._returning:  # when the driver is done with the one that left
            asyncio.get_running_loop().call_soon(self._return)

    def _return(self) -> None:
        views = self._driver.snapshot().workers
        taken = {view.id for view in views} | {view.spec.url for view in views}
        for worker_id, spec in list(self._returning.items()):
            if worker_id not in taken and spec.url not in taken:
                del self._returning[worker_id]
                self._join(spec)
