"""Whether an urgent request may take the place of a less urgent one that a worker has begun on.

Nobody has seen a byte of the victim's answer, so it can be cancelled, queued again with its age and
served later; what is lost is the prefill that was done. That pays only rarely, as what is held back
in the router never has to be preempted. A candidate is a victim only if all of this holds:

    band       it is of a lower band than the newcomer
    unseen     it is dispatched, and no first byte came
    once       it was never preempted before
    young      done <= done_ratio_max, done = share of its prefill that is behind it
    needed     wait > slack: without its place the newcomer misses its target,
               slack = target at - now - prefill of the newcomer
    enough     wait after <= slack: with its place the newcomer meets it
    worth it   restart <= cost_ratio_max * (wait - wait after),
               restart = done * prefill of the victim + overhead

Waits are seconds until the newcomer's own prefill begins. Among victims the lowest band gives way
first, there the one with the cheapest restart, and of equals the one that came last.
Source: A17; "prefer holding back" and "never twice per victim" are its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.core.types import Ticket, TicketState
from router.qos_settings import PreemptSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A waiting request and what its future looks like. Times in seconds."""

    ticket: Ticket
    target_at: float  # when its first token is due
    prefill_s: float  # its own, on the workers in question
    wait_s: float  # until its prefill begins, when nobody is preempted; inf: unknown but long

    def slack_s(self, now: float) -> float:
        """The longest wait with which it is still in time; negative when it cannot be."""
        return self.target_at - now - self.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A dispatched request whose place the newcomer could take. Times in seconds."""

    ticket: Ticket
    prefill_s: float  # predicted, the cached prefix left out
    done_ratio: float  # 0 to 1, see `done_ratio`
    wait_after_s: float  # the newcomer's wait if this one were cancelled
    preempted: int  # how often it gave way before


def done_ratio(*, running_s: float, ahead_s: float, prefill_s: float) -> float:
    """The share of a prefill that is done, as far as the router can tell.

    `running_s` since dispatch, of which the prefills that its worker had to do first, `ahead_s`, do
    not count. A prompt that costs nothing is done at once.
    """
    if prefill_s <= 0:
        return 1.0
    return min(1.0, max(0.0, (running_s - ahead_s) / prefill_s))


def victim(
    newcomer: Newcomer, candidates: Iterable[Candidate], *, now: float, settings: PreemptSettings
) -> Ticket | None:
    """Who gives way to `newcomer`, or None: it waits, as it would have.

    The caller cancels the victim, keeps its place for the newcomer, and queues the victim again
    with its arrival time and one more preemption on its account.
    """
    if not settings.enabled:
        return None
    slack_s = newcomer.slack_s(now)
    if slack_s < 0 or newcomer.wait_s <= slack_s:
        return None
    best: Ticket | None = None
    best_key = (0, 0.0, 0)
    for candidate in candidates:
        restart_s = candidate.done_ratio * candidate.prefill_s + settings.overhead_s
        if not _may_give_way(candidate, newcomer, slack_s, restart_s, settings):
            continue
        ticket = candidate.ticket
        key = (int(ticket.spec.priority), -restart_s, ticket.number)
        if best is None or key > best_key:
            best, best_key = ticket, key
    return best


def _may_give_way(
    candidate: Candidate,
    newcomer: Newcomer,
    slack_s: float,
    restart_s: float,
    settings: PreemptSettings,
) -> bool:
    ticket = candidate.ticket
    gain_s = newcomer.wait_s - candidate.wait_after_s
    return (
        ticket.spec.priority > newcomer.ticket.spec.priority
        and ticket.state is TicketState.DISPATCHED
        and ticket.first_token_at is None
        and candidate.preempted == 0
        and candidate.done_ratio <= settings.done_ratio_max
        and candidate.wait_after_s <= slack_s
        and restart_s <= settings.cost_ratio_max * gain_s
    )
