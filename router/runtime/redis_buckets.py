"""Limits kept in Redis, for all routers together, in one round trip per request at most.

All asks of one turn of the loop go in one call of a script, which decides them in order; what is to
be settled goes with them, or a moment later when nobody asks. There is one connection. A
reply that is overdue closes it, and with it goes everything that is under way: those asks are
decided by `AwayBuckets` at once, and given back in Redis when it is there again, for nobody knows
whether it took them. While there is no connection, nothing waits. A task of its own looks for one,
first soon, then more rarely; it counts when a trial of the script has been answered in time.

Settlements are told once Redis has confirmed them, however long it is away, up to a bound. The
reservations of requests that run long are renewed. Where the script itself fails, Redis is not
away: the asks of that call are decided here, its settlements told one by one, each a last time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final

import hiredis

from router.config import Config
from router.core.bucket import Ask, Rule, Settlement, Verdict
from router.limit_settings import LimitsSettings
from router.metrics_limits import LimitsView
from router.runtime.away import AwayBuckets
from router.runtime.bucket_store import Decided
from router.runtime.redis_errors import RedisAway
from router.runtime.redis_link import Guard, GuardState, RedisLink
from router.runtime.redis_scripts import Codec, key_of, verdicts
from router.runtime.resp import Endpoint, RespConnection
from router.runtime.settling import Held, Orphans, Unsettled

_log = logging.getLogger(__name__)

_NAME: Final = "laneway-limits"  # of its connection, at the server
_PER_CALL_MAX: Final = 64  # the server does nothing else meanwhile: some 2 ms
_SETTLE_WITHIN_S: Final = 0.01
_RENEW_EVERY_S: Final = 1.0
# A loop that is so late itself has perhaps only not read yet what came in time.
_LATE_S: Final = 0.005
_READ_FIRST_S: Final = 0.001
_RENEWALS_MAX: Final = 1024  # per round
_CLOSE_WITHIN_S: Final = 1.0
_WARN_EVERY_S: Final = 60.0
# What an error of the script begins with; all others say that the server can't serve now.
_SCRIPT_ERRORS: Final = ("ERR ", "WRONGTYPE ")


class _Batch:
    """Asks, settlements and renewals that are under way together."""

    __slots__ = (
        "alone", "asks", "deciders", "due_at", "in_full", "renewals", "sent_at", "settlements",
    )  # fmt: skip

    def __init__(
        self,
        asks: list[Ask],
        deciders: list[Decided],  # whom to tell of each
        settlements: list[Settlement],
        renewals: Sequence[Ask] = (),
        *,
        sent_at: float,
        within_s: float,
        alone: bool = False,
    ) -> None:
        self.asks = asks
        self.deciders = deciders
        self.settlements = settlements
        self.renewals = renewals
        self.sent_at = sent_at
        self.due_at = sent_at + within_s
        self.alone = alone  # sent once more by itself, because the script failed
        self.in_full = False  # with the script, which the server did not know


class RedisBuckets:
    """The store of limits in Redis. Make it and `start` it inside the loop that uses it.

    `away` decides while Redis is away; its `replicas` is the number of routers that live.
    """

    def __init__(
        self,
        link: RedisLink,
        settings: LimitsSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.away = AwayBuckets(settings.away, now=clock())
        self._link = link
        self._timeout_s = settings.timeout_s
        self._lease_s = settings.lease_s
        self._loop = loop
        self._clock = clock
        self._guard = Guard(link.settings.retry_s, link.settings.retry_s_max, state=GuardState.OPEN)
        self._was_away = False  # and the log says so
        self._warn_at = -inf  # not before it is a failure of the script told again
        self._view = LimitsView()
        self._connection: RespConnection | None = None
        self._endpoint: Endpoint | None = None  # of the last connection
        self._trial_key = key_of(link.settings.key_prefix, "trial")
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._asks: list[Ask] = []  # of this turn, and whom to tell of each
        self._deciders: list[Decided] = []
        self._adopted: list[Ask] = []  # that Redis is to hear of before it hears of their ends
        self._batches: dict[_Batch, None] = {}
        self._orphans = Orphans()
        self._held = Held()
        self._unsettled = Unsettled()
        self._tell_timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._codec = Codec(link.settings.key_prefix)

    async def start(self) -> None:
        """Connect, and keep it so. Returns when Redis answers or the first trial has failed."""
        await self._try_to_connect()
        self._keeper = self._loop.create_task(self._keep_connected())

    async def aclose(self) -> None:
        """Tell Redis what is to be settled, if it answers within a second, and end."""
        if self._keeper is not None:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        ends_at = self._loop.time() + _CLOSE_WITHIN_S
        while self._connection is not None and (self._unsettled or self._batches):
            self._tell()
            await asyncio.sleep(_SETTLE_WITHIN_S)
            if self._loop.time() > ends_at:
                break
        self._drop_connection()
        for timer in (self._tell_timer, self._watch):
            if timer is not None:
                timer.cancel()

    def reserve(self, ask: Ask, decided: Decided) -> None:
        """Decide `ask`: in Redis with all others of this turn, or at once while it is away."""
        if self._connection is None:
            self._decide_here(ask, decided)
            return
        if not self._asks:
            self._loop.call_soon(self._send_asks)
        self._asks.append(ask)
        self._deciders.append(decided)

    def adopt(self, ask: Ask) -> None:
        """Renew what a process before this one was granted; if that was from a lease, which ends
        with its process, Redis gets to know it by that.
        """
        self._held.adopt(ask, self._clock())
        self._adopted.append(ask)
        self._tell_soon()

    def reclaim(self, prefix: str, *, own: str) -> None:
        """Take back permits of processes that died, when a limit on them denies something."""
        self._orphans.look_for(prefix, own=own, until=self._clock() + self._lease_s)

    def settle(self, settlement: Settlement) -> None:
        """End a reservation, in Redis or where else it was made, or change one in Redis."""
        if not settlement.ends:
            self._unsettled.add(settlement)
            self._tell_soon()
            return
        known = self._held.ended(settlement)
        if known is None:
            self.away.settle(settlement, self._clock())
            return
        self._unsettled.add(known)
        self._tell_soon()

    def on_config(self, config: Config) -> None:
        """Time-out and policies may change; the connection stays."""
        self._timeout_s = config.limits.timeout_s
        self.away.on_settings(config.limits.away)

    def view(self) -> LimitsView:
        """What its series are made from."""
        view = self._view
        view.away = self._guard.state.value
        view.held = len(self._held)
        view.unsettled = len(self._unsettled) + sum(len(b.settlements) for b in self._batches)
        view.settlements_lost = self._unsettled.lost
        return view

    # Asks

    def _decide_here(self, ask: Ask, decided: Decided) -> None:
        _tell_verdict(decided, self.away.reserve(ask, self._clock()))

    def _send_asks(self) -> None:
        """Send what was asked in this turn, with what is to be settled, which makes room. All that
        leases gave back goes before it: for that an ask may have come again.
        """
        asks, deciders = self._asks, self._deciders
        self._asks, self._deciders = [], []
        if self._connection is None:  # lost since they asked
            for ask, decided in zip(asks, deciders, strict=True):
                self._decide_here(ask, decided)
            return
        while self._unsettled.first > _PER_CALL_MAX:
            self._send([], [])
        if len(asks) <= _PER_CALL_MAX:
            self._send(asks, deciders)
            return
        for first in range(0, len(asks), _PER_CALL_MAX):
            last = first + _PER_CALL_MAX
            self._send(asks[first:last], deciders[first:last])

    def _send(self, asks: list[Ask], deciders: list[Decided], renewals: Sequence[Ask] = ()) -> None:
        """Run the script for `asks` and for some of what is to be settled."""
        now, within_s = self._loop.time(), self._timeout_s
        adopted, self._adopted = self._adopted, []
        for some in _parts(adopted):  # in a call it would come behind what ends it
            self._run(_Batch([], [], [], some, sent_at=now, within_s=within_s))
        settlements = self._unsettled.take(_PER_CALL_MAX)
        self._run(_Batch(asks, deciders, settlements, renewals, sent_at=now, within_s=within_s))

    def _run(self, batch: _Batch) -> None:
        self._batches[batch] = None
        if self._watch is None:
            self._watch = self._loop.call_at(batch.due_at, self._look_at_oldest)
        self._send_batch(batch)

    def _send_batch(self, batch: _Batch) -> None:
        if self._connection is not None:
            asks, settlements, renewals = batch.asks, batch.settlements, batch.renewals
            call = self._codec.call(asks, settlements, renewals, in_full=batch.in_full)
            self._connection.send_packed(call, partial(self._replied, batch))

    def _replied(self, batch: _Batch, answer: Any) -> None:
        if not isinstance(answer, hiredis.ReplyError):
            self._answered(batch, answer)
        elif str(answer).startswith("NOSCRIPT") and not batch.in_full:  # restarted, or flushed
            self._send_in_full(batch)
        elif _is_of_script(answer):
            self._script_failed(batch, str(answer))
        else:
            self._lose(str(answer))

    def _send_in_full(self, batch: _Batch) -> None:
        """Send it again, with the script. That may come behind what was sent since and was decided
        as somebody else had taught the server the script: no word on a reservation is said again
        that a later one has replaced.
        """
        batch.in_full = True
        batches, later = list(self._batches), set[str]()
        for each in batches[batches.index(batch) + 1 :]:
            later.update([one.reservation_id for one in each.settlements])
            later.update([ask.reservation_id for ask in each.asks])
        batch.settlements = [
            one for one in batch.settlements if one.ends or one.reservation_id not in later
        ]
        self._send_batch(batch)

    def _look_at_oldest(self, *, again: bool = False) -> None:
        """Lose the connection if a reply is overdue. One timer serves all, it is seldom set."""
        self._watch = None
        oldest = next(iter(self._batches), None)
        if oldest is None:
            return
        late_s = self._loop.time() - oldest.due_at
        if late_s < 0:
            self._watch = self._loop.call_at(oldest.due_at, self._look_at_oldest)
        elif late_s > _LATE_S and not again:
            look = partial(self._look_at_oldest, again=True)
            self._watch = self._loop.call_later(_READ_FIRST_S, look)
        else:
            self._lose("no answer in time")

    def _answered(self, batch: _Batch, answer: bytes) -> None:
        try:
            found = verdicts(batch.asks, answer)
        except (TypeError, ValueError) as exc:
            self._script_failed(batch, str(exc))
            return
        del self._batches[batch]
        if self._unsettled:
            self._tell_next()
        if not found:
            return
        self._view.waited(self._loop.time() - batch.sent_at, len(found))
        now = self._clock()
        for place, ask in enumerate(batch.asks):
            decided, verdict = batch.deciders[place], found[place]
            if verdict.granted:
                self._held.add(ask, now)
            elif (rules := self._orphans.to_look_at(ask, now)) and self._connection is not None:
                self._reclaim(self._connection, rules, ask, decided)
                continue
            _tell_verdict(decided, verdict)

    def _reclaim(
        self, connection: RespConnection, rules: list[Rule], ask: Ask, decided: Decided
    ) -> None:
        """Look for permits of processes that died, and ask once more."""
        sent_at = self._loop.time()
        again = _Batch([ask], [decided], [], sent_at=sent_at, within_s=self._timeout_s)
        self._batches[again] = None  # whatever happens meanwhile, it is decided
        keys = [self._codec.key(rule) for rule in rules]
        for key in keys[:-1]:
            connection.send((b"ZRANGE", key, b"0", b"-1"), partial(self._found, connection, key))

        def found_last(answer: Any) -> None:
            self._found(connection, keys[-1], answer)
            del self._batches[again]
            self.reserve(ask, decided)

        connection.send((b"ZRANGE", keys[-1], b"0", b"-1"), found_last)
        if self._watch is None:
            self._watch = self._loop.call_at(again.due_at, self._look_at_oldest)

    def _found(self, connection: RespConnection, key: bytes, members: Any) -> None:
        """These hold permits."""
        if isinstance(members, hiredis.ReplyError):
            return
        name = self._codec.reservation_in
        if dead := [each for each in members if self._orphans.has(name(each), self._held)]:
            _log.info("%d permits of a process that died are taken back", len(dead))
            connection.send((b"ZREM", key, *dead), _no_matter)

    def _script_failed(self, batch: _Batch, why: str) -> None:
        """What a call did before it failed nobody knows. One settlement may have been the cause."""
        del self._batches[batch]
        now, within_s = self._loop.time(), self._timeout_s
        if now >= self._warn_at:
            self._warn_at = now + _WARN_EVERY_S
            _log.warning("the script of the limits failed in redis: %s", why)
        if batch.alone:
            self._unsettled.give_up(batch.settlements)
        else:
            undone = [ask.given_back() for ask in batch.asks if not ask.extends]
            # One that ends nothing would now come behind what was asked since; the next one counts.
            ends = [settlement for settlement in batch.settlements if settlement.ends]
            for one in (*ends, *undone):
                self._run(_Batch([], [], [one], sent_at=now, within_s=within_s, alone=True))
        for ask, decided in zip(batch.asks, batch.deciders, strict=True):
            self._decide_here(ask, decided)

    # Settlements and leases

    def _tell_soon(self) -> None:
        news = self._unsettled or self._adopted
        if self._tell_timer is None and self._connection is not None and news:
            self._tell_timer = self._loop.call_later(_SETTLE_WITHIN_S, self._tell)

    def _tell_next(self) -> None:
        """Settlements have arrived. Of the many that there are after an outage the next ones are
        sent only now, so that asks need not wait behind all of them.
        """
        if len(self._unsettled) >= _PER_CALL_MAX and self._tell_timer is None:
            self._tell()
        else:
            self._tell_soon()

    def _tell(self) -> None:
        """Send some settlements, if no asks took them along."""
        self._tell_timer = None
        if self._connection is not None and (self._unsettled or self._adopted):
            self._send([], [])

    def _renew_leases(self) -> None:
        for some in _parts(self._held.to_renew(self._clock(), _RENEWALS_MAX)):
            self._send([], [], some)

    # The connection

    async def _keep_connected(self) -> None:
        while True:
            try:
                if self._connection is None:
                    await asyncio.sleep(self._guard.trial_in_s(self._clock()))
                    await self._try_to_connect()
                else:
                    await self._look_after_it()
            except Exception as exc:  # whatever it is, limits come back when it is over
                _log.exception("looking after the connection to redis failed")
                if self._connection is None:
                    self._failed(str(exc))
                await asyncio.sleep(_RENEW_EVERY_S)

    async def _look_after_it(self) -> None:
        """After a while, or once the connection is lost."""
        self._lost.clear()
        timer = self._loop.call_later(_RENEW_EVERY_S, self._lost.set)
        try:
            await self._lost.wait()
        finally:
            timer.cancel()
        if self._connection is not None:
            self._renew_leases()
            await self._follow_master()

    async def _follow_master(self) -> None:
        """Leave a master that Sentinel has replaced. It takes writes for another eight seconds or
        so, and loses them; of a Cluster, a node that was replaced says so itself.
        """
        if self._link.settings.mode != "sentinel":
            return
        try:
            endpoint = await self._link.endpoint(self._trial_key)
        except RedisAway:
            return  # no Sentinel answers, but the master may
        if endpoint != self._endpoint:
            self._lose(f"the master is now {endpoint}")

    async def _try_to_connect(self) -> None:
        if not self._guard.allows(self._clock()):
            return
        settings = self._link.settings
        try:
            endpoint = await self._link.endpoint(self._trial_key)
            connection = await RespConnection.open(endpoint, settings, name=_NAME, loop=self._loop)
        except RedisAway as exc:
            self._failed(str(exc))
            return
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await self._prepare(connection)
            async with asyncio.timeout(self._timeout_s):
                await connection.ask_packed(self._codec.call())
        except (OSError, TimeoutError, hiredis.HiredisError) as exc:
            connection.close()
            self._failed(f"{endpoint}: {str(exc) or 'no answer in time'}")
            return
        except BaseException:
            connection.close()
            raise
        self._connected(connection, endpoint)

    async def _prepare(self, connection: RespConnection) -> None:
        """See that it takes writes, and teach it the script. Only then what an ask does is timed:
        one round trip with a script that is known.
        """
        await connection.ask(b"SET", self._trial_key.encode(), b"1", b"PX", b"60000")
        await connection.ask(b"SCRIPT", b"LOAD", self._codec.script)

    def _connected(self, connection: RespConnection, endpoint: Endpoint) -> None:
        connection.on_lost = lambda: self._lose(connection.why_lost)
        self._connection, self._endpoint = connection, endpoint
        self._guard.succeeded()
        _log.info("limits are kept in redis at %s%s", endpoint, ", again" * self._was_away)
        self._was_away = False
        self._tell_soon()

    def _failed(self, why: str) -> None:
        self._guard.failed(self._clock())
        if not self._was_away:
            _log.warning("limits are decided by limits.away, redis is away: %s", why)
        self._was_away = True

    def _lose(self, why: str) -> None:
        """Give up the connection, and decide here what was under way on it."""
        if self._connection is not None:
            self._failed(why)
            self._drop_connection()
            self._lost.set()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        batches, self._batches = self._batches, {}
        self._unsettled.put_back([one for batch in batches for one in batch.settlements])
        for batch in batches:
            for ask, decided in zip(batch.asks, batch.deciders, strict=True):
                if not ask.extends:
                    self._unsettled.add(ask.given_back())
                self._decide_here(ask, decided)


def _parts(asks: list[Ask]) -> list[list[Ask]]:
    """As many as one call takes, each."""
    return [asks[at : at + _PER_CALL_MAX] for at in range(0, len(asks), _PER_CALL_MAX)]


def _no_matter(answer: Any) -> None:
    """Permits that could not be taken back end by themselves."""


def _tell_verdict(decided: Decided, verdict: Verdict) -> None:
    try:
        decided(verdict)
    except Exception:  # the others of its batch are still to be decided
        _log.exception("a verdict could not be taken")


def _is_of_script(error: hiredis.ReplyError) -> bool:
    text = str(error)
    return text.startswith(_SCRIPT_ERRORS) and "user_script" in text
