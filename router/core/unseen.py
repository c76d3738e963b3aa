"""Plain answers, of which nothing is seen until they end: how far they are is predicted.

Their prompts are taken for prefilled when that was predicted. From then on each sample is taken to
grow by a token with each decode step of its worker. Where the worker does not say how much KV
memory is in use, reservations grow with that, in strides, so that they are ahead of it, up to what
the answer may have. Predicted steps are corrected by the streams that run beside (`pace.trim`) and
by how long the plain answers were that ended.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from router.core.classify import limit_tokens
from router.core.types import Ticket

if TYPE_CHECKING:
    from router.core.worker import Worker

# When or at which step something is due, with which charge of the worker, and of whom.
Entry = tuple[float, int, Ticket]

STRIDE_TOKENS: Final = 64  # of each sample that is reserved beyond what is expected of it
# Answers of fewer tokens tell little of the time that one takes.
_TOLD_TOKENS_MIN: Final = 16
# Answers that are longer than expected are believed sooner than those that are shorter.
_WEIGHT_UP: Final = 0.5
_WEIGHT_DOWN: Final = 0.1
_RATIO_MIN: Final = 0.05
_RATIO_MAX: Final = 4.0


def look(w: Worker, now: float) -> None:
    """Bring what is expected of the plain answers of `w` up to `now`."""
    known, silent = w.known_until > now, w.silent
    if known and not (silent and (silent[0][0] <= now or is_over(w, silent[0]))):
        return
    _step(w, now)
    while silent and (silent[0][0] <= now or is_over(w, silent[0])):
        entry = at, number, ticket = heappop(silent)
        if ticket.pending and not is_over(w, entry):
            w.prefilled(ticket, now=at)
            _begin(w, ticket, number, at, now)
    if not known:
        _grow(w)


def is_over(w: Worker, entry: Entry) -> bool:
    """Whether the attempt that `entry` is of ended; the next may be at `w` as well."""
    return entry[2].worker is not w or entry[2].charge_number != entry[1]


def resume(w: Worker, ticket: Ticket, *, now: float) -> None:
    """`ticket` runs on `w` since it was dispatched, perhaps long before it was charged."""
    assert ticket.dispatched_at is not None
    _step(w, now)
    ticket.began_step = w.steps - (now - ticket.dispatched_at) * w.steps_per_s


def _step(w: Worker, now: float) -> None:
    """Count the decode steps since the last time, at the pace that is predicted now."""
    step_s = w.rates.step_time_s(w.part * (w.streams - w.waiting), w.part * w.kv_held_tokens)
    w.steps_per_s = w.answer_ratio * w.pace.trim / step_s
    w.steps += (now - w.stepped_at) * w.steps_per_s
    w.stepped_at = now


def _begin(w: Worker, ticket: Ticket, number: int, at: float, now: float) -> None:
    """Its answer grows since `at`."""
    if ticket.began_step is None:
        ticket.began_step = w.steps - (now - at) * w.steps_per_s
    reserved = (ticket.kv_tokens - ticket.prompt_tokens) // ticket.spec.samples
    due = ticket.began_step + max(0, reserved - STRIDE_TOKENS)
    heappush(w.growing, (due, number, ticket))


def learn(w: Worker, ticket: Ticket, output_tokens: int | None, *, now: float) -> None:
    """A plain answer ended well with so many tokens, of all its samples; None: not said."""
    look(w, now)
    if output_tokens is None or ticket.began_step is None:
        return
    each = output_tokens / ticket.spec.samples
    expected = w.steps - ticket.began_step
    if each < _TOLD_TOKENS_MIN or expected < _TOLD_TOKENS_MIN:
        return
    error = each / expected - 1
    weight = _WEIGHT_UP if error > 0 else _WEIGHT_DOWN
    ratio = w.answer_ratio * (1 + weight * error)
    w.answer_ratio = min(_RATIO_MAX, max(_RATIO_MIN, ratio))


def _grow(w: Worker) -> None:
    """Reserve a stride more for each answer that comes near to what is reserved for it."""
    growing = w.growing
    while growing and (growing[0][0] <= w.steps or is_over(w, growing[0])):
        entry = due, number, ticket = heappop(growing)
        if is_over(w, entry):
            continue
        strides = int((w.steps - due) / STRIDE_TOKENS) + 1
        most = ticket.prompt_tokens + ticket.spec.samples * _output_tokens_max(w, ticket)
        wanted = ticket.kv_tokens + strides * STRIDE_TOKENS * ticket.spec.samples
        if wanted < most:
            heappush(growing, (due + strides * STRIDE_TOKENS, number, ticket))
        more = min(wanted, most) - ticket.kv_tokens
        if more > 0:
            w.reserve_more(ticket, more)


def _output_tokens_max(w: Worker, ticket: Ticket) -> int:
    """Tokens that a sample may have; where no limit was asked for, what the whole pool holds."""
    limited = limit_tokens(ticket.spec) is not None
    if limited or (ticket.degraded is not None and ticket.degraded.max_tokens is not None):
        return ticket.output_tokens
    left = (w.kv_total_tokens or 0) - ticket.prompt_tokens
    return max(ticket.output_tokens, left // ticket.spec.samples)
