"""What the router says of itself: health, readiness, models, loads, metrics, state."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.api.services import ServingPhase
from router.contract import LoadReport, WorkerId, decode_report
from router.core.refusals import NONE_REGISTERED
from router.runtime.loops import LEADS_BACK
from tests.api.cluster import Exchange, cluster


async def test_a_live_process_says_so_whatever_its_workers_do() -> None:
    async with cluster() as router:
        for path in ("/livez", "/liveness"):
            assert (await router.client.get(path)).status_code == 200
            assert (await router.client.head(path)).status_code == 200


@pytest.mark.parametrize("path", ["/readyz", "/readiness"])
async def test_ready_means_a_healthy_worker_and_no_order_to_stop(path: str) -> None:
    async with cluster() as router:
        answer = await router.client.get(path)
        assert answer.status_code == 503
        assert answer.json() == {
            "status": "no_workers", "healthy_workers": 0, "total_workers": 0,
            "why": NONE_REGISTERED,
        }  # fmt: skip
        assert answer.headers["retry-after"] == "1"
        await router.add("http://h:1")
        await router.client.post("/workers", json={"url": "http://h:2"})
        answer = await router.client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ready")
        assert (answer.json()["healthy_workers"], answer.json()["total_workers"]) == (1, 2)
        router.services.lifecycle.phase = ServingPhase.DRAINING
        answer = await router.client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert (await router.client.get("/livez")).status_code == 200


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_halves_of_a_pair_make_no_router_ready(kind: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1", worker_type=kind)
        answer = await router.client.get("/readyz")
        assert (answer.status_code, answer.json()["healthy_workers"]) == (503, 0)
        assert (await router.client.get("/health")).json()["status"] == "no_workers"


async def test_health_is_a_load_report_that_a_router_in_front_can_read() -> None:
    async with cluster() as router:
        assert (await router.client.get("/health")).json()["status"] == "no_workers"
        for port, used in ((1, 100), (2, 300)):
            worker_id = await router.add(f"http://h:{port}", kv_total_tokens=1_000)
            report = LoadReport(kv_used_tokens=used, kv_total_tokens=1_000)
            router.driver.on_report(worker_id, report)
        answer = await router.client.get("/health")
        assert answer.json()["status"] == "ok"
        report = decode_report(answer.content)
        assert report.ready is True
        assert report.kv_total_tokens == 2_000
        assert report.queued_requests == 0


async def test_what_waits_here_and_in_workers_counts_as_queued() -> None:
    async with cluster(headroom={"concurrency_default": 1}) as router:
        worker_id = await router.add("http://h:1")
        for _ in range(3):
            Exchange(router)
        report = decode_report((await router.client.get("/health")).content)
        assert (report.running_requests, report.queued_requests, report.workers) == (1, 2, 1)
        # Another router sends there, too: five are in it, two of them wait.
        figures = LoadReport(running_requests=3, queued_requests=2)
        router.driver.on_report(worker_id, figures)
        report = decode_report((await router.client.get("/health")).content)
        assert (report.running_requests, report.queued_requests) == (3, 4)


async def test_a_router_behind_this_one_counts_with_all_its_engines_but_not_for_itself() -> None:
    async with cluster() as router:
        await router.add("http://h:1")
        region = await router.add("http://h:2")
        figures = LoadReport(
            running_requests=7, queued_requests=3, workers=4, routers=("aa", "bb"), ready=True
        )
        router.driver.on_report(region, figures)
        report = decode_report((await router.client.get("/health")).content)
        assert (report.workers, report.running_requests, report.queued_requests) == (5, 7, 3)
        for via in ("aa", "cc,bb"):
            asked = await router.client.get("/health", headers={"x-laneway-via": via})
            report = decode_report(asked.content)
            assert (report.workers, report.running_requests, report.queued_requests) == (1, 0, 0)


async def test_to_a_router_that_all_workers_lead_back_to_this_one_is_not_ready() -> None:
    async with cluster() as router:

        async def tells(asked_by: str) -> tuple[bool | None, int | None]:
            asked = await router.client.get("/health", headers={"x-laneway-via": asked_by})
            report = decode_report(asked.content)
            return report.ready, report.workers

        region = await router.add("http://h:2")
        empty = LoadReport(workers=0, routers=("aa", "bb"), ready=True)
        router.driver.on_report(region, replace(empty, workers=4))
        assert await tells("aa") == (False, 0), "those are its own"
        assert await tells("bb") == (True, 0), "those are not what leads there"
        assert await tells("cc") == (True, 4)
        router.driver.on_report(region, empty)
        assert await tells("bb") == (False, 0)
        await router.add("http://h:1")
        for name in ("aa", "bb"):
            assert await tells(name) == (True, 1)
        router.services.lifecycle.phase = ServingPhase.DRAINING
        assert await tells("cc") == (False, 1)


async def test_a_router_in_front_reads_the_load_in_no_form_but_ours() -> None:
    """It would take the sums, what leads back to it among them, for those of an engine."""
    async with cluster() as router:
        await router.add("http://h:1")
        for headers, status in (({}, 200), ({"x-laneway-via": "aa"}, 404)):
            answer = await router.client.get("/v1/loads", headers=headers)
            assert answer.status_code == status


async def test_why_it_is_not_ready_is_said() -> None:
    async with cluster() as router:
        await router.client.post("/workers", json={"url": "http://h:1"})
        assert (await router.client.get("/readyz")).json()["why"] == "no worker is live"
        router.driver.on_probe_failed(WorkerId("h:1"), LEADS_BACK)
        why = (await router.client.get("/readyz")).json()["why"]
        assert why == "no worker is live but routers whose workers all lead back to this one"


async def test_a_trusted_router_reads_the_models_without_a_key() -> None:
    auth = {"api_keys": ["sk"], "admin_keys": ["sk-a"]}
    async with cluster(auth=auth) as router:
        assert (await router.client.get("/v1/models")).status_code == 401
    async with cluster(auth={**auth, "trusted_proxies": ["127.0.0.1/32"]}) as router:
        assert (await router.client.get("/v1/models")).status_code == 200
        assert (await router.client.get("/v1/loads")).status_code == 401


async def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    async with cluster() as router:
        await router.add("http://h:1", kv_total_tokens=1_000)
        await router.add("http://h:2")
        assert decode_report((await router.client.get("/health")).content).kv_total_tokens is None


async def test_models_are_the_union_over_workers_with_their_aliases() -> None:
    models = {"org/name": {"aliases": ["chat"], "context_tokens": 4096}, "absent": {}}
    async with cluster(models=models) as router:
        assert (await router.client.get("/v1/models")).json() == {"object": "list", "data": []}
        await router.add("http://h:1", models=["org/name", "b"])
        await router.add("http://h:2", models=["b"])
        listed = (await router.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["b", "org/name", "chat"]
        assert listed["data"][1]["max_model_len"] == 4096
        assert listed["data"][2]["root"] == "org/name"


@pytest.mark.parametrize("path", ["org/name", "org%2Fname", "org%2fname?x=a%2520b&e="])
async def test_a_model_with_a_slash_is_found_raw_and_encoded(path: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1", models=["org/name"])
        answer = await router.client.get(f"/v1/models/{path}")
        assert (answer.status_code, answer.json()["id"]) == (200, "org/name")


@pytest.mark.parametrize("path", ["nope", "..%2Fx", "a%20b", "%00", "%E4%B8%AD", "x" * 5_000])
async def test_an_unknown_model_is_a_404_in_openais_shape(path: str) -> None:
    async with cluster() as router:
        await router.add("http://h:1", models=["m"])
        answer = await router.client.get(f"/v1/models/{path}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(error["message"]) < 500


async def test_a_model_of_an_ejected_worker_is_gone() -> None:
    async with cluster(probe={"failures_to_eject": 1}) as router:
        worker_id = await router.add("http://h:1", models=["m"])
        router.driver.on_probe_failed(worker_id, "refused")
        assert (await router.client.get("/v1/models")).json()["data"] == []


async def test_loads_are_summed_and_shown_by_worker_with_unknowns_as_null() -> None:
    async with cluster() as router:
        await router.add("http://h:1", kv_total_tokens=1_000)
        await router.add("http://h:2")
        report = LoadReport(running_requests=3, queued_requests=1)
        router.driver.on_report(WorkerId("h:1"), report)
        answer = (await router.client.get("/v1/loads")).json()
        first, second = answer["loads"]
        assert (first["num_running_reqs"], first["num_waiting_reqs"]) == (3, 1)
        assert first["max_total_num_tokens"] == 1_000
        assert second["num_running_reqs"] is None
        assert answer["aggregate"]["total_running_reqs"] == 3


async def test_metrics_are_served_as_text_and_as_openmetrics() -> None:
    async with cluster() as router:
        plain = await router.client.get("/metrics")
        assert plain.headers["content-type"].startswith("text/plain")
        assert "laneway_workers{" in plain.text
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        modern = await router.client.get("/metrics", headers=accept)
        assert modern.text.endswith("# EOF\n")


async def test_odd_paths_and_methods_make_no_series() -> None:
    async with cluster() as router:
        before = (await router.client.get("/metrics")).text.count("\n")
        for number in range(200):
            await router.client.get(f"/v1/x/{number}")
            await router.client.request(f"ODD{number}", "/workers")
        after = (await router.client.get("/metrics")).text.count("\n")
        assert after - before < 20


async def test_the_state_shows_queues_counters_and_reports() -> None:
    async with cluster() as router:
        worker_id = await router.add("http://h:1")
        router.driver.on_report(worker_id, LoadReport(cache_hit_ratio=0.5))
        state = (await router.client.get("/admin/state")).json()
        assert {lane["lane"]: lane["queued"] for lane in state["lanes"]} == {"short": 0, "long": 0}
        assert state["workers"][0]["report"]["cache_hit_ratio"] == 0.5
        assert state["counters"]["requests"] == 0


async def test_the_shadow_policy_reports_how_far_it_agrees() -> None:
    async with cluster() as router:
        assert (await router.client.get("/shadow")).json() == {"enabled": False}
    async with cluster(policy={"shadow": "random"}) as router:
        await router.add("http://h:1")
        Exchange(router)
        answer = (await router.client.get("/shadow")).json()
        assert (answer["live"], answer["shadow"]) == ("least_work", "random")
        assert (answer["agreed"], answer["differed"], answer["recent"]) == (1, 0, [])
        series = (await router.client.get("/metrics")).text
        pair = 'live="least_work",shadow="random"'
        assert f'laneway_shadow_decisions_total{{{pair},verdict="agreed"}} 1.0' in series
