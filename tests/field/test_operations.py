"""Metrics stay few, connections are neither capped nor kept for ever, names may be odd."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.field.harness import Field, assert_error
from tests.field.mock_worker import held
from tests.field.wire import Answer, eventually

BODY_TIMEOUT_S = 1.0
CONFIG = {"server": {"body_timeout_s": BODY_TIMEOUT_S, "keep_alive_s": 1.0}}
CHINESE = "\u4e2d\u6587-\U0001f600"


async def test_unknown_paths_and_methods_make_no_series(field: Field) -> None:
    """MT01."""
    await field.worker()
    await field.chat()
    before = set(await field.series())
    paths = [f"/v1/x/{uuid.uuid4()}" for _ in range(200)]
    paths += [f"/v1/models/{uuid.uuid4()}" for _ in range(50)]
    for start in range(0, len(paths), 50):
        await asyncio.gather(*(field.get(path) for path in paths[start : start + 50]))
    for method in ("PUT", "DELETE", "BREW", "PROPFIND", "X" * 40):
        for path in ("/v1/chat/completions", "/metrics", f"/{uuid.uuid4()}"):
            answer = await field.send(method, path)
            await (await answer.head()).read()
            assert 400 <= answer.status < 500, (method, path)
    await asyncio.gather(*(field.chat(model=f"no-{uuid.uuid4()}") for _ in range(150)))
    new = {key for key in set(await field.series()) - before if not key[0].endswith("_bucket")}
    assert len(new) < 20, new


async def test_three_hundred_streams_run_at_once(field: Field) -> None:
    """LK01."""
    worker, gate = await field.unregistered(), asyncio.Event()
    worker.kv_total_tokens = 10**7
    await field.register(worker, concurrency_max=1000)
    worker.answer = held(gate)
    streams = await asyncio.gather(*(field.open() for _ in range(300)))
    await eventually(lambda: worker.running == 300, within_s=5, what="300 at once")
    gate.set()
    for stream in streams:
        assert b"[DONE]" in await (await stream.head()).read()


_POST = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
_CHAT = _POST % b"/v1/chat/completions"


@pytest.mark.parametrize(
    "beginnings",
    [(b"", b"POST / HT", _CHAT, _CHAT + b"{"), (_POST % b"/workers",)],
    ids=["chats", "admin"],
)
async def test_sockets_that_send_no_whole_request_are_closed(
    field: Field, beginnings: tuple[bytes, ...]
) -> None:
    """LK05."""
    await field.worker()
    files = field.router.open_files()
    idle = []
    for sent in beginnings:
        for _ in range(30):
            idle.append(await Answer.connect(field.router.port))
            idle[-1].send(sent)
    assert (await field.chat()).status == 200
    await asyncio.gather(*(connection.closed(within_s=BODY_TIMEOUT_S + 2) for connection in idle))
    await eventually(lambda: field.router.open_files() <= files + 4)
    assert close_waits(field.router.port) == 0


def close_waits(port: int) -> int:
    """Sockets in CLOSE_WAIT on a local port."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(
        line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "08" for line in lines
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_may_have_any_unicode_name(field: Field, *, stream: bool) -> None:
    """UN01."""
    worker = await field.worker(models=(CHINESE,))
    answer = await (field.stream if stream else field.chat)(model=CHINESE)
    assert answer.status == 200
    await answer.read()
    assert answer.complete
    assert all(value.isascii() for _, value in answer.headers)
    assert worker.calls[0].json()["model"] == CHINESE
    await eventually(lambda: has_series_of(field, CHINESE))


async def has_series_of(field: Field, model: str) -> bool:
    return await field.metric("laneway_model_requests_total", model=model) > 0


async def test_odd_model_names_work_where_they_are_served(field: Field) -> None:
    """UN03."""
    names = ("org/name", "a b", "../x", CHINESE, "a%2Fb", 'q"uo\\te')
    await field.worker(models=names)
    listed = (await field.get("/v1/models")).json()["data"]
    assert {model["id"] for model in listed} == set(names)
    for name in names:
        assert (await field.chat(model=name)).status == 200, name
        answer = await field.get(f"/v1/models/{quote(name, safe='')}")
        assert answer.status == 200, (name, answer.body)
        assert answer.json()["id"] == name


@pytest.mark.parametrize(
    "names",
    [("org/none", "a b c", "../y", "x\ny\u2028z\x7f"), ("n" * 10_240, "")],
    ids=["unknown", "impossible"],
)
async def test_odd_model_names_are_refused_where_they_are_not(
    field: Field, names: tuple[str, ...]
) -> None:
    """UN03: valid JSON, and one line in the log."""
    worker = await field.worker()
    for name in names:
        before = len(field.router.log())
        answer = await field.chat(model=name)
        assert_error(answer, 400, 404)
        wanted = answer.header("x-request-id") or "?"
        await eventually(lambda: wanted in field.router.log(), what=f"a line for {name!r:.20}")  # noqa: B023
        lines = re.split("[\n\r\u2028\u2029\x85]", field.router.log()[before:])
        (line,) = (line for line in lines if wanted in line)
        assert json.loads(line)
    assert worker.calls == []


async def test_an_encoded_unknown_model_is_not_found(field: Field) -> None:
    """UN03."""
    await field.worker()
    assert_error(await field.get("/v1/models/org%2Fnone"), 404)
    assert_error(await field.get("/v1/models/..%2F..%2Fworkers"), 404)
