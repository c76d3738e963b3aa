"""The workers that all routers agree on, and what the routers tell each other.

With Redis every router exchanges a few kilobytes with the registry five times a second: what it has
on each worker goes in; what the others have, which workers there are and who leads come back. One
exchange is one script, so there is nothing to subscribe to and nothing to miss.

While Redis is away a router goes on with what it last knew. What is asked of it meanwhile it does
for itself and tells the registry afterwards. A Redis that comes back empty, or with an older
memory, is told what the routers know; it never costs a worker. Without Redis a router stands alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from random import Random
from typing import Final

from router.cluster_settings import ClusterSettings
from router.contract import WorkerId, WorkerSpec
from router.core.membership import Entry
from router.core.peers import PeerLoad
from router.core.replicas import ClusterView, Replica, Standing
from router.errors import Reason, Refused
from router.runtime.driver import Driver
from router.runtime.members import Members, about_removed
from router.runtime.redis_errors import RedisAway
from router.runtime.registry_store import (
    WORKERS_MAX,
    BadRegistry,
    Heard,
    How,
    Known,
    RegistryStore,
)
from router.runtime.removals import REMEMBERED_S

_log = logging.getLogger(__name__)

_JITTER: Final = 0.1
# Between two exchanges of a router that knows of no other: nobody waits for what it says.
_ALONE_S: Final = 0.5
_ALONE_PER_TTL: Final = 6  # but so often at least before others would take it for gone
# A lease is renewed when a third of it is over, so two renewals may be lost.
_RENEWALS: Final = 3
_OUTBOX_MAX: Final = WORKERS_MAX


@dataclass(frozen=True, slots=True)
class _Put:
    how: How
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Removed:
    worker_id: WorkerId
    url: str
    drain_s: float
    barred: bool
    at: float


_Said = _Put | _Removed


class Registry:
    """Adds, changes and removes workers, here and for all routers."""

    def __init__(
        self,
        driver: Driver,
        settings: ClusterSettings,
        *,
        store: RegistryStore | None,
        name: str,
        version: str,
        started_at: float,
        is_draining: Callable[[], bool] = lambda: False,
        config_version: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._store = store
        self.name = name
        # Told how many routers live, this one included, when that changes.
        self.on_replicas: list[Callable[[int], None]] = []
        # Told before each exchange: what they ask in the next turn of the loop goes with it.
        self.before_exchange: list[Callable[[], None]] = []
        self.address: str | None = None  # where operators reach this router
        self._version = version
        self._started_at = started_at
        self._is_draining = is_draining
        self._config_version = config_version
        self._clock = clock
        self._rng = Random(name)
        self._standing = Standing.ALONE if store is None else Standing.AWAY
        self._why_away = "it was not asked yet"
        self._away_logged = False
        self._heard_at: float | None = None
        self._now_ms = 0  # on the registry's clock, at _heard_at
        self._removed_ms = 0  # of this router's last removal: what comes now came after it
        self._known = Known()
        self._leader = ""
        self._members = Members(driver, time_ms=self.time_ms, clock=clock)
        self._renewed: dict[WorkerId, float] = {}
        self._replicas: dict[str, Replica] = {}
        self._stands_alone = False
        self._back_at = 0.0
        self._outbox: dict[str, list[_Said]] = {}  # by URL, what is still to be said of each
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._asked = asyncio.Event()  # the first exchange is over, whatever came of it

    # Life.

    def start(self) -> None:
        """Begin to exchange with the others."""
        if self._store is not None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def met(self, *, within_s: float) -> None:
        """Wait for the workers that the others know; a Redis that is away is not waited for."""
        if self._store is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._asked.wait()

    async def aclose(self) -> None:
        """Stop, and tell the others."""
        task, self._task = self._task, None
        if task is None or self._store is None:
            return
        self._stopping = True  # a cancellation may be lost in a client that waits for an answer
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(RedisAway, BadRegistry):
            await self._store.leave(self.name)

    def view(self) -> ClusterView:
        """What is known now."""
        own = self._own()
        replicas = {**self._replicas, self.name: own}
        return ClusterView(
            standing=self._standing,
            name=self.name,
            leader=self._leader if self._store is not None else self.name,
            term=int(self._known.term),
            age_s=None if self._heard_at is None else self._clock() - self._heard_at,
            why_away=self._why_away if self._standing is Standing.AWAY else "",
            workers=len(self._members.entries),
            untold=len(self._outbox),
            replicas=tuple(replicas[name] for name in sorted(replicas)),
        )

    # What the admin API asks for. Refused says why not.

    async def add(self, spec: WorkerSpec) -> bool:
        """Register a worker; True: all routers know, False: this one alone, for now.

        The caller has seen to it that no worker here has its id or URL. Raises Refused.
        """
        entry = Entry(spec=spec, stamp=secrets.token_hex(8))
        shared = await self._tell(_Put("new", entry))
        self._members.join(entry)
        return shared

    async def change(self, spec: WorkerSpec) -> bool:
        """Replace the spec of a worker that is here. Returns as `add` does. Raises Refused."""
        stamp = self._members.stamp(spec.worker_id)
        entry = Entry(spec=spec, stamp=stamp or secrets.token_hex(8))
        shared = await self._tell(_Put("new" if stamp is None else "change", entry))
        self._members.change(entry)
        return shared

    async def remove(self, spec: WorkerSpec, *, drain_s: float, barred: bool) -> bool:
        """Take a worker out: drain it for so long, or forget it at once. Returns as `add` does.

        `barred`: its agent must not bring it back.
        """
        shared = await self._tell(
            _Removed(spec.worker_id, spec.url, drain_s, barred, self._clock())
        )
        self._members.remove(spec, drain_s=drain_s, barred=barred)
        return shared

    def holds(self, worker_id: WorkerId) -> bool:
        """Whether a worker that is here is one of all routers, as far as is known here."""
        return self._store is not None and self._members.stamp(worker_id) is not None

    async def _tell(self, said: _Said) -> bool:
        """Tell the registry, now or when it is back."""
        if self._store is None:
            self._check(said)
            return True
        url = said.entry.spec.url if isinstance(said, _Put) else said.url
        async with self._lock:
            if not self._outbox and await self._sent(said):
                return True
            self._check(said)
            if len(self._outbox) >= _OUTBOX_MAX and url not in self._outbox:
                raise Refused(Reason.CONFLICT, "too many changes wait for Redis, which is away")
            self._outbox[url] = _and_then(self._outbox.get(url, []), said)
            return False

    def _check(self, said: _Said) -> None:
        """Judge what the registry can't be asked about. Raises Refused."""
        if isinstance(said, _Put) and said.how == "new":
            self._members.check_not_removed(said.entry.spec)

    async def _sent(self, said: _Said) -> bool:
        try:
            await self._send(said)
        except (RedisAway, BadRegistry) as exc:
            self._is_away(str(exc))
            return False
        return True

    async def _send(self, said: _Said) -> None:
        """Raises RedisAway, BadRegistry, and Refused when it may not be."""
        assert self._store is not None
        if isinstance(said, _Removed):
            removal = await self._store.remove(
                said.worker_id,
                said.url,
                drain_s=said.drain_s,
                barred=said.barred,
                remembered_s=REMEMBERED_S,
                age_s=self._clock() - said.at,
            )
            self._removed_ms = max(self._removed_ms, removal.at_ms)
            return
        spec = said.entry.spec
        put = await self._store.put(said.how, said.entry)
        match put.verdict:
            case "ok":
                pass
            case "exists":
                raise Refused(Reason.CONFLICT, f"{put.other} is registered already")
            case "removed":
                raise Refused(Reason.REMOVED, about_removed(spec.url))
            case "gone":
                raise Refused(Reason.NOT_FOUND, f"{spec.worker_id} was removed meanwhile")
            case "full":
                raise Refused(
                    Reason.CONFLICT, f"the registry holds {WORKERS_MAX} workers, more it does not"
                )

    # The exchange.

    async def _run(self) -> None:
        settings = self._settings
        alone_s = max(settings.sync_interval_s, min(_ALONE_S, settings.ttl_s / _ALONE_PER_TTL))
        while not self._stopping:
            for tell in self.before_exchange:
                tell()
            await asyncio.sleep(0)
            async with self._lock:
                await self._exchange()
            self._asked.set()
            interval_s = settings.sync_interval_s if self._others() else alone_s
            await asyncio.sleep(interval_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER))

    async def _exchange(self) -> None:
        try:
            await self._empty_outbox()
            heard = await self._ask()
            if self._has_lost(heard):
                _log.warning("the registry has lost what it knew: telling it again")
                await self._restore()
                heard = await self._ask()
            self._take(heard)
            await self._give_back()
        except (RedisAway, BadRegistry) as exc:
            self._is_away(str(exc))
        except Exception:
            _log.exception("an exchange with the other routers failed")
            self._is_away("a fault of this router; its log has more")

    async def _ask(self) -> Heard:
        assert self._store is not None
        leads = self._leader == self.name
        renewals = self._due_renewals()
        heard = await self._store.sync(
            self._own(),
            self._known,
            ttl_s=self._settings.ttl_s,
            epoch=secrets.token_hex(8),  # each time another: one that is new is never taken for old
            leads=not self._is_draining(),
            shares=self._driver.dispatcher.peering.shares if leads else None,
            renewals=renewals,
        )
        self._renewed.update(dict.fromkeys(renewals, self._clock()))
        return heard

    def _own(self) -> Replica:
        peering = self._driver.dispatcher.peering
        loads = peering.loads
        return Replica(
            name=self.name,
            address=self.address,
            version=self._version,
            config_version=self._config_version(),
            started_at=self._started_at,
            draining=self._is_draining(),
            workers=len(self._members),
            running=sum(load.streams for load in loads.values()),
            queued=self._driver.dispatcher.queued,
            owns=len(peering.owned),
            judged=peering.judged,
            lines=peering.lines(self._clock()),
            loads=loads,
        )

    def _due_renewals(self) -> dict[WorkerId, float]:
        """Leases of workers that answer their polls, a third of each lease after the last time."""
        now = self._clock()
        alive = self._driver.dispatcher.peering.leased
        self._renewed = {id_: at for id_, at in self._renewed.items() if id_ in alive}
        return {
            worker_id: ttl_s
            for worker_id, ttl_s in alive.items()
            if now >= self._renewed.get(worker_id, -ttl_s) + ttl_s / _RENEWALS
        }

    def _has_lost(self, heard: Heard) -> bool:
        if not self._known.epoch:
            return False
        if heard.known.epoch != self._known.epoch:
            return True
        (then, then_token), (now, now_token) = map(_version, (self._known, heard.known))
        return now < then or (now == then and now_token != then_token)

    async def _restore(self) -> None:
        assert self._store is not None
        for removal in self._members.removed:
            await self._store.restore_removal(removal)
        for entry in self._members.entries:
            await self._store.put("restore", entry)
        self._known = Known()

    async def _give_back(self) -> None:
        """Put back workers that answer here, though their leases have ended in the registry."""
        assert self._store is not None
        lost = self._members.lost
        for worker_id, entry in list(lost.items()):
            put = await self._store.put("restore", entry)
            if put.verdict == "ok":
                _log.warning("the lease of %s had ended, but it answers here: put back", worker_id)
            lost.pop(worker_id, None)

    async def _empty_outbox(self) -> None:
        while self._outbox:
            url, waiting = next(iter(self._outbox.items()))
            while waiting:
                try:
                    await self._send(waiting[0])
                except Refused as exc:
                    _log.warning("what was asked of %s while Redis was away can't be: %s", url, exc)
                del waiting[0]
            del self._outbox[url]

    def _is_away(self, why: str) -> None:
        if self._standing is not Standing.AWAY or not self._away_logged:
            _log.warning(
                "the registry is away (%s): this router goes on with the %d workers it knows", why,
                len(self._members),
            )  # fmt: skip
            self._away_logged = True
        self._standing, self._why_away = Standing.AWAY, why
        # Heard of nobody for as long as it takes to believe that somebody is gone: what they said
        # is no knowledge any more, and the slow loop cannot wait for a leader.
        heard_at = self._heard_at
        if heard_at is not None and self._clock() - heard_at > self._settings.ttl_s:
            self._stand_alone()

    def _stand_alone(self) -> None:
        if self._stands_alone:
            return
        self._stands_alone = True
        silent = _sum(replica.loads for replica in self._others().values())
        self._driver.on_peers(None, own=self.name, loads={}, silent=silent)
        self._driver.on_lines({})
        self._driver.on_leadership(leads=True)
        self._leader = ""

    def _others(self) -> dict[str, Replica]:
        return {name: each for name, each in self._replicas.items() if name != self.name}

    # What comes of it.

    def _take(self, heard: Heard) -> None:
        now = self._clock()
        if self._standing is Standing.AWAY:
            if self._away_logged:
                _log.warning("the registry answers again")
            if self._heard_at is not None:
                self._back_at = now
            self._away_logged = self._stands_alone = False
        self._standing = Standing.TOGETHER
        self._heard_at, self._now_ms, self._known = now, heard.now_ms, heard.known
        self._members.take(heard)
        self._take_leader(heard)
        self._take_replicas(heard)

    def _take_leader(self, heard: Heard) -> None:
        if heard.leader != self._leader:
            self._leader = heard.leader
            _log.info("router %s leads (term %s)", heard.leader or "nobody", heard.known.term)
            self._driver.on_leadership(leads=heard.leader == self.name)
        peering = self._driver.dispatcher.peering
        if heard.leader != self.name and heard.shares not in (None, peering.shares):
            assert heard.shares is not None
            peering.on_shares(heard.shares)

    def _take_replicas(self, heard: Heard) -> None:
        before, self._replicas = self._others(), heard.replicas
        others = self._others()
        if self._clock() - self._back_at <= self._settings.ttl_s and self._back_at:
            # Others come back at their own pace; until then they are not gone.
            others = {**before, **others}
            self._replicas = {**others, self.name: heard.replicas[self.name]}
        if others.keys() != before.keys():
            names = sorted({*others, self.name})
            _log.info("%d routers share the workers: %s", len(names), ", ".join(names))
            for observe in self.on_replicas:
                observe(len(names))
        gone = [each.loads for name, each in before.items() if name not in others]
        self._driver.on_peers(
            [name for name, each in others.items() if not each.draining],
            own=self.name,
            loads=_sum(each.loads for each in others.values()),
            silent=_sum(gone),
        )
        self._driver.on_judged({name: o.judged for name, o in others.items() if o.judged})
        self._driver.on_lines({name: other.lines for name, other in others.items() if other.lines})

    def time_ms(self) -> int:
        """The registry's clock, as far as it is known; 0 before."""
        if self._heard_at is None:
            return 0
        now_ms = self._now_ms + round((self._clock() - self._heard_at) * 1000)
        return max(now_ms, self._removed_ms + 1)


def _and_then(waiting: list[_Said], said: _Said) -> list[_Said]:
    """What is to be said of one URL, as short as it can be: two removals and a registration."""
    last = waiting[-1] if waiting else None
    if isinstance(said, _Removed):
        # What is removed again never was in the registry; what was there before it has to go too.
        first = waiting[0] if waiting else None
        if isinstance(first, _Removed) and first.worker_id != said.worker_id:
            return [first, said]
        return [said]
    if isinstance(last, _Put):
        # The registry has to hear first of one that is new, whatever has become of it since.
        how: How = "new" if "new" in (last.how, said.how) else "change"
        return [*waiting[:-1], _Put(how, said.entry)]
    return [*waiting, said]


def _version(known: Known) -> tuple[int, str]:
    """How many changes there were, and a token of the last: another history has another one."""
    count, _, token = known.version.partition(":")
    return int(count), token


def _sum(loads: Iterable[Mapping[WorkerId, PeerLoad]]) -> dict[WorkerId, PeerLoad]:
    found: dict[WorkerId, list[PeerLoad]] = {}
    for each in loads:
        for worker_id, load in each.items():
            found.setdefault(worker_id, []).append(load)
    return {worker_id: reduce(add, several) for worker_id, several in found.items()}
