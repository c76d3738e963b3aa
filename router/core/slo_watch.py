"""Ties the monitor of attainment to the slow loop, and the loop's shares to flow control.

The loop's first look comes with the first request that ends, then one every `slo.interval_s`. What
it decides takes effect at once: its guarantees become the bands' minimum shares. A move, and the
finding that no move could help, leave as an effect for the log. Of several routers one runs the
loop, by what all count; the others go by its shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.config import Config
from router.core.effects import Effect, SharesJudged
from router.core.flow import FlowQueue
from router.core.rate_loop import Act, LoopView, RateLoop, Shares
from router.core.slo import ClassView, SloMonitor, Totals
from router.core.timers import Timers
from router.core.types import Priority, RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SloView:
    """Attainment of the classes, and the loop."""

    target: float
    floor: float
    classes: tuple[ClassView, ...]
    loop: LoopView
    looks: Mapping[Act, int]  # since the start, by what came of them


class SloWatch:
    """Counts what ended and lets the loop look in time."""

    def __init__(
        self, config: Config, *, flow: FlowQueue, timers: Timers, effects: list[Effect]
    ) -> None:
        self._flow = flow
        self._timers = timers
        self._effects = effects
        self._monitor = SloMonitor(config)
        self._loop = RateLoop(config)
        self._looks = dict.fromkeys(Act, 0)
        self._last: Act | None = None
        self._armed = False
        self._leads = True
        self._take_over(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; shares that were moved stay, as far as these allow."""
        self._monitor.configure(config)
        self._loop.configure(config)
        self._take_over(config)
        self._flow.set_shares(self._loop.guarantees)

    def _take_over(self, config: Config) -> None:
        self._settings = config.slo
        # A prompt leaves time for its target if its prefill alone takes no more. Source: 2.11.
        ratio = config.slo.feasible_ratio
        self._prefill_s_max = [ratio * c.ttft_target_s for c in config.classes.by_priority]

    def count(self, record: RequestRecord, prefill_s: float, now: float) -> None:
        """A request ended whose prompt takes an idle worker `prefill_s`, less what is cached."""
        self._monitor.count(record, feasible=prefill_s <= self._prefill_s_max[record.priority])
        if not self._armed:
            self._arm(now)

    def hear(self, judged: Mapping[str, Sequence[Totals]], now: float) -> None:
        """Other routers say what they counted: the loop that leads goes by all of it."""
        if self._monitor.hear(judged):
            self._arm(now)

    def _arm(self, now: float) -> None:
        if not self._armed and self._settings.loop != "off":
            self._armed = True
            self._timers.call_at(now, self._look)

    @property
    def judged(self) -> tuple[Totals, ...]:
        """What this router counted of each class."""
        return tuple([self._monitor.own_totals(priority) for priority in Priority])

    def lead(self, *, leads: bool) -> None:
        """Whether this router's loop is the one that runs; one that stops has nothing to say."""
        if self._leads and not leads:
            self._loop.forget()
            self._last = None
        self._leads = leads

    @property
    def shares(self) -> Shares:
        """The classes' shares of the budget."""
        return self._loop.shares

    def adopt(self, shares: Shares) -> None:
        """Go by the shares of the router that leads."""
        self._loop.adopt(shares)
        self._flow.set_shares(self._loop.guarantees)

    def view(self) -> SloView:
        """All of it, frozen."""
        return SloView(
            target=self._settings.target,
            floor=self._settings.floor,
            classes=self._monitor.snapshot(),
            loop=self._loop.view(),
            looks=dict(self._looks),
        )

    def _look(self, now: float) -> None:
        if not self._leads:
            self._timers.call_at(now + self._settings.interval_s, self._look)
            return
        step = self._loop.step(self._monitor, now=now)
        if step is None:  # switched off: the next request after it is on again starts it
            self._armed, self._last = False, None
            return
        self._looks[step.act] += 1
        if step.applied:
            self._flow.set_shares(self._loop.guarantees)
        if step.act.moves or Act.OVERLOADED is step.act is not self._last:
            self._effects.append(SharesJudged(step))
        self._last = step.act
        self._timers.call_at(self._loop.due_at, self._look)
