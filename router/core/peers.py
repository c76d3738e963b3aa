"""What another router says that it has put on a worker.

Figures of others come a fraction of a second late and are never mixed with the own account: they
are added to it where a decision asks for the load of all, and taken out of reports as the own
account is, so that what remains there is load that nobody told of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from router.contract import WorkerId
from router.core.types import Priority


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """A router's account of one worker, or the sum of several routers'.

    Prompts that wait for prefill are no part of it: they are done in less time than figures take
    to come, so counting them sends all routers to whoever had none a moment ago.
    """

    streams: int = 0
    kv_reserved_tokens: int = 0  # promised, what is held included
    kv_held_tokens: int = 0
    kv_held_tokens_max: int = 0

    def __add__(self, other: PeerLoad) -> PeerLoad:
        return PeerLoad(
            self.streams + other.streams,
            self.kv_reserved_tokens + other.kv_reserved_tokens,
            self.kv_held_tokens + other.kv_held_tokens,
            self.kv_held_tokens_max + other.kv_held_tokens_max,
        )


@dataclass(frozen=True, slots=True)
class PeerLine:
    """Whose requests wait for a common limit at a router, and what it was granted there."""

    key: str  # of the limit
    priority: Priority
    began: float  # seconds on that router's clock; what was granted counts from here
    at: float  # when this was said, on the same clock
    granted: float  # units
    tenants: Mapping[str, float]  # weights, of so many at most
    more: float = 0.0  # weight of those that are not named


NO_LOAD: Final = PeerLoad()
NOBODY: Final[Mapping[WorkerId, PeerLoad]] = MappingProxyType({})


@dataclass(slots=True)
class Peers:
    """Other routers, as one worker's record knows them.

    Between two words from the others a router that does not own the worker takes only its part of
    the room that was left, so that several at once cannot overfill it; and always one request.
    """

    load: PeerLoad = NO_LOAD
    sharers: int = 1  # how many send here without asking; 1: this router owns it, or is alone
    # The own account when others were last heard of, or less if it has shrunk since.
    streams_told: int = 0
    kv_told_tokens: int = 0

    @property
    def none(self) -> bool:
        """Whether nobody else sends here, as far as is known."""
        return self.sharers == 1 and self.load is NO_LOAD

    def told(self, streams: int, kv_reserved_tokens: int) -> None:
        """There is news of what others have; this is the own account of the moment."""
        self.streams_told, self.kv_told_tokens = streams, kv_reserved_tokens

    def streams_max(self, streams: int, left: int) -> int:
        """Own streams may reach this, when `left` is what others leave of the worker."""
        told = self.streams_told = min(self.streams_told, streams)
        if self.sharers == 1 or streams == told:
            return left
        return told + max(0, left - told) // self.sharers

    def kv_max_tokens(self, reserved: int, left: float) -> float:
        """The same for own reservations."""
        told = self.kv_told_tokens = min(self.kv_told_tokens, reserved)
        if self.sharers == 1 or reserved == told:
            return left
        return min(left, told + max(0.0, left - told) / self.sharers)
