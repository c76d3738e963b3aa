"""What the demo shows: workers, lanes, queue and first-token times, live or as plain lines."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from router.contract import word_for_lanes
from router.demo.load import BURST, BURST_EVERY_S, CHAT, CHATS_MAX, GROUPS, Tally, percentile

ABOUT_BURSTS: Final = (
    f"A burst is {CHAT.burst} short chats at once, every {BURST_EVERY_S:.0f} s. Workers take few "
    "requests at once here, so\nmost of a burst waits in the router for its turn, as do chats that "
    "come just behind it."
)
_BAR_WIDTH: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """One look at the router: its answers to GET /workers and GET /admin/state."""

    workers: list[dict[str, Any]]
    queue_depth: dict[str, int]  # by lane


class View:
    """Makes pictures of a cluster and of what its clients saw."""

    def __init__(self, tally: Tally, *, url: str) -> None:
        self._tally = tally
        self._url = url
        self._cluster = Cluster(workers=[], queue_depth={})
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._last = (self._started_at, 0)
        self._tokens_per_s = 0.0
        self._peak: Counter[str] = Counter()  # of each lane's queue, since the last line

    def end(self) -> None:
        """No more is sent: what follows is clearing up."""
        self._ended_at = time.monotonic()

    def look(self, cluster: Cluster | None) -> None:
        """Take in what the router says now; None: nothing, in time."""
        if cluster is None:
            return
        self._cluster = cluster
        for lane, depth in cluster.queue_depth.items():
            self._peak[lane] = max(self._peak[lane], depth)

    def picture(self) -> Group:
        """The whole picture, for a terminal."""
        self._measure()
        tally = self._tally
        workers = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("worker", "lane", "state"):
            workers.add_column(heading)
        for heading in ("running", "", "KV used", "answers"):
            workers.add_column(heading, justify="right" if heading else "left")
        for worker in self._cluster.workers:
            workers.add_row(*self._worker(worker))
        lanes = Table(box=None, pad_edge=False, header_style="dim")
        for heading in ("lane", "waiting", "TTFT p50", "p90", "p99", "answers"):
            lanes.add_column(heading, justify="left" if heading == "lane" else "right")
        for group in GROUPS:
            times = tally.ttft_s[group]
            shares = (percentile(times, share) for share in (0.5, 0.9, 0.99))
            depth = "" if group == BURST else str(self._cluster.queue_depth.get(group, 0))
            lanes.add_row(group, depth, *map(in_ms, shares), str(tally.first_tokens[group]))
        head = Text(f"Laneway demo  {self._url}  ", style="bold")
        head.append(f"{self._age_s():.0f} s   Ctrl-C ends it", style="dim")
        foot = Text(
            f"sent {tally.sent}   running {tally.running}   "
            f"answered {tally.outcomes['answered']}   {self._tokens_per_s:.0f} tokens/s"
        )
        others = self._others()
        if others:
            foot.append(f"   {others}", style="yellow")
        return Group(head, Text(), workers, Text(), lanes, Text(), foot)

    def line(self) -> str:
        """The same in one line, for a log; queues at their longest since the last line."""
        self._measure()
        tally = self._tally
        lanes = "  ".join(
            f"{group}: {'' if group == BURST else f'waiting {self._peak[group]:2d}, '}"
            f"TTFT p50 {in_ms(percentile(tally.ttft_s[group], 0.5))} "
            f"p99 {in_ms(percentile(tally.ttft_s[group], 0.99))}"
            for group in GROUPS
        )
        self._peak.clear()
        workers = self._cluster.workers
        ready = sum(worker["status"] == "Ready" for worker in workers)
        line = (
            f"{self._age_s():4.0f} s  workers {ready}/{len(workers)}  "
            f"running {tally.running:3d}  answered {tally.outcomes['answered']:5d}  "
            f"{self._tokens_per_s:5.0f} tokens/s  {lanes}"
        )
        others = self._others()
        return f"{line}  {others}" if others else line

    def summary(self) -> list[str]:
        """What happened in all, at the end."""
        tally = self._tally
        lines = [
            "",
            f"{tally.sent} requests sent in {self._age_s():.0f} s, {tally.tokens} tokens:",
            *(f"  {count:6d}  {outcome}" for outcome, count in tally.outcomes.most_common()),
        ]
        if tally.not_sent:
            lines.append(f"{tally.not_sent} more not sent, as {CHATS_MAX} were running")
        lines.append("first token, as the clients saw it:")
        for group in GROUPS:
            times = tally.ttft_s[group]
            shares = (percentile(times, share) for share in (0.5, 0.9, 0.99))
            p50, p90, p99 = map(in_ms, shares)
            begun = tally.first_tokens[group]
            lines.append(f"  {group:5}  p50 {p50}   p90 {p90}   p99 {p99}   ({begun} answers)")
        lines.append(ABOUT_BURSTS)
        lines.append("answers that began, by worker:")
        for worker, count in sorted(tally.by_worker.items()):
            lines.append(f"  {worker:16} {count:6d}")
        return lines

    def _worker(self, worker: dict[str, Any]) -> tuple[str | Text, ...]:
        load, kv_ratio = worker["load"], worker["kv_used_ratio"]
        style = "green" if worker["status"] == "Ready" else "yellow"
        bar = "█" * min(_BAR_WIDTH, load)
        return (
            worker["id"],
            word_for_lanes(worker["lanes"]),
            Text(worker["state"], style=style),
            str(load),
            Text(f"{bar:<{_BAR_WIDTH}}", style="cyan"),
            "?" if kv_ratio is None else f"{kv_ratio:.1%}",
            str(self._tally.by_worker[worker["id"]]),
        )

    def _others(self) -> str:
        """Outcomes that are no plain answer."""
        counts = self._tally.outcomes
        others = [f"{name}: {n}" for name, n in counts.items() if name != "answered"]
        others += [f"not sent: {self._tally.not_sent}"] if self._tally.not_sent else []
        return "  ".join(others)

    def _age_s(self) -> float:
        return (self._ended_at or time.monotonic()) - self._started_at

    def _measure(self) -> None:
        at, tokens = self._last
        now = time.monotonic()
        if now - at >= 1.0:
            self._tokens_per_s = (self._tally.tokens - tokens) / (now - at)
            self._last = (now, self._tally.tokens)


def in_ms(value_s: float | None) -> str:
    """A duration in milliseconds, for a table."""
    return "     -" if value_s is None else f"{value_s * 1000:4.0f} ms"
