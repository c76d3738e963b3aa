"""Series of the policy: attainment, shares, the slow loop and the queue, made from a snapshot.

A part of `router.metrics`. Labels come from enums, and from the models that workers serve. Layer 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.core.degrading import DegradeView
from router.core.queue_view import QueueView
from router.core.reserving import ReservingView
from router.core.slo_watch import SloView
from router.core.snapshot import Snapshot
from router.core.types import Priority

_MODELS_MAX: Final = 100


def qos_families(snapshot: Snapshot) -> Iterable[Metric]:
    """All of them."""
    yield from _queue_families(snapshot.queue)
    yield from _attainment_families(snapshot.slo)
    yield from _loop_families(snapshot.slo)
    yield from _degrade_families(snapshot.degrade)
    yield from _limit_families(snapshot.limits)
    preemptions = CounterMetricFamily(
        "laneway_preemptions", "Requests that gave way to more urgent ones before their answer."
    )
    preemptions.add_metric((), snapshot.counters.preemptions)
    yield preemptions


def _queue_families(queue: QueueView) -> Iterable[Metric]:
    labels = ("lane", "band")
    waiting = GaugeMetricFamily(
        "laneway_queue_length", "Requests that wait; late: those past their target.", labels=labels
    )
    cost = GaugeMetricFamily("laneway_queue_cost", "Their cost, in cost units.", labels=labels)
    oldest = GaugeMetricFamily(
        "laneway_queue_oldest_seconds", "Age of the oldest request that waits.", labels=labels
    )
    for line in queue.lines:
        row = line.lane.value, line.band
        waiting.add_metric(row, line.waiting)
        cost.add_metric(row, line.cost)
        oldest.add_metric(row, line.oldest_age_s)
    relegated = CounterMetricFamily(
        "laneway_queue_relegated", "Requests that fell behind because their target had passed."
    )
    relegated.add_metric((), queue.relegated)
    promoted = CounterMetricFamily(
        "laneway_queue_promoted", "Requests that moved up a band because they waited very long."
    )
    promoted.add_metric((), queue.promoted)
    yield from (waiting, cost, oldest, relegated, promoted)


def _attainment_families(slo: SloView) -> Iterable[Metric]:
    attainment = GaugeMetricFamily(
        "laneway_slo_attainment_ratio",
        "Share of a class's last requests within their targets, of all or of feasible ones.",
        labels=("priority", "kind"),
    )
    counted = GaugeMetricFamily(
        "laneway_slo_window_requests",
        "Requests that this is a share of.",
        labels=("priority", "kind"),
    )
    for view in slo.classes:
        for kind, ratio, count in (
            ("all", view.attainment, view.requests),
            ("feasible", view.attainment_feasible, view.feasible_requests),
        ):
            row = view.priority.name, kind
            if ratio is not None:
                attainment.add_metric(row, ratio)
            counted.add_metric(row, count)
    yield from (attainment, counted)
    for name, text, value in (
        ("target", "What attainment should be.", slo.target),
        ("floor", "Below this it is an alarm.", slo.floor),
    ):
        bound = GaugeMetricFamily(f"laneway_slo_{name}_ratio", text)
        bound.add_metric((), value)
        yield bound


def _loop_families(slo: SloView) -> Iterable[Metric]:
    shares = GaugeMetricFamily(
        "laneway_class_share_ratio",
        "A class's share: now, as configured, and what it is guaranteed of the dispatched cost.",
        labels=("priority", "kind"),
    )
    loop = slo.loop
    for priority in Priority:
        shares.add_metric((priority.name, "now"), loop.shares[priority])
        shares.add_metric((priority.name, "configured"), loop.configured[priority])
        shares.add_metric((priority.name, "guaranteed"), loop.guarantees[priority])
    looks = CounterMetricFamily(
        "laneway_slo_loop_looks", "Looks of the slow loop, by what came of them.", labels=("act",)
    )
    for act, count in slo.looks.items():
        looks.add_metric((act.value,), count)
    overloaded = GaugeMetricFamily(
        "laneway_slo_overloaded", "1: all classes are below target, only more workers help."
    )
    overloaded.add_metric((), loop.overloaded)
    yield from (shares, looks, overloaded)


def _degrade_families(view: DegradeView) -> Iterable[Metric]:
    degraded = CounterMetricFamily(
        "laneway_degraded",
        "Requests that overload changed or turned away.",
        labels=("act", "priority"),
    )
    for (act, priority), count in view.counts.items():
        degraded.add_metric((act.value, priority.name), count)
    level = GaugeMetricFamily(
        "laneway_degrade_level", "0 normal, 1 cut, 2 no P3, 3 no P2 either.", labels=("model",)
    )
    saturation = GaugeMetricFamily(
        "laneway_degrade_saturation_ratio", "What the level goes by.", labels=("model",)
    )
    for ladder in view.ladders[:_MODELS_MAX]:
        level.add_metric((ladder.model,), ladder.level)
        if ladder.saturation is not None:
            saturation.add_metric((ladder.model,), ladder.saturation)
    yield from (degraded, level, saturation)


def _limit_families(view: ReservingView) -> Iterable[Metric]:
    decisions = CounterMetricFamily(
        "laneway_limit_decisions", "Requests that limits granted or denied, by who decided.",
        labels=("by", "verdict", "scope"),
    )  # fmt: skip
    for by, count in view.granted.items():
        decisions.add_metric((by.value, "granted", "none"), count)
    by_scope = Counter[str]()
    for (by, scope), count in view.refused.items():
        decisions.add_metric((by.value, "denied", "none" if scope is None else scope.value), count)
        by_scope["unknown" if scope is None else scope.value] += count
    refused = CounterMetricFamily(
        "laneway_limit_refusals",
        "Requests that a limit turned away, by which; unknown: its store could not be asked.",
        labels=("scope",),
    )
    for name, count in by_scope.items():
        refused.add_metric((name,), count)
    shortened = CounterMetricFamily(
        "laneway_limit_shortened", "Requests whose answer was cut so that a limit let them in."
    )
    shortened.add_metric((), view.shortened)
    borrowed = CounterMetricFamily(
        "laneway_limit_borrowed_cost_units",
        "Cost units that tenants used above their guarantees, of requests that ended.",
        labels=("priority",),
    )
    for priority, units in view.borrowed.items():
        borrowed.add_metric((priority.name,), units)
    waiting = GaugeMetricFamily(
        "laneway_limit_waiting", "Requests that wait until a limit lets them in."
    )
    waiting.add_metric((), view.waiting)
    held = GaugeMetricFamily(
        "laneway_limit_held", "Requests that run, or wait for a worker, on what limits granted."
    )
    held.add_metric((), view.held)
    yield from (decisions, refused, shortened, borrowed, waiting, held)
