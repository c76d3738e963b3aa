"""What holds for every route: access, errors, methods, request ids, CORS."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from router.api.surface import cors_headers
from router.config import Config, ServerSettings
from tests.api.cluster import Cluster, cluster

KEYS: dict[str, Any] = {"api_keys": ["sk-user"], "admin_keys": ["sk-admin"]}
ADMIN_ROUTES = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/h:1"),
    ("PUT", "/workers/h:1"),
    ("PATCH", "/workers/h:1"),
    ("DELETE", "/workers/h:1"),
    ("POST", "/add_worker?url=http://h:2"),
    ("GET", "/add_worker?url=http://h:2"),
    ("POST", "/remove_worker?url=http://h:1"),
    ("GET", "/list_workers"),
    ("GET", "/admin/state"),
    ("GET", "/shadow"),
    ("GET", "/replicas"),
    ("POST", "/flush_cache"),
    ("GET", "/config"),
    ("PATCH", "/config"),
    ("GET", "/config/history"),
    ("POST", "/config/rollback"),
    ("DELETE", "/config/overlay"),
]
USER_ROUTES = [
    "/v1/models", "/v1/models/m", "/v1/loads", "/get_loads", "/server_info", "/get_server_info",
    "/model_info", "/health_generate", "/v1/responses/x",
]  # fmt: skip
OPEN_ROUTES = ["/livez", "/readyz", "/liveness", "/readiness", "/health", "/metrics"]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def workers_of(router: Cluster) -> list[str]:
    answer = await router.client.get("/list_workers", headers=bearer("sk-admin"))
    urls: list[str] = answer.json()["urls"]
    return urls


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), (bearer("sk-wrong"), 401), (bearer("sk-user"), 403)],
    ids=["no key", "wrong key", "user key"],
)
async def test_only_an_admin_key_opens_admin_routes(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    async with cluster(auth=KEYS) as router:
        spec = {"url": "http://h:1"}
        await router.client.post("/workers", json=spec, headers=bearer("sk-admin"))
        answer = await router.client.request(
            method, path, json={"url": "http://h:3"}, headers=headers
        )
        assert answer.status_code == status
        assert answer.json()["error"]["code"] in ("unauthorized", "forbidden")
        assert ("www-authenticate" in answer.headers) == (status == 401)
        assert await workers_of(router) == ["http://h:1"]


@pytest.mark.parametrize("path", USER_ROUTES)
async def test_user_routes_want_a_key_when_there_are_keys(path: str) -> None:
    async with cluster(auth=KEYS) as router:
        assert (await router.client.get(path)).status_code == 401
        assert (await router.client.get(path, headers=bearer("no"))).status_code == 401
        for key in ("sk-user", "sk-admin"):
            answer = await router.client.get(path, headers={"authorization": f"bearer {key}"})
            assert answer.status_code not in (401, 403)


@pytest.mark.parametrize("path", OPEN_ROUTES)
async def test_health_and_metrics_need_no_key(path: str) -> None:
    async with cluster(auth=KEYS, client_host="10.0.0.9") as router:
        assert (await router.client.get(path)).status_code in (200, 503)


async def test_metrics_can_be_closed() -> None:
    async with cluster(auth={**KEYS, "metrics_open": False}) as router:
        assert (await router.client.get("/metrics")).status_code == 401
        answer = await router.client.get("/metrics", headers=bearer("sk-admin"))
        assert answer.status_code == 200


async def test_without_admin_keys_admin_routes_are_for_this_machine() -> None:
    async with cluster(client_host="10.0.0.9") as router:
        assert (await router.client.get("/workers")).status_code == 403
        assert (await router.client.get("/v1/models")).status_code == 200
    async with cluster(client_host="::1") as router:
        assert (await router.client.get("/workers")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/nope", "/v1/nope", "/livez/", "/workersx", "/v1/x/%2F"])
async def test_an_unknown_path_is_a_404_in_json(path: str) -> None:
    async with cluster() as router:
        answer = await router.client.get(path)
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
        assert answer.headers["x-laneway-reason"] == "not_found"
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/generate", {"POST"}),
        ("DELETE", "/workers", {"GET", "HEAD", "POST"}),
        ("POST", "/workers/x", {"DELETE", "GET", "HEAD", "PATCH", "PUT"}),
        ("BREW", "/livez", {"GET", "HEAD"}),
    ],
)
async def test_a_wrong_method_is_a_405_with_all_that_is_allowed(
    method: str, path: str, allowed: set[str]
) -> None:
    async with cluster() as router:
        answer = await router.client.request(method, path)
        assert answer.status_code == 405
        assert set(re.split(r",\s*", answer.headers["allow"])) == allowed
        assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_a_request_id_is_kept_or_made() -> None:
    async with cluster() as router:
        for name in ("x-request-id", "x-correlation-id"):
            answer = await router.client.get("/livez", headers={name: "abc-1"})
            assert answer.headers["x-request-id"] == "abc-1"
        both = {"x-correlation-id": "second", "x-request-id": "first"}
        assert (await router.client.get("/x", headers=both)).headers["x-request-id"] == "first"
        for bad in (b"", b"a b", b"x" * 300, b"\xe9"):
            answer = await router.client.get("/livez", headers=[(b"x-request-id", bad)])
            assert answer.headers["x-request-id"].startswith("made-")


async def test_a_fault_of_ours_is_a_500_that_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster() as router:

        def broken() -> None:
            raise RuntimeError("the secret is 42")

        monkeypatch.setattr(router.driver, "snapshot", broken)
        answer = await router.client.get("/workers", headers={"x-request-id": "r-9"})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "42" not in answer.text
        assert answer.headers["x-request-id"] == "r-9"


PREFLIGHT = {
    "origin": "https://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


async def test_a_preflight_needs_no_key() -> None:
    settings = {"cors_allowed_origins": ["https://app.example"]}
    async with cluster(auth=KEYS, server=settings) as router:
        answer = await router.client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = await router.client.get("/v1/models", headers={"origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]


async def test_other_origins_get_no_permission() -> None:
    settings = {"cors_allowed_origins": ["https://app.example"]}
    async with cluster(server=settings) as router:
        answer = await router.client.get("/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
    async with cluster() as router:
        answer = await router.client.get("/v1/models", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in answer.headers


def cors_of(*origins: str) -> Callable[[bytes], bytes]:
    return cors_headers(Config(server=ServerSettings(cors_allowed_origins=origins)))


def test_prepared_cors_lines_say_what_the_middleware_says() -> None:
    lines = cors_of("https://app.example")
    allowed = lines(b"https://app.example")
    assert b"access-control-allow-origin: https://app.example\r\n" in allowed
    assert b"vary: Origin\r\n" in allowed
    assert allowed.endswith(b"\r\n")
    assert b"x-laneway-worker" in allowed
    assert lines(b"https://evil.example") == b"vary: Origin\r\n"
    assert cors_of()(b"https://app.example") == b""
    assert b"access-control-allow-origin: *\r\n" in cors_of("*")(b"https://x")


async def test_a_path_that_only_looks_like_an_inference_route_is_404() -> None:
    async with cluster(auth=KEYS) as router:
        answer = await router.client.post("/v1/chat/completions%0A", json={})
        assert (answer.status_code, answer.headers["x-laneway-reason"]) == (404, "not_found")
