"""What a router does about each worker, given the registry and what it has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.contract import WorkerId, WorkerSpec
from router.core.membership import (
    Change,
    Drain,
    Entry,
    Join,
    Leave,
    Present,
    Removal,
    Restore,
    Step,
    steps,
)

W = WorkerId("w")
NOW = 100_000


def spec(url: str = "http://w:1", **fields: object) -> WorkerSpec:
    return WorkerSpec.model_validate({"url": url, "id": "w"} | fields)


def entry(stamp: str = "s1", **fields: object) -> Entry:
    return Entry(spec=spec(**fields), stamp=stamp)  # type: ignore[arg-type]


def present(
    stamp: str | None = "s1", *, draining: bool = False, since_ms: int = 1, **fields: Any
) -> Present:
    return Present(spec=spec(**fields), stamp=stamp, since_ms=since_ms, draining=draining)


def removal(*, at_ms: int = NOW - 1, drain_s: float = 5.0, over: bool = False) -> Removal:
    until_ms = NOW - 1 if over else NOW + 3_600_000
    drain_until_ms = NOW + round(drain_s * 1000)
    return Removal(
        id=W, url="http://w:1", at_ms=at_ms, drain_until_ms=drain_until_ms, until_ms=until_ms,
        barred=True,
    )  # fmt: skip


MOVED = entry(url="http://elsewhere:1")
CASES: list[tuple[str, Entry | None, Removal | None, Present | None, Step | None]] = [
    ("a new one joins", entry(), None, None, Join(entry())),
    ("one that is there stays", entry(), None, present(), None),
    ("another spec is taken over", entry(cost=2.0), None, present(), Change(entry(cost=2.0))),
    ("and another registration", entry("s2"), None, present(), Change(entry("s2"))),
    ("the file's becomes the registry's", entry(), None, present(None), Change(entry())),
    ("another URL is another worker", MOVED, None, present(), Leave(W)),
    ("one that drains leaves first", entry("s2"), None, present(draining=True), None),
    ("one that is not there any more goes", None, None, present(), Leave(W)),
    ("with time for its requests", None, removal(), present(), Drain(W, 5.0)),
    ("which is not begun anew", None, removal(), present(draining=True), None),
    ("and is over some time", None, removal(drain_s=0), present(draining=True), Leave(W)),
    ("the file's stays", None, None, present(None), None),
    ("unless it was removed", None, removal(), present(None), Drain(W, 5.0)),
    ("before it came", None, removal(), present(None, since_ms=NOW), None),
    ("or too long ago", None, removal(over=True), present(None), None),
    ("nothing comes of a removal alone", None, removal(), None, None),
]


@pytest.mark.parametrize(("entry", "gone", "there", "step"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_each_case_has_its_step(
    entry: Entry | None, gone: Removal | None, there: Present | None, step: Step | None
) -> None:
    found = steps(
        {W: entry} if entry else {}, [gone] if gone else [], {W: there} if there else {}, now_ms=NOW
    )
    assert found == ([step] if step else [])


def test_a_worker_under_another_name_keeps_its_url_to_itself() -> None:
    other = Entry(spec=spec(id="v"), stamp="s9")
    assert steps({WorkerId("v"): other}, [], {W: present(None)}, now_ms=NOW) == []


LOST = Restore(entry(ttl_s=30.0))


@pytest.mark.parametrize(("given_", "there", "step"), [
    ({}, present(ttl_s=30.0), LOST),
    ({"gone": removal()}, present(ttl_s=30.0), Drain(W, 5.0)),
    ({"gone": removal(drain_s=0)}, present(ttl_s=30.0), Leave(W)),
    ({"gone": removal(over=True)}, present(ttl_s=30.0), Leave(W)),
    ({}, present(ttl_s=30.0, draining=True), Leave(W)),
    ({}, present(None, ttl_s=30.0), None),
    ({"entry": entry("s2", ttl_s=30.0)}, present(ttl_s=30.0), Change(entry("s2", ttl_s=30.0))),
    ({"entry": MOVED}, present(ttl_s=30.0), Leave(W)),
    ({"other": Entry(spec=spec(id="v"), stamp="s9")}, present(ttl_s=30.0), Leave(W)),
])  # fmt: skip
def test_one_that_answers_here_is_given_back_unless_somebody_meant_it(
    given_: dict[str, Any], there: Present, step: Step | None
) -> None:
    gone = given_.pop("gone", None)
    entries = {each.spec.worker_id: each for each in given_.values()}
    found = steps(entries, [gone] if gone else [], {W: there}, now_ms=NOW, alive={W})
    assert found == ([step] if step else [])


names = st.sampled_from([WorkerId(name) for name in "abcd"])
ports = st.integers(1, 4)


@st.composite
def registered(draw: st.DrawFn) -> dict[WorkerId, Entry]:
    urls = draw(st.lists(ports, unique=True, max_size=4))
    ids = draw(st.lists(names, unique=True, min_size=len(urls), max_size=len(urls)))
    return {
        name: Entry(spec=WorkerSpec(url=f"http://h:{port}", id=name), stamp=f"{name}{port}")
        for name, port in zip(ids, urls, strict=True)
    }


@given(st.lists(registered(), min_size=1, max_size=6))
def test_whatever_was_before_a_router_soon_has_what_the_registry_has(
    history: list[dict[WorkerId, Entry]],
) -> None:
    there: dict[WorkerId, Present] = {}
    for entries in history:
        for _ in range(3):  # a worker that moved leaves, and one that took its place joins
            for step in steps(entries, [], there, now_ms=NOW):
                match step:
                    case Join(made) | Change(made):
                        there[made.spec.worker_id] = Present(
                            spec=made.spec, stamp=made.stamp, since_ms=1
                        )
                    case Leave(worker_id) | Drain(worker_id):
                        del there[worker_id]
                urls = [each.spec.url for each in there.values()]
                assert len(urls) == len(set(urls))
    assert {id_: (p.spec, p.stamp) for id_, p in there.items()} == {
        id_: (e.spec, e.stamp) for id_, e in history[-1].items()
    }
