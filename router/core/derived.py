"""What is derived of a worker's record for decisions: score, permits, pace.

It is costlier than a decision and moves slowly, so it is brought up to date a few dozen times per
second, and at once after a report or a mark. The figures stand in the worker itself.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from router.core import unseen

if TYPE_CHECKING:
    from router.core.worker import Worker

# The KV cliff of docs/policy.md: seconds that a request is expected to lose in a pool filled to k.
_CLIFF_S: Final = 0.05
_STEPS_PRICED: Final = 2
NO_LIMIT: tuple[float, ...] = (inf, inf, inf)
NOT_PACED: tuple[float, ...] = (-inf, -inf, -inf)
# Less prefill than this, of prompts that others have waiting, is what reports left behind: a prompt
# waits for a moment, and reports come each second.
_PENDING_NOISE_S: Final = 0.01
# Derived figures are at most this old: short beside a prefill, long beside a decision. While no
# prompt waits they change slowly, and in a large fleet deriving them is most of a decision's cost.
_REFRESH_S: Final = 0.02
_REFRESH_QUIET_S: Final = 0.2
# Prompts of plain answers may count as waiting for this much longer than predicted: taken out one
# by one, they would have every decision derive everything anew.
_LAPSE_S: Final = 0.005
# For so long a worker keeps the pace of a class of which nothing runs there any more.
_CLASS_KEPT_S: Final = 5.0


def refresh(w: Worker, now: float) -> bool:
    """Bring the derived figures up to date; they hold until `valid_until` or a change.

    Returns True, so that `valid_until > now or refresh(now)` reads as a condition.
    """
    if w.plain or w.silent:
        unseen.look(w, now)
    foreign, peers = w.foreign, w.peers
    rates, part = w.rates, w.part
    if w.fresh_until <= now and foreign.known:
        foreign.forget()
    alone, others_streams = peers.none, foreign.streams + peers.load.streams
    load, total, usable = w.kv_load_tokens, w.kv_total_tokens, w.kv_usable_tokens
    if total is None or usable is None:
        w.kv_admitted_tokens, cliff_s = inf, 0.0
    else:
        others = load - w.kv_reserved_tokens
        w.kv_admitted_tokens = usable - others  # below zero when others overfill the pool
        if not alone:
            left, reserved = w.kv_admitted_tokens, w.kv_reserved_tokens
            w.kv_admitted_tokens = peers.kv_max_tokens(reserved, left)
        k = min(0.99, load / total)
        cliff_s = _CLIFF_S * k / (1 - k)
    paced = _pace(w, others_streams, now)
    most = w.concurrency_max if w.out_until <= now else 0
    if not alone:
        most = min(most, peers.streams_max(w.streams, most - int(others_streams)))
    w.streams_max = most
    if paced:
        urgent_at, others_at, late_at = w.paced_until
        w.permits = most * (urgent_at <= now), most * (others_at <= now), most * (late_at <= now)
    else:
        w.permits = most, most, most
    w.unknown = w.known_until <= now
    streams = w.streams + 1
    step_s = rates.step_time_s(part * (streams + others_streams), part * load)
    own_load = max(0.0, load - (foreign.kv_tokens + peers.load.kv_reserved_tokens))
    own_step_s = rates.step_time_s(part * streams, part * own_load)
    pending_s = cliff_s + part * rates.prefill_s * foreign.pend_tokens
    foreign_s = pending_s + _STEPS_PRICED * (step_s - own_step_s)
    factor = w.cost if now >= w.warm_at else w.cost / w.share(now)
    w.factor = factor
    w.score = factor * (foreign_s + _STEPS_PRICED * own_step_s)
    w.score_foreign = factor * foreign_s
    w.score_per_s = factor if w.waiting else 0.0
    w.score_per_token = part * factor * rates.prefill_s
    w.score_per_pair = part * factor * rates.attention_s / 2
    w.valid_until = _next_change(w, now, paced=paced)
    return True


def _pace(w: Worker, others_streams: float, now: float) -> bool:
    """Bring prefill credit and the allowance for waiting prompts up to date.

    True: its streams are so many that `paced_until` says something.
    """
    pacing, foreign, rates = w.pacing, w.foreign, w.rates
    w.paced_until = NOT_PACED
    if not pacing.enabled or w.is_router:  # a router paces its own workers
        w.pend_admitted_tokens = NO_LIMIT
        return False
    pend, prefill_s = foreign.pend_tokens, rates.prefill_s
    w.pend_foreign = pend * prefill_s > _PENDING_NOISE_S
    per_s = 1 / prefill_s
    others = pacing.prefill_ahead_s * per_s - pend
    w.pend_admitted_tokens = pacing.prefill_ahead_urgent_s * per_s - pend, others, others
    streaming = w.streams - w.waiting
    held = foreign.kv_scale * (w.kv_held_tokens + w.peers.load.kv_held_tokens) + foreign.kv_tokens
    step_s = rates.step_time_s(streaming + others_streams, held)
    w.tpot_target_s = target_s = _tpot_target_s(w, others_streams, now)
    pace = w.pace
    pace.earn(pacing, step_s=step_s, tpot_s=target_s, now=now)
    if streaming <= pacing.streams_free:
        return False
    others_s = pacing.credit_resume_s if pace.saving else pacing.credit_kept_s
    w.paced_until = (
        pace.above_at(-pacing.overdraft_s, now),
        pace.above_at(others_s, now),
        pace.above_at(max(others_s, pacing.credit_kept_late_s), now),
    )
    return True


def _tpot_target_s(w: Worker, others_streams: float, now: float) -> float:
    """The tightest target of the classes that run here, or came lately and so will again.

    A batch that grew at the pace of others is not thinned when an urgent stream comes. Of all
    classes while nothing runs, and while others' streams do, whose class nobody tells.
    """
    classes = w.pacing.by_tpot_target
    if others_streams < 1:
        since, by_class, came_at = now - _CLASS_KEPT_S, w.by_class, w.came_at
        for priority, target_s in classes:
            if by_class[priority] or came_at[priority] > since:
                return target_s
    return classes[0][1]


def _next_change(w: Worker, now: float, *, paced: bool) -> float:
    at = now + (_REFRESH_S if w.waiting or now < w.warm_at else _REFRESH_QUIET_S)
    if w.silent:
        at = min(at, max(w.silent[0][0], now + _LAPSE_S))
    if now < w.out_until < at:
        at = w.out_until
    if paced:
        for moment in w.paced_until:
            if now < moment < at:
                at = moment
    if now < w.fresh_until < at:  # known_until is the same moment, or past
        at = w.fresh_until
    return at
