"""Bodies: odd ones are refused clearly, good ones reach the worker byte for byte."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from tests.field.harness import Field, assert_error, chat_body
from tests.field.mock_worker import Call, good, plain
from tests.field.wire import Answer

BODY_BYTES_MAX = 9 * 2**20
CONFIG = {"server": {"body_bytes_max": BODY_BYTES_MAX, "body_timeout_s": 5}}
CHAT = "/v1/chat/completions"


async def sent(field: Field, body: bytes, *, path: str = CHAT) -> Answer:
    answer = await field.post(path, body)
    await (await answer.head()).read()
    return answer


async def sglang_checks(call: Call) -> None:
    """Refuses token limits as SGLang does."""
    body = call.json()
    limits = {**body, **body.get("sampling_params", {})}
    names = ("max_tokens", "max_completion_tokens", "max_new_tokens")
    tokens = next((limits[name] for name in names if name in limits), None)
    if tokens is not None and (type(tokens) is not int or not 0 < tokens < 2**31):
        plain(call, 400, {"object": "error", "message": "bad max_tokens", "code": 400})
    else:
        await good(call)


async def test_a_body_in_a_legacy_code_page_is_a_bad_request(field: Field) -> None:
    """RP01."""
    worker = await field.worker()
    answer = await sent(field, b'{"model":"m","messages":[{"role":"user","content":"a\x97b"}]}')
    assert_error(answer, 400)
    assert worker.calls == []


NO_REQUESTS = (
    *(b"", b"{", b"[]", b"null", b'"text"', b"12", b"{}}", b"\xff\xfe{}", b"{'model':'m'}"),
    b'{"model":"m","messages":[NaN]}',
    b'{"model":"m","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    *(b'{"model":7,"messages":[]}', b'{"model":["m"],"messages":[]}'),
    *(b'{"model":"m","stream":"yes","messages":[]}', b'{"model":"m","n":-1,"messages":[]}'),
)


async def test_a_body_that_is_no_request_is_refused(field: Field) -> None:
    """RP01, for the whole kind: never a 500, and the worker never sees it."""
    worker = await field.worker()
    for body in NO_REQUESTS:
        answer = await sent(field, body)
        assert answer.status == 400, (body[:80], answer.status, answer.body)
        assert_error(answer, 400)
    assert worker.calls == []


NO_LIMITS = ("0", "-1", "-950", "1.5", '"10"', "true", "1e400", "9223372036854775808", "{}", "[]")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        *((CHAT, "max_tokens"), (CHAT, "max_completion_tokens")),
        *(("/v1/completions", "max_tokens"), ("/generate", "max_new_tokens")),
    ],
)
async def test_a_token_limit_that_is_no_positive_integer_is_refused(
    field: Field, path: str, name: str
) -> None:
    """RP03."""
    worker = await field.worker()
    worker.answer = sglang_checks
    for value in NO_LIMITS:
        text = json.dumps(chat_body(prompt="hi", text="hi"))[:-1] + f',"{name}":{value}}}'
        if path == "/generate":
            text = f'{{"text":"hi","sampling_params":{{"{name}":{value}}}}}'
        answer = await sent(field, text.encode(), path=path)
        assert answer.status == 400, (value, answer.status, answer.body)
        assert json.loads(answer.body)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}, {"max_tokens": 1}])
async def test_a_token_limit_may_be_null_or_absent(field: Field, fields: dict[str, None]) -> None:
    """RP03."""
    worker = await field.worker()
    worker.answer = sglang_checks
    assert (await field.chat(**fields)).status == 200


async def test_pictures_pass_unchanged(field: Field) -> None:
    """RP05."""
    worker = await field.worker()
    picture = "data:image/png;base64," + base64.b64encode(b"\x00\xffpng" * 420_000).decode()
    parts = [{"type": "image_url", "image_url": {"url": picture}} for _ in range(3)]
    content = [{"type": "text", "text": "what is it?"}, *parts]
    body = json.dumps(chat_body(messages=[{"role": "user", "content": content}])).encode()
    assert 8 * 2**20 < len(body) < BODY_BYTES_MAX
    assert (await sent(field, body)).status == 200
    assert worker.calls[0].body == body


async def test_a_body_above_the_limit_is_refused(field: Field) -> None:
    """RP05: by its announced length, and by its real one when it is sent in chunks."""
    worker = await field.worker()
    padding = b'{"model":"m","messages":[],"x":"'
    body = padding + b"y" * (BODY_BYTES_MAX + 1 - len(padding) - 2) + b'"}'
    refused = await field.metric("laneway_refusals_total", reason="body_too_large")
    assert_error(await sent(field, body), 413)
    answer = await Answer.connect(field.router.port)
    answer.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    answer.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    await (await answer.head()).read()
    assert_error(answer, 413)
    assert await field.metric("laneway_refusals_total", reason="body_too_large") == refused + 2
    assert worker.calls == []


async def test_a_body_at_the_limit_is_served(field: Field) -> None:
    """RP05."""
    worker = await field.worker(kv_total_tokens=10**9)
    padding = b'{"model":"m","messages":[],"x":"'
    body = padding + b"y" * (BODY_BYTES_MAX - len(padding) - 2) + b'"}'
    assert (await sent(field, body)).status == 200
    assert len(worker.calls[0].body) == BODY_BYTES_MAX


async def test_a_chunked_body_reaches_the_worker_whole(field: Field) -> None:
    """RP05."""
    worker = await field.worker()
    body = json.dumps(chat_body()).encode()
    answer = await Answer.connect(field.router.port)
    answer.send(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for byte in body:
        answer.send(b"1;ext=1\r\n%c\r\n" % byte)
    answer.send(b"0\r\ntrailer: 1\r\n\r\n")
    await (await answer.head()).read()
    assert answer.status == 200, answer.body
    assert worker.calls[0].body == body


async def test_fields_that_the_router_does_not_know_pass_byte_for_byte(field: Field) -> None:
    """RP07."""
    worker = await field.worker()
    body = (
        b'{ "model":"m" , "return_hidden_states":true,"x":1.0,"y":12345678901234567890,'
        b'"z":{"b":1,"a":2},"t":"\\u4f60","u":"\xe4\xbd\xa0","d":1,"d":2,'
        b'"messages":[{"role":"user","content":"hi"}]}\r\n'
    )
    assert (await sent(field, body)).status == 200
    assert worker.calls[0].body == body


async def test_a_client_may_wait_for_the_word_to_continue(field: Field) -> None:
    """RP05: curl asks before it sends a large body."""
    worker = await field.worker()
    body = json.dumps(chat_body()).encode()
    answer = await Answer.connect(field.router.port)
    answer.send(
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
    )
    interim = await asyncio.wait_for(answer.raw_head(), 3)
    assert interim.startswith(b"HTTP/1.1 100")
    answer.send(body)
    await (await answer.head()).read()
    assert answer.status == 200
    assert worker.calls[0].body == body
