"""GET /slo and GET /queue, and the lines of the log about shares."""

from __future__ import annotations

import logging

import pytest

from router.contract import LoadReport
from router.core.effects import SharesJudged
from router.core.rate_loop import Act, Step
from router.core.types import Outcome
from tests.api.cluster import Exchange, cluster

SHARES = (0.6, 0.3, 0.08, 0.02)


async def test_slo_tells_attainment_targets_shares_and_the_loop() -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        made = Exchange(router)
        router.driver.first_token(made.ticket)
        router.driver.finished(made.ticket, Outcome.SUCCESS, None, None)
        answer = await router.client.get("/slo")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["target"], body["floor"]) == (0.99, 0.95)
        assert [found["priority"] for found in body["classes"]] == ["P0", "P1", "P2", "P3"]
        p1 = body["classes"][1]
        assert (p1["standing"], p1["requests"], p1["attainment"]) == ("met", 1, 1.0)
        assert (p1["ttft_target_s"], p1["feasible_requests"]) == (0.5, 1)
        p0 = body["classes"][0]
        assert (p0["standing"], p0["attainment"]) == ("unknown", None)
        loop = body["loop"]
        assert (loop["mode"], loop["overloaded"], loop["shed"]) == ("adjust", False, None)
        assert loop["shares"] == {"P0": 0.6, "P1": 0.3, "P2": 0.08, "P3": 0.02}
        assert loop["guarantees"] == loop["configured"] == loop["shares"]


async def test_slo_tells_the_last_moves_with_their_reasons() -> None:
    async with cluster(slo={"loop": "observe"}) as router:
        core = router.driver.dispatcher
        await router.add("http://h:1", concurrency_max=1_000)
        for late in range(2):
            core.on_timer(now=1_000.0 + 5 * late)
            for _ in range(200):
                made = Exchange(router)
                start = made.ticket.arrived_at
                core.on_first_token(made.ticket, now=start + 9 * late)
                core.on_finished(made.ticket, Outcome.SUCCESS, now=start + 9 * late)
        core.on_timer(now=1e9)
        loop = (await router.client.get("/slo")).json()["loop"]
        assert sum(loop["looks"].values()) >= 1
        last = loop["last"]
        assert last["act"] in set(Act)
        assert last["applied"] is False
        assert last["why"]
        assert last["evidence"]["P0"]["attainment"] is None
        assert loop["moves"][0]["after"].keys() == loop["shares"].keys()


async def test_queue_tells_who_waits_where_and_what_holds_them_back() -> None:
    async with cluster() as router:
        worker_id = await router.add("http://h:1", concurrency_max=1, kv_total_tokens=10_000)
        router.driver.on_report(worker_id, LoadReport(kv_used_tokens=0))
        for _ in range(3):
            Exchange(router)
        body = (await router.client.get("/queue")).json()
        assert (body["order"], body["waiting"]) == ("fair", 2)
        lanes = {lane["lane"]: lane for lane in body["lanes"]}
        assert sum(lane["waiting"] for lane in lanes.values()) == 2
        bands = [band["band"] for band in lanes["short"]["bands"]]
        assert bands == ["P0", "P1", "P2", "P3", "late"]
        (domain,) = body["domains"]
        p1, late = domain["bands"][1], domain["bands"][-1]
        assert p1["waiting"] + late["waiting"] == 2
        assert (p1["share_min"], late["share_min"], late["owed"]) == (0.3, None, None)
        (pacing,) = body["pacing"]
        assert pacing["worker"] == worker_id
        assert 0 < pacing["duty"] <= 1
        assert pacing["trim"] == 1
        (elephants,) = body["elephants"]
        assert (elephants["workers"], elephants["width"], elephants["busy"]) == (1, 1, 0)


async def test_an_empty_queue_has_all_its_lines_and_no_domains() -> None:
    async with cluster() as router:
        body = (await router.client.get("/queue")).json()
        assert body["waiting"] == 0
        assert [len(lane["bands"]) for lane in body["lanes"]] == [5, 5]
        assert body["domains"] == body["pacing"] == body["elephants"] == []


@pytest.mark.parametrize("path", ["/slo", "/queue"])
async def test_they_are_for_operators(path: str) -> None:
    keys = {"api_keys": ["user"], "admin_keys": ["admin"]}
    async with cluster(auth=keys) as router:
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"authorization": f"Bearer {key}"}
            answer = await router.client.get(path, headers=headers)
            assert answer.status_code == status
        assert (await router.client.get(path)).status_code == 401


@pytest.mark.parametrize(
    ("act", "applied", "line"),
    [
        (Act.LIFT, True, "shares of the classes are P0 60.0% P1 30.0% P2 8.0% P3 2.0% (lift): w"),
        (Act.RETURN, False, "shares of the classes would be P0 60.0%"),
        (Act.OVERLOADED, False, "shares of the classes cannot help (overloaded): w"),
    ],
)
async def test_moves_are_lines_of_the_log(
    act: Act, applied: bool, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = Step(at=0.0, act=act, applied=applied, why="w", before=SHARES, after=SHARES, evidence=())
    async with cluster() as router:
        with caplog.at_level(logging.INFO, "router"):
            router.driver._execute_rare(SharesJudged(step))
    assert line in caplog.text
