"""GET and PATCH /config, its history and the way back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.cluster import cluster

ADMIN = {"authorization": "Bearer sk-admin"}
KEYS: dict[str, Any] = {"api_keys": ["sk-user"], "admin_keys": ["sk-admin"]}


async def test_the_configuration_is_shown_without_secrets() -> None:
    workers = [{"url": "http://h:1", "api_key": "sk-worker"}]
    async with cluster(auth=KEYS, workers=workers) as router:
        answer = await router.client.get("/config", headers=ADMIN)
        assert answer.status_code == 200
        for secret in ("sk-user", "sk-admin", "sk-worker"):
            assert secret not in answer.text
        body = answer.json()
        assert body["version"]["number"] == 1
        assert len(body["version"]["digest"]) == 12
        assert body["config"]["queue"]["depth_max"] == 1_000
        assert body["config"]["workers"][0]["api_key"] == "**********"
        assert body["config"]["auth"]["api_keys"][0].startswith("key-")
        assert "server.port" in body["fixed"]
        assert (body["overlay"], body["needs_restart"]) == ({}, [])


async def test_a_patch_changes_what_it_names_and_says_who_did_it() -> None:
    async with cluster(auth=KEYS) as router:
        patch = {"queue": {"depth_max": 7}, "tenants": {"a": {"weight": 3}}}
        dry = await router.client.patch("/config?dry_run=true", json=patch, headers=ADMIN)
        assert (dry.status_code, dry.json()["dry_run"]) == (200, True)
        assert router.driver.config.queue.depth_max == 1_000
        done = await router.client.patch("/config", json=patch, headers=ADMIN)
        assert done.json()["changes"][0] == {"path": "queue.depth_max", "old": 1_000, "new": 7}
        assert done.json()["changes"] == dry.json()["changes"]
        assert done.json()["version"]["number"] == 2
        assert done.json()["version"]["who"].startswith("admin key-")
        assert router.driver.config.queue.depth_max == 7
        shown = (await router.client.get("/config", headers=ADMIN)).json()
        assert shown["overlay"] == patch


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({"queue": {"depth_max": -1}}, "queue.depth_max"),
        ({"nothing": 1}, "nothing"),
        ({"server": {"port": 1}}, "server.port"),
        ({"_secrets_dir": "/"}, "_secrets_dir"),
        ({"auth": {"admin_keys": ["**********"]}}, "auth.admin_keys.0"),
        ({"upstream": {"ca_path": "a\u0000b"}}, "upstream.ca_path"),
        ({"upstream": {"cert_path": "a\u0000b", "key_path": "c"}}, "upstream"),
    ],
)
async def test_a_bad_patch_is_a_400_that_names_the_setting(
    patch: dict[str, Any], param: str
) -> None:
    async with cluster(auth=KEYS) as router:
        for query in ("", "?dry_run=1"):
            answer = await router.client.patch(f"/config{query}", json=patch, headers=ADMIN)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
        assert (await router.client.get("/config", headers=ADMIN)).json()["version"]["number"] == 1


async def test_a_patch_of_any_depth_is_a_400() -> None:
    async with cluster(auth=KEYS) as router:
        deep = b'{"queue":' * 900 + b"1" + b"}" * 900
        for method, path in (("PATCH", "/config"), ("PUT", "/tenants/a"), ("PATCH", "/config")):
            answer = await router.client.request(method, path, content=deep, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request")


async def test_the_last_key_stays_whatever_an_admin_asks() -> None:
    async with cluster(auth={"admin_keys": ["sk-admin"]}) as router:
        keys = {"auth": {"api_keys": ["sk-user"]}}
        await router.client.patch("/config", json=keys, headers=ADMIN)
        for method, path, body in (
            ("PATCH", "/config", {"auth": {"api_keys": []}}),
            ("PATCH", "/config?dry_run=1", {"auth": {"api_keys": None}}),
            ("POST", "/config/rollback", {"version": 1}),
            ("DELETE", "/config/overlay", None),
        ):
            answer = await router.client.request(method, path, json=body, headers=ADMIN)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
            assert (await router.client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("query", ["?dry_run=maybe", "?dry_run=1&dry_run=0", "?dryrun=true"])
async def test_a_dry_run_that_is_unclear_is_no_run_at_all(query: str) -> None:
    async with cluster() as router:
        patch = {"queue": {"depth_max": 3}}
        await router.client.patch("/config", json={"queue": {"depth_max": 5}})
        for method, path, body in (
            ("PATCH", "/config", patch),
            ("POST", "/config/rollback", {"version": 1}),
            ("DELETE", "/config/overlay", None),
            ("PUT", "/tenants/a", {}),
        ):
            answer = await router.client.request(method, path + query, json=body)
            assert answer.status_code == 400
        assert router.services.live.version.number == 2


async def test_patches_are_forgotten_or_only_said_to_be() -> None:
    async with cluster() as router:
        await router.client.patch("/config", json={"queue": {"depth_max": 5}})
        dry = await router.client.delete("/config/overlay?dry_run=true")
        assert dry.json()["changes"] == [{"path": "queue.depth_max", "old": 5, "new": 1_000}]
        assert router.driver.config.queue.depth_max == 5
        await router.client.delete("/config/overlay")
        assert router.driver.config.queue.depth_max == 1_000


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b'"x"'])
async def test_a_patch_is_a_json_object(body: bytes) -> None:
    async with cluster() as router:
        assert (await router.client.patch("/config", content=body)).status_code == 400


async def test_a_version_is_brought_back_by_its_number() -> None:
    async with cluster() as router:
        for depth in (5, 6):
            await router.client.patch("/config", json={"queue": {"depth_max": depth}})
        versions = (await router.client.get("/config/history")).json()["versions"]
        assert [version["number"] for version in versions] == [3, 2, 1]
        assert versions[0]["changes"] == [{"path": "queue.depth_max", "old": 5, "new": 6}]
        back = await router.client.post("/config/rollback", json={"version": 2})
        assert back.json()["version"]["number"] == 4
        assert back.json()["version"]["digest"] == versions[1]["digest"]
        assert router.driver.config.queue.depth_max == 5
        gone = await router.client.delete("/config/overlay")
        assert gone.json()["version"]["digest"] == versions[2]["digest"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"version": 99}, 404), ({"version": "1"}, 400), ({"version": True}, 400), ({}, 400)],
)
async def test_a_rollback_to_what_never_was_is_refused(body: dict[str, Any], status: int) -> None:
    async with cluster() as router:
        assert (await router.client.post("/config/rollback", json=body)).status_code == status


async def test_a_key_that_is_taken_away_opens_nothing_from_then_on() -> None:
    async with cluster(auth=KEYS) as router:
        new = {"authorization": "Bearer sk-new"}
        assert (await router.client.get("/config", headers=new)).status_code == 401
        patch = {"auth": {"admin_keys": ["sk-new"], "metrics_open": False}}
        assert (await router.client.get("/metrics")).status_code == 200
        answer = await router.client.patch("/config", json=patch, headers=ADMIN)
        assert "sk-new" not in answer.text
        assert (await router.client.get("/config", headers=ADMIN)).status_code == 401
        assert (await router.client.get("/config", headers=new)).status_code == 200
        assert (await router.client.get("/metrics")).status_code == 401
        assert (await router.client.get("/metrics", headers=new)).status_code == 200
