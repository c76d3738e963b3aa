"""Shadow mode: a second policy is asked about each dispatch and decides nothing.

It sees what the live policy saw: the same ticket, the same expected prefix hits, the accounts
before the dispatch is charged, and of the group of workers from which the live one chose exactly
those at which it looked: all, or the sample of a large group, or own ones and those that it may
borrow. Their figures were just brought up to date, so asking again only reads; draws come from a
random of its own. Whatever the shadow answers, no account, timer or draw of the live policy is
another one than without it. `round_robin` in the shadow goes by the turns that really happened.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Final

from router.config import PolicySettings
from router.contract import WorkerId
from router.core.score import Hits, Pick, expected_hit, policy
from router.core.types import Ticket
from router.core.worker import Worker

_RECENT_MAX: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One dispatch on which the two policies differed."""

    at: float
    request_id: str
    live: WorkerId
    shadow: WorkerId
    ttft_difference_s: float  # predicted: the shadow's minus the live one's


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowView:
    """A pair of policies and how far they agreed since the pair was configured."""

    live: str
    shadow: str
    agreed: int
    differed: int
    sooner: int  # of these: the shadow's worker was predicted to answer sooner
    ttft_difference_s_total: float  # over those that differed; above 0 the shadow is slower
    recent: tuple[Difference, ...]  # the last ones, oldest first


class Shadow:
    """One pair of policies, live and shadow, under one configuration."""

    def __init__(self, settings: PolicySettings) -> None:
        assert settings.shadow is not None
        self.settings = settings
        asked = settings.model_copy(update={"name": settings.shadow})
        self._pick: Pick = policy(asked, Random(f"{settings.seed}/shadow"))
        self._agreed = self._differed = self._sooner = 0
        self._difference_s = 0.0
        self._recent: deque[Difference] = deque(maxlen=_RECENT_MAX)

    def look(
        self, ticket: Ticket, chosen: Worker, seen: list[Worker], hits: Hits, *, now: float
    ) -> None:
        """Compare with the live choice among `seen`, before the ticket is charged to `chosen`."""
        other = self._pick(list(dict.fromkeys(seen)), ticket, hits, now)
        assert other is not None, "the live choice itself has room"
        if other is chosen:
            self._agreed += 1
            return
        live_s = chosen.ttft_s(ticket, expected_hit(hits, chosen), now=now)
        difference_s = other.ttft_s(ticket, expected_hit(hits, other), now=now) - live_s
        self._differed += 1
        self._sooner += difference_s < 0
        self._difference_s += difference_s
        self._recent.append(
            Difference(
                at=now,
                request_id=ticket.spec.request_id,
                live=chosen.id,
                shadow=other.id,
                ttft_difference_s=difference_s,
            )
        )

    def view(self) -> ShadowView:
        """The counts so far."""
        assert self.settings.shadow is not None
        return ShadowView(
            live=self.settings.name,
            shadow=self.settings.shadow,
            agreed=self._agreed,
            differed=self._differed,
            sooner=self._sooner,
            ttft_difference_s_total=self._difference_s,
            recent=tuple(self._recent),
        )
