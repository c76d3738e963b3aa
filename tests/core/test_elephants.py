"""Elephants: how many workers are for very long prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import Lane
from router.core.elephants import Elephants
from router.core.pools import ANY_MODEL, UNLISTED, Pool
from router.core.worker import Worker
from tests.core.builders import Bench, bench, config, plain_config, ticket, worker

PLAIN = plain_config()


def herd(count: int, *, busy: int = 0) -> tuple[Pool, list[Worker]]:
    pool = Pool("m", Lane.SHORT)
    workers = [worker(f"w{n}", bit=1 << n, settings=PLAIN) for n in range(count)]
    for one in workers[:busy]:
        one.pend_tokens = 20_000
    pool.members = {one.id: one for one in workers}
    return pool, workers


def elephants() -> Elephants:
    made = Elephants(config())
    made.serve(["m"])
    return made


def test_without_others_all_workers_are_for_elephants() -> None:
    some, (pool, _) = elephants(), herd(8)
    assert some.width(pool, 0.0) == 8


@given(st.integers(1, 64), st.lists(st.floats(0, 0.15), max_size=60), st.floats(0.3, 0.9))
def test_others_narrow_the_width_to_one_at_least(
    count: int, prefills: list[float], duty: float
) -> None:
    some, (pool, workers) = elephants(), herd(count)
    for one in workers:
        one.pace.duty = duty
    widths = [some.width(pool, 10.0)]
    for prefill_s in prefills:
        some.came(ticket(prefill_s=prefill_s), 10.0)
        widths.append(some.width(pool, 10.0))
    assert widths == sorted(widths, reverse=True)
    assert all(1 <= width <= count for width in widths)


def test_one_more_starts_only_below_the_width() -> None:
    some = elephants()
    assert some.may_start(herd(3, busy=2)[0], 0.0)
    assert not some.may_start(herd(3, busy=3)[0], 0.0)


def test_elephants_themselves_are_not_the_others_demand() -> None:
    some, (pool, _) = elephants(), herd(2)
    for _ in range(1_000):
        some.came(ticket(prefill_s=5.0), 0.0)
    assert some.width(pool, 0.0) == 2


def test_demand_is_kept_for_domains_that_there_are_only() -> None:
    some, (pool, _) = elephants(), herd(4)
    for _ in range(1_000):
        some.came(ticket(prefill_s=0.1), 0.0)
    assert some.width(pool, 0.0) == 1
    some.serve(["n"])
    some.came(ticket(prefill_s=0.1), 0.0)
    some.serve(["m", "n"])
    assert some.width(pool, 0.0) == 4


@pytest.mark.parametrize("model", ["m", None, "whatever"])
def test_requests_for_workers_without_a_list_of_models_are_others_too(model: str | None) -> None:
    b = bench()
    b.join("w1", models=["m"])
    b.join("w2", models=[])
    for _ in range(500):
        b.end(b.ask(model=model, prompt_bytes=4_000))
    key = {"m": "m", None: ANY_MODEL, "whatever": UNLISTED}[model]
    found = {view.model: view for view in b.core.snapshot(now=b.now).queue.elephants}
    assert (found[key].width, found[key].busy) == (1, 0)


@pytest.mark.parametrize("model", ["m", "adapter", None])
def test_others_are_all_that_compete_for_the_same_workers(model: str | None) -> None:
    b = bench()
    b.join("w1", "w2", "w3", "w4", models=["m", "adapter"])
    assert widths(b, model, ("m", "adapter", "")) == [1, 1, 1]


@pytest.mark.parametrize(("model", "narrowed"), [("m", [1, 4, 2]), (None, [1, 1, 2])])
def test_others_that_name_no_model_may_be_anywhere(model: str | None, narrowed: list[int]) -> None:
    b = bench()
    b.join("w1", "w2", models=["m"])
    b.join("x1", "x2", "x3", "x4", models=["x"])
    assert widths(b, model, ("m", "x", "")) == narrowed


def widths(b: Bench, model: str | None, names: tuple[str, ...]) -> list[int]:
    """By model, after a while with 2.7 s of prefill a second for one of them."""
    for _ in range(2_000):
        b.now += 0.01
        b.end(b.ask(model=model, prompt_bytes=4_000))
    pools = [b.core._pools.get(name, Lane.SHORT) for name in names]
    return [b.core._scheduler.elephants.width(pool, b.now) for pool in pools]


def test_of_several_routers_each_has_its_part_of_the_width() -> None:
    pool, workers = herd(4, busy=2)
    assert (elephants().width(pool, 0.0), elephants().may_start(pool, 0.0)) == (4, True)
    pool.routers = 2
    assert (elephants().width(pool, 0.0), elephants().may_start(pool, 0.0)) == (2, False)
    workers[0].pend_tokens = 0
    assert elephants().may_start(pool, 0.0)


def test_a_second_elephant_waits_while_small_ones_pass() -> None:
    b = bench("w1", pacing={"enabled": True, "prefill_ahead_s": 9.0})
    first, second = b.ask(prompt_bytes=80_000), b.ask(prompt_bytes=80_000)
    small = b.ask()
    assert b.dispatched == [first, small]
    b.core.on_first_token(first, now=0.1)
    b.take()
    assert b.dispatched == [first, small, second]
