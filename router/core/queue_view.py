"""What the queue shows of itself: every line by lane, what each domain owes, where elephants go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from router.contract import Lane
from router.core.bands import Domain
from router.core.drain import LATE
from router.core.elephants import Elephants
from router.core.flow import FlowQueue
from router.core.pools import Pool
from router.core.types import Priority

BAND_NAMES: Final = (*(priority.name for priority in Priority), "late")  # by index; LATE is last


@dataclass(frozen=True, slots=True, kw_only=True)
class LineView:
    """What waits in one band, or the late line, of one lane."""

    lane: Lane
    band: str
    waiting: int
    cost: float  # cost units
    oldest_age_s: float  # 0 when nothing waits


@dataclass(frozen=True, slots=True, kw_only=True)
class BandView:
    """One band, or the late line, of a domain: requests that compete for the same workers."""

    domain: str  # by the name of one of its models; empty: requests for any model
    band: str
    waiting: int
    cost: float
    share_min: float | None  # of the dispatched cost; None: the late line has none
    owed: float | None  # cost units
    cost_per_s: float | None  # lately, while something waited; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class ElephantView:
    """Very long prompts in one pool."""

    model: str
    lane: Lane
    workers: int
    width: int  # workers that may have one of this router's at once
    busy: int  # that have one


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """All that waits."""

    order: str
    lines: tuple[LineView, ...]
    bands: tuple[BandView, ...]
    elephants: tuple[ElephantView, ...]
    relegated: int  # since the start
    promoted: int


def queue_view(
    flow: FlowQueue, pools: Iterable[Pool], elephants: Elephants, now: float
) -> QueueView:
    """The queue at `now`."""
    bands = range(LATE + 1)
    return QueueView(
        order=flow.settings.order,
        lines=tuple(_line_view(flow, lane, band, now) for lane in Lane for band in bands),
        bands=tuple(_band_view(domain, band, now) for domain in flow.domains for band in bands),
        elephants=tuple(_elephant_view(pool, elephants, now) for pool in pools),
        relegated=flow.relegated,
        promoted=flow.promoted,
    )


def _line_view(flow: FlowQueue, lane: Lane, band: int, now: float) -> LineView:
    tickets = flow.waiting(lane, band)
    oldest_at = min((ticket.arrived_at for ticket in tickets), default=now)
    return LineView(
        lane=lane,
        band=BAND_NAMES[band],
        waiting=len(tickets),
        cost=sum(ticket.cost for ticket in tickets),
        oldest_age_s=now - oldest_at,
    )


def _band_view(domain: Domain, index: int, now: float) -> BandView:
    band = None if index == LATE else domain.bands[index]
    return BandView(
        domain=domain.name,
        band=BAND_NAMES[index],
        waiting=domain.drain.waiting(index),
        cost=domain.drain.cost(index),
        share_min=None if band is None else band.share,
        owed=None if band is None else band.owed,
        cost_per_s=domain.drain.cost_per_s(index, now=now),
    )


def _elephant_view(pool: Pool, elephants: Elephants, now: float) -> ElephantView:
    return ElephantView(
        model=pool.model,
        lane=pool.lane,
        workers=len(pool.members),
        width=elephants.width(pool, now),
        busy=elephants.busy(pool.members.values()),
    )
