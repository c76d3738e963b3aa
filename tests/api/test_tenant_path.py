"""/t/NAME/...: a proxy that names the tenant in the path."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from tests.api.cluster import Cluster, cluster, worker
from tests.runtime.scripted_worker import Scripted

SETTINGS: dict[str, Any] = {
    "auth": {"trusted_proxies": ["10.0.0.0/8"], "tenant_header": "x-consumer"},
    "tenants": {"acme": {"models": ["m"]}, "off": {"disabled": True}},
    "models": {"m": {}, "n": {}},
}
PROXY = "10.0.0.1"
# The same with the tenant's header and by the path.
PATHS = [
    "/v1/models", "/v1/models/m", "/v1/models/n", "/health", "/livez", "/readyz", "/get_loads",
    "/v1/nothing", "/", "/v1/models?x=1",
]  # fmt: skip
OPERATORS = [
    "/workers",
    "/config",
    "/admin/state",
    "/metrics",
    "/queue",
    "/tenants",
    "/flush_cache",
]


def router(client_host: str = PROXY) -> AbstractAsyncContextManager[Cluster]:
    return cluster(client_host=client_host, **SETTINGS)


async def get(made: Cluster, path: str, tenant: str | None = None) -> Any:
    headers = {} if tenant is None else {"x-consumer": tenant}
    return await made.client.get(path, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_the_path_says_the_same_as_the_header(path: str) -> None:
    async with router() as made:
        by_header, by_path = await get(made, path, "acme"), await get(made, "/t/acme" + path)
        assert by_path.status_code == by_header.status_code
        if by_header.status_code == 200 and path != "/health":  # which tells the time
            assert by_path.content == by_header.content


@pytest.mark.parametrize("path", OPERATORS)
async def test_nothing_for_operators_is_below_it(path: str) -> None:
    async with cluster(client_host="127.0.0.1", auth={"trusted_proxies": ["127.0.0.1"]}) as made:
        assert (await get(made, path)).status_code in (200, 503)
        assert (await get(made, "/t/acme" + path)).status_code == 404
        assert (await get(made, "/t/" + path)).status_code == 404


async def test_from_anybody_else_there_is_nothing_at_such_a_path() -> None:
    async with router("192.0.2.1") as made:
        assert (await get(made, "/t/acme/v1/models")).status_code == 404
        assert (await get(made, "/t/acme/livez")).status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/t/acme/v1/models", 200),
        ("/t/%C3%A4%20b/v1/loads", 401),
        ("/%74/acme/v1/loads", 200),
        ("/t/ac%6De/v1/loads", 200),
        ("/t/nobody/v1/loads", 401),
        ("/t/off/v1/loads", 403),
        ("/t/acme%2Fv1/loads", 404),
        ("/t%2Facme/v1/loads", 404),
        ("/t%2Facme", 404),
        ("/t/", 404),
        ("/t/acme", 404),
        ("/t/acme/", 404),
        ("/t/acme/t/acme/v1/loads", 404),
    ],
)
async def test_odd_spellings(path: str, status: int) -> None:
    async with router() as made:
        assert (await get(made, path)).status_code == status


async def test_two_names_must_be_one() -> None:
    async with router() as made:
        assert (await get(made, "/t/acme/v1/loads", "acme")).status_code == 200
        assert (await get(made, "/t/acme/v1/loads", "other")).status_code == 400


async def test_another_method_is_not_possible_there() -> None:
    async with router() as made:
        answer = await made.client.get("/t/acme/v1/chat/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_a_worker_is_asked_without_the_name() -> None:
    settings = {**SETTINGS, "auth": {"trusted_proxies": ["127.0.0.1"]}}
    async with worker(model_info=Scripted(200, {"x": 1})) as asked, cluster(**settings) as made:
        await made.add(asked.url)
        answer = await made.client.get("/t/acme/model_info?q=1")
        assert (answer.status_code, answer.json()) == (200, {"x": 1})
        assert [path for path, _ in asked.asked] == ["/model_info"]
