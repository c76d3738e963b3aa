"""Headers and targets pass as HTTP wants it; keys open what they should, and go no further."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.field.harness import Field, assert_error, chat_body
from tests.field.mock_worker import DONE, SSE, Call, chat_event, plain
from tests.field.wire import Answer

CONFIG = {
    "auth": {"api_keys": ["r-key"], "admin_keys": ["a-key"]},
    "server": {"cors_allowed_origins": ["https://app.example"]},
}


def streamed_or_plain(call: Call, headers: list[tuple[str, str]]) -> None:
    """A good answer with more headers, in the form that was asked for."""
    if not call.json().get("stream"):
        plain(call, 200, {"choices": []}, headers)
        return
    call.head(headers=[*SSE, *headers])
    call.chunk(chat_event("one"))
    call.chunk(DONE)
    call.end()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_workers_own_connection_is_its_own(field: Field, *, stream: bool) -> None:
    """HD01."""
    worker = await field.worker()
    theirs = [
        *(("Server", "uvicorn"), ("Date", "Thu, 01 Jan 2026 00:00:00 GMT"), ("X-A", "1")),
        *(("Connection", "keep-alive, x-hop"), ("Keep-Alive", "timeout=5"), ("X-Hop", "1")),
    ]

    async def chatty(call: Call) -> None:
        streamed_or_plain(call, theirs)

    worker.answer = chatty
    answer = await field.stream() if stream else await field.chat()
    names = [name for name, _ in answer.headers]
    assert names.count("server") <= 1
    assert names.count("date") <= 1
    assert answer.header("x-a") == "1"
    assert "x-hop" not in names
    assert answer.header("keep-alive") is None
    assert answer.header("connection") in (None, "keep-alive")
    assert not (answer.all("content-length") and answer.all("transfer-encoding"))
    await answer.read()
    assert answer.complete


async def test_a_clients_own_connection_is_its_own(field: Field) -> None:
    """HD01, towards the worker."""
    worker = await field.worker()
    headers = [
        *(("connection", "close, x-hop"), ("x-hop", "1"), ("keep-alive", "timeout=1"), ("te", "a")),
        *(("x-forwarded-for", "10.9.8.7"), ("x-kept", "1"), ("accept-language", "de")),
    ]
    answer = await field.post("/v1/chat/completions", chat_body(), headers=headers)
    await (await answer.head()).read()
    call = worker.calls[0]
    names = [name for name, _ in call.headers]
    assert {"x-hop", "keep-alive", "te"}.isdisjoint(names)
    assert "close" not in (call.header("connection") or "")
    assert (call.header("x-kept"), call.header("accept-language")) == ("1", "de")
    assert [value for name, value in call.headers if name == "host"] == [worker.id]
    assert names.count("content-length") == 1


async def test_a_worker_gets_its_own_key_on_every_route(field: Field) -> None:
    """HD03."""
    worker = await field.unregistered()
    worker.api_key = "w-key"
    await field.register(worker, api_key="w-key")
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate")
    for path in paths:
        body = chat_body(prompt="hi", input="hi", text="hi", max_tokens=4)
        answer = await field.post(path, body)
        await (await answer.head()).read()
        assert answer.status == 200, (path, answer.body)
    for path in ("/v1/models", "/get_model_info"):
        assert (await field.get(path)).status == 200
    await field.polled(worker)
    assert [call.path for call in worker.calls] == list(paths)
    keys = {call.header("authorization") for call in (*worker.calls, *worker.polls)}
    assert keys == {"Bearer w-key"}
    assert "w-key" not in str(await field.shown(worker))
    assert "w-key" not in field.router.log()


async def test_a_changed_key_of_a_worker_is_used_for_polls_and_requests(field: Field) -> None:
    """HD03."""
    worker = await field.unregistered()
    worker.api_key = "old-key"
    await field.register(worker, api_key="old-key")
    worker.api_key = "new-key"
    target = f"/workers/{quote(worker.id, safe='')}"
    assert (await field.admin("PATCH", target, {"api_key": "new-key"})).status == 200
    worker.polls.clear()
    await field.polled(worker)
    assert {call.header("authorization") for call in worker.polls} == {"Bearer new-key"}
    assert (await field.chat()).status == 200


async def test_a_worker_without_a_key_never_sees_the_routers(field: Field) -> None:
    """HD03."""
    worker = await field.worker()
    assert (await field.chat()).status == 200
    assert [call.header("authorization") for call in worker.calls] == [None]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_target_is_passed_byte_for_byte(field: Field, method: str) -> None:
    """HD05."""
    worker = await field.worker()
    query = "?x=a%2520b&y=a|b&z=%26&e=&&p=+%2B"
    target = {
        "GET": "/v1/responses/resp%2Fname" + query,
        "POST": "/v1/chat/completions" + query,
    }[method]
    if method == "GET":
        answer = await field.get(target)
    else:
        answer = await field.post(target, chat_body())
        await (await answer.head()).read()
    assert [call.target for call in worker.calls] == [target], answer.body


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_of_one_name_all_arrive_in_order(field: Field, *, stream: bool) -> None:
    """HD07."""
    worker = await field.worker()
    cookies = ["a=1; Expires=Thu, 01 Jan 2026 00:00:00 GMT", "b=2"]
    several = [
        *(("Set-Cookie", cookies[0]), ("X-Multi", "1")),
        *(("Set-Cookie", cookies[1]), ("X-Multi", "2")),
    ]

    async def answer_with_them(call: Call) -> None:
        streamed_or_plain(call, several)

    worker.answer = answer_with_them
    answer = await field.stream() if stream else await field.chat()
    assert answer.all("set-cookie") == cookies
    assert answer.all("x-multi") == ["1", "2"]
    await answer.read()


async def test_a_preflight_needs_no_key(field: Field) -> None:
    """AU01."""
    await field.worker()
    asks = [
        ("origin", "https://app.example"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "authorization, content-type"),
    ]
    answer = await Answer.request(
        field.router.port, "OPTIONS", "/v1/chat/completions", headers=asks
    )
    await (await answer.head()).read()
    assert answer.status in (200, 204)
    assert answer.header("access-control-allow-origin") == "https://app.example"
    assert "POST" in (answer.header("access-control-allow-methods") or "")
    assert "authorization" in (answer.header("access-control-allow-headers") or "").lower()
    page = [("origin", "https://app.example")]
    answer = await field.post("/v1/chat/completions", chat_body(), headers=page)
    await (await answer.head()).read()
    assert answer.header("access-control-allow-origin") == "https://app.example"


@pytest.mark.parametrize(
    "headers",
    [[], [("authorization", "Bearer other")], [("authorization", "r-key")], [("x-api-key", "no")]],
    ids=["none", "wrong", "no scheme", "other header"],
)
async def test_a_chat_needs_a_key(field: Field, headers: list[tuple[str, str]]) -> None:
    """AU01."""
    worker = await field.worker()
    body = b'{"model":"m","messages":[]}'
    port = field.router.port
    answer = await Answer.request(port, "POST", "/v1/chat/completions", headers=headers, body=body)
    await (await answer.head()).read()
    assert_error(answer, 401)
    assert worker.calls == []


ADMIN_ROUTES = (
    *(("GET", "/workers"), ("POST", "/workers"), ("GET", "/workers/{id}")),
    *(("PUT", "/workers/{id}"), ("PATCH", "/workers/{id}"), ("DELETE", "/workers/{id}")),
    *(("POST", "/add_worker?url=http://127.0.0.1:9"), ("POST", "/remove_worker?url={url}")),
    *(("GET", "/list_workers"), ("POST", "/flush_cache"), ("GET", "/admin/state")),
)
KEYS = {"none": "", "wrong": "other", "user": "r-key"}


@pytest.mark.parametrize(("who", "status"), [("none", 401), ("wrong", 401), ("user", 403)])
async def test_admin_routes_open_for_admin_keys_only(field: Field, who: str, status: int) -> None:
    """AU03."""
    worker = await field.worker()
    before = (await field.admin("GET", "/list_workers")).body
    headers = [("authorization", f"Bearer {KEYS[who]}")] if KEYS[who] else []
    body = b'{"url":"http://127.0.0.1:9","priority":9}'
    for method, form in ADMIN_ROUTES:
        target = form.format(id=worker.id, url=worker.url)
        port = field.router.port
        answer = await Answer.request(port, method, target, headers=headers, body=body)
        await (await answer.head()).read()
        assert answer.status == status, (method, target, answer.body)
        assert_error(answer, status)
    assert (await field.admin("GET", "/list_workers")).body == before
    assert (await field.shown(worker))["priority"] == 0
    assert not [call for call in worker.polls if call.path == "/flush_cache"]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
async def test_health_stays_open(field: Field, path: str) -> None:
    """AU03."""
    await field.worker()
    answer = await Answer.request(field.router.port, "GET", path)
    await (await answer.head()).read()
    assert answer.status == 200
