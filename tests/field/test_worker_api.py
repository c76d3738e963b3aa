"""Workers come and go by the admin API while requests run; what is gone leaves no trace."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from tests.field.harness import Field, assert_error
from tests.field.mock_worker import MockWorker, held
from tests.field.wire import eventually


async def is_gone(field: Field, worker: MockWorker) -> bool:
    return await field.shown(worker) == {}


async def test_a_worker_on_an_ipv6_address_is_one_like_any_other(field: Field) -> None:
    """WK01."""
    worker = await field.worker(host="::1")
    listed = (await field.admin("GET", "/workers")).json()["workers"]
    assert [entry["url"] for entry in listed] == [f"http://[::1]:{worker.port}"]
    assert (await field.chat()).status == 200
    assert len(worker.calls) == 1
    assert worker.calls[0].header("host") == f"[::1]:{worker.port}"
    assert (await field.remove(worker)).status in (200, 202)
    await eventually(lambda: is_gone(field, worker))


BAD_URLS = (
    *("http://user@127.0.0.1:9", "http://user:pass@127.0.0.1:9", "127.0.0.1:9", "ftp://h:9"),
    *("http://", "http://h:0", "http://h:99999", "http://h:9?x=1", "http://h h:9", ""),
)


async def test_a_bad_worker_url_is_refused(field: Field) -> None:
    """WK01."""
    for url in BAD_URLS:
        answer = await field.admin("POST", "/workers", {"url": url})
        assert answer.status == 400, (url, answer.body)
        assert_error(answer, 400)
    assert (await field.admin("GET", "/workers")).json()["total"] == 0


async def test_registering_the_same_worker_twice_is_a_conflict(field: Field) -> None:
    """WK01."""
    worker = await field.worker()
    for url in (worker.url, worker.url + "/", worker.url.replace("http:", "HTTP:")):
        assert (await field.admin("POST", "/workers", {"url": url})).status in (400, 409)
    assert (await field.admin("GET", "/workers")).json()["total"] == 1


async def test_a_worker_that_hangs_on_registration_hinders_nobody(field: Field) -> None:
    """WK03."""
    going = await field.worker()
    hanging = await field.unregistered()
    hanging.hang.set()
    assert (await field.admin("POST", "/workers", {"url": hanging.url})).status == 202
    await eventually(lambda: hanging.polls)
    began_at = asyncio.get_running_loop().time()
    assert (await field.admin("GET", "/workers")).json()["total"] == 2
    coming = await field.worker()
    assert (await field.remove(going)).status in (200, 202)
    assert asyncio.get_running_loop().time() - began_at < 1
    assert not (await field.shown(hanging))["is_healthy"]
    assert (await field.chat()).status == 200
    assert len(coming.calls) == 1
    hanging.hang.clear()
    for call in hanging.polls:
        call.close()  # what hung fails now; the next poll is answered
    await field.until_worker(hanging, is_healthy=True)


async def test_a_removed_worker_ends_its_streams_first(field: Field) -> None:
    """WK05."""
    worker, gate = await field.worker(), asyncio.Event()
    worker.answer = held(gate)
    streams = [await field.stream() for _ in range(5)]
    other = await field.worker()
    assert (await field.remove(worker, deadline_s=None)).status == 202
    assert (await field.shown(worker))["status"] == "Draining"
    assert {answer.status for answer in await field.chats(10)} == {200}
    assert (len(worker.calls), len(other.calls)) == (5, 10)
    assert (await field.remove(worker, deadline_s=None)).status in (404, 409)
    gate.set()
    for stream in streams:
        assert b"[DONE]" in await stream.read()
    await eventually(lambda: is_gone(field, worker))
    assert (await field.remove(worker, deadline_s=None)).status == 404


async def test_a_removed_worker_is_gone_at_its_deadline(field: Field) -> None:
    """WK05."""
    worker, gate = await field.worker(), asyncio.Event()
    worker.answer = held(gate)
    stream = await field.stream()
    await stream.until(b"one ")
    assert (await field.remove(worker, deadline_s=0.3)).status == 202
    await eventually(lambda: is_gone(field, worker), within_s=2)
    gate.set()
    await stream.read()


async def test_removed_workers_leave_no_series(field: Field) -> None:
    """MT05."""
    workers = [await field.unregistered(host=f"127.0.0.{n}") for n in range(1, 26)]
    for worker in workers:
        assert (await field.admin("POST", "/workers", {"url": worker.url})).status == 202
    await asyncio.gather(*(field.until_worker(worker, is_healthy=True) for worker in workers))
    assert await field.metric("laneway_workers", state="active") == 25
    await asyncio.gather(*(worker.stop() for worker in workers[:10]))
    await asyncio.gather(*(field.until_worker(w, is_healthy=False) for w in workers[:10]))
    assert await field.metric("laneway_workers", state="active") == 15
    assert await field.metric("laneway_workers", state="ejected") == 10
    for worker in workers:
        await field.remove(worker)
    await eventually(lambda: no_workers(field))
    text = str(await field.series())
    assert not [worker.id for worker in workers if worker.id in text]


async def no_workers(field: Field) -> bool:
    return await field.metric("laneway_workers") == 0


async def test_a_worker_can_be_named_by_its_url(field: Field) -> None:
    """WK05."""
    worker = await field.worker()
    answer = await field.admin("GET", f"/workers/{quote(worker.url, safe='')}")
    assert answer.json()["id"] == worker.id
    assert_error(await field.admin("GET", "/workers/127.0.0.1:1"), 404)
