"""Limits as a client sees them: what is refused, what it is told, what it is charged in the end.

No Redis is set up here: the limits are this router's own (CF05).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.tenant_settings import digest_of
from tests.field.harness import Field, assert_error, chat_body
from tests.field.mock_worker import DONE, Call, held, silent, status
from tests.field.wire import Answer, eventually

# One tenant for each case, or one would use up what is another's.
LIMITS: dict[str, dict[str, Any]] = {
    "lm03": {"requests_per_minute": 0.001, "requests_burst": 2, "concurrency": 1},
    "lm05": {"cost_per_s": 0.0001, "cost_burst": 9000},
    "lm15": {"requests_per_minute": 30, "requests_burst": 1},
    "rp09": {"cost_per_s": 0.0001, "cost_burst": 300},
    "told": {"requests_per_minute": 600, "cost_per_s": 10, "cost_burst": 500},
    "cut": {"cost_per_s": 0.0001, "cost_burst": 300},
    "t1": {"requests_per_minute": 600},
    "t2": {"requests_per_minute": 600},
}
CONFIG: dict[str, Any] = {
    "auth": {"api_keys": ["sk-main"], "admin_keys": ["sk-admin"]},
    "tenants": {
        name: {"keys": [digest_of(f"lw-{name}")], "limits": limits}
        for name, limits in LIMITS.items()
    }
    | {
        "t1": {"keys": [digest_of("lw-t1")], "tier": "standard", "limits": LIMITS["t1"]},
        "narrow": {"keys": [digest_of("lw-narrow")], "models": ["m"]},
        "off": {"keys": [digest_of("lw-off")], "disabled": True},
    },
    "limits": {"cost": {"prompt_token_units": 1.0, "output_token_units": 1.0}},
    "models": {"m": {"output_tokens_default": 100}},
}
PROBE_UNITS = 13  # of prompt and output, as a good worker reports them


async def send(
    field: Field, tenant: str, *, headers: tuple[tuple[str, str], ...] = (), **fields: Any
) -> Answer:
    """Send a chat with a tenant's key; the answer's head is not yet read."""
    sent = [
        ("authorization", f"Bearer lw-{tenant}"),
        ("content-type", "application/json"),
        *headers,
    ]
    body = json.dumps(chat_body(**fields)).encode()
    return await Answer.request(
        field.router.port, "POST", "/v1/chat/completions", headers=sent, body=body
    )


async def chat(field: Field, tenant: str, **fields: Any) -> Answer:
    """The same, with its whole answer."""
    answer = await send(field, tenant, **fields)
    await (await answer.head()).read()
    return answer


async def remaining(field: Field, tenant: str) -> float:
    """What a small request finds left, in cost units, after its own reservation."""
    answer = await chat(field, tenant, max_tokens=1)
    assert answer.status == 200, answer.body
    return float(answer.header("x-ratelimit-remaining-cost") or "nan")


async def test_what_one_limit_refuses_is_not_charged_by_another(field: Field) -> None:
    """LM03."""
    worker, gate = await field.worker(), asyncio.Event()
    worker.answer = silent(gate)
    running = await send(field, "lm03")
    await eventually(lambda: worker.calls)
    refused = await chat(field, "lm03")
    assert_error(refused, 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    gate.set()
    assert (await running.head()).status == 200
    await running.read()
    assert (await chat(field, "lm03")).status == 200


async def test_every_way_to_end_is_charged_for_what_it_used(field: Field) -> None:
    """LM05: plain, streamed with and without usage, left by its client, failed."""
    worker = await field.worker()
    level = await remaining(field, "lm05")

    async def used() -> float:
        nonlocal level
        await eventually(field.is_idle)
        before, level = level, await remaining(field, "lm05")
        return before - level - PROBE_UNITS

    await chat(field, "lm05", max_tokens=200)
    assert await used() == PROBE_UNITS
    await chat(field, "lm05", max_tokens=200, stream=True)
    assert await used() == PROBE_UNITS
    worker.script.append(without_usage)
    await chat(field, "lm05", max_tokens=200, stream=True)
    assert 5 <= await used() < 25  # its events, and the prompt as estimated
    gate = asyncio.Event()
    worker.script.append(held(gate, first=("one ", "two ", "three ", "four ", "five ")))
    leaving = await send(field, "lm05", max_tokens=200, stream=True)
    await leaving.until(b"five")
    leaving.close()
    assert 5 <= await used() < 25
    worker.script.append(status(500))
    assert (await chat(field, "lm05", max_tokens=200)).status == 500
    assert await used() == 0


async def without_usage(call: Call) -> None:
    """A good stream that does not say how long it was."""
    call.head()
    for text in ("one ", "two ", "three ", "four ", "five"):
        call.event(text)
    call.event("", finish_reason="stop")
    call.chunk(DONE)
    call.end()


async def test_the_wait_that_is_told_is_the_wait_that_helps(field: Field) -> None:
    """LM15."""
    await field.worker()
    assert (await chat(field, "lm15")).status == 200
    refused = await chat(field, "lm15")
    refused_at = asyncio.get_running_loop().time()
    assert_error(refused, 429)
    assert refused.header("retry-after") == "2"
    assert refused.header("x-ratelimit-limit-requests") == "1"
    assert refused.header("x-ratelimit-remaining-requests") == "0"
    assert refused.header("x-ratelimit-reset") == "2"

    async def at(seconds: float) -> int:
        await asyncio.sleep(refused_at + seconds - asyncio.get_running_loop().time())
        return (await chat(field, "lm15")).status

    assert await at(1) == 429
    assert await at(2) == 200


async def test_each_sample_costs_and_what_was_not_made_is_given_back(field: Field) -> None:
    """RP09."""
    worker = await field.worker()
    never = await chat(field, "rp09", n=4, max_tokens=100)
    assert_error(never, 413)
    assert never.header("retry-after") is None
    assert "never has more than 300" in never.json()["error"]["message"]
    gate = asyncio.Event()
    worker.script.append(silent(gate))
    two = await send(field, "rp09", n=2, max_tokens=100)
    await eventually(lambda: worker.calls)
    gate.set()
    await (await two.head()).read()
    assert float(two.header("x-ratelimit-remaining-cost") or "nan") < 300 - 200
    # 13 of the 300 are used; without max_tokens the model's default is charged, 100
    third = await chat(field, "rp09")
    assert third.status == 200
    assert 100 < 300 - PROBE_UNITS - float(third.header("x-ratelimit-remaining-cost") or 0) < 110


async def test_answers_say_where_the_limits_stand(field: Field) -> None:
    await field.worker()
    answer = await chat(field, "told", max_tokens=100)
    assert answer.header("x-ratelimit-limit-requests") == "600"
    assert answer.header("x-ratelimit-remaining-requests") == "599"
    assert answer.header("x-ratelimit-reset-requests") == "100ms"
    assert answer.header("x-ratelimit-limit-cost") == "500"
    assert answer.header("x-ratelimit-limit") == "500", "of the tightest"
    unlimited = await field.chat()
    assert unlimited.header("x-ratelimit-limit") is None


async def test_a_long_answer_is_cut_and_the_client_told(field: Field) -> None:
    worker = await field.worker()
    answer = await chat(field, "cut", max_tokens=5000)
    assert answer.status == 200
    assert answer.header("x-laneway-degraded") == "max_tokens=256; level=0"
    assert worker.calls[-1].json()["max_tokens"] == 256


async def test_the_tenant_is_the_keys_whatever_a_client_says(field: Field) -> None:
    """AU05."""
    worker = await field.worker()
    before = await used_by(field, "t2")
    claims = tuple(
        (name, value)
        for name, value in (
            ("x-tenant", "t2"),
            ("x-laneway-tenant", "t2"),
            ("x-user-tier", "premium"),
            ("x-priority", "high"),
            ("x-laneway-priority", "P0"),
        )
    )
    answer = await chat(field, "t1", headers=claims, user="t2")
    assert answer.status == 200
    # the standard tier is P1, which is the default and so goes without saying but for the claim
    assert answer.header("x-laneway-priority") == "P1; claimed=P0"
    assert worker.calls[-1].header("x-laneway-tenant") is None
    assert worker.calls[-1].header("x-user-tier") is None
    assert await used_by(field, "t2") == before
    assert await used_by(field, "t1") >= 1


async def used_by(field: Field, tenant: str) -> int:
    answer = await field.admin("GET", f"/tenants/{tenant}/usage")
    requests: int = answer.json()["since_start"]["requests"]
    return requests


@pytest.mark.parametrize(
    ("tenant", "fields", "status", "code"),
    [
        ("narrow", {"model": "m"}, 200, ""),
        ("narrow", {"model": "n"}, 403, "forbidden"),
        ("narrow", {"model": None}, 403, "forbidden"),
        ("off", {}, 403, "forbidden"),
        ("nobody", {}, 401, "unauthorized"),
    ],
)
async def test_who_may_not_is_told_so(
    field: Field, tenant: str, fields: dict[str, Any], status: int, code: str
) -> None:
    await field.worker(models=("m", "n"))
    answer = await chat(field, tenant, **fields)
    assert answer.status == status
    if code:
        assert_error(answer, status)
        assert answer.json()["error"]["code"] == code


async def test_a_tenant_that_is_removed_is_refused_at_once(field: Field) -> None:
    """On a connection that it has already."""
    await field.worker()
    made = {"keys": [digest_of("lw-new")]}
    assert (await field.admin("PUT", "/tenants/new", made)).status == 200
    answer = await chat(field, "new")
    assert answer.status == 200
    assert (await field.admin("DELETE", "/tenants/new")).status == 200
    assert_error(await chat(field, "new"), 401)


async def test_without_redis_the_limits_are_this_routers_and_nothing_is_logged_of_it(
    field: Field,
) -> None:
    """CF05."""
    await field.worker()
    answers = await asyncio.gather(*(chat(field, "told", max_tokens=1) for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert "redis" not in field.router.log().lower()
