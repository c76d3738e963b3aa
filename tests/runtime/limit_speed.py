"""What limits cost: `python -m tests.runtime.limit_speed`. CPU of this process per request.

Each request asks, hears the verdict, settles and makes the next; what the same loop costs without a
store is taken off. Only on an idle machine do the figures say something. With few requests at once
each pays for a round trip of its own, with many they share.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import uvloop

from router.core.bucket import Ask, Family, Rule, Scope, Settlement, Verdict
from router.limit_settings import LimitsSettings
from router.runtime.bucket_store import BucketStore
from router.runtime.leased_buckets import LeasedBuckets
from router.runtime.local_buckets import LocalBuckets
from tests.redis_servers import single
from tests.runtime.limit_world import ask, cost, permits, routers

_REQUESTS = 6_000
_MANY = 1e9
_CLASS = Family(Rule("cluster", Scope.CLUSTER, _MANY, _MANY), (("p0", 0.6), ("p1", 0.4))).rules
_RULES = (
    cost(_MANY, rate=_MANY, key="requests"),
    _CLASS["p1"],
    cost(_MANY, rate=_MANY),
    cost(_MANY, rate=_MANY, key="model"),
    permits(1_000_000),
)


async def measure(
    store: BucketStore | None, limits: int, at_once: int
) -> tuple[float, list[float]]:
    """Microseconds of CPU per request, and how long each waited."""
    loop, waits, done = asyncio.get_running_loop(), list[float](), asyncio.Event()
    rules, begun = _RULES[:limits], 0

    def request() -> None:
        nonlocal begun
        begun += 1
        one, began = ask(*((rule, 1.0) for rule in rules)), time.perf_counter()
        if store is None:
            loop.call_soon(decided, one, began, None)
        else:
            store.reserve(one, partial(decided, one, began))

    def decided(one: Ask, began: float, verdict: Verdict | None) -> None:
        assert verdict is None or verdict.granted
        waits.append(time.perf_counter() - began)
        settlement = Settlement(one.reservation_id, one.charges)
        if store is not None:
            store.settle(settlement)
        if begun < _REQUESTS:
            loop.call_soon(request)
        elif len(waits) == _REQUESTS:
            done.set()

    before = time.process_time()
    for _ in range(at_once):
        loop.call_soon(request)
    await done.wait()
    return (time.process_time() - before) / _REQUESTS * 1e6, sorted(waits)


async def main() -> None:
    """Print a line for each store and each number of requests at once."""
    settings = LimitsSettings.model_validate({"batch_s": 0.5})
    with single() as server:
        async with routers([server.url]) as (redis,):
            leased = LeasedBuckets(redis, settings, name="r", loop=asyncio.get_running_loop())
            for name, store in (("redis", redis), ("leases", leased), ("memory", LocalBuckets())):
                for limits in (1, 3, 5):
                    for at_once in (1, 8, 64):
                        cost_us, waits = await measure(store, limits, at_once)
                        without_us, _ = await measure(None, limits, at_once)
                        print(
                            f"{name:6} {limits} limits, {at_once:2} at once: "
                            f"{cost_us - without_us:5.1f} us of CPU a request, "
                            f"p99 {waits[int(len(waits) * 0.99)] * 1e3:.2f} ms"
                        )


if __name__ == "__main__":
    uvloop.run(main())
