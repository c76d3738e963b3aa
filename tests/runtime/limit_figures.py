"""The figures of docs/limits.md: `python -m tests.runtime.limit_figures [NAME...]`.

`load`: 500 asks per second on loopback, with and without leases: how long each waits, and the CPU
of this process, beside that of the bare round trip. `server`: what a decision costs the server.
`refill`: four routers with leases whose clocks are 30 s apart, for a minute. `fair`: how evenly
four routers serve tenants that always want more, everywhere, at one router alone, or with ten times
as many requests; of a limit of all, and of what a class may borrow beside one that takes its share.
`outage`: a router at 50 requests per second whose Redis hangs for half a minute. Real servers and
real time; on a busy machine the times are those of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Final

import httpx
import uvloop

from router.core.bucket import Settlement, Verdict
from router.limit_settings import LimitsSettings
from router.runtime.bucket_store import BucketStore
from router.runtime.leased_buckets import LeasedBuckets
from tests.e2e.router_process import RouterProcess, client_of, router_process, until_ready
from tests.redis_servers import Server, single
from tests.runtime.limit_speed import _RULES, bare
from tests.runtime.limit_world import ask, cost, granted, left, routers
from workers.profiles import load_profiles
from workers.sim.intake import WorkerOptions
from workers.sim.server import SimulatedServer

_RATE: Final = 500.0
_LIMITS: Final = LimitsSettings()  # as they ship
_CHAT: Final = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
_FAST: Final = WorkerOptions(profile=load_profiles()["h100-8b"], time_scale=100.0)


def _at(values: Sequence[float], ratio: float) -> float:
    return sorted(values)[int(len(values) * ratio)]


# load


async def paced(store: BucketStore | None, seconds: float) -> tuple[float, list[float]]:
    """Microseconds of CPU per ask at random moments, and how long each waited."""
    loop, rng, waits = asyncio.get_running_loop(), Random(1), list[float]()
    rules, total, done = _RULES[:3], int(_RATE * seconds), asyncio.Event()

    def request() -> None:
        one, began = ask(*((rule, 1.0) for rule in rules)), time.perf_counter()

        def decided(verdict: Verdict | None) -> None:
            assert verdict is None or verdict.granted
            waits.append(time.perf_counter() - began)
            settlement = Settlement(one.reservation_id, one.charges)
            if store is not None:
                store.settle(settlement)
            if len(waits) == total:
                done.set()

        if store is None:
            decided(None)
        else:
            store.reserve(one, decided)

    before, at = time.process_time(), loop.time()
    for _ in range(total):
        at += rng.expovariate(_RATE)
        loop.call_at(at, request)
    await done.wait()
    return (time.process_time() - before) / total * 1e6, waits


async def load() -> None:
    with single() as server:
        async with routers([server.url]) as (redis,), bare(server.url, 3) as floor:
            leased = LeasedBuckets(redis, _LIMITS, name="r", loop=asyncio.get_running_loop())
            for name, store in (("bare", floor), ("redis", redis), ("leases", leased)):
                without_us, _ = await paced(None, 5.0)
                cost_us, waits = await paced(store, 20.0)
                print(
                    f"{name:6} {_RATE:.0f} asks/s: {cost_us - without_us:5.1f} us of CPU each, "
                    f"wait p50 {_at(waits, 0.5) * 1e3:.2f} p99 {_at(waits, 0.99) * 1e3:.2f} ms"
                )


# server


async def server() -> None:
    """CPU of the server per decision, alone in a call and 64 in one, with five limits."""
    with single() as one, one.admin() as admin:

        def used_s() -> float:
            cpu = admin.info("cpu")
            return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

        async with routers([one.url]) as (store,):
            for at_once in (1, 64):
                before, total = used_s(), 0
                for _ in range(6400 // at_once):
                    asks = [ask(*((rule, 1.0) for rule in _RULES)) for _ in range(at_once)]
                    assert all(await granted(store, *asks))
                    for each in asks:
                        store.settle(Settlement(each.reservation_id, each.charges))
                    total += at_once
                each_s = (used_s() - before) / total
                print(
                    f"server: {at_once:2} asks in a call, 5 limits: {each_s * 1e6:.0f} us each, "
                    f"so {1 / each_s:.0f} requests/s on one core"
                )


# refill


async def refill() -> None:
    rate, burst, amount, seconds = 400.0, 800.0, 4.0, 60.0
    rule, total = cost(burst, rate=rate), 0.0
    with single() as server:
        async with routers([server.url], 4) as shared:
            loop, stores = asyncio.get_running_loop(), list[LeasedBuckets]()
            for number, store in enumerate(shared):
                skew_s = (number - 1.5) * 20
                store._clock = clock = lambda skew_s=skew_s: time.monotonic() + skew_s
                leased = LeasedBuckets(store, _LIMITS, name=f"r{number}", loop=loop, clock=clock)
                leased.replicas = 4
                stores.append(leased)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                answers = await asyncio.gather(
                    *(granted(store, *(ask((rule, amount)) for _ in range(30))) for store in stores)
                )
                total += amount * sum(map(sum, answers))
                await asyncio.sleep(0.02)
            await asyncio.sleep(2 * _LIMITS.batch_s)  # what is leased comes back
            total += await left(shared[0], rule)
            lawful = burst + rate * (time.monotonic() - began)
            print(f"refill: {total:.0f} of {lawful:.0f} units in 60 s: {total / lawful - 1:+.2%}")


# fair and outage: routers as processes


@asynccontextmanager
async def serving(
    server: Server, number: int, *flags: str
) -> AsyncIterator[list[tuple[RouterProcess, httpx.AsyncClient]]]:
    """Router processes that share a Redis and a simulated worker."""
    worker = SimulatedServer(_FAST)
    await worker.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        found = []
        redis = ["--set", "redis.mode=single", "--set", f"redis.urls=[{server.url}]"]
        for _ in range(number):
            process = await stack.enter_async_context(
                router_process("--worker-urls", worker.url, *redis, *flags)
            )
            client = await stack.enter_async_context(client_of(process))
            await until_ready(client)
            found.append((process, client))
        yield found


async def until_shared(client: httpx.AsyncClient, routers: int) -> None:
    while len((await client.get("/replicas")).json()["replicas"]) < routers:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


_TENANTS: Final = [f"t{number}" for number in range(8)]
_AT_ONCE: Final = 3  # requests that each has under way at a router
_OTHERS: Final = "others"  # of P0, who insist as well
_ONE_UNIT: Final = [
    "auth.trusted_proxies=[127.0.0.1/32]", "limits.wait_s_max=30", "classes.p1.wait_s_max=60",
    "limits.cost.request_units=1", "limits.cost.prompt_token_units=0",
    "limits.cost.output_token_units=0", *[f"tenants.{name}.weight=1" for name in _TENANTS],
]  # fmt: skip
_Wanted = dict[tuple[int, str], int]  # requests under way, by router and tenant


def _everywhere(routers: int) -> _Wanted:
    return {(n, tenant): _AT_ONCE for n in range(routers) for tenant in _TENANTS}


def _one_is_alone(routers: int) -> _Wanted:
    """The first tenant at the first router, the others at the others."""
    wanted = _everywhere(routers)
    return {at: count for at, count in wanted.items() if (at[0] == 0) == (at[1] == "t0")}


def _one_sends_more(routers: int) -> _Wanted:
    wanted = _everywhere(routers)
    return {at: count * (10 if at[1] == "t0" else 1) for at, count in wanted.items()}


async def fair() -> None:
    each, of_all = "limits.tenant.requests_per_minute=120", "limits.cluster.cost_per_s=16"
    beside = [of_all, f"tenants.{_OTHERS}.priority=P0"]
    insist = {(n, _OTHERS): _AT_ONCE for n in range(4)}
    await _fair("each tenant's own limit", [each], _everywhere(4))
    for what, wanted in (
        ("everywhere", _everywhere(4)),
        ("one alone at a router", _one_is_alone(4)),
        ("one with ten times as many", _one_sends_more(4)),
    ):
        await _fair(f"one limit of all, {what}", [of_all], wanted)
        await _fair(f"what P1 may borrow beside P0, {what}", beside, wanted | insist)
    await _fair("two routers, one alone at a router", [of_all], _one_is_alone(2))


async def _fair(what: str, flags: list[str], wanted: _Wanted, seconds: float = 30.0) -> None:
    served: Counter[str] = Counter()
    routers = 1 + max(number for number, _ in wanted)
    args = [arg for flag in (*_ONE_UNIT, *flags) for arg in ("--set", flag)]
    with single() as server:
        async with serving(server, routers, *args) as found:
            await until_shared(found[0][1], routers)
            ends_at = time.monotonic() + seconds

            async def insist(client: httpx.AsyncClient, tenant: str) -> None:
                while time.monotonic() < ends_at:
                    headers = {"x-laneway-tenant": tenant}
                    answer = await client.post(
                        "/v1/chat/completions", json=_CHAT, headers=headers, timeout=60
                    )
                    if answer.status_code == 200 and time.monotonic() < ends_at:
                        served[tenant] += 1
                    elif answer.status_code not in (200, 429):
                        raise RuntimeError(answer.text)

            await asyncio.gather(
                *(
                    insist(found[number][1], tenant)
                    for (number, tenant), at_once in wanted.items()
                    for _ in range(at_once)
                )
            )
    shares = [served[tenant] for tenant in _TENANTS]
    jain = sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares))
    others = f", P0 had {served[_OTHERS]}" if served[_OTHERS] else ""
    print(f"fair, {what}: Jain index {jain:.4f} of {shares}{others}", flush=True)


async def outage() -> None:
    rate, warm_s, before_s, frozen_s, after_s = 50.0, 10.0, 20.0, 30.0, 5.0
    codes: Counter[int] = Counter()
    taken: list[tuple[float, float]] = []  # when it was sent, and how long it took
    with single() as server:
        async with serving(server, 1, "--set", "limits.tenant.cost_per_s=1000000") as found:
            client, loop = found[0][1], asyncio.get_running_loop()

            async def request(began: float) -> None:
                answer = await client.post("/v1/chat/completions", json=_CHAT)
                codes[answer.status_code] += 1
                taken.append((began, loop.time() - began))

            gc.collect()
            gc.freeze()  # a collection of all that was imported here takes a tenth of a second
            start = loop.time()
            tasks = []
            for number in range(int(rate * (before_s + frozen_s + after_s))):
                await asyncio.sleep(max(0.0, start + number / rate - loop.time()))
                if number == int(rate * before_s):
                    server.freeze()
                if number == int(rate * (before_s + frozen_s)):
                    server.thaw()
                tasks.append(asyncio.create_task(request(loop.time())))
            await asyncio.gather(*tasks)
    usual = [s for at, s in taken if warm_s <= at - start < before_s]
    first = [s for at, s in taken if 0 <= at - start - before_s < 1]
    rest = [s for at, s in taken if 1 <= at - start - before_s < frozen_s]
    print(
        f"outage: answers {dict(codes)}; before p50 {_at(usual, 0.5) * 1e3:.1f} "
        f"p99 {_at(usual, 0.99) * 1e3:.1f} ms; first second of the freeze: longest "
        f"{max(first) * 1e3:.1f} ms; then p50 {_at(rest, 0.5) * 1e3:.1f} p99 "
        f"{_at(rest, 0.99) * 1e3:.1f} ms, longest {max(rest) * 1e3:.1f} ms"
    )


FIGURES: Final[dict[str, Callable[[], Awaitable[None]]]] = {
    "load": load, "server": server, "refill": refill, "fair": fair, "outage": outage,
}  # fmt: skip


async def main() -> None:
    for name in sys.argv[1:] or FIGURES:
        await FIGURES[name]()


if __name__ == "__main__":
    uvloop.run(main())
