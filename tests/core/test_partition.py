"""Who owns which worker: every worker one router, equal shares, and little moves."""

from __future__ import annotations

from statistics import mean

from hypothesis import given
from hypothesis import strategies as st

from router.contract import WorkerId
from router.core.partition import Partition, owners

names = st.text(alphabet="abcdefgh-0123456789", min_size=1, max_size=12)
routers = st.lists(names, min_size=1, max_size=8, unique=True)
workers = st.lists(names.map(WorkerId), max_size=40, unique=True)


def ids(count: int) -> list[WorkerId]:
    return [WorkerId(f"10.0.0.{number}:30000") for number in range(count)]


def moved(before: dict[WorkerId, str], after: dict[WorkerId, str]) -> int:
    """Workers that are there before and after, and have another owner."""
    return sum(after[worker] != owner for worker, owner in before.items() if worker in after)


@given(routers, workers)
def test_every_worker_has_one_owner_and_shares_differ_by_one_at_most(
    routers: list[str], workers: list[WorkerId]
) -> None:
    found = owners(routers, workers)
    assert set(found) == set(workers)
    counts = [list(found.values()).count(router) for router in routers]
    assert max(counts) - min(counts) <= 1


@given(routers, workers)
def test_all_routers_compute_the_same_whatever_the_order(
    routers: list[str], workers: list[WorkerId]
) -> None:
    assert owners(routers[::-1], workers[::-1]) == owners(routers, workers)


@given(routers, st.lists(st.tuples(st.sampled_from("mn"), names.map(WorkerId)), max_size=30))
def test_each_kind_is_divided_without_rest_and_without_overlap(
    routers: list[str], kinds: list[tuple[str, WorkerId]]
) -> None:
    kinds = list({worker: (kind, worker) for kind, worker in kinds}.values())
    taken: list[WorkerId] = []
    for router in routers:
        partition = Partition()
        partition.set_routers(routers, own=router)
        own = partition.owned(kinds)
        taken += own
        for kind in "mn":
            alike = {worker for name, worker in kinds if name == kind}
            assert abs(len(own & alike) - len(alike) / len(routers)) < 1
    assert sorted(taken) == sorted(worker for _, worker in kinds)


def test_a_router_that_leaves_hardly_moves_the_workers_of_the_others() -> None:
    excess = []
    for trial in range(40):
        there = [f"router-{trial}-{number}" for number in range(4)]
        before, after = owners(there, ids(16)), owners(there[1:], ids(16))
        orphans = sum(owner == there[0] for owner in before.values())
        assert orphans == 4
        excess.append(moved(before, after) - orphans)
    assert min(excess) == 0
    assert mean(excess) <= 3, excess  # of the 12 that had an owner; dealt anew, 8 would move


def test_a_worker_that_comes_moves_few() -> None:
    there = ["a", "b", "c", "d"]
    moves = [moved(owners(there, ids(n)), owners(there, ids(n + 1))) for n in range(8, 40)]
    assert mean(moves) <= 2, moves


def test_alone_a_router_owns_all() -> None:
    partition = Partition()
    kinds = [("m", worker) for worker in ids(3)]
    assert partition.owned(kinds) == frozenset(ids(3))
    assert not partition.shares_all(1)
    assert owners([], ids(3)) == {}


def test_with_less_than_one_worker_each_all_use_all() -> None:
    partition = Partition()
    partition.set_routers(["a", "b", "c"], own="a")
    assert [count for count in range(10) if partition.shares_all(count)] == [0, 1, 2]


def test_a_router_counts_itself_and_tells_whether_anything_is_new() -> None:
    partition = Partition()
    assert partition.set_routers([], own="a")
    assert partition.routers == 1
    assert partition.set_routers(["b", "a"], own="a")
    assert not partition.set_routers(["a", "b"], own="a")
    assert partition.routers == 2
