"""The shadow policy: asked about each dispatch, without any effect."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from router.contract import WorkerId
from router.core.dispatcher import Dispatcher
from router.core.effects import Dispatch, Effect
from router.core.shadow import ShadowView
from router.core.types import Priority, Ticket, TicketState
from tests.core.builders import Bench, config, plain_config


def bench(**policy: Any) -> Bench:
    return Bench(Dispatcher(plain_config(policy=policy), rng=Random(7)))


def view(of: Bench) -> ShadowView:
    seen = of.core.snapshot(now=of.now).shadow
    assert seen is not None
    return seen


def test_without_a_shadow_there_is_nothing_to_see() -> None:
    made = bench()
    made.join("w1")
    made.ask()
    assert made.core.snapshot(now=0.0).shadow is None


def test_where_both_would_send_it_they_agree() -> None:
    made = bench(shadow="least_in_flight")
    made.join("w1", "w2")
    made.ask()
    made.ask()
    made.ask(prompt_bytes=8)
    seen = view(made)
    assert (seen.live, seen.shadow) == ("least_work", "least_in_flight")
    assert seen.agreed + seen.differed == 3


def test_a_difference_says_who_would_have_got_it_and_what_it_costs() -> None:
    made = bench(shadow="least_in_flight")
    made.join("w1")
    for _ in range(3):
        made.ask(prompt_bytes=4)
    made.join("w2")
    long = made.ask(prompt_bytes=80_000)  # one request, but the most work
    assert long.worker_id == "w2"
    made.ask(request_id="it")  # fewer tokens wait on w1, fewer requests on w2
    (difference,) = [d for d in view(made).recent if d.request_id == "it"]
    assert (difference.live, difference.shadow) == (WorkerId("w1"), WorkerId("w2"))
    assert difference.ttft_difference_s > 0.1
    assert view(made).sooner == 0


@pytest.mark.parametrize(
    "shadow", ["weighted", "round_robin", "random", "least_in_flight", "power_of_two"]
)
def test_it_changes_no_decision_and_no_draw(shadow: str) -> None:
    def story(**policy: Any) -> list[tuple[str, WorkerId | None]]:
        made, rng = bench(**policy), Random(3)
        made.join(*(f"w{n}" for n in range(5)))
        running = []
        for number in range(300):
            made.pass_to(made.now + rng.expovariate(40))
            size = rng.choice((40, 4_000, 40_000))
            running.append(made.ask(request_id=str(number), prompt_bytes=size))
            if rng.random() < 0.5:
                made.core.on_first_token(rng.choice(running), now=made.now)
            if rng.random() < 0.6:
                made.end(running.pop(rng.randrange(len(running))))
            if rng.random() < 0.1:
                queued = rng.randint(0, 4)
                made.report(f"w{rng.randint(0, 4)}", running_requests=9, queued_requests=queued)
        return [(t.spec.request_id, t.worker_id) for t in dispatched(made.effects)]

    assert story() == story(shadow=shadow)
    assert story(name="power_of_two") == story(name="power_of_two", shadow=shadow)


@pytest.mark.parametrize(("workers", "routers"), [(60, ()), (8, ("b",))], ids=["many", "shared"])
def test_it_refreshes_no_worker_that_the_live_policy_did_not_look_at(
    workers: int, routers: tuple[str, ...]
) -> None:
    def story(**policy: Any) -> list[tuple[str, WorkerId | None]]:
        settings = config(policy=policy, probe={"stale_after_s": 600.0})  # pacing goes by time
        made, rng = Bench(Dispatcher(settings, rng=Random(7))), Random(3)
        made.join(*(f"w{n}" for n in range(workers)), concurrency_max=8)
        if routers:
            made.core.peering.on_replicas(routers, own="a", now=0.0)
        running: list[Ticket] = []
        for number in range(1_000):
            made.pass_to(made.now + rng.expovariate(12 * workers))
            fields = {"prompt_bytes": rng.choice((40, 4_000, 20_000)), "priority": Priority(1)}
            running.append(made.ask(request_id=str(number), max_tokens=500, **fields))
            for ticket in rng.choices(running, k=3):
                if ticket.state is TicketState.DISPATCHED:
                    made.core.on_first_token(ticket, now=made.now)
                elif ticket.state is TicketState.STREAMING:
                    tokens = ticket.output_seen_tokens + rng.randint(1, 20)
                    made.core.on_tokens(ticket, tokens, now=made.now)
            if rng.random() < 0.95:
                made.end(running.pop(rng.randrange(len(running))))
        if policy:
            assert view(made).agreed + view(made).differed == len(dispatched(made.effects))
        return [(t.spec.request_id, t.worker_id) for t in dispatched(made.effects)]

    assert story() == story(shadow="least_in_flight")


def test_a_dispatch_that_left_its_lane_is_compared_with_its_own_group() -> None:
    made = bench(shadow="least_in_flight")
    made.join("s1", lanes=("short",), concurrency_max=1)
    made.join("l1", "l2", lanes=("long",))
    made.ask()
    spilled = [made.ask() for _ in range(4)]
    assert all(ticket.spilled for ticket in spilled)
    assert view(made).agreed + view(made).differed == 5
    assert {d.shadow for d in view(made).recent} <= {"l1", "l2"}


def test_a_dispatch_that_stays_in_its_lane_is_not_compared_with_the_other() -> None:
    made = bench(shadow="least_in_flight")
    made.join("l1", lanes=("long",))
    made.join("s1", lanes=("short",))
    made.ask(max_tokens=4_000)
    assert made.ask(max_tokens=4_000).worker_id == "l1"  # which waits, so s1 was looked at, too
    assert (view(made).agreed, view(made).differed) == (2, 0)


def dispatched(effects: list[Effect]) -> list[Any]:
    return [effect.ticket for effect in effects if isinstance(effect, Dispatch)]


def test_a_new_pair_of_policies_counts_from_zero_and_other_settings_do_not() -> None:
    made = bench(shadow="random")
    made.join("w1")
    made.ask()
    made.core.on_config(plain_config(policy={"shadow": "random"}, queue={"depth_max": 7}), now=0.0)
    assert view(made).agreed == 1
    made.core.on_config(plain_config(policy={"shadow": "weighted"}), now=0.0)
    assert (view(made).shadow, view(made).agreed) == ("weighted", 0)
    made.core.on_config(plain_config(), now=0.0)
    assert made.core.snapshot(now=0.0).shadow is None


def test_only_the_last_differences_are_kept() -> None:
    made = bench(shadow="random")
    made.join(*(f"w{n}" for n in range(8)))
    for _ in range(200):
        made.ask()
    seen = view(made)
    assert seen.differed > 50
    assert len(seen.recent) == 50
    assert seen.agreed + seen.differed == 200
