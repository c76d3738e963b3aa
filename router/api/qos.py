"""What operators ask of the policy: how the classes do (GET /slo), who waits for what (GET /queue),
and what overload costs whom (GET /degrade).

An unknown figure is null, never zero. Moments are told as ages: the core's clock means nothing to
anybody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.auth import Access
from router.api.http import Json, Resources
from router.api.services import Services
from router.api.views import rounded
from router.core.degrade import Act
from router.core.queue_view import BandView, LineView
from router.core.rate_loop import LoopView, Step
from router.core.slo import ClassView
from router.core.snapshot import Snapshot, WorkerView
from router.core.types import Priority


class Qos:
    """Handlers that show the policy's state."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, resources: Resources) -> list[Route]:
        """The routes."""
        return [
            resources.route("/slo", Access.ADMIN, GET=self.slo),
            resources.route("/queue", Access.ADMIN, GET=self.queue),
            resources.route("/degrade", Access.ADMIN, GET=self.degrade),
        ]

    async def slo(self, request: Request) -> Response:  # noqa: ARG002
        """Attainment of every class, and what the slow loop did about it."""
        return Json(slo_json(self._services.snapshot()))

    async def queue(self, request: Request) -> Response:  # noqa: ARG002
        """Everything that waits, and what holds it back."""
        return Json(queue_json(self._services.snapshot()))

    async def degrade(self, request: Request) -> Response:  # noqa: ARG002
        """The degrade ladder of every model, and whom it touched."""
        return Json(degrade_json(self._services.snapshot()))


def slo_json(snapshot: Snapshot) -> dict[str, Any]:
    """The answer of GET /slo."""
    slo = snapshot.slo
    return {
        "target": slo.target,
        "floor": slo.floor,
        "classes": [_class_json(view) for view in slo.classes],
        "loop": {
            **_loop_json(slo.loop, snapshot.at),
            "looks": {act.value: count for act, count in slo.looks.items()},
        },
    }


def queue_json(snapshot: Snapshot) -> dict[str, Any]:
    """The answer of GET /queue."""
    queue = snapshot.queue
    return {
        "order": queue.order,
        "waiting": sum(line.waiting for line in queue.lines),
        "relegated": queue.relegated,
        "promoted": queue.promoted,
        "lanes": [
            {
                "lane": lane.value,
                "waiting": view.queued,
                "waiting_max": view.depth_max,
                "oldest_age_s": rounded(view.oldest_age_s),
                "bands": [_line_json(line) for line in queue.lines if line.lane is lane],
            }
            for lane, view in snapshot.lanes.items()
        ],
        "domains": [
            {
                "domain": domain.strip("\0"),
                "bands": [_band_json(band) for band in queue.bands if band.domain == domain],
            }
            for domain in dict.fromkeys(band.domain for band in queue.bands)
        ],
        "pacing": [_pacing_json(view) for view in snapshot.workers],
        "elephants": [{**asdict(view), "lane": view.lane.value} for view in queue.elephants],
    }


def degrade_json(snapshot: Snapshot) -> dict[str, Any]:
    """The answer of GET /degrade."""
    view = snapshot.degrade
    return {
        "models": [
            {
                "model": ladder.model,
                "level": int(ladder.level),
                "name": ladder.level.name.lower(),
                "saturation": rounded(ladder.saturation),
            }
            for ladder in view.ladders
        ],
        "degraded": {
            act.value: {p.name: view.counts.get((act, p), 0) for p in Priority}
            for act in Act
            if act is not Act.KEEP
        },
        "preempted": snapshot.counters.preemptions,
        "changes": [
            {
                "age_s": rounded(snapshot.at - change.at),
                "domain": domain.strip("\0"),
                "from": int(change.old),
                "to": int(change.new),
                "saturation": rounded(change.saturation),
            }
            for domain, change in reversed(view.changes)
        ],
    }


def _class_json(view: ClassView) -> dict[str, Any]:
    return {
        "priority": view.priority.name,
        "standing": view.standing.value,
        "ttft_target_s": view.ttft_target_s,
        "tpot_target_s": view.tpot_target_s,
        "attainment": _ratio(view.attainment),
        "requests": view.requests,
        "met": view.met,
        "attainment_feasible": _ratio(view.attainment_feasible),
        "feasible_requests": view.feasible_requests,
        "feasible_met": view.feasible_met,
        "engine_misses": view.engine_misses,
    }


def _loop_json(loop: LoopView, now: float) -> dict[str, Any]:
    return {
        "mode": loop.loop,
        "overloaded": loop.overloaded,
        "shed": None if loop.shed is None else loop.shed.name,
        "shares": _by_class(loop.shares),
        "configured": _by_class(loop.configured),
        "guarantees": _by_class(loop.guarantees),
        "last": None if loop.last is None else _step_json(loop.last, now),
        "moves": [_step_json(step, now) for step in reversed(loop.moves)],
    }


def _step_json(step: Step, now: float) -> dict[str, Any]:
    return {
        "age_s": rounded(now - step.at),
        "act": step.act.value,
        "applied": step.applied,
        "why": step.why,
        "before": _by_class(step.before),
        "after": _by_class(step.after),
        "evidence": {
            priority.name: {
                "attainment": _ratio(found.attainment),
                "requests": found.requests,
                "attainment_since_move": _ratio(found.fresh_attainment),
                "requests_since_move": found.fresh_requests,
                "engine_misses": found.engine_misses,
            }
            for priority, found in zip(Priority, step.evidence, strict=True)
        },
    }


def _line_json(line: LineView) -> dict[str, Any]:
    return {
        "band": line.band,
        "waiting": line.waiting,
        "cost": rounded(line.cost),
        "oldest_age_s": rounded(line.oldest_age_s),
    }


def _band_json(band: BandView) -> dict[str, Any]:
    return {
        "band": band.band,
        "waiting": band.waiting,
        "cost": rounded(band.cost),
        "share_min": _ratio(band.share_min),
        "owed": rounded(band.owed),
        "cost_per_s": rounded(band.cost_per_s),
    }


def _pacing_json(view: WorkerView) -> dict[str, Any]:
    return {
        "worker": view.id,
        "duty": _ratio(view.prefill_duty),
        "trim": _ratio(view.prefill_trim),
        "credit_s": rounded(view.prefill_credit_s),
        "pending_prefill_tokens": view.pending_tokens,
        "streams": view.streams,
    }


def _by_class(shares: Sequence[float]) -> dict[str, float | None]:
    return {p.name: _ratio(share) for p, share in zip(Priority, shares, strict=True)}


def _ratio(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
