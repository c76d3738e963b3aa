"""Any order of comings and goings: nothing is lost, nothing kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.contract import Lane
from router.core.drain import LATE
from router.core.pools import Pool
from router.core.types import Priority, Ticket
from tests.core.builders import config
from tests.core.flow_rig import Queue


class Against(RuleBasedStateMachine):
    """The queue against a plain list of who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(shares=None, queue={}, tenants={"a": {"weight": 2.0}})
        self.pools = [Pool(m, lane) for m in ("m", "n") for lane in Lane]
        self.here: list[Ticket] = []
        self.away: list[Ticket] = []  # served, may be settled or come back

    @rule(
        priority=st.sampled_from(Priority),
        tenant=st.sampled_from("abc"),
        cost=st.floats(0.01, 10),
        prefill_s=st.sampled_from([0.0, 0.02, 0.3]),
        pool=st.integers(0, 3),
        wait_s=st.floats(0, 20),
        late_s=st.floats(0, 5),
        ttft_target_s=st.sampled_from([0.1, 0.5]),
    )
    def push(self, pool: int, wait_s: float, late_s: float, **fields: Any) -> None:
        now = self.queue.now
        made = self.queue.push(
            pool=self.pools[pool],
            queue_deadline_at=now + wait_s,
            late_at=now + late_s,
            **fields,
        )
        self.here.append(made)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        made = data.draw(st.sampled_from(self.here))
        assert self.queue.flow.remove(made, now=self.queue.now)
        assert not self.queue.flow.remove(made, now=self.queue.now)
        self.here.remove(made)

    @precondition(lambda self: self.here)
    @rule(passed=st.integers(0, 5), pools=st.lists(st.integers(0, 3), min_size=1, unique=True))
    def round(self, passed: int, pools: list[int]) -> None:
        """Some do not fit, then one does."""
        flow, asked = self.queue.flow, [self.pools[n] for n in pools]
        able = [made for made in self.here if made.pool in asked]
        skipped: dict[int, Ticket] = {}
        while len(skipped) <= passed:
            made = flow.offer(asked, skipped, now=self.queue.now)
            if made is None:
                assert len(skipped) == len(able)
                break
            assert made in able
            assert made.number not in skipped
            skipped[made.number] = made
        if len(skipped) > passed:
            *_, made = skipped.values()
            flow.serve(made, now=self.queue.now)
            self.here.remove(made)
            self.away.append(made)
        flow.end_round()

    @precondition(lambda self: self.away)
    @rule(data=st.data(), cost=st.floats(0, 20), back=st.booleans(), waited=st.booleans())
    def end(self, data: st.DataObject, cost: float, back: bool, waited: bool) -> None:
        made = data.draw(st.sampled_from(self.away))
        self.queue.flow.settle(made, 0.0 if back else cost)
        self.away.remove(made)
        if back and waited:
            made.attempts += 1
            self.queue.flow.push(made, now=self.queue.now)
            self.here.append(made)
        elif back:
            self.queue.flow.serve(made, now=self.queue.now)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        over = self.queue.pass_to(self.queue.now + seconds)
        due = [made for made in self.here if made.queue_deadline_at <= self.queue.now]
        assert sorted(made.number for made in over) == sorted(made.number for made in due)
        self.here = [made for made in self.here if made not in over]

    @rule(which=st.integers(0, 3), joined=st.booleans())
    def membership_moves(self, which: int, joined: bool) -> None:
        pool = self.pools[which]
        pool.domain = "m" if joined else pool.model
        self.queue.flow.regroup({"m", "n"}, now=self.queue.now)

    @rule(relegate=st.booleans())
    def reload(self, relegate: bool) -> None:
        self.queue.flow.configure(config(queue={"relegate_ratio": 0.9 if relegate else 0}))

    @invariant()
    def who_waits_is_who_came_and_did_not_leave(self) -> None:
        flow = self.queue.flow
        assert len(flow) == len(self.here)
        for lane in Lane:
            in_lane = {made.number for made in self.here if made.lane is lane}
            bands = [{t.number for t in flow.waiting(lane, b)} for b in range(LATE + 1)]
            assert sorted(n for band in bands for n in band) == sorted(in_lane)
            assert flow.depth(lane) == len(in_lane)
        for pool in self.pools:
            assert {t.number for t in flow.of_pool(pool)} == {
                made.number for made in self.here if made.pool is pool
            }

    @invariant()
    def everybody_stands_in_one_line_and_is_counted_once(self) -> None:
        for domain in self.queue.flow.domains:
            for band in range(LATE + 1):
                slots = range(LATE, LATE + len(Priority)) if band == LATE else [band]
                stands = domain.stands.values()
                lines = [line for s in stands for n in slots for line in s.lines[n].values()]
                waiting = [t for line in lines for t in line.tickets]
                assert all(t.band == band for t in waiting)
                assert domain.drain.waiting(band) == len(waiting)
                assert domain.drain.cost(band) == pytest.approx(sum(t.cost for t in waiting))
                if band < LATE:
                    assert domain.bands[band].waiting == len(waiting)
                    assert abs(domain.bands[band].owed) <= 5 * 10.0  # times the largest cost
                for line in lines:
                    places = [(t.place_at, t.number) for t in line.tickets]
                    assert places == sorted(places)

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        flow = self.queue.flow
        assert len(flow._alarms) <= 2 * len(self.here) + 65 + 2 * len(self.here)
        for domain in flow.domains:
            for stand in domain.stands.values():
                for heap, lines in zip(stand.heaps, stand.lines, strict=True):
                    assert len(heap) <= 2 * len(lines) + 66

    def teardown(self) -> None:
        """Whoever is left is offered."""
        for _ in range(len(self.here)):
            self.here.remove(self.queue.serve())
        assert not self.here
        assert not self.queue.flow.pools
        assert not any(self.queue.flow.depth(lane) for lane in Lane)
        assert not any(self.queue.flow.waiting(lane, b) for lane in Lane for b in range(LATE + 1))


Against.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
TestAgainst = Against.TestCase
