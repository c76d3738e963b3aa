"""What tenants used at each of the routers that share a Redis.

Each router writes its own figures under a key of its own, those of a tenant when they have changed.
The key ends soon after its router does, and with it these figures: what is to outlive a router is
in its metrics. Whoever sums asks for one tenant, at all routers in one call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from router.runtime.redis_errors import RedisAway, RedisRefused
from router.usage import TenantUsage, UsageTable

if TYPE_CHECKING:
    from router.runtime.redis_link import RedisLink

_log = logging.getLogger(__name__)

_SAY: Final = """
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""
_READ: Final = """
local found = {}
for i, key in ipairs(KEYS) do found[i] = redis.call('HMGET', key, '', ARGV[1]) end
return found
"""
_WHOLE: Final = ""  # the field that says that all tenants are there; no tenant has this name
_TENANTS_PER_CALL: Final = 50  # some 3 kB each at most
_INTERVALS_KEPT: Final = 6  # a key outlives so many rounds


class UsageSync:
    """Tells the others what was used here, and asks what was used there.

    `time_ms` is a clock that all routers share, 0 as long as it is not known.
    """

    def __init__(
        self,
        usage: UsageTable,
        link: RedisLink,
        *,
        name: str,
        time_ms: Callable[[], int],
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usage = usage
        self._link = link
        self._name = name
        self._time_ms = time_ms
        self._interval_s = interval_s
        self._clock = clock
        self._told: dict[str, int] = {}  # by tenant, how many requests the others know of
        self._is_whole = False  # the others know that this is all there is
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to tell."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Tell no more; the others forget in a while."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def tell(self) -> None:
        """Tell what has changed, or all if nothing is there. Raises RedisAway, RedisRefused."""
        key, ttl_ms = self._key(self._name), round(self._interval_s * _INTERVALS_KEPT * 1000)
        tenants = self._usage.tenants()
        if self._told.keys() <= tenants.keys():
            there = await self._link.ask("PEXPIRE", key, ttl_ms)
        else:  # some are no tenants any more
            await self._link.ask("DEL", key)
            there = False
        if not there:
            self._told.clear()
            self._is_whole = False
        changed = [
            name for name, one in tenants.items() if one.total.requests != self._told.get(name)
        ]
        for first in range(0, len(changed), _TENANTS_PER_CALL):
            names = changed[first : first + _TENANTS_PER_CALL]
            counts = {name: tenants[name].total.requests for name in names}
            fields = [part for name in names for part in (name, self._written(tenants[name]))]
            await self._say(key, ttl_ms, fields)
            self._told |= counts
        if not self._is_whole:
            await self._say(key, ttl_ms, [_WHOLE, b"1"])
            self._is_whole = True

    async def of(self, tenant: str, routers: Sequence[str]) -> dict[str, TenantUsage | str]:
        """What each of these routers has told of a tenant, or why that can't be read, as it may be
        of another release; those that told nothing are left out.

        Raises RedisAway, RedisRefused.
        """
        if not routers:
            return {}
        keys = [self._key(name) for name in routers]
        answers: Any = await self._link.ask("EVAL", _READ, len(keys), *keys, tenant)
        found: dict[str, TenantUsage | str] = {}
        for name, (whole, body) in zip(routers, answers, strict=True):
            if body is not None:
                found[name] = self._read(body)
            elif whole is not None:
                found[name] = TenantUsage()
        return found

    async def _run(self) -> None:
        trouble = ""  # that was said
        while True:
            try:
                if self._time_ms():
                    await self.tell()
                trouble = ""
            except RedisAway:
                pass  # the link says so
            except RedisRefused as exc:
                if str(exc) != trouble:
                    _log.warning("usage is not shared: Redis refuses: %s", exc)
                trouble = str(exc)
            except Exception:
                _log.exception("sharing usage failed")
            await asyncio.sleep(self._interval_s)

    async def _say(self, key: str, ttl_ms: int, fields: list[Any]) -> None:
        await self._link.ask("EVAL", _SAY, 1, key, ttl_ms, *fields)

    def _key(self, router: str) -> str:
        return f"{{{self._link.settings.key_prefix}:usage}}:{router}"

    def _written(self, usage: TenantUsage) -> bytes:
        return orjson.dumps([self._time_ms(), usage.as_json(self._clock())])

    def _read(self, body: bytes) -> TenantUsage | str:
        try:
            told_ms, document = orjson.loads(body)
            told_at = self._clock() - max(0, self._time_ms() - int(told_ms)) / 1000
            return TenantUsage.of_json(document, told_at)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            return f"what it told can't be read: {exc!r:.150}"
