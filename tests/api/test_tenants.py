"""GET /tenants and below: who there is, what they used, and changes that count at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from router.config import Config
from router.core.cost import CostModel
from router.core.limits import Limits
from router.core.replicas import Replica
from router.core.types import Outcome, RequestRecord
from router.errors import Reason
from router.records import Records
from router.runtime.redis_errors import RedisAway
from router.tenant_settings import digest_of
from router.usage import OTHERS, Amounts, TenantUsage, UsageTable
from tests.api.cluster import cluster
from tests.test_access_log import RECORD

ADMIN = {"authorization": "Bearer sk-admin"}
AUTH: dict[str, Any] = {"api_keys": ["sk-user"], "admin_keys": ["sk-admin"]}
ACME: dict[str, Any] = {"keys": [digest_of("lw-acme")], "tier": "premium"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_all_tenants_are_listed_and_no_key_is_shown() -> None:
    async with cluster(auth=AUTH, tenants={"acme": ACME}) as router:
        answer = await router.client.get("/tenants", headers=ADMIN)
        names = [tenant["name"] for tenant in answer.json()["tenants"]]
        assert names == sorted(["acme", "anonymous", names[-1]])
        assert names[-1].startswith("key-")
        assert digest_of("lw-acme") not in answer.text
        acme = answer.json()["tenants"][0]
        assert (acme["tier"], acme["configured"]) == ("premium", True)
        assert acme["used"]["requests"] == 0
        for headers in ({}, bearer("sk-user"), bearer("lw-acme")):
            assert (await router.client.get("/tenants", headers=headers)).status_code in (401, 403)


@pytest.mark.parametrize(
    ("auth", "tenant", "told_by"),
    [
        (AUTH, {}, []),
        (AUTH, ACME, ["key"]),
        ({**AUTH, "trusted_proxies": ["10.0.0.1"]}, {}, ["proxy"]),
        ({**AUTH, "trusted_proxies": ["10.0.0.1"]}, ACME, ["key", "proxy"]),
    ],
)
async def test_it_is_said_by_what_the_requests_of_a_tenant_are_known(
    auth: dict[str, Any], tenant: dict[str, Any], told_by: list[str]
) -> None:
    async with cluster(auth=auth, tenants={"acme": tenant}) as router:
        shown = (await router.client.get("/tenants", headers=ADMIN)).json()["tenants"]
        found = {each["name"]: each["told_by"] for each in shown}
        assert (found.pop("acme"), found.pop("anonymous")) == (told_by, [])
        assert list(found.values()) == [["key"]]  # the one that is a key alone
    everybody = {**auth, "allow_anonymous": True}
    for changes in ({"auth": everybody}, {"auth": {"admin_keys": ["sk-admin"]}}):
        async with cluster(**changes) as router:
            shown = (await router.client.get("/tenants/anonymous", headers=ADMIN)).json()
            assert shown["told_by"] == ["no_key"]


async def test_limits_are_shown_as_they_hold() -> None:
    limits = {"tenant": {"requests_per_minute": 60}}
    tenants = {"acme": {"limits": {"cost_per_s": 2}}}
    async with cluster(limits=limits, tenants=tenants) as router:
        shown = (await router.client.get("/tenants/acme")).json()["limits"]
        assert (shown["requests_per_minute"], shown["cost_per_s"]) == (60, 2)
        assert (await router.client.get("/tenants/nobody")).status_code == 404


async def test_a_tenant_is_made_changed_and_removed_from_the_next_request_on() -> None:
    async with cluster(auth=AUTH) as router:
        client, keys = router.client, router.services.authenticator
        made = await client.put("/tenants/acme", json=ACME, headers=ADMIN)
        assert (made.status_code, made.json()["tenant"]["tier"]) == (200, "premium")
        headers = [(b"authorization", b"Bearer lw-acme")]
        assert keys.tenant(headers) == "acme"
        changed = await client.patch("/tenants/acme", json={"weight": 3}, headers=ADMIN)
        assert (changed.json()["tenant"]["tier"], changed.json()["tenant"]["weight"]) == (
            "premium",
            3,
        )
        whole = await client.put("/tenants/acme", json={"keys": ACME["keys"]}, headers=ADMIN)
        assert (whole.json()["tenant"]["tier"], whole.json()["tenant"]["weight"]) == (None, 1)
        gone = await client.delete("/tenants/acme", headers=ADMIN)
        assert gone.json()["tenant"] is None
        assert (await client.get("/v1/models", headers=bearer("lw-acme"))).status_code == 401
        assert (await client.delete("/tenants/acme", headers=ADMIN)).status_code == 404


async def test_a_dry_run_changes_nothing() -> None:
    async with cluster(auth=AUTH) as router:
        answer = await router.client.put("/tenants/acme?dry_run=true", json=ACME, headers=ADMIN)
        assert answer.json()["tenant"]["tier"] == "premium"
        assert (await router.client.get("/tenants/acme", headers=ADMIN)).status_code == 404


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"keys": ["lw-plain"]}, "tenants.acme.keys.0"),
        ({"tier": "gold"}, "tenants.acme.tier"),
        ({"limits": {"cost_per_s": 0}}, "tenants.acme.limits.cost_per_s"),
        ({"limits": {"cost_burst": 5}}, "tenants.acme.limits"),
        ({"wieght": 1}, "tenants.acme.wieght"),
    ],
)
async def test_faults_are_named_and_change_nothing(document: dict[str, Any], fault: str) -> None:
    async with cluster(auth=AUTH) as router:
        answer = await router.client.put("/tenants/acme", json=document, headers=ADMIN)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == fault
        assert "lw-plain" not in answer.text
        assert "acme" not in router.driver.config.tenants


async def test_a_change_is_validated_once() -> None:
    async with cluster(auth=AUTH) as router:
        await router.client.put("/tenants/acme", json=ACME, headers=ADMIN)
        assert router.services.live.counts == {("api", "applied"): 1}


async def test_a_strange_name_is_refused() -> None:
    async with cluster(auth=AUTH) as router:
        answer = await router.client.put("/tenants/a%20b", json={}, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


async def test_the_last_key_is_not_removed() -> None:
    auth = {"admin_keys": ["sk-admin"]}
    async with cluster(auth=auth, tenants={"acme": ACME}) as router:
        for query in ("?dry_run=1", ""):
            answer = await router.client.delete(f"/tenants/acme{query}", headers=ADMIN)
            assert answer.status_code == 409
        assert router.services.live.counts == {("api", "refused"): 2}
        assert (await router.client.get("/v1/models")).status_code == 401


def record(**changes: Any) -> RequestRecord:
    made = RequestRecord(**{one.name: getattr(RECORD, one.name) for one in fields(RECORD)})
    for name, value in changes.items():
        setattr(made, name, value)
    return made


async def test_usage_since_the_start_and_of_late() -> None:
    async with cluster(auth=AUTH, tenants={"acme": ACME}) as router:
        used = {"tenant": "acme", "prompt_tokens": 1000, "output_tokens": 500, "cached_tokens": 0}
        now = router.driver._clock()
        for observe in router.driver.on_record:
            observe(record(**used, finished_at=now - 7200))
            observe(record(**used, finished_at=now))
            refused = {"outcome": Outcome.REFUSED, "reason": Reason.RATE_LIMITED}
            observe(record(tenant="acme", dispatched_at=None, finished_at=now, **refused))
        answer = await router.client.get("/tenants/acme/usage?minutes=5", headers=ADMIN)
        total, recent = answer.json()["since_start"], answer.json()["recent"]
        covers = answer.json()["covers"]
        assert (covers["router"], covers["routers"]) == ("r", 1)
        assert covers["since"]["r"].endswith("+00:00")
        assert covers["missing"] == {}
        assert (total["requests"], total["output_tokens"], total["refused"]) == (3, 1000, 1)
        assert total["cost_units"] == pytest.approx(4.0)
        assert total["refusals"] == {"rate_limit_exceeded": 1}
        assert recent["minutes"] == 5
        assert (recent["requests"], recent["output_tokens"]) == (2, 500)
        for minutes in ("0", "61", "-1", "x", "1.5", "00000000599", "9" * 5_000):
            path = f"/tenants/acme/usage?minutes={minutes}"
            assert (await router.client.get(path, headers=ADMIN)).status_code == 400
        path = "/tenants/acme/usage?scope=all"
        assert (await router.client.get(path, headers=ADMIN)).status_code == 400


class Told:
    """What other routers told of usage, or why that is not known."""

    def __init__(self) -> None:
        self.said: dict[str, TenantUsage] | RedisAway = {}

    async def of(self, tenant: str, routers: Sequence[str]) -> dict[str, TenantUsage]:
        assert (tenant, list(routers)) == ("acme", ["a", "b"])
        if isinstance(self.said, RedisAway):
            raise self.said
        return self.said


async def test_usage_is_that_of_all_routers_that_told_theirs() -> None:
    told = Told()
    async with cluster(auth=AUTH, tenants={"acme": ACME}, shared_usage=told) as router:
        others = {name: Replica(name=name, started_at=60.0, loads={}) for name in "ab"}
        router.services.registry._replicas = others
        now, other = router.driver._clock(), TenantUsage()
        other.add(int(now // 60), Amounts(2, 0, 10, 0, 5, 0.5), Outcome.SUCCESS)
        for observe in router.driver.on_record:
            observe(record(tenant="acme", finished_at=now))

        async def used(query: str = "") -> tuple[Any, Any]:
            answer = await router.client.get(f"/tenants/acme/usage{query}", headers=ADMIN)
            body = answer.json()
            figures = [body[part]["requests"] for part in ("since_start", "recent")]
            assert body["covers"]["routers"] == 3
            return figures, body["covers"]

        told.said = {"a": other}
        figures, covers = await used()
        assert figures == [3, 3]
        assert set(covers["since"]) == {"r", "a"}
        assert covers["since"]["a"] == "1970-01-01T00:01:00+00:00"
        assert covers["missing"] == {"b": "it has told nothing yet"}
        told.said = RedisAway("no answer in time")
        figures, covers = await used()
        assert figures == [1, 1]
        assert covers["missing"] == dict.fromkeys("ab", "no answer in time")
        figures, covers = await used("?scope=router")
        assert figures == [1, 1]
        assert covers["missing"] == dict.fromkeys("ab", "it was not asked for")


def test_who_is_not_configured_shares_one_entry() -> None:
    limits = Limits(Config(), CostModel({}))
    table = UsageTable(Records(), known=lambda: frozenset(("acme",)), limits=lambda: limits)
    for number in range(500):
        table.records.add(record(tenant=f"key-{number}"))
    table.records.add(record(tenant="acme"))
    assert set(table.tenants()) == {"acme", OTHERS}
    others = table.of(OTHERS)
    assert others is not None
    assert others.total.requests == 500
