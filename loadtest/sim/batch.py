"""Many runs at once: which ones, in parallel processes, in a fixed order."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from multiprocessing import active_children, get_context
from typing import Final

from loadtest.sim.run import POLICIES, Run, Settings, simulate
from loadtest.sim.trials import SUITE, TRIALS, Trial

ALL: Final = "all"  # the name of the whole suite
_SEEDS_MAX: Final = 1_000


class BadRequest(ValueError):
    """A name or a range that means nothing here; says what would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One run to do."""

    trial: Trial
    policy: str
    seed: int
    settings: Settings = field(default_factory=dict)

    def run(self) -> Run:
        """Do it. Nothing in a run is cyclic, so the collector only costs time meanwhile."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            return simulate(self.trial, self.policy, seed=self.seed, settings=self.settings)
        finally:
            if enabled:
                gc.enable()


def trials_named(name: str, *, workers: int | None = None) -> list[Trial]:
    """The trial of that name, or the suite. Raises BadRequest, or BadTrial for too few workers."""
    if name != ALL and name not in TRIALS:
        raise BadRequest(f"no scenario is named {name!r:.80}: there are {', '.join(TRIALS)}, {ALL}")
    found = [TRIALS[one] for one in (SUITE if name == ALL else (name,))]
    return found if workers is None else [trial.on_workers(workers) for trial in found]


def policies_named(names: Sequence[str]) -> list[str]:
    """The same names, each once. Raises BadRequest for one that does not exist."""
    for name in names:
        if name not in POLICIES:
            raise BadRequest(f"no policy is named {name!r:.80}: there are {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def seeds_in(text: str) -> list[int]:
    """The seeds of `1-5`, `7` or `1,4,8-9`, in that order. Raises BadRequest."""
    seeds: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() if dash else True)):
            raise BadRequest(f"seeds are as 1-5 or 1,4,8-9, not {text!r:.80}")
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            raise BadRequest(f"seeds {part.strip()} run backwards")
        if high - low >= _SEEDS_MAX:
            raise BadRequest(f"seeds {part.strip()} are more than {_SEEDS_MAX}")
        seeds.update(dict.fromkeys(range(low, high + 1)))
    return list(seeds)


def errands(
    trials: Sequence[Trial],
    policies: Sequence[str],
    seeds: Sequence[int],
    settings: Settings | None = None,
) -> list[Errand]:
    """Every policy on every trial with every seed."""
    return [
        Errand(trial=trial, policy=policy, seed=seed, settings=settings or {})
        for trial, policy, seed in product(trials, policies, seeds)
    ]


def done(
    asked: Sequence[Errand], *, jobs: int, on_done: Callable[[Run], None] = lambda _: None
) -> Iterator[Run]:
    """Yield the runs in the order asked, done by `jobs` processes; 1: by this one."""
    if jobs == 1:
        for errand in asked:
            run = errand.run()
            on_done(run)
            yield run
        return
    # Fresh processes: a fork would copy whatever threads hold at that moment.
    others = set(active_children())
    with ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_leave_interrupts_to_the_parent
    ) as pool:
        running: list[Future[Run]] = [pool.submit(errand.run) for errand in asked]
        try:
            for future in running:
                run = future.result()
                on_done(run)
                yield run
        except BaseException:  # nobody wants the rest, so nobody waits for what runs
            for child in active_children():
                if child not in others:
                    child.terminate()
            raise


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
