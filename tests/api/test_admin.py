"""The worker API: who may join, what is shown, how a worker goes."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from router.contract import LoadReport, WorkerId
from router.runtime.removals import Removals
from tests.api.cluster import Exchange, cluster


async def test_a_new_worker_is_accepted_located_and_probed_at_once() -> None:
    async with cluster() as router:
        answer = await router.client.post("/workers", json={"url": "http://10.0.0.7:30000/"})
        assert answer.status_code == 202
        assert answer.headers["location"] == "/workers/10.0.0.7%3A30000"
        assert answer.json()["worker_id"] == answer.json()["id"] == "10.0.0.7:30000"
        assert router.probed == ["10.0.0.7:30000"]
        shown = (await router.client.get(answer.headers["location"])).json()
        assert (shown["status"], shown["is_healthy"]) == ("Pending", False)
        router.driver.on_report(WorkerId("10.0.0.7:30000"), LoadReport())
        shown = (await router.client.get(answer.headers["location"])).json()
        assert (shown["status"], shown["is_healthy"]) == ("Ready", True)


async def test_a_second_worker_of_the_same_id_or_url_is_a_conflict() -> None:
    async with cluster() as router:
        await router.add("http://h:1", id="a")
        for body in ({"url": "http://h:2", "id": "a"}, {"url": "http://h:1/", "id": "b"}):
            answer = await router.client.post("/workers", json=body)
            assert answer.status_code == 409
            assert answer.json()["error"]["code"] == "conflict"
        assert len(await router.listed()) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "url"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://user@h:1"}, "url"),
        ({"url": "http://h:99999"}, "url"),
        ({"url": "http://h:1?x=1"}, "url"),
        ({"url": 5}, "url"),
        ({"url": "http://h:1", "id": "a b"}, "id"),
        ({"url": "http://h:1", "id": "x\n"}, "id"),
        ({"url": "http://h:1", "lanes": []}, "lanes"),
        ({"url": "http://h:1", "lanes": ["medium"]}, "lanes"),
        ({"url": "http://h:1", "cost": -1}, "cost"),
        ({"url": "http://h:1", "priority": 10**9}, "priority"),
        ({"url": "http://h:1", "nonsense": 1}, "nonsense"),
        ({"url": "http://h:1", "kv_total_tokens": 0}, "kv_total_tokens"),
    ],
)
async def test_a_bad_worker_is_a_400_that_names_the_field(body: object, field: str) -> None:
    async with cluster() as router:
        answer = await router.client.post("/workers", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"] == field
        assert error["message"].startswith(field)
        assert await router.listed() == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    async with cluster() as router:
        answer = await router.client.post("/workers", content=body)
        assert answer.status_code == 400
        assert answer.headers["x-laneway-reason"] == "bad_request"


async def test_a_huge_body_is_a_413() -> None:
    async with cluster() as router:
        answer = await router.client.post("/workers", content=b" " * (2**20 + 1))
        assert answer.status_code == 413


async def test_fields_of_sglang_router_are_understood_or_named_as_ignored() -> None:
    async with cluster() as router:
        body = {
            "url": "http://h:1",
            "model_id": "llama",
            "priority": 50,
            "cost": 2.5,
            "worker_type": "regular",
            "labels": {"pool": "a"},
            "runtime": "sglang",
            "disable_health_check": False,
        }
        answer = await router.client.post("/workers", json=body)
        assert answer.json()["ignored"] == ["disable_health_check", "runtime"]
        (shown,) = await router.listed()
        for field in ("model_id", "priority", "cost", "worker_type", "labels"):
            assert shown[field] == body[field]


async def test_a_workers_key_is_never_shown() -> None:
    async with cluster() as router:
        await router.add("http://h:1", api_key="sk-worker")
        for path in ("/workers", "/workers/h:1", "/admin/state", "/v1/loads", "/list_workers"):
            answer = await router.client.get(path)
            assert answer.status_code == 200
            assert "sk-worker" not in answer.text
            assert "api_key" not in answer.text
        answer = await router.client.patch("/workers/h:1", json={"api_key": "sk-2", "cost": -1})
        assert "sk-2" not in answer.text
        assert "sk-worker" not in answer.text


@pytest.mark.parametrize("url", ["http://[::1]:9", "http://h:1/base/path", "https://h"])
async def test_every_form_of_id_works_raw_and_encoded(url: str) -> None:
    async with cluster() as router:
        worker_id = await router.add(url)
        for name in (worker_id, quote(worker_id, safe=""), quote(worker_id), quote(url, safe="")):
            answer = await router.client.get(f"/workers/{name}")
            assert answer.status_code == 200, name
            assert answer.json()["id"] == worker_id
        (shown,) = await router.listed()
        assert shown["url"].startswith(url)
        assert (await router.client.delete(f"/workers/{worker_id}")).status_code == 202


async def test_unknown_workers_are_404_for_every_method() -> None:
    async with cluster() as router:
        for method in ("GET", "PUT", "PATCH", "DELETE"):
            answer = await router.client.request(method, "/workers/nobody", json={})
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_an_update_changes_the_fields_given_and_no_other(method: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1", models=["m"], labels={"a": "b"}, priority=3)
        changes = {"lanes": ["long"], "cost": 2}
        answer = await router.client.request(method, "/workers/h:1", json=changes)
        assert answer.status_code == 200
        shown = answer.json()
        assert (shown["lanes"], shown["cost"]) == (["long"], 2.0)
        assert (shown["models"], shown["labels"], shown["priority"]) == (["m"], {"a": "b"}, 3)


@pytest.mark.parametrize(
    "changes", [{"url": "http://other:1"}, {"id": "other"}, {"cost": 0}, {"nonsense": 1}]
)
async def test_an_update_that_cannot_be_changes_nothing(changes: dict[str, object]) -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        before = await router.listed()
        answer = await router.client.patch("/workers/h:1", json=changes)
        assert answer.status_code == 400
        after = await router.listed()
        assert [w["url"] for w in after] == [w["url"] for w in before]
        assert after[0]["cost"] == 1.0


async def test_an_idle_worker_is_gone_as_soon_as_it_is_drained() -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        answer = await router.client.delete("/workers/h:1")
        assert (answer.status_code, answer.json()["status"]) == (202, "draining")
        assert await router.listed() == []
        assert (await router.client.delete("/workers/h:1")).status_code == 404


async def test_a_busy_worker_drains_and_a_second_delete_is_a_conflict() -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        Exchange(router)
        answer = await router.client.delete("/workers/h:1")
        assert (answer.status_code, answer.json()["running"]) == (202, 1)
        (shown,) = await router.listed()
        assert (shown["status"], shown["is_healthy"], shown["load"]) == ("Draining", False, 1)
        assert (await router.client.delete("/workers/h:1")).status_code == 409
        gone = await router.client.delete("/workers/h:1?deadline_s=0")
        assert (gone.status_code, gone.json()["status"]) == (200, "removed")
        assert await router.listed() == []


@pytest.mark.parametrize("deadline", ["x", "-1", "nan", "inf", "1e9", ""])
async def test_a_drain_deadline_that_is_no_time_is_a_400(deadline: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        answer = await router.client.delete(f"/workers/h:1?deadline_s={deadline}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "deadline_s"
        assert (await router.listed())[0]["status"] == "Ready"


async def test_the_old_forms_still_work() -> None:
    async with cluster() as router:
        for method, port in (("POST", 1), ("GET", 2)):
            answer = await router.client.request(method, f"/add_worker?url=http://h:{port}")
            assert answer.status_code == 200
            assert f"http://h:{port}" in answer.text
        listed = (await router.client.get("/list_workers")).json()
        assert listed == {"urls": ["http://h:1", "http://h:2"]}
        loads = (await router.client.get("/get_loads")).json()
        assert loads["workers"][0] == {
            "worker": "http://h:1", "worker_type": "regular", "load": 0,
        }  # fmt: skip
        for method, port in (("POST", 1), ("GET", 2)):
            answer = await router.client.request(method, f"/remove_worker?url=http://h:{port}")
            assert answer.status_code == 200
        assert await router.listed() == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/add_worker", 400),
        ("/add_worker?url=nonsense", 400),
        ("/add_worker?url=http://h:1&nonsense=2", 400),
        ("/remove_worker", 404),
        ("/remove_worker?url=http://h:9", 404),
    ],
)
async def test_old_forms_refuse_as_the_new_ones_do(path: str, status: int) -> None:
    async with cluster() as router:
        assert (await router.client.post(path)).status_code == status


async def test_the_list_counts_workers_by_state_and_lane() -> None:
    async with cluster() as router:
        await router.add("http://h:1", lanes=["short"])
        await router.add("http://h:2")
        await router.client.post("/workers", json={"url": "http://h:3", "lanes": ["long"]})
        answer = (await router.client.get("/workers")).json()
        assert answer["total"] == 3
        assert answer["stats"]["healthy"] == 2
        assert answer["stats"]["by_lane"] == {"short": 2, "long": 2}
        assert answer["stats"]["by_state"]["joining"] == 1
        assert answer["stats"]["regular_count"] == 3


async def test_a_worker_that_stops_answering_is_not_ready_and_one_never_seen_has_failed() -> None:
    async with cluster(probe={"failures_to_eject": 1}) as router:
        seen = await router.add("http://h:1")
        await router.client.post("/workers", json={"url": "http://h:2"})
        router.driver.on_probe_failed(seen, "refused")
        much_later = router.services.snapshot().at + 1_000
        router.driver.dispatcher.on_timer(now=much_later)
        assert [w["status"] for w in await router.listed()] == ["NotReady", "Failed"]


async def test_unknown_figures_are_null() -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        (shown,) = await router.listed()
        assert shown["kv_used_ratio"] is None
        assert shown["queued_requests"] is None
        assert shown["kv_total_tokens"] is None


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/add_worker?url=http://h:1&url=http://h:2"),
        ("POST", "/remove_worker?url=http://h:1&url=http://h:2"),
        ("DELETE", "/workers/h:1?deadline_s=1&deadline_s=0"),
    ],
)
async def test_a_parameter_that_is_given_twice_is_refused(method: str, target: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        answer = await router.client.request(method, target)
        assert answer.status_code == 400
        assert "is given twice" in answer.json()["error"]["message"]
        assert [worker["url"] for worker in await router.listed()] == ["http://h:1"]


@pytest.mark.parametrize(
    "path", ["/add_worker?url=http://w:1", "/remove_worker?url=http://w:1", "/flush_cache"]
)
async def test_no_image_of_a_web_page_changes_anything(path: str) -> None:
    async with cluster() as router:
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await router.client.get(path, headers=headers)).status_code == 403
        rebound = {"host": "evil.example"}
        assert (await router.client.get(path, headers=rebound)).status_code == 403
        assert await router.listed() == []


async def test_a_worker_that_an_operator_removed_is_gone_for_its_agent() -> None:
    async with cluster() as router:
        leased = {"url": "http://w:1", "ttl_s": 600}
        for way in ("DELETE", "old form"):
            await router.add("http://w:1", ttl_s=600)
            if way == "DELETE":
                answer = await router.client.delete("/workers/w:1?deadline_s=0")
            else:
                answer = await router.client.post("/remove_worker?url=http://w:1")
            assert answer.status_code == 200
            answer = await router.client.post("/workers", json=leased)
            assert answer.status_code == 410
            assert answer.json()["error"]["code"] == "removed"
            await router.add("http://w:1")  # an operator brings it back
            await router.client.delete("/workers/w:1?deadline_s=0&by=agent")
            await router.add(
                "http://w:1", ttl_s=600
            )  # and so may the agent that took it out itself
            await router.client.delete("/workers/w:1?deadline_s=0&by=agent")


async def test_a_draining_worker_takes_no_changes() -> None:
    async with cluster() as router:
        await router.add("http://w:1")
        Exchange(router)
        await router.client.delete("/workers/w:1")
        for method in ("PUT", "PATCH"):
            answer = await router.client.request(method, "/workers/w:1", json={"cost": 2})
            assert answer.status_code == 409


def test_removals_are_remembered_for_a_while_and_not_without_end() -> None:
    removals = Removals()
    removals.add("http://w:1", now=0.0, drain_s=100.0)
    assert removals.holds("http://w:1", now=3_699.0)
    assert not removals.holds("http://w:1", now=3_700.0)
    for number in range(5_000):
        removals.add(f"http://w:{number}", now=0.0, drain_s=0.0)
    assert len(removals) == 1_024
    assert removals.holds("http://w:4999", now=1.0)
    assert not removals.holds("http://w:1", now=1.0)
