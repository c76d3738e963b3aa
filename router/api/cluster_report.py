"""The load of everything behind this router as one report, for a router in front.

Work that waits here counts as queued. A figure with an unknown part is unknown. Whoever asks may be
one of this router's own workers, or stand behind one: then what leads back to the asker is left
out, else routers that lend to each other would count the same load without end. To one for whom
nothing is left this router is not ready, else two without an engine would hold each other up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from router.api.views import can_serve
from router.contract import LoadReport
from router.core.snapshot import Snapshot, WorkerView
from router.core.types import Ticket, TicketState

_ROUTERS_MAX: Final = 64


def cluster_report(
    snapshot: Snapshot,
    tickets: Iterable[Ticket],
    *,
    router_id: str,
    asked_by: bytes,
    ready: bool,
    waiting_elsewhere: int = 0,
) -> LoadReport:
    """The report. `asked_by` is the via header of who asks; `tickets` are all there are here.

    `ready` is whether requests are taken at all. `waiting_elsewhere` are requests that wait in
    other routers which share these workers.
    """
    views = [view for view in snapshot.workers if not _leads_to(view, asked_by)]
    serving = [view for view in views if can_serve(view)]
    waiting = [ticket for ticket in tickets if ticket.state is TicketState.QUEUED]
    queued_there = sum(_queued(view) for view in views)
    pending = sum(_pending_tokens(view) for view in views)
    below = (name for view in snapshot.workers for name in _routers(view))
    ids = tuple(dict.fromkeys((router_id, *below)))[:_ROUTERS_MAX]
    return LoadReport(
        running_requests=sum(_present(view) for view in views) - queued_there,
        queued_requests=queued_there + len(waiting) + waiting_elsewhere,
        queued_uncached_tokens=pending + sum(ticket.prompt_tokens for ticket in waiting),
        max_running_requests=sum(view.concurrency_max for view in serving),
        kv_used_tokens=_whole_sum([view.kv_used_tokens for view in serving]),
        kv_total_tokens=_whole_sum([view.kv_total_tokens for view in serving]),
        generation_tokens_per_s=_reported_sum(serving, "generation_tokens_per_s"),
        prefill_tokens_total=_reported_sum(serving, "prefill_tokens_total"),
        prefill_busy_s_total=_reported_sum(serving, "prefill_busy_s_total"),
        ready=ready and any(_serves(view, asked_by) for view in snapshot.workers),
        workers=sum(_engines(view) for view in serving),
        routers=ids if router_id else None,
    )


def _serves(view: WorkerView, asked_by: bytes) -> bool:
    """Whether the worker can serve requests of who asks. A router that leads back there may have
    engines besides, and then says so.
    """
    if not can_serve(view):
        return False
    if not _leads_to(view, asked_by):
        return True
    return _routers(view)[0].encode() not in asked_by and _engines(view) > 0


def _leads_to(view: WorkerView, asked_by: bytes) -> bool:
    return any(name.encode() in asked_by for name in _routers(view))


def _routers(view: WorkerView) -> tuple[str, ...]:
    return () if view.report is None else view.report.routers or ()


def _engines(view: WorkerView) -> int:
    known = None if view.report is None else view.report.workers
    return 1 if known is None else known


def _queued(view: WorkerView) -> int:
    """Requests that wait in the worker, whoever sent them."""
    if view.report is None or view.stale:
        return 0
    return min(_present(view), view.report.queued_requests or 0)


def _present(view: WorkerView) -> int:
    """Requests in the worker: as counted here, or as it reports where others send to it too."""
    if view.report is None or view.stale or view.report.running_requests is None:
        return view.streams
    return max(view.streams, view.report.running_requests + (view.report.queued_requests or 0))


def _pending_tokens(view: WorkerView) -> int:
    reported = None if view.report is None or view.stale else view.report.queued_uncached_tokens
    return max(view.pending_tokens, reported or 0)


def _reported_sum(views: list[WorkerView], name: str) -> Any:
    fresh = [None if v.report is None or v.stale else getattr(v.report, name) for v in views]
    return _whole_sum(fresh)


def _whole_sum(figures: list[Any]) -> Any:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known and len(known) == len(figures) else None
