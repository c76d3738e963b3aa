"""Routers that act as one, as each of them shows itself and sees the others: values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from router.contract import WorkerId
from router.core.peers import PeerLine, PeerLoad
from router.core.slo import Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A router, as it describes itself to the others."""

    name: str
    address: str | None = None
    version: str = ""
    config_version: str = ""
    started_at: float = 0.0  # seconds on its wall clock, for people
    draining: bool = False
    workers: int = 0
    running: int = 0
    queued: int = 0  # requests that wait in it
    owns: int = 0  # of its live workers
    judged: tuple[Totals, ...] = ()  # by class; none: it says nothing of that
    lines: tuple[PeerLine, ...] = ()  # of requests that wait for a limit that tenants share
    loads: Mapping[WorkerId, PeerLoad]


class Standing(StrEnum):
    """How a router stands to the others. Closed: a metric label."""

    ALONE = "alone"  # there is no Redis
    TOGETHER = "together"
    AWAY = "away"  # Redis does not answer: on its own, with what it last knew


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What this router knows of all."""

    standing: Standing
    name: str
    leader: str  # empty: not known
    term: int
    age_s: float | None  # since the last exchange; None: there was none
    why_away: str
    workers: int  # in the registry
    untold: int  # changes that it has still to be told
    replicas: tuple[Replica, ...]  # by name, this one included
