"""The degrade ladders at work: how saturated the workers are, and what that costs a request.

Every domain, the requests that compete for the same workers, has a ladder of its own (`degrade`),
so that the overload of one model costs nobody whose workers are free. Saturation is looked at four
times a second while anything waits, and on until all is calm again; then the ladder is forgotten.
Only a request that came, found no room and would be late is decided on: what waits already was
promised its turn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from router.config import Config
from router.contract import Lane, WorkerId
from router.core.claims import allowed
from router.core.classify import limit_tokens
from router.core.degrade import Act, Decision, Facts, Ladder, Level, LevelChange, saturation
from router.core.effects import Effect, LevelChanged
from router.core.flow import FlowQueue
from router.core.homes import Homes, could_take
from router.core.pools import Pools
from router.core.timers import Timers
from router.core.types import PREFILL_ONLY, Priority, Ticket
from router.core.worker import Worker

_TICK_S: Final = 0.25
_WORN_RATIO: Final = 0.75  # of a patience
_CHANGES_MAX: Final = 100
# Members of enums are found slowly; these are asked for at each request under overload.
_NORMAL: Final = Level.NORMAL
_KEEP: Final = Act.KEEP
_CHANGING: Final = (Act.CUT, Act.OTHER_MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderView:
    """Where the ladder of a model stands; models that share workers share it."""

    model: str
    level: Level
    saturation: float | None  # None: unknown, or nothing waited lately


@dataclass(frozen=True, slots=True, kw_only=True)
class DegradeView:
    """All ladders, their last moves with the domain of each, and how many requests they changed."""

    ladders: tuple[LadderView, ...]  # by served model
    changes: tuple[tuple[str, LevelChange], ...]  # oldest first
    counts: Mapping[tuple[Act, Priority], int]


class Degrading:
    """The ladders of all domains. Times are the driver's monotonic seconds."""

    def __init__(
        self,
        config: Config,
        *,
        pools: Pools,
        homes: Homes,
        flow: FlowQueue,
        timers: Timers,
        effects: list[Effect],
    ) -> None:
        self._pools = pools
        self._homes = homes
        self._flow = flow
        self._timers = timers
        self._effects = effects
        self._ladders: dict[str, Ladder] = {}
        self._worn: dict[str, list[float]] = {}  # by domain: see `_used_up`
        self._seen: dict[str, float | None] = {}  # saturation by domain, since `_seen_at`
        self._seen_at = -inf
        self._ticking = False
        self._high = False  # some ladder is above its foot
        self._changes: deque[tuple[str, LevelChange]] = deque(maxlen=_CHANGES_MAX)
        self._counts: Counter[tuple[Act, Priority]] = Counter()
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Take over new settings; levels follow with the next look."""
        self._settings = config.degrade
        self._tenants, self._models = config.tenants, config.models
        self._paces = config.pacing.enabled
        self._waits_s_max = config.waits_s_max
        self._fallbacks = {
            name: settings.fallback
            for model, settings in config.models.items()
            for name in (model, *settings.aliases)
            if settings.fallback is not None
        }
        for ladder in self._ladders.values():
            ladder.configure(config.degrade)

    # Looking.

    def watch(self, now: float) -> None:
        """Something waits: look at saturation from now on."""
        if not self._ticking and self._settings.enabled:
            self._tick_later(now)

    def view(self) -> DegradeView:
        """How things stand, for every served model."""
        return DegradeView(
            ladders=tuple(self._ladder_view(model) for model in self._pools.served()),
            changes=tuple(self._changes),
            counts=dict(self._counts),
        )

    def saturation_for(self, ticket: Ticket, now: float) -> float | None:
        """How saturated the workers are that may serve `ticket`, whether or not there are ladders.

        At most as old as the ladders' own look; None: unknown.
        """
        if now - self._seen_at >= _TICK_S:
            self._seen, self._seen_at = {}, now
        domain = self._pools.fresh(ticket.pool).domain
        if domain not in self._seen:
            pools = [p for p in self._flow.pools if self._pools.fresh(p).domain == domain]
            waiting = [each for pool in pools for each in self._flow.of_pool(pool)]
            self._seen[domain] = self._saturation(domain, waiting, now)
        return self._seen[domain]

    def _ladder_view(self, model: str) -> LadderView:
        ladder = self._ladders.get(self._pools.get(model, Lane.SHORT).domain)
        if ladder is None:
            return LadderView(model=model, level=Level.NORMAL, saturation=None)
        return LadderView(model=model, level=ladder.level, saturation=ladder.saturation)

    def _tick_later(self, now: float) -> None:
        self._ticking = True
        self._timers.call_at(now + _TICK_S, self._tick)

    def _tick(self, now: float) -> None:
        self._ticking = False
        waiting: dict[str, list[Ticket]] = {}
        for pool in self._flow.pools:
            domain = self._pools.fresh(pool).domain
            waiting.setdefault(domain, []).extend(self._flow.of_pool(pool))
        for domain in waiting:
            if domain not in self._ladders:
                self._ladders[domain] = Ladder(self._settings)
        for domain, ladder in list(self._ladders.items()):
            self._look(domain, ladder, waiting.get(domain, []), now)
        self._high = any(ladder.level for ladder in self._ladders.values())
        if self._ladders:
            self._tick_later(now)

    def _look(self, domain: str, ladder: Ladder, waiting: list[Ticket], now: float) -> None:
        seen = self._saturation(domain, waiting, now)
        self._worn[domain] = self._used_up(waiting, now)
        change = ladder.observe(seen, now=now)
        if change is not None:
            self._changes.append((domain, change))
            self._effects.append(LevelChanged(domain, change))
        calm = seen is None or seen <= self._settings.cut_above
        if calm and not waiting and ladder.level is _NORMAL:
            del self._ladders[domain], self._worn[domain]

    def _used_up(self, waiting: list[Ticket], now: float) -> list[float]:
        """By class, how much of its patience the oldest who waits has used up; from 0."""
        used_up = [0.0] * len(Priority)
        for ticket in waiting:
            priority = ticket.spec.priority  # a client's own patience says nothing of others
            patience_ratio = (now - ticket.arrived_at) / self._waits_s_max[priority]
            life_ratio = (now - ticket.queued_at) / (ticket.lives_until - ticket.queued_at)
            used_up[priority] = max(used_up[priority], patience_ratio, life_ratio)
        return used_up

    def _saturation(self, domain: str, waiting: list[Ticket], now: float) -> float | None:
        workers: dict[WorkerId, Worker] = {}
        for pool in self._pools.live:
            if pool.domain == domain:
                workers |= pool.members
        hold_ratio = 0.0
        for ticket in waiting:
            ratio = (now - ticket.arrived_at) / ticket.ttft_target_s
            hold_ratio = max(hold_ratio, ratio)
        held = total = 0.0
        duty_min: float | None = None
        for worker in workers.values():
            if worker.valid_until <= now:
                worker.refresh(now)
            if self._paces:
                duty_min = min(duty_min or 1.0, worker.pace.duty)
            if not worker.unknown and worker.kv_total_tokens is not None:
                held += worker.kv_load_tokens
                total += worker.kv_total_tokens
        kv_ratio = held / total if total else None
        return saturation(hold_ratio=hold_ratio, duty_min=duty_min, kv_ratio=kv_ratio)

    # Deciding.

    def concerns(self, ticket: Ticket) -> bool:
        """Whether a ticket that finds no room may be touched at all, as things stand."""
        if not self._high:
            return False
        ladder = self._ladders.get(ticket.pool.domain)
        return ladder is not None and ladder.level is not _NORMAL

    def waits_in_time(self, ticket: Ticket, now: float) -> bool:
        """Whether a ticket is expected to have its first token in time, although it has to wait."""
        wait_s = self._flow.expected_wait_s(ticket, now=now)
        due_at = ticket.arrived_at + ticket.ttft_target_s - ticket.prefill_s
        return wait_s is not None and now + wait_s <= due_at

    def act_on(self, ticket: Ticket, *, fits: bool) -> Act:
        """Decide on a ticket that came and `concerns` is true of, and change it accordingly."""
        spec, before = ticket.spec, ticket.degraded
        asked = limit_tokens(spec)
        cut = None if before is None else before.max_tokens
        facts = Facts(
            priority=spec.priority,
            fits=fits,
            times_out=self._times_out(ticket),
            changeable=self._may_change(ticket),
            structured=spec.structured,
            generates=spec.endpoint not in PREFILL_ONLY,
            max_tokens=asked if cut is None else cut,
            fallback=self._fallback(ticket),
        )
        decision = self._ladders[ticket.pool.domain].decide(facts)
        if decision.max_tokens is None and cut is not None:  # its limits let it in so much shorter
            decision = replace(decision, max_tokens=cut)
        if decision.act is not _KEEP:
            ticket.degraded = decision
            self._counts[decision.act, spec.priority] += 1
        if decision.act in _CHANGING:
            self._change(ticket, decision)
        return decision.act

    def shorten(self, ticket: Ticket) -> bool:
        """Cut the answer of a ticket that its limits do not let in as it is; False: it may not be,
        or is short enough.
        """
        settings = self._settings
        spec, most = ticket.spec, settings.tokens_cap
        may = settings.enabled and (settings.structured or not spec.structured)
        if not may or not self._may_change(ticket) or ticket.output_tokens <= most:
            return False
        ticket.degraded = Decision(act=Act.CUT, level=Level.NORMAL, max_tokens=most)
        self._counts[Act.CUT, spec.priority] += 1
        self._change(ticket, ticket.degraded)
        return True

    def _times_out(self, ticket: Ticket) -> bool:
        """Whether those of its class who wait have done so until little of their patience is left.

        Seen, not predicted: how long a burst lasts nobody knows, and while it does the late line
        stands still.
        """
        worn = self._worn.get(ticket.pool.domain)
        return worn is not None and worn[ticket.spec.priority] >= _WORN_RATIO

    def _may_change(self, ticket: Ticket) -> bool:
        tenant = self._tenants.get(ticket.spec.tenant)
        return not ticket.spec.fixed and (tenant is None or tenant.degrade)

    def _change(self, ticket: Ticket, decision: Decision) -> None:
        """Give a ticket the figures, the lane and the pool of what it has become."""
        model = decision.model or ticket.pool.model
        self._homes.move(ticket, model, tokens_max=decision.max_tokens)

    def _fallback(self, ticket: Ticket) -> str | None:
        """The smaller model, as its workers name it, if a ticket of this size can go there now."""
        name = self._fallbacks.get(ticket.pool.model)
        if name is None or ticket.spec.endpoint in PREFILL_ONLY:
            return None
        model = self._pools.named(name)
        if model is None or model == ticket.pool.model:
            return None
        tenant = self._tenants.get(ticket.spec.tenant)
        open_to = None if tenant is None else allowed(tenant, self._models)
        if open_to is not None and model not in open_to:
            return None
        pool = self._pools.get(model, ticket.lane)
        ladder = self._ladders.get(pool.domain)
        if ladder is not None and ladder.level is not _NORMAL:
            return None  # it would only move the trouble
        return model if could_take(pool, ticket.kv_tokens) else None
