"""Other routers over the same workers: which part is this one's, what the others have, who leads.

Events of the dispatcher that only come where several routers know of each other. What they change
is the fleet's picture of each worker, the owners of the workers, and whose slow loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from router.contract import WorkerId, WorkerSpec
from router.core.fleet import Fleet
from router.core.peers import NOBODY, PeerLine, PeerLoad
from router.core.rate_loop import Shares
from router.core.scheduler import Scheduler
from router.core.sharing import load_of
from router.core.slo import Totals
from router.core.slo_watch import SloWatch
from router.core.types import WorkerState
from router.core.wait_lines import WaitLines


class Peering:
    """The dispatcher's events about other routers, and what it tells them."""

    def __init__(
        self,
        fleet: Fleet,
        slo: SloWatch,
        scheduler: Scheduler,
        lines: WaitLines,
        follow: Callable[[float], None],
    ) -> None:
        self._fleet = fleet
        self._slo = slo
        self._scheduler = scheduler
        self._lines = lines
        self._follow = follow

    def on_replicas(self, names: Collection[str], *, own: str, now: float) -> None:
        """These routers share the workers; this one is called `own`. Alone it owns them all."""
        self._fleet.set_routers(names, own=own)
        self._follow(now)

    def on_loads(
        self,
        loads: Mapping[WorkerId, PeerLoad],
        *,
        silent: Mapping[WorkerId, PeerLoad] = NOBODY,
        now: float,
    ) -> None:
        """What all other routers together have on each worker; one that is left out has nothing.

        `silent` is what was last heard of routers whose loads are in `loads` no more.
        """
        self._fleet.heard(loads, silent, now=now)
        self._scheduler.pump(now)

    def on_judged(self, judged: Mapping[str, Sequence[Totals]], *, now: float) -> None:
        """What other routers counted of each class's targets, by name."""
        self._slo.hear(judged, now)

    def on_lines(self, lines: Mapping[str, Sequence[PeerLine]], *, now: float) -> None:
        """What other routers last said of their lines for common limits, by name."""
        self._lines.hear(lines, now)

    def on_leadership(self, *, leads: bool) -> None:
        """Whether this router runs the slow loop for all; alone it does."""
        self._slo.lead(leads=leads)

    def on_shares(self, shares: Shares) -> None:
        """The router that leads gives the classes these shares, by priority, 1 together."""
        self._slo.adopt(shares)

    @property
    def loads(self) -> dict[WorkerId, PeerLoad]:
        """What this router has on each worker; idle ones are left out."""
        workers = self._fleet.workers.values()
        return {worker.id: load_of(worker) for worker in workers if worker.streams}

    @property
    def members(self) -> dict[WorkerId, tuple[WorkerSpec, bool]]:
        """The spec of each worker, and whether it is draining."""
        return {
            worker.id: (worker.spec, worker.state is WorkerState.DRAINING)
            for worker in self._fleet.workers.values()
        }

    @property
    def leased(self) -> dict[WorkerId, float]:
        """Seconds of life that each worker with a `ttl_s` has from now: those that answer polls."""
        return {
            worker.id: worker.spec.ttl_s
            for worker in self._fleet.workers.values()
            if worker.spec.ttl_s is not None and worker.answered and not worker.probe_failures
        }

    @property
    def owned(self) -> frozenset[WorkerId]:
        """The live workers that this router fills first."""
        return self._fleet.pools.owned

    @property
    def judged(self) -> tuple[Totals, ...]:
        """What this router counted of each class's targets, since its start."""
        return self._slo.judged

    def lines(self, now: float) -> tuple[PeerLine, ...]:
        """Who waits here for a limit that tenants share."""
        return self._lines.tell(now)

    @property
    def shares(self) -> Shares:
        """The classes' shares, as this router's loop or the leader's last left them."""
        return self._slo.shares
