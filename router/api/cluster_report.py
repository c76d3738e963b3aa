"""The load of everything behind this router as one report, for a router in front.

Work that waits here counts as queued. A figure with an unknown part is unknown. Whoever asks may be
one of this router's own workers, or stand behind one: then what leads back to the asker is left
out, else routers that lend to each other would count the same load without end.

To one who asks, this router is ready if it can get a request to an engine without who asks: else
routers without an engine would hold each other up. For that each router tells what it can send to,
and passes on what those behind it tell, of each router what it said last. Whatever is found here is
behind workers that serve, which this router polls, so what is told of a router that is N routers
away is as old as N times `probe.failures_to_eject` polls at most: nothing that is gone is told of
in circles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from router.api.views import can_serve
from router.contract import ROUTERS_MAX, Links, LoadReport
from router.core.snapshot import Snapshot, WorkerView
from router.core.types import Ticket, TicketState


def cluster_report(
    snapshot: Snapshot,
    tickets: Iterable[Ticket],
    *,
    router_id: str,
    asked_by: bytes,
    ready: bool,
    now: float,
    waiting_elsewhere: int = 0,
) -> LoadReport:
    """The report. `asked_by` is the via header of who asks; `tickets` are all there are here.

    `ready` is whether requests are taken at all. `now` is in seconds, on a clock that goes on when
    this router's processes are started anew. `waiting_elsewhere` are requests that wait in other
    routers which share these workers.
    """
    views = [view for view in snapshot.workers if not _leads_to(view, asked_by)]
    serving = [view for view in views if can_serve(view)]
    waiting = [ticket for ticket in tickets if ticket.state is TicketState.QUEUED]
    queued_there = sum(_queued(view) for view in views)
    pending = sum(_pending_tokens(view) for view in views)
    below = (name for view in snapshot.workers for name in _routers(view))
    ids = tuple(dict.fromkeys((router_id, *below)))[:ROUTERS_MAX]
    reached = _reached([v for v in snapshot.workers if can_serve(v)], router_id, asked_by, now)
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
        ready=ready and any(known.engines for known in reached),
        workers=sum(_engines(view) for view in serving),
        routers=ids if router_id else None,
        links=_told(reached) if router_id else None,
    )


def _reached(
    serving: list[WorkerView], router_id: str, asked_by: bytes, now: float
) -> tuple[Links, ...]:
    """This router and those that its requests can get to without who asks, the nearest first."""
    told: dict[str, Links] = {}
    engines, routers = 0, list[str]()
    for view in serving:
        behind = _links(view)
        if behind is None:
            engines += 1
            continue
        routers += [behind[0].router] if behind else []
        for known in behind:
            if known.router not in told or told[known.router].said_at < known.said_at:
                told[known.router] = known
    told[router_id] = Links(router_id, now, engines, tuple(dict.fromkeys(routers)))
    reached = {router_id: None}
    to_visit = [router_id]
    for name in to_visit:
        new = [
            n for n in told[name].routers
            if n in told and n not in reached and n.encode() not in asked_by
        ]  # fmt: skip
        reached.update(dict.fromkeys(new))
        to_visit += new
    return tuple(told[name] for name in to_visit)


def _told(reached: tuple[Links, ...]) -> tuple[Links, ...]:
    """As much of it as a report may have."""
    own, *others = reached[:ROUTERS_MAX]
    return replace(own, routers=own.routers[:ROUTERS_MAX]), *others


def _links(view: WorkerView) -> tuple[Links, ...] | None:
    """What a router tells it can send to; None: it is an engine."""
    report = view.report
    if report is None or report.workers is None:
        return None
    if report.links is None and report.routers:  # of a release that does not tell
        return (Links(report.routers[0], 0.0, report.workers, ()),)
    return report.links or ()


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
