"""A worker's record and other routers: what they are told of it, and what they say."""

from __future__ import annotations

from math import inf

from router.core.peers import PeerLoad
from router.core.worker import Worker


def load_of(worker: Worker) -> PeerLoad:
    """The own account of `worker`, for other routers."""
    held, held_max = worker.kv_held_tokens, worker.kv_held_tokens_max
    return PeerLoad(worker.streams, worker.kv_reserved_tokens, held, held_max)


def hear(worker: Worker, load: PeerLoad, silent: PeerLoad, *, now: float) -> None:
    """Other routers said what they have on `worker`.

    Of `silent`, the last word of some, a part may still be there: reports will show.
    """
    peers = worker.peers
    worker.foreign.take_over(silent)
    peers.told(worker.streams, worker.kv_reserved_tokens)
    if load != peers.load:
        peers.load = load
        worker.mark(now)
    worker.valid_until = -inf
