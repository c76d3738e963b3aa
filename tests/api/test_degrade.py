"""GET /degrade, and the series of the ladders."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest

from router.api.qos import degrade_json
from router.core.types import Priority
from router.metrics import Metrics
from router.records import Records
from tests.api.cluster import cluster
from tests.core.builders import Bench, bench


def crowded() -> Bench:
    """Two models; one place of m is taken while a P3 request waits.

    A P2 request has waited most of its patience.
    """
    made = bench(degrade={"rise_s": 0.0, "fall_s": 1.0}, queue={"give_up_after_targets": 0})
    made.join("w1", concurrency_max=1)
    made.join("w2", models=("other",))
    made.ask()
    made.ask(priority=Priority.P3)
    made.ask(priority=Priority.P2)
    made.pass_to(29.0)
    made.ask(priority=Priority.P2)
    return made


def test_levels_and_whom_they_touched_are_shown() -> None:
    made = crowded()
    body: dict[str, Any] = degrade_json(made.core.snapshot(now=made.now))
    assert body["models"] == [
        {"model": "m", "level": 3, "name": "shed_p2", "saturation": 14.5},
        {"model": "other", "level": 0, "name": "normal", "saturation": None},
    ]
    assert body["degraded"]["refuse"] == {"P0": 0, "P1": 0, "P2": 1, "P3": 0}
    assert set(body["degraded"]) == {"cut", "other_model", "refuse"}
    assert body["preempted"] == 0
    first = body["changes"][-1]
    assert (first["domain"], first["from"], first["to"]) == ("m", 0, 1)
    assert 0 < body["changes"][0]["age_s"] < first["age_s"]


def test_the_same_is_a_series() -> None:
    made = crowded()
    metrics = Metrics(
        Records(),
        version="1",
        snapshot=lambda: made.core.snapshot(now=made.now),
        log_lines_dropped=lambda: 0,
    )
    text = generate_latest(metrics.registry).decode()
    assert 'laneway_degrade_level{model="m"} 3.0' in text
    assert 'laneway_degrade_level{model="other"} 0.0' in text
    assert 'laneway_degrade_saturation_ratio{model="m"}' in text
    assert 'laneway_degrade_saturation_ratio{model="other"}' not in text
    assert 'laneway_degraded_total{act="refuse",priority="P2"} 1.0' in text
    assert "laneway_preemptions_total 0.0" in text


async def test_the_route_is_for_operators() -> None:
    async with cluster() as router:
        answer = await router.client.get("/degrade")
        assert (answer.status_code, answer.json()["models"]) == (200, [])
    async with cluster(client_host="10.0.0.9") as router:
        assert (await router.client.get("/degrade")).status_code == 403
