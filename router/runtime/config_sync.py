"""Patches that all routers of a cluster share, kept in Redis.

What was patched at one router is in force at all of them within about a second, and still is after
a restart. Each router lays the shared patches over its own file. Two routers that are patched at
the same moment keep both patches; of two words on one setting the later one counts. While Redis is
away each router goes on with what it has, and says afterwards what was patched meanwhile. A Redis
that forgot is told again.

The patches lie there with their secrets: whoever can read this Redis has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from router.config import BadConfig
from router.config_overlay import patch_between, patched, rebased
from router.runtime.live_config import Author, LiveConfig
from router.runtime.redis_errors import RedisAway, RedisRefused

if TYPE_CHECKING:
    from router.runtime.redis_link import RedisLink

_log = logging.getLogger(__name__)

# Replaces the patches, unless somebody else did since they were read.
_REPLACE: Final = """
local revision = redis.call('HGET', KEYS[1], 'revision') or '0'
if revision ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'revision', ARGV[1] + 1, 'overlay', ARGV[2], 'who', ARGV[3])
return 1
"""
_NOTHING: Final = [None, None, None]  # is said of a key that is not there
_WHO_CHARS_MAX: Final = 200
# How long a router may take to begin: without an answer it serves by its file.
_FIRST_WITHIN_S: Final = 1.0
# Of the longest time between two exchanges: what has to be over before it goes with another's.
_TOGETHER_AFTER: Final = 1 / 3
# What was refused may depend on more than settings: on certificates that are mounted later.
_REFUSED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What lies in Redis. `revision` 0: nothing."""

    revision: int
    overlay: Mapping[str, Any]
    who: str


@dataclass(frozen=True, slots=True)
class _Refused:
    """Patches that cannot be used here, what they were laid over, and until when that stands."""

    revision: int
    base: Mapping[str, Any]
    overlay: Mapping[str, Any]
    until: float

    def holds(self, shared: Shared, live: LiveConfig, now: float) -> bool:
        """Whether they would be refused again; to find out takes the whole configuration."""
        same = self.revision == shared.revision and self.base is live.base
        return same and self.overlay is live.overlay and now < self.until


class ConfigSync:
    """Keeps one router's patches the same as those of all, by an exchange every `interval_s` at
    least.
    """

    def __init__(
        self, live: LiveConfig, link: RedisLink, *, prefix: str, interval_s: float = 0.75
    ) -> None:
        self._live = live
        self._link = link
        self._key = f"{{{prefix}:config}}"
        self._interval_s = interval_s
        self._revision = 0  # what was taken over last
        self._seen = 0  # what was read last
        self._before: Mapping[str, Any] = {}  # what of the patches here the others have
        self._unsaid: Author | None = None  # who patched here what the others do not have yet
        self._refused: _Refused | None = None
        self._trouble = ""  # what Redis refused, and that was said
        self._wake = asyncio.Event()
        self._together_at = 0.0  # on the loop's clock
        self._task: asyncio.Task[None] | None = None
        live.shared = True
        live.on_overlay.append(self._patched)

    async def start(self) -> None:
        """Take over what all have, if Redis says it within a second, and go on sharing."""
        try:
            async with asyncio.timeout(_FIRST_WITHIN_S):
                await self.exchange()
        except (RedisAway, RedisRefused, TimeoutError) as exc:
            _log.warning(
                "this router begins by its file alone, and may accept keys that were taken away by "
                "patches, until Redis says what was patched: %s", str(exc) or "no answer in time",
            )  # fmt: skip
        except Exception:
            _log.exception("sharing patches failed")
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Share no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def go_along(self) -> None:
        """Exchange in the next turn of the loop, if the last time was not just now. What is asked
        in one turn costs one write, one read and one time to wake up.
        """
        if asyncio.get_running_loop().time() >= self._together_at:
            self._wake.set()

    def _patched(self, author: Author) -> None:
        self._unsaid = author
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._together_at = loop.time() + _TOGETHER_AFTER * self._interval_s
            try:
                await self.exchange()
                self._trouble = ""
            except RedisAway:
                pass  # the link says so; what was patched here waits
            except RedisRefused as exc:
                if str(exc) != self._trouble:
                    _log.warning("patches are not shared: Redis refuses: %s", exc)
                self._trouble = str(exc)
            except Exception:
                _log.exception("sharing patches failed")
            self._wake.clear()
            if self._unsaid is not None:
                await asyncio.sleep(self._interval_s)
                continue
            timer = loop.call_later(self._interval_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()

    async def exchange(self) -> None:
        """Take over what others patched, then say what was patched here. Raises RedisAway."""
        shared = await self._read()
        if shared.revision < self._seen:
            # Redis forgot: what is in force here is as good as what anybody has.
            self._revision, self._before, self._refused = 0, {}, None
            self._unsaid = self._unsaid or Author("cluster", "what a router still knew")
        self._seen = shared.revision
        if shared.revision != self._revision:
            await self._take(shared)
        if (author := self._unsaid) is not None:
            await self._say(shared, author)

    async def _take(self, shared: Shared) -> None:
        live, now = self._live, asyncio.get_running_loop().time()
        if self._refused is not None and self._refused.holds(shared, live, now):
            return

        def overlay() -> Mapping[str, Any]:
            if self._unsaid is None:
                return shared.overlay
            return rebased(shared.overlay, self._before, live.overlay, live.base)

        try:
            await live.apply_aside(overlay, Author("cluster", f"{shared.who}, at another router"))
        except BadConfig as exc:
            # The file here may be older or newer than where it was patched.
            if self._refused is None or self._refused.revision != shared.revision:
                _log.warning(
                    "patches of %s cannot be used with this router's file: %s", shared.who, exc
                )
            until = now + _REFUSED_S
            self._refused = _Refused(shared.revision, live.base, live.overlay, until)
            return
        self._revision, self._refused = shared.revision, None
        # Without what was patched here: that alone may be laid over what others say next.
        self._before = patch_between(live.base, patched(live.base, shared.overlay))

    async def _say(self, shared: Shared, author: Author) -> None:
        ours = self._live.overlay
        overlay = rebased(shared.overlay, self._before, ours, self._live.base)
        arguments: list[Any] = [
            str(shared.revision), orjson.dumps(overlay), author.name[:_WHO_CHARS_MAX],
        ]  # fmt: skip
        said = await self._link.ask("EVAL", _REPLACE, 1, self._key, *arguments)
        if not said:
            return  # somebody was faster: it is laid over theirs
        self._before = ours
        if self._revision == shared.revision:  # else there is more in it than could be used
            self._revision = self._seen = shared.revision + 1
        if self._live.overlay is ours:
            self._unsaid = None

    async def _read(self) -> Shared:
        found: Any = await self._link.ask("HMGET", self._key, "revision", "overlay", "who")
        if found == _NOTHING:
            return Shared(0, {}, "")
        try:
            overlay = orjson.loads(found[1])
            revision, who = int(found[0]), found[2].decode(errors="replace")
        except (TypeError, AttributeError, ValueError) as exc:
            raise RedisRefused(f"the patches there cannot be read: {exc}") from exc
        if not isinstance(overlay, dict) or revision < 1:
            raise RedisRefused("the patches there cannot be read")
        return Shared(revision, overlay, who)
