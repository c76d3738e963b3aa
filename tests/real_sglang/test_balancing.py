"""Who gets the work: both servers, by lane and by load, and whether the router's figures are true.

The router says in `x-laneway-worker` who served a request; the servers' own counters check that.
"""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from .client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PROMPT,
    chat_body,
    generate_body,
    open_stream,
    post,
)
from .cluster import Loads, Router, SGLangServer, Worker
from .conftest import RUNNING_MAX, Pair, StartRouter
from .kit import MODEL_NAME
from .service import eventually

pytestmark = pytest.mark.real_sglang

Request: TypeAlias = tuple[str, dict[str, object]]
UNBOUNDED: dict[str, object] = {"model": MODEL_NAME, "prompt": PROMPT}
SHORT: list[Request] = [
    (CHAT, chat_body(16)),
    (CHAT, chat_body(512, max_completion_tokens=16)),
    (CHAT, chat_body(256, stop=["e"])),
    (COMPLETIONS, UNBOUNDED),  # SGLang's default here: 16 tokens
    (GENERATE, generate_body(16)),
    (GENERATE, {"text": PROMPT}),  # SGLang's default here: 128 tokens
    (MESSAGES, chat_body(16)),
]
LONG: list[Request] = [
    (CHAT, chat_body(512)),
    (CHAT, chat_body(16, max_completion_tokens=512)),
    (CHAT, chat_body(257)),
    (COMPLETIONS, UNBOUNDED | {"max_tokens": 512}),
    (GENERATE, generate_body(512)),
]


def test_both_servers_work_under_concurrent_load(router: Router, pair: Pair) -> None:
    before = {server.url: server.received(CHAT) for server in pair}
    served = _served(router, [(CHAT, chat_body(32))] * 36, at_once=12)
    assert {s.url: s.received(CHAT) - before[s.url] for s in pair} == served
    assert min(served.values()) >= 6, served


@pytest.mark.parametrize("by", ["configuration", "registration"])
def test_requests_land_in_their_lane(by: str, pair: Pair, start_router: StartRouter) -> None:
    short, long = pair
    router = _router_with_lanes(by, short, long, start_router)
    assert router.worker(short).lanes == {"short"}
    assert router.worker(long).lanes == {"long"}
    for server, requests in ((short, SHORT), (long, LONG)):
        expected_id = router.worker(server).id
        for path, body in requests:
            with open_stream(router.url + path, body) as stream:
                assert stream.response.status_code == 200
                assert stream.worker_id == expected_id, (path, body)


def test_lanes_hold_under_concurrent_load_when_spilling_is_off(
    pair: Pair, start_router: StartRouter
) -> None:
    short, long = pair
    router = _router_with_lanes("configuration", short, long, start_router)
    mixed = [(CHAT, chat_body(16)), (CHAT, chat_body(16)), (CHAT, chat_body(300))] * 8
    assert _served(router, mixed, at_once=12) == {short.url: 16, long.url: 8}


def test_a_slow_server_gets_the_smaller_part_of_the_work(router: Router, pair: Pair) -> None:
    slow, quick = pair
    with slow.slowed(0.05):
        served = _served(router, [(CHAT, chat_body(16))] * 48, at_once=8)
    assert served[quick.url] >= 0.7 * 48, served


def test_a_server_with_a_queue_of_others_requests_is_spared(router: Router, pair: Pair) -> None:
    busy, free = pair
    with busy.slowed(0.05), busy.filled(RUNNING_MAX + 4):
        eventually(
            lambda: router.worker(busy),
            lambda worker: bool(worker.queued),
            within_s=5,
            what="the router knows of the queue",
        )
        served = _served(router, [(CHAT, chat_body(16))] * 16, at_once=4)
    assert served[free.url] >= 15, served


def test_the_routers_load_figures_are_the_servers_own(router: Router, pair: Pair) -> None:
    with pair[0].slowed(0.02), pair[1].slowed(0.02), ExitStack() as streams:
        for _ in range(5):
            streams.enter_context(open_stream(router.url + GENERATE, generate_body(1500)))
        for server in pair:
            known = _loads_when_settled(server)
            worker = _worker_newer_than(known, router, server)
            assert (worker.kv_used_tokens or 0) <= 1.2 * server.loads().used_tokens
            assert worker.kv_total_tokens == known.capacity_tokens
            # 2 x 2 layers x 2 heads x 16 numbers of 2 bytes; SGLang says 0.005 GiB for all tokens.
            assert worker.kv_bytes_per_token == pytest.approx(256, rel=0.1)
            assert worker.streams == worker.running == known.running > 0
            assert worker.queued == known.waiting == 0
        assert sum(server.loads().running for server in pair) == 5


def _loads_when_settled(server: SGLangServer) -> Loads:
    """Return the loads of a server that decodes: from now on its used tokens only grow."""
    return eventually(
        server.loads,
        lambda loads: loads.used_tokens > 5 * len(PROMPT),
        within_s=10,
        what="all streams are decoding",
    )


def _worker_newer_than(known: Loads, router: Router, server: SGLangServer) -> Worker:
    """Return what the router says of `server` once its figures have reached `known`."""
    return eventually(
        lambda: router.worker(server),
        lambda worker: (worker.kv_used_tokens or 0) >= known.used_tokens,
        within_s=5,
        what="the router has newer figures",
    )


def _router_with_lanes(
    by: str, short: SGLangServer, long: SGLangServer, start_router: StartRouter
) -> Router:
    lanes = ((short, ["short"]), (long, ["long"]))
    if by == "configuration":
        workers = [{"url": server.url, "lanes": names} for server, names in lanes]
        return start_router(config={"workers": workers, "lanes": {"spill": False}})
    router = start_router()
    for server, names in lanes:
        router.add_worker(server, lanes=names)
    return router


def _served(router: Router, requests: Iterable[Request], *, at_once: int) -> Counter[str]:
    """Send all requests, `at_once` at a time, and count the good answers by the server's URL."""
    urls = {worker.id: worker.url for worker in router.workers().values()}

    def send(request: Request) -> str:
        path, body = request
        answer = post(router.url + path, body).raise_for_status()
        return urls[answer.headers["x-laneway-worker"]]

    with ThreadPoolExecutor(at_once) as threads:
        return Counter(threads.map(send, requests))
