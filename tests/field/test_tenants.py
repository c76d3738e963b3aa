"""Tenants behind a proxy that the router trusts: the tests' own address is one."""

from __future__ import annotations

from typing import Any

from router.tenant_settings import digest_of
from tests.field.harness import Field, assert_error, chat_body
from tests.field.wire import Answer, eventually

CONFIG: dict[str, Any] = {
    "auth": {
        "api_keys": ["sk-main"],
        "trusted_proxies": ["127.0.0.1"],
        "tenant_header": "X-Consumer",
    },
    "tenants": {
        "acme": {"ceiling": "P1"},
        "keyed": {"keys": [digest_of("lw-keyed")], "tier": "free"},
        "narrow": {"keys": [digest_of("lw-narrow")], "models": ["n"]},
    },
}


async def post(
    field: Field,
    *headers: tuple[str, str],
    key: str | None = None,
    path: str = "/v1/chat/completions",
) -> Answer:
    """Send a chat with these headers, with a key or without any."""
    auth = [("authorization", f"Bearer {key}")] if key else []
    sender = Field(field.router)
    answer = await sender.post(path, chat_body(), headers=[*auth, *headers])
    await (await answer.head()).read()
    return answer


async def test_a_trusted_proxy_names_tenant_and_tier(field: Field) -> None:
    worker = await field.worker()
    answer = await post(field, ("x-consumer", "acme"), ("x-user-tier", "free"))
    assert (answer.status, answer.header("x-laneway-priority")) == (200, "P2")
    capped = await post(field, ("x-consumer", "acme"), ("x-user-tier", "premium"))
    assert (capped.status, capped.header("x-laneway-priority")) == (200, None)
    assert worker.calls[-1].header("x-consumer") is None
    await eventually(lambda: '"tenant":"acme"' in field.router.log(), what="its log line")


async def test_a_key_counts_more_than_the_proxys_word(field: Field) -> None:
    await field.worker()
    answer = await post(field, ("x-consumer", "acme"), key="lw-keyed")
    assert (answer.status, answer.header("x-laneway-priority")) == (200, "P2")
    assert_error(await post(field, ("x-consumer", "acme"), key="lw-wrong"), 401)


async def test_an_unknown_tenant_or_tier_is_refused(field: Field) -> None:
    await field.worker()
    assert_error(await post(field, ("x-consumer", "nobody")), 401)
    assert_error(await post(field), 401)
    assert_error(await post(field, ("x-consumer", "acme"), ("x-user-tier", "gold")), 400)


async def test_a_trusted_proxy_may_name_the_tenant_by_the_path(field: Field) -> None:
    worker = await field.worker()
    path = "/t/acme/v1/chat/completions?x=1"
    answer = await post(field, ("x-laneway-priority", "P0"), path=path)
    assert (answer.status, answer.header("x-laneway-priority")) == (200, "P1; claimed=P0")
    assert worker.calls[-1].target == "/v1/chat/completions?x=1"
    assert_error(await post(field, path="/t/nobody/v1/chat/completions"), 401)
    assert_error(await post(field, ("x-consumer", "keyed"), path=path), 400)
    assert_error(await post(field, path="/t/acme/v1/nothing"), 404)


async def test_a_tenant_sees_the_models_that_it_may_use(field: Field) -> None:
    await field.worker(models=("m", "n"))
    answer = await Answer.request(
        field.router.port, "GET", "/v1/models", headers=[("authorization", "Bearer lw-narrow")]
    )
    await (await answer.head()).read()
    assert [model["id"] for model in answer.json()["data"]] == ["n"]
