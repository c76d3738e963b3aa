"""The registry that routers share, as it lies in Redis: workers, leases, removals, routers, leader.

All keys have one hash tag, so they live in one slot of a Redis Cluster and each call is one script,
whole or not at all. Times are the server's: clocks of routers are never compared. Specs are stored
with their API keys, so whoever can read this Redis can use the workers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import orjson
from pydantic import ValidationError

from router.contract import WorkerId, WorkerSpec, encode_spec
from router.core.membership import Entry, Removal
from router.core.peers import PeerLine, PeerLoad
from router.core.rate_loop import Shares
from router.core.replicas import Replica
from router.core.slo import Totals
from router.core.types import Priority
from router.core.wait_lines import LINES_MAX, TENANTS_MAX
from router.runtime.redis_errors import RedisRefused

if TYPE_CHECKING:
    from router.runtime.redis_link import RedisLink

_LUA: Final = Path(__file__).with_name("lua")
_SYNC, _PUT, _REMOVE, _LEAVE = (
    (_LUA / f"registry_{name}.lua").read_text() for name in ("sync", "put", "remove", "leave")
)
WORKERS_MAX: Final = 10_000
_REMOVALS_MAX: Final = 1024

How = Literal["new", "change", "restore"]


class BadRegistry(Exception):
    """What lies in Redis can't be read; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a router knows of the registry, and tells it."""

    epoch: str = ""
    version: str = ""  # how many changes there were, a colon, and a token of the last
    term: str = "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """The answer to one exchange. `entries` and `removals` are None when the version was known."""

    known: Known
    now_ms: int
    leader: str
    shares: Shares | None
    replicas: dict[str, Replica]
    entries: dict[WorkerId, Entry] | None
    removals: dict[str, Removal] | None  # by URL


@dataclass(frozen=True, slots=True)
class Put:
    """What became of a registration; `other` is the worker that stands in its way."""

    verdict: Literal["ok", "exists", "removed", "gone", "full"]
    other: str = ""


class RegistryStore:
    """The calls. All raise RedisAway, and BadRegistry for an answer that can't be read."""

    def __init__(self, link: RedisLink, *, prefix: str) -> None:
        self._link = link
        tag = f"{{{prefix}:registry}}"
        self._workers, self._leases, self._removed, self._replicas, self._heard, self._state = (
            f"{tag}:{name}"
            for name in ("workers", "leases", "removed", "replicas", "heard", "state")
        )
        self._raw: dict[bytes, tuple[bytes, Any]] = {}  # what was read last, by its key

    async def sync(
        self,
        own: Replica,
        known: Known,
        *,
        ttl_s: float,
        epoch: str,
        leads: bool,
        shares: Shares | None,
        renewals: Mapping[WorkerId, float],
    ) -> Heard:
        """Say what this router is and hear of all else.

        `renewals` are seconds for which workers' leases are to hold from now; `shares` are those
        of a router that leads, `epoch` is for a registry that is new, `leads` whether it may.
        """
        keys = (
            self._workers, self._leases, self._removed, self._replicas, self._heard, self._state,
        )  # fmt: skip
        said = [] if shares is None else list(shares)
        arguments = [
            own.name, _ms(ttl_s), encode_replica(own), epoch, known.epoch, known.version,
            int(leads), known.term, orjson.dumps(said) if said else "",
        ]  # fmt: skip
        for worker_id, lease_s in renewals.items():
            arguments += [worker_id, _ms(lease_s)]
        answer = await self._eval(_SYNC, keys, arguments)
        # Kilobytes of each of many routers are read in a few steps, so that requests go between.
        return await self._read(answer, own)

    async def put(self, how: How, entry: Entry) -> Put:
        """Register a worker (`new`), replace its entry, or restore one that was lost."""
        spec = entry.spec
        lease = "" if spec.ttl_s is None else _ms(spec.ttl_s)
        body = orjson.dumps({"stamp": entry.stamp, "spec": orjson.loads(encode_spec(spec))})
        answer = await self._eval(
            _PUT,
            (self._workers, self._leases, self._removed, self._state),
            [how, spec.worker_id, spec.url, body, lease, WORKERS_MAX, _token()],
        )
        verdict, *other = (part.decode() for part in answer)
        return Put(verdict, *other)

    async def remove(
        self,
        worker_id: WorkerId,
        url: str,
        *,
        drain_s: float,
        barred: bool,
        remembered_s: float,
        age_s: float = 0.0,
    ) -> Removal:
        """Take a worker out, whether it is registered here or in routers' files.

        `age_s` is how long ago that was: what came to a router's file since stays.
        """
        spans_ms = _ms(drain_s), _ms(remembered_s)
        at = "ago", _ms(age_s)
        return await self._remove(worker_id, url, spans_ms, barred=barred, at=at)

    async def restore_removal(self, removal: Removal) -> None:
        """Give back a removal that was lost; it takes nothing out, and yields to a later one."""
        drain_ms = removal.drain_until_ms - removal.at_ms
        spans_ms = drain_ms, removal.until_ms - removal.drain_until_ms
        at = "lost", removal.at_ms
        await self._remove(removal.id, removal.url, spans_ms, barred=removal.barred, at=at)

    async def _remove(
        self,
        worker_id: WorkerId,
        url: str,
        spans_ms: tuple[int, int],
        *,
        barred: bool,
        at: tuple[str, int],
    ) -> Removal:
        answer = await self._eval(
            _REMOVE,
            (self._workers, self._leases, self._removed, self._state),
            [worker_id, url, spans_ms[0], int(barred), spans_ms[1], _REMOVALS_MAX, *at, _token()],
        )
        return _removal_of(answer)

    async def leave(self, name: str) -> None:
        """A router stops: the others need not wait until it is not heard of."""
        await self._eval(_LEAVE, (self._replicas, self._heard, self._state), [name])

    async def _eval(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        # The whole text each time: a server that lost its scripts, or is another one, is no case.
        try:
            return await self._link.ask("EVAL", script, len(keys), *keys, *arguments)
        except RedisRefused as exc:
            raise BadRegistry(f"Redis refuses: {exc}") from exc

    async def _read(self, answer: list[Any], own: Replica) -> Heard:
        epoch, version, now_ms, leader, term, shares, replicas, *rest = answer
        found: dict[str, Replica] = {}
        for written, body in _pairs(replicas):
            if (name := written.decode()) == own.name:
                found[name] = own  # it was said with this call
                continue
            found[name] = decode_replica(name, body)
            await asyncio.sleep(0)
        entries = removals = None
        if rest:
            entries = await self._entries(rest[0])
            removals = {each.url: each for each in map(_removal_of, rest[1])}
        return Heard(
            known=Known(epoch=epoch.decode(), version=version.decode(), term=term.decode()),
            now_ms=int(now_ms),
            leader=leader.decode(),
            shares=_shares_of(shares),
            replicas=found,
            entries=entries,
            removals=removals,
        )

    async def _entries(self, flat: list[bytes]) -> dict[WorkerId, Entry]:
        """All entries; those whose text has not moved are not read again."""
        read: dict[bytes, tuple[bytes, Any]] = {}
        for worker_id, body in _pairs(flat):
            before = self._raw.get(worker_id)
            if before is not None and before[0] == body:
                read[worker_id] = before
            else:
                read[worker_id] = body, _entry_of(body)
                await asyncio.sleep(0)
        self._raw = read
        return {entry.spec.worker_id: entry for _, entry in read.values()}


def encode_replica(replica: Replica) -> bytes:
    """The JSON form, without the name; a load is a list of its four figures, a count of three,
    a line of seven.
    """
    return orjson.dumps({
        "address": replica.address,
        "version": replica.version,
        "config_version": replica.config_version,
        "started_at": replica.started_at,
        "draining": replica.draining,
        "workers": replica.workers,
        "running": replica.running,
        "queued": replica.queued,
        "owns": replica.owns,
        "lines": [
            [
                line.key, line.priority, line.began, line.at, line.granted, line.tenants, line.more,
            ]
            for line in replica.lines
        ],
        "judged": [[each.judged, each.met, each.engine_misses] for each in replica.judged],
        "loads": {
            worker_id: [
                load.streams, load.kv_reserved_tokens, load.kv_held_tokens, load.kv_held_tokens_max,
            ]
            for worker_id, load in replica.loads.items()
        },
    })  # fmt: skip


def decode_replica(name: str, body: bytes) -> Replica:
    """Read the JSON form back; unknown fields are ignored, so that routers may be newer."""
    try:
        document = orjson.loads(body)
        loads = {
            WorkerId(worker_id): PeerLoad(*(max(0, int(figure)) for figure in figures[:4]))
            for worker_id, figures in document.pop("loads").items()
        }
        judged = _judged_of(document.pop("judged", None))
        lines = tuple(map(_line_of, document.pop("lines", ())[:LINES_MAX]))
        known = {key: document[key] for key in _REPLICA_FIELDS if key in document}
        return Replica(name=name, loads=loads, judged=judged, lines=lines, **known)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise BadRegistry(f"what router {name!r:.150} says of itself: {exc}") from exc


_IN_PARTS: Final = ("name", "loads", "judged", "lines")
_REPLICA_FIELDS: Final = tuple(
    name for name in Replica.__dataclass_fields__ if name not in _IN_PARTS
)


def _judged_of(said: Any) -> tuple[Totals, ...]:
    """Counts of all classes; none from a router that says none."""
    if not said:
        return ()
    return tuple(Totals(*map(int, each)) for each, _ in zip(said, Priority, strict=True))


def _line_of(said: Any) -> PeerLine:
    key, priority, began, at, granted, tenants, more = said[:7]
    named = {str(tenant): float(weight) for tenant, weight in tenants.items()}
    weights = more, *named.values()
    if not (len(named) <= TENANTS_MAX and min(weights) >= 0 and sum(weights) > 0):
        raise ValueError("the weights of who waits in a line")
    since = float(began), float(at), float(granted)
    return PeerLine(str(key), Priority(priority), *since, named, float(more))


def _entry_of(body: bytes) -> Entry:
    try:
        document = orjson.loads(body)
        return Entry(spec=WorkerSpec.model_validate(document["spec"]), stamp=str(document["stamp"]))
    except (ValueError, TypeError, KeyError, ValidationError) as exc:
        raise BadRegistry(f"a worker in the registry: {exc}") from exc


def _removal_of(body: bytes) -> Removal:
    try:
        document = orjson.loads(body)
        return Removal(
            id=WorkerId(document["id"]),
            url=document["url"],
            barred=document["barred"],
            **{key: int(document[key]) for key in ("at_ms", "drain_until_ms", "until_ms")},
        )
    except (ValueError, TypeError, KeyError) as exc:
        raise BadRegistry(f"a removal in the registry: {exc}") from exc


def _shares_of(body: bytes) -> Shares | None:
    """Shares by class; None where none were said, or where they make no sense."""
    try:
        shares = tuple(float(share) for share in orjson.loads(body)) if body else ()
    except (ValueError, TypeError) as exc:
        raise BadRegistry(f"the shares of the classes: {exc}") from exc
    whole = len(shares) == len(Priority) and abs(sum(shares) - 1) < 1e-6 and min(shares) >= 0
    return shares if whole else None


def _pairs(flat: Any) -> list[tuple[bytes, bytes]]:
    if isinstance(flat, dict):
        return list(flat.items())
    return list(zip(flat[::2], flat[1::2], strict=True))


def _token() -> str:
    return secrets.token_hex(8)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
