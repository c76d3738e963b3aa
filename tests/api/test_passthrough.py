"""Routes that workers answer: which worker is asked, what comes back, what never does."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import unquote

import pytest

from router.api.passthrough import without_secrets
from router.errors import Reason
from tests.api.cluster import Cluster, Exchange, cluster, worker
from tests.runtime.scripted_worker import HANG, Scripted

OK = Scripted(200)
INFO = Scripted(200, {"model_path": "m"})


async def abort(router: Cluster, body: Any, **headers: str) -> int:
    answer = await router.client.post("/abort_request", json=body, headers=headers)
    return answer.status_code


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info", "/v1/responses/r"])
async def test_a_dead_worker_is_never_the_answer(path: str) -> None:
    script = {path: INFO}
    async with worker() as dead, worker() as alive, cluster() as router:
        alive.script.update(script)
        await router.add(dead.url)
        await router.add(alive.url)
        await dead.stop()
        for _ in range(10):
            answer = await router.client.get(path)
            assert (answer.status_code, answer.json()) == (200, {"model_path": "m"})


async def test_without_workers_it_is_a_503_with_a_time_to_come_back() -> None:
    async with cluster() as router:
        answer = await router.client.get("/model_info")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_workers"
        assert answer.json()["error"]["message"].startswith("no worker is registered: add one by")
        await router.client.post("/workers", json={"url": "http://h:1"})
        answer = await router.client.get("/model_info")
        assert answer.json()["error"]["message"] == "no worker is live"


async def test_when_all_fail_the_last_answer_is_passed_on() -> None:
    async with worker(model_info=Scripted(500, {"x": 1})) as only, cluster() as router:
        await router.add(only.url)
        answer = await router.client.get("/model_info")
        assert (answer.status_code, answer.json()) == (500, {"x": 1})
        await only.stop()
        answer = await router.client.get("/model_info")
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_unreachable"


async def raw_get(app: Any, path: bytes, query: bytes) -> None:
    """One GET with exactly these bytes as its target."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "GET", "path": "/v1/responses/a b", "raw_path": path,
        "query_string": query, "headers": [], "client": ("127.0.0.1", 1), "http_version": "1.1",
        "scheme": "http", "server": ("router", 80),
    }  # fmt: skip
    await app(scope, receive, send)


async def test_the_target_reaches_the_worker_byte_for_byte() -> None:
    path, query = b"/v1/responses/a%20b", b"x=a%2520b&y=a|b&z=%26&e="
    lines: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    async with server, cluster() as router:
        await router.add(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await raw_get(router.app, path, query)
    assert lines == [b"GET " + path + b"?" + query + b" HTTP/1.1\r\n"]


async def test_server_info_loses_every_key() -> None:
    info = {
        "api_key": "sk-1",
        "admin_api_key": "sk-2",
        "launch_command": "--api-key sk-1",
        "ssl_keyfile_password": "sk-3",
        "hf_token": "sk-4",
        "internal_states": [{"some_secret": "sk-5", "max_total_tokens": 9}],
        "max_total_num_tokens": 1_000,
        "tokenizer_path": "t",
    }
    async with worker(server_info=Scripted(200, info)) as only, cluster() as router:
        await router.add(only.url)
        answer = await router.client.get("/server_info")
        assert answer.json() == {
            "internal_states": [{"max_total_tokens": 9}],
            "max_total_num_tokens": 1_000,
            "tokenizer_path": "t",
        }
        assert "sk-" not in answer.text


def test_secrets_are_found_at_any_depth_and_counts_of_tokens_are_none() -> None:
    assert without_secrets([{"a": {"API-Key": 1, "b": 2}}]) == [{"a": {"b": 2}}]
    kept = {"max_tokens": 1, "tokens": 2, "page_size": 3, "bos_token": "<s>"}
    assert without_secrets(kept) == kept


async def test_a_worker_gets_its_own_key_and_never_the_routers() -> None:
    keys = {"api_keys": ["r-key"], "admin_keys": ["a-key"]}
    async with worker(model_info=INFO, flush_cache=OK) as only, cluster(auth=keys) as router:
        admin = {"authorization": "Bearer a-key"}
        spec = {"url": only.url, "api_key": "w-key"}
        answer = await router.client.post("/workers", json=spec, headers=admin)
        router.driver.on_report_missing(answer.json()["id"], "no report")
        user = {"authorization": "Bearer r-key", "x-api-key": "r-key"}
        assert (await router.client.get("/model_info", headers=user)).status_code == 200
        assert (await router.client.post("/flush_cache", headers=admin)).status_code == 200
        assert len(only.asked) == 2
        for _, headers in only.asked:
            assert headers["authorization"] == "Bearer w-key"
            assert "r-key" not in str(headers)


async def test_a_flush_asks_all_and_says_when_some_failed() -> None:
    async with worker(flush_cache=OK) as a, worker(flush_cache=OK) as b, cluster() as router:
        assert (await router.client.post("/flush_cache")).status_code == 503
        first, second = await router.add(a.url), await router.add(b.url)
        answer = await router.client.post("/flush_cache")
        assert (answer.status_code, answer.json()["successful"]) == (200, [first, second])
        b.script["/flush_cache"] = Scripted(400, b"busy")
        answer = await router.client.get("/flush_cache")
        assert (answer.status_code, answer.json()["successful"]) == (206, [first])
        assert answer.json()["failed"] == [{"worker": second, "error": "400: busy"}]
        await a.stop()
        assert (await router.client.post("/flush_cache")).status_code == 502


async def test_a_stored_response_is_found_on_the_worker_that_has_it() -> None:
    found = {"/v1/responses/r-1": INFO, "/v1/responses/r-1/cancel": INFO}
    async with worker() as a, worker() as b, worker() as c, cluster() as router:
        for each in (a, b, c):
            await router.add(each.url)
        c.script.update(found)
        assert (await router.client.get("/v1/responses/r-1")).status_code == 200
        assert (await router.client.post("/v1/responses/r-1/cancel")).status_code == 200
        assert (await router.client.get("/v1/responses/r-2")).status_code == 404


async def test_an_abort_goes_to_the_one_worker_that_runs_it() -> None:
    async with worker(abort_request=OK) as a, worker(abort_request=OK) as b, cluster() as router:
        first = await router.add(a.url)
        await router.add(b.url)
        exchange = Exchange(router, "job-1")
        ran_on, other = (a, b) if exchange.ticket.worker_id == first else (b, a)
        assert await abort(router, {"rid": "job-1"}) == 200
        assert (ran_on.count("/abort_request"), other.count("/abort_request")) == (1, 0)
        assert exchange.cuts == []


async def test_an_id_that_begins_another_live_one_never_reaches_a_worker() -> None:
    async with worker(abort_request=OK) as only, cluster() as router:
        await router.add(only.url)
        short, long = Exchange(router, "job-1"), Exchange(router, "job-10")
        assert await abort(router, {"rid": "job-1"}) == 200
        assert await abort(router, {"rid": "job"}) == 200
        assert only.count("/abort_request") == 0
        assert (short.cuts, long.cuts) == ([Reason.ABORTED], [])


async def test_an_unknown_id_is_asked_of_all_workers() -> None:
    async with worker(abort_request=OK) as a, worker() as b, cluster() as router:
        await router.add(a.url)
        await router.add(b.url)
        assert await abort(router, {"rid": "chatcmpl-1"}) == 200
        assert a.count("/abort_request") == b.count("/abort_request") == 1


async def test_a_waiting_request_is_cut_without_asking_anybody() -> None:
    async with worker(abort_request=OK) as only, cluster() as router:
        await router.add(only.url, concurrency_max=1)
        running, waiting = Exchange(router, "one"), Exchange(router, "two")
        assert await abort(router, {"rid": "two"}) == 200
        assert only.count("/abort_request") == 0
        assert (running.cuts, waiting.cuts) == ([], [Reason.ABORTED])


async def test_a_worker_that_refuses_the_abort_loses_the_connection() -> None:
    async with worker(abort_request=Scripted(401)) as only, cluster() as router:
        await router.add(only.url)
        exchange = Exchange(router, "one")
        assert await abort(router, {"rid": "one"}) == 200
        assert exchange.cuts == [Reason.ABORTED]


async def test_nobody_aborts_what_another_tenant_runs() -> None:
    keys = {"api_keys": ["t1", "t2"], "admin_keys": ["root"]}
    async with worker(abort_request=OK) as only, cluster(auth=keys) as router:
        admin = {"authorization": "Bearer root"}
        answer = await router.client.post("/workers", json={"url": only.url}, headers=admin)
        router.driver.on_report_missing(answer.json()["id"], "no report")
        Exchange(router, "job", tenant="key-of-t1")
        assert await abort(router, {"rid": "job"}, authorization="Bearer t2") == 200
        assert only.count("/abort_request") == 0
        assert await abort(router, {"abort_all": True}, authorization="Bearer t2") == 403
        assert await abort(router, {"rid": "a"}, authorization="Bearer t2") == 200
        assert only.count("/abort_request") == 0, "workers abort all ids that begin so"
        assert await abort(router, {"rid": "job"}) == 401
        assert await abort(router, {"rid": "job"}, authorization="Bearer root") == 200
        assert only.count("/abort_request") == 1
        assert await abort(router, {"abort_all": True}, authorization="Bearer root") == 200
        assert only.count("/abort_request") == 2
        assert await abort(router, {"rid": "f" * 32}, authorization="Bearer t2") == 200
        assert only.count("/abort_request") == 3


@pytest.mark.parametrize("body", [[], {"rid": 5}, {"rid": None}, {"rid": "x", "abort_all": "y"}])
async def test_an_abort_of_the_wrong_shape_is_a_400(body: object) -> None:
    async with cluster() as router:
        assert await abort(router, body) == 400


async def test_an_empty_id_aborts_nothing() -> None:
    async with worker(abort_request=OK) as only, cluster() as router:
        await router.add(only.url)
        Exchange(router, "job")
        assert await abort(router, {"rid": ""}) == 200
        assert only.asked == []


@pytest.mark.parametrize(
    "id_of_response",
    [
        "../../flush_cache",
        "%2e%2e/%2E./flush_cache",
        "..%2f..%2Fflush_cache",
        "%252e%252e%252fflush_cache",
        "..%5cflush_cache",
        "./x",
        "..",
    ],
)
@pytest.mark.parametrize("form", ["/v1/responses/{}", "/v1/responses/{}/input_items"])
async def test_no_path_leads_a_worker_to_another_of_its_routes(
    form: str, id_of_response: str
) -> None:
    async with cluster() as router, worker() as one:
        await router.add(one.url)
        scope_path = form.format(id_of_response).encode()
        # As bytes on the wire: an HTTP client would resolve the dots itself.
        status = await status_of_raw(router, scope_path)
        assert status == 400
        assert one.asked == []


@pytest.mark.parametrize("id_of_response", ["resp_a.b..c", "x%2Fy", "...", "%"])
async def test_dots_in_a_name_pass(id_of_response: str) -> None:
    async with cluster() as router, worker() as one:
        await router.add(one.url)
        assert await status_of_raw(router, b"/v1/responses/" + id_of_response.encode()) == 404
        assert len(one.asked) == 1


async def status_of_raw(router: Cluster, raw_path: bytes) -> int:
    """The status of GET `raw_path`, byte for byte."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(raw_path.decode()),
        "raw_path": raw_path,
        "query_string": b"",
        "headers": [],
        "client": ("127.0.0.1", 1),
    }
    await router.app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


async def test_no_form_of_a_web_page_aborts_everything() -> None:
    async with cluster() as router:
        headers = {"sec-fetch-site": "cross-site", "content-type": "text/plain"}
        answer = await router.client.post(
            "/abort_request", content=b'{"abort_all": true}', headers=headers
        )
        assert answer.status_code == 403


HAS_IT, ILL, BUSY = INFO, Scripted(500), Scripted(503)
UNKNOWN, NO = Scripted(404), Scripted(400, {"error": "not cancellable"})


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([ILL, HAS_IT], 200),
        ([HAS_IT, ILL], 200),
        ([BUSY, HAS_IT], 200),
        ([UNKNOWN, ILL], 500),
        ([ILL, UNKNOWN], 500),
        ([UNKNOWN, BUSY], 503),
        ([UNKNOWN, UNKNOWN], 404),
        ([UNKNOWN, NO], 400),
        ([ILL, NO], 400),
        ([HANG, HAS_IT], 200),
    ],
)
async def test_an_ill_worker_does_not_hide_a_stored_response(
    answers: list[Scripted | None], status: int
) -> None:
    path = "v1__responses__r"
    first, second = ({path: answer} for answer in answers)
    async with worker(**first) as a, worker(**second) as b, cluster() as router:
        for each in (a, b):
            await router.add(each.url)
        async with asyncio.timeout(5):
            answer = await router.client.get("/v1/responses/r")
        assert answer.status_code == status
        if status == 503:
            assert answer.headers["retry-after"] == "1"


async def test_a_stored_response_is_found_on_a_worker_that_drains() -> None:
    async with worker(v1__responses__r=INFO) as only, cluster() as router:
        worker_id = await router.add(only.url)
        Exchange(router)
        await router.client.delete(f"/workers/{worker_id}")
        assert (await router.client.get("/v1/responses/r")).status_code == 200


@pytest.mark.parametrize("path", ["/model_info", "/server_info"])
@pytest.mark.parametrize("status", [429, 503])
async def test_a_worker_that_is_busy_says_when_to_come_back(path: str, status: int) -> None:
    async with worker(**{path[1:]: Scripted(status, {})}) as only, cluster() as router:
        await router.add(only.url)
        answer = await router.client.get(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
