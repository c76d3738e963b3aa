"""What relays and their brain say to each other, as bytes.

A frame is its length, four bytes, and a JSON array of messages; a message is an array of its kind
and its fields. One frame carries all that a turn of the loop has to say: encoded and decoded by one
call of a library in C each, a message costs a third of what `struct` takes for it.

Both ends are of one release, and the socket is private. What is checked is the shape of a message:
a frame that is not as it must be is a fault of ours, and ends its link before anything is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import orjson

from router.runtime.malformed import MalformedFrame
from router.runtime.packing import (
    BOOL,
    DECISION,
    FAILURE,
    FLOAT,
    GRANTED,
    INT,
    LANE,
    OUTCOME,
    REASON,
    REFUSAL,
    RUN,
    SPEC,
    STR,
    STR_OR_NONE,
    STRS,
    USAGE,
    Check,
    OrNone,
    read_each,
)

VERSION: Final = 4
FRAME_BYTES_MAX: Final = 2**26
_LENGTH: Final = Struct("<I")
_LENGTH_BYTES: Final = 4

Message = tuple[Any, ...]

# Kinds. From a relay:
# Either way: version, process id, number (0: the brain), a token of a brain's start (from a relay:
# of the one whose workers it knows, 0: of none).
HELLO: Final = 1
KNOWN: Final = 2  # a worker that it knows, from before the brain began; fields as of WORKER
RUNS: Final = 3  # a request that runs, likewise: number, spec, how far it is
ANNOUNCED: Final = 4  # that was all of these
SUBMIT: Final = 5  # number, spec
FIRST_TOKEN: Final = 6  # number
TOKENS: Final = 7  # number, output tokens
FAILED: Final = 8  # number, failure
PREEMPTED: Final = 9  # number
FINISHED: Final = 10  # number, outcome, reason, usage
EDGE_REFUSED: Final = 11  # reason, request id, target
PING: Final = 12  # CPU seconds, resident bytes and connections of the relay
RESUBMIT: Final = 13  # number, spec, what limits granted under a brain before
UNUSED: Final = 14  # spec, what limits granted, of one that ended while it waited for a brain
RESUMED: Final = 15  # that was all that waited when requests could come again
# From the brain:
# Registration (JSON), priority order, router id, whether it drains, whether it is of the file.
WORKER: Final = 20
WORKER_GONE: Final = 21  # worker id
READY: Final = 22  # requests may come
DISPATCH: Final = 23  # number, lane, worker id, decision, what its limits granted
JUDGED: Final = 24  # number, whether another attempt follows
REFUSE: Final = 25  # number, refusal
PREEMPT: Final = 26  # number
CUT: Final = 27  # number, reason, message
CONFIG: Final = 28  # the configuration in force (JSON)
PONG: Final = 29
WORKERS: Final = 30  # worker ids: there are no others
RESERVED: Final = 31  # number, what limits granted; it waits for a worker

# Checks of the fields of each kind. The first is the kind, which is known then.
_SHAPES: Final[dict[int, tuple[Check, ...]]] = {
    HELLO: (INT, INT, INT, INT, INT),
    KNOWN: (INT, STR, STR_OR_NONE, STR_OR_NONE, BOOL, BOOL),
    RUNS: (INT, INT, SPEC, RUN),
    ANNOUNCED: (INT,),
    SUBMIT: (INT, INT, SPEC),
    RESUBMIT: (INT, INT, SPEC, GRANTED),
    UNUSED: (INT, SPEC, GRANTED),
    RESUMED: (INT,),
    FIRST_TOKEN: (INT, INT),
    TOKENS: (INT, INT, INT),
    FAILED: (INT, INT, FAILURE),
    PREEMPTED: (INT, INT),
    FINISHED: (INT, INT, OUTCOME, OrNone(REASON), OrNone(USAGE)),
    EDGE_REFUSED: (INT, REASON, STR, STR),
    PING: (INT, FLOAT, INT, INT),
    WORKER: (INT, STR, STR_OR_NONE, STR_OR_NONE, BOOL, BOOL),
    WORKER_GONE: (INT, STR),
    READY: (INT,),
    DISPATCH: (INT, INT, LANE, STR, OrNone(DECISION), OrNone(GRANTED)),
    JUDGED: (INT, INT, BOOL),
    REFUSE: (INT, INT, REFUSAL),
    PREEMPT: (INT, INT),
    CUT: (INT, INT, REASON, STR),
    CONFIG: (INT, STR),
    PONG: (INT,),
    WORKERS: (INT, STRS),
    RESERVED: (INT, INT, GRANTED),
}


def frame(messages: Sequence[Message]) -> bytes:
    """Encode messages into one frame."""
    body = orjson.dumps(messages)
    return _LENGTH.pack(len(body)) + body


def messages_in(body: bytes) -> list[list[Any]]:
    """The messages of a frame, each its kind and its fields. Raises MalformedFrame."""
    try:
        messages = orjson.loads(body)
    except ValueError as exc:
        raise MalformedFrame(f"not JSON: {exc}") from exc
    if type(messages) is not list:
        raise MalformedFrame("not a list of messages")
    for message in messages:
        if type(message) is not list or not message or type(message[0]) is not int:
            raise MalformedFrame(f"{message!r:.80} is no message")
        checks = _SHAPES.get(message[0])
        if checks is None:
            raise MalformedFrame(f"{message!r:.80} has no known kind")
        read_each(message, checks)
    return messages


class Unframer:
    """Finds the frames in bytes as they are read."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of the frames that are whole now. Raises MalformedFrame."""
        held = self._held + data if self._held else data
        bodies: list[bytes] = []
        at, end = 0, len(held)
        while end - at >= _LENGTH_BYTES:
            length: int = _LENGTH.unpack_from(held, at)[0]
            if length > FRAME_BYTES_MAX:
                raise MalformedFrame(f"a frame of {length} bytes")
            start = at + _LENGTH_BYTES
            if end - start < length:
                break
            at = start + length
            bodies.append(held[start:at])
        self._held = held[at:]
        return bodies
