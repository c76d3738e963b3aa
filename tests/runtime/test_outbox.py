"""Writes of one turn of the loop: order, bound, and transports that closed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import cast

from router.runtime.outbox import Outbox


class Wire:
    """Stands for a transport, and remembers what was written."""

    def __init__(self, log: list[tuple[str, bytes]], name: str) -> None:
        self.closing = False
        self.broken = False
        self.aborted = False
        self._log = log
        self._name = name

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("the handler is closed")
        self._log.append((self._name, data))

    def writelines(self, pieces: Iterable[bytes]) -> None:
        self.write(b"+".join(pieces))


Log = list[tuple[str, bytes]]


def quiet() -> tuple[Log, Wire, Wire, Outbox]:
    """Wires of an outbox that has had nothing to write."""
    log: Log = []
    return log, Wire(log, "a"), Wire(log, "b"), Outbox(asyncio.get_running_loop())


async def wires() -> tuple[Log, Wire, Wire, Outbox]:
    """The same behind a turn with several writes: the next is likely to have several, too."""
    log, a, b, outbox = quiet()
    for _ in range(3):
        outbox.write(as_transport(b), b"0")
    await asyncio.sleep(0)
    log.clear()
    return log, a, b, outbox


def as_transport(wire: Wire) -> asyncio.Transport:
    return cast("asyncio.Transport", wire)


async def test_writes_go_out_in_their_order_at_the_end_of_the_turn() -> None:
    log, a, b, outbox = await wires()
    for wire, data in ((a, b"1"), (b, b"2"), (a, b"3")):
        outbox.write(as_transport(wire), data)
    assert log == []
    await asyncio.sleep(0)
    assert log == [("a", b"1"), ("b", b"2"), ("a", b"3")]


async def test_a_large_request_goes_out_at_once_behind_what_waits() -> None:
    log, a, b, outbox = await wires()
    outbox.write(as_transport(a), b"1")
    outbox.write_large(as_transport(b), b"head", b"body")
    assert log == [("a", b"1"), ("b", b"head+body")]
    outbox.write(as_transport(a), b"2")
    await asyncio.sleep(0)
    assert log[2:] == [("a", b"2")]


async def test_a_large_request_on_a_connection_that_is_gone_harms_nobody() -> None:
    log, a, b, outbox = await wires()
    a.closing = b.broken = True
    for wire in (a, b):
        outbox.write_large(as_transport(wire), b"head", b"body")
    assert log == []
    assert (a.aborted, b.aborted) == (False, True)


async def test_a_write_that_is_alone_in_its_turn_goes_out_at_once() -> None:
    log, a, b, outbox = quiet()
    for turn in range(3):
        outbox.write(as_transport(a if turn else b), b"%d" % turn)
        assert log[-1] == ("a" if turn else "b", b"%d" % turn)
        await asyncio.sleep(0)
    assert len(log) == 3


async def test_behind_a_write_that_went_out_at_once_others_wait_in_their_order() -> None:
    log, a, b, outbox = quiet()
    for wire, data in ((a, b"1"), (a, b"2"), (b, b"3"), (a, b"4")):
        outbox.write(as_transport(wire), data)
    assert log == [("a", b"1")]
    await asyncio.sleep(0)
    assert log == [("a", b"1"), ("a", b"2"), ("b", b"3"), ("a", b"4")]


async def test_after_a_turn_with_several_writes_the_first_of_the_next_waits_for_more() -> None:
    log, a, b, outbox = await wires()
    outbox.write(as_transport(a), b"1")
    outbox.write(as_transport(b), b"2")
    assert log == []
    await asyncio.sleep(0)
    assert log == [("a", b"1"), ("b", b"2")]


async def test_after_a_turn_with_one_write_the_next_goes_out_at_once_again() -> None:
    log, a, _, outbox = await wires()
    outbox.write(as_transport(a), b"1")
    assert log == []
    await asyncio.sleep(0)
    outbox.write(as_transport(a), b"2")
    assert log == [("a", b"1"), ("a", b"2")]


async def test_a_write_that_is_alone_on_a_broken_connection_cuts_that() -> None:
    log, a, b, outbox = quiet()
    a.broken = b.closing = True
    for wire in (a, b):
        outbox.write(as_transport(wire), b"1")
        await asyncio.sleep(0)
    assert log == []
    assert (a.aborted, b.aborted) == (True, False)


async def test_what_is_written_later_goes_out_in_a_later_turn() -> None:
    log, a, _, outbox = await wires()
    for data in (b"1", b"2"):
        outbox.write(as_transport(a), data)
        await asyncio.sleep(0)
    assert log == [("a", b"1"), ("a", b"2")]


async def test_many_writes_wait_for_as_many_more_but_not_for_ever() -> None:
    log, a, _, outbox = await wires()
    for turn in range(10):
        for _ in range(4):
            outbox.write(as_transport(a), b"%d" % turn)
        await asyncio.sleep(0)
        sent = (turn + 1) // 4 * 4  # turns, as four of them go out together
        assert [int(data) for _, data in log] == [n for n in range(sent) for _ in range(4)]


async def test_many_writes_wait_no_longer_than_others_follow() -> None:
    log, a, b, outbox = await wires()
    for _ in range(4):
        outbox.write(as_transport(a), b"1")
    await asyncio.sleep(0)
    outbox.write(as_transport(b), b"2")
    assert log == []
    await asyncio.sleep(0)
    assert log == [("a", b"1")] * 4 + [("b", b"2")]


async def test_much_is_not_held_so_that_transports_see_slow_readers() -> None:
    log, a, _, outbox = await wires()
    outbox.write(as_transport(a), b"x" * 200_000)
    assert log == []
    outbox.write(as_transport(a), b"y" * 200_000)
    assert [data[:1] for _, data in log] == [b"x", b"y"]
    outbox.write(as_transport(a), b"z")
    await asyncio.sleep(0)
    assert log[-1] == ("a", b"z")


async def test_so_many_small_writes_wait_for_no_other_turn() -> None:
    log, a, _, outbox = await wires()
    for _ in range(1_000):
        outbox.write(as_transport(a), b"x")
    assert log == []
    await asyncio.sleep(0)
    assert len(log) == 1_000


async def test_a_transport_that_closed_meanwhile_is_passed_over() -> None:
    log, a, b, outbox = await wires()
    outbox.write(as_transport(a), b"1")
    outbox.write(as_transport(b), b"2")
    a.closing = True
    await asyncio.sleep(0)
    assert log == [("b", b"2")]


async def test_flushing_writes_at_once_and_only_once() -> None:
    log, a, _, outbox = await wires()
    outbox.write(as_transport(a), b"1")
    outbox.flush()
    assert log == [("a", b"1")]
    await asyncio.sleep(0)
    assert log == [("a", b"1")]


async def test_a_write_that_fails_cuts_its_own_connection_and_no_other() -> None:
    log, a, b, outbox = await wires()
    a.broken = True
    for wire, data in ((b, b"1"), (a, b"2"), (b, b"3")):
        outbox.write(as_transport(wire), data)
    await asyncio.sleep(0)
    assert log == [("b", b"1"), ("b", b"3")]
    assert (a.aborted, b.aborted) == (True, False)
    outbox.write(as_transport(b), b"4")
    await asyncio.sleep(0)
    assert log[-1] == ("b", b"4")
