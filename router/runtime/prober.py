"""Polls workers for life and load, and reports what it saw as events.

The core decides when (its `Probe` effect), this module how. A worker is alive when GET /ready says
so; servers without that route are alive when they answer at all. SGLang's own /health is never part
of the rhythm, as each call generates a token and takes a second. Where the load is read from is
searched at the first poll, and again when the worker returned from the dead or its source dried up:
the agent at `health_url`, our JSON at the worker's own /health, or SGLang's /v1/loads, /get_load,
/metrics. A worker that lives but has no readable load is reported as such: unknown, never idle.

What a worker is (its models, its sizes) is asked at each search, soon again while any of it is
unknown, and now and then for ever: a list that failed once must not stay unknown, and adapters are
loaded while it runs. What was known stays known until another answer comes.

One poll at most per worker is under way, each under a deadline. Of a worker that is well it is a
quick one (`quick_polls`), and so is asking again what it is; when nothing good comes of that, the
same begins again in full. One that is slow to answer stops counting against the bound on polls at
once, so dead hosts never hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Final, Protocol, assert_never

from router.config import Config
from router.contract import LoadReport, WorkerId, WorkerSpec
from router.errors import Reason
from router.load_formats import (
    SGLANG_FORMATS,
    LoadFormat,
    PriorityOrder,
    WorkerDescription,
    describe_models,
    describe_server_info,
    merged,
)
from router.runtime.patience import Patience
from router.runtime.probed import Dead, NoReport, NotReady, ProbedWorker, RouteMissing, Source
from router.runtime.quick_polls import Bodies, Done, Question, QuickPolls
from router.runtime.upstream import UpstreamFailed, Upstreams
from router.runtime.watch import UNKNOWN, Watch, report_in

_log = logging.getLogger(__name__)

_WHY_LENGTH_MAX: Final = 200
_TROUBLES_MAX: Final = 8
# A poll that took this long no longer counts as one of the polls at once.
_PATIENCE_S: Final = 0.05
# The share of a poll's time that its quick form gets; the rest is for asking again in full.
_QUICK_SHARE: Final = 0.25
# How much longer than SGLang's own answer a worker may take to show our JSON at /health.
_OWN_HEALTH_GRACE_S: Final = 0.1


class ProbeEvents(Protocol):
    """Who is told: the driver, which adds the moment and hands on to the core."""

    def on_report(self, worker_id: WorkerId, report: LoadReport) -> None:
        """The worker is alive and said this."""

    def on_report_missing(self, worker_id: WorkerId, why: str) -> None:
        """The worker is alive, but its load could not be read."""

    def on_probe_failed(self, worker_id: WorkerId, why: str) -> None:
        """The worker did not show that it is alive."""

    def on_worker_described(
        self,
        worker_id: WorkerId,
        *,
        models: tuple[str, ...],
        kv_total_tokens: int | None,
        concurrency_max: int | None,
        kv_bytes_per_token: float | None,
        priority_order: PriorityOrder | None,
    ) -> None:
        """The worker said this of itself; may come again with more."""


class Prober:
    """Executes `Probe` effects for the workers it was told to watch."""

    def __init__(self, config: Config, upstreams: Upstreams, events: ProbeEvents) -> None:
        self._settings = config.probe
        self._upstreams = upstreams
        self._events = events
        self._slots = asyncio.Semaphore(config.probe.concurrency_max)
        self._watches: dict[WorkerId, Watch] = {}
        self._loop = upstreams.loop  # asking for the running one is a system call each time
        self._quick = QuickPolls(
            upstreams,
            most=config.probe.concurrency_max,
            within_s=_QUICK_SHARE * config.probe.timeout_s,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def on_config(self, config: Config) -> None:
        """Use these settings from the next poll on."""
        self._settings = config.probe
        self._slots = asyncio.Semaphore(config.probe.concurrency_max)
        self._quick.most = config.probe.concurrency_max
        self._quick.allow(_QUICK_SHARE * config.probe.timeout_s)

    def watch(self, spec: WorkerSpec) -> None:
        """Be ready to poll this worker.

        One of that id is asked as before unless it is reached in another way now; then all is asked
        afresh, and a poll that is under way begins anew: the core waits for what comes of it.
        """
        known = self._watches.get(spec.worker_id)
        if known is not None and known.worker.reached_as(spec):
            return
        polling = known is not None and known.polling
        self.forget(spec.worker_id)
        self._watches[spec.worker_id] = Watch(ProbedWorker(spec, self._upstreams), spec.worker_id)
        if polling:
            self.probe(spec.worker_id)

    def forget(self, worker_id: WorkerId) -> None:
        """Stop polling this worker; no event about it follows. Unknown ids are ignored."""
        watch = self._watches.pop(worker_id, None)
        if watch is not None:
            for question in (watch.question, watch.description_question):
                if question is not None:
                    self._quick.cancel(question)
            watch.end()

    def probe(self, worker_id: WorkerId) -> None:
        """Poll this worker now, unless a poll of it is still under way."""
        watch = self._watches.get(worker_id)
        if watch is None or watch.poll is not None:
            return
        question = watch.question
        if question is not None and question.under_way:
            return
        if question is None or watch.polls_to_search == 0 or question.line.question is not None:
            self._begin(watch, self._settings.timeout_s)
        else:
            self._quick.ask(question)

    async def aclose(self) -> None:
        """Forget every worker and wait until all polls have ended."""
        for worker_id in list(self._watches):
            self.forget(worker_id)
        self._quick.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a poll broke off", exc_info=fault)

    def _begin(self, watch: Watch, within_s: float) -> None:
        watch.poll = self._spawn(self._run(watch, within_s))

    def _ask_quickly(self, watch: Watch) -> None:
        """Have the next polls ask a worker that is well for what it said now."""
        source = watch.source
        if source is None or watch.troubles or watch.polls_to_search == 0:
            watch.question = None
        elif watch.polls_in_full:
            watch.polls_in_full -= 1
        elif watch.question is None:
            watch.question = self._question(
                watch,
                source.base_url,
                watch.worker.load_requests(source),
                partial(self._quick_over, watch, source.format),
            )

    def _question(
        self, watch: Watch, base_url: str, requests: Sequence[bytes], done: Done
    ) -> Question:
        line = watch.lines.get(base_url)
        if line is None:
            line = watch.lines[base_url] = self._quick.line(base_url)
        return Question(line, requests, done)

    def _quick_over(self, watch: Watch, load_format: LoadFormat, bodies: Bodies | None) -> None:
        """Report what a quick poll read; if that is nothing good, ask again in full."""
        report = None if bodies is None else report_in(bodies[-1], load_format)
        if report is None:
            watch.ask_in_full()
            self._begin(watch, (1 - _QUICK_SHARE) * self._settings.timeout_s)
            return
        if watch.quick_failures:
            watch.quick_failures = 0
        if watch.polls_to_search is not None:
            # A description that broke off may have asked for a search meanwhile.
            watch.polls_to_search = max(0, watch.polls_to_search - 1)
            self._ask_quickly(watch)
        if watch.polls_to_description > 0:
            watch.polls_to_description -= 1
        elif not self._quick.busy:
            self._describe_again(watch)
        self._events.on_report(watch.worker_id, report)

    async def _run(self, watch: Watch, within_s: float) -> None:
        """One poll; the events hear what came of it when the next one may already begin."""
        try:
            outcome = await self._outcome(watch, within_s)
        finally:
            watch.poll = None
        match outcome:
            case Dead() if _reason_of(outcome) is Reason.CONNECTIONS_FULL:
                # It was not even asked, and that is our doing: nothing is known of it.
                self._note(watch, "not polled", str(outcome))
                if watch.again is not None:  # who asked meanwhile began no second rhythm
                    watch.again.cancel()
                interval_s = self._settings.interval_s
                watch.again = self._loop.call_later(interval_s, self.probe, watch.worker_id)
            case Dead():
                self._on_dead(watch, outcome)
            case NoReport():
                self._on_no_report(watch, str(outcome)[:_WHY_LENGTH_MAX])
            case LoadReport():
                self._on_report(watch, outcome)
            case _:
                assert_never(outcome)

    async def _outcome(self, watch: Watch, within_s: float) -> LoadReport | Dead | NoReport:
        """Poll within the bound on polls at once; waiting for that takes none of its time."""
        loop = self._loop
        slots = self._slots
        await slots.acquire()
        watch.slot = slots
        patience = loop.call_later(_PATIENCE_S, watch.release_slot)
        try:
            return await self._report(watch, loop.time() + within_s)
        except (Dead, NoReport) as exc:
            return exc
        finally:
            patience.cancel()
            watch.release_slot()

    def _on_report(self, watch: Watch, report: LoadReport) -> None:
        watch.failures = 0
        if watch.troubles:
            watch.troubles.clear()
            watch.trouble = None
            _log.info("worker %s: its load is known again", watch.worker_id)
        self._ask_quickly(watch)
        self._events.on_report(watch.worker_id, report)

    def _on_no_report(self, watch: Watch, why: str) -> None:
        watch.failures = 0
        self._note(watch, "its load is unknown", why, once=True)
        watch.trouble = why
        self._events.on_report_missing(watch.worker_id, why)

    def _on_dead(self, watch: Watch, exc: Dead) -> None:
        watch.failures += 1
        refused = _reason_of(exc) is Reason.UPSTREAM_UNREACHABLE
        if refused or watch.failures >= self._settings.failures_to_eject:
            watch.start_over()
            if watch.description_question is not None:
                self._quick.cancel(watch.description_question)
        why = str(exc)[:_WHY_LENGTH_MAX]
        self._note(watch, "no sign of life", why)
        self._events.on_probe_failed(watch.worker_id, why)

    def _note(self, watch: Watch, what: str, why: str, *, once: bool = False) -> None:
        """Log a trouble the first time until the worker is well; `once`: whatever its reasons."""
        key = what if once else why
        if key not in watch.troubles and len(watch.troubles) < _TROUBLES_MAX:
            watch.troubles.add(key)
            _log.warning("worker %s: %s: %s", watch.worker_id, what, why)

    async def _report(self, watch: Watch, until: float) -> LoadReport:
        """The worker's load. Raises Dead or NoReport."""
        if watch.polls_to_search == 0:
            watch.question = None  # what it asks may be another source's
            return await self._search(watch, until)
        if watch.polls_to_search is not None:
            watch.polls_to_search -= 1
        self._describe_again(watch)
        if watch.source is None:
            await watch.worker.check_life(until)
            raise NoReport(watch.trouble or "no known load answer")
        by_agent = watch.source == watch.worker.agent
        # Our own answer tells readiness too, so that one request does.
        ours = watch.source.format is LoadFormat.LANEWAY
        ready = not ours and await watch.worker.is_ready(until)
        try:
            soon = self._soon(until) if by_agent else until
            return await watch.worker.load(watch.source, soon)
        except NoReport as exc:
            self._on_source_dry(watch, gone=isinstance(exc, RouteMissing))
            raise
        except UpstreamFailed as exc:
            if by_agent:  # its end says nothing about the worker's
                await watch.worker.check_life(until)
            elif not ready:
                raise Dead(f"GET {watch.source.format.target}: {exc}") from exc
            self._on_source_dry(watch, gone=False)
            raise NoReport(f"GET {watch.source.format.target}: {exc}") from exc

    def _on_source_dry(self, watch: Watch, *, gone: bool) -> None:
        """See to it that a search follows: at once where there is surely another source."""
        if watch.polls_to_search is None:
            if gone or watch.source == watch.worker.agent:
                watch.polls_to_search = 0
            else:
                watch.search_later()

    async def _search(self, watch: Watch, until: float) -> LoadReport:
        """Find the best source of load there is, and read what the worker is.

        The worker's own port is always tried, also where an agent speaks for it.
        """
        ready = await watch.worker.is_ready(until)
        await self._describe(watch, until)
        found = await self._agent_says(watch, until)
        found = found or await self._worker_says(watch, until, ready=ready)
        if found is None:
            watch.search_later()  # the former source, if any, may come back before
            raise NoReport("none of /health, /v1/loads, /get_load, /metrics tells its load")
        source, report = found
        if watch.source != source:
            where = source.base_url + source.format.target
            _log.info("worker %s: its load comes from %s", watch.worker_id, where)
        watch.source = source
        if watch.worker.agent in (None, source):
            watch.polls_to_search, watch.searches = None, 0
        else:
            watch.search_later()
        return report

    def _soon(self, until: float) -> float:
        """When an agent must have answered, so that there is time to ask its worker."""
        return min(until, self._loop.time() + self._settings.timeout_s / 2)

    async def _agent_says(self, watch: Watch, until: float) -> tuple[Source, LoadReport] | None:
        agent = watch.worker.agent
        if agent is None:
            return None
        try:
            return agent, await watch.worker.load(agent, self._soon(until))
        except (NoReport, UpstreamFailed) as exc:
            if watch.source in (None, agent):
                _log.warning("worker %s: no report from its agent: %s", watch.worker_id, exc)
            return None

    async def _worker_says(
        self, watch: Watch, until: float, *, ready: bool
    ) -> tuple[Source, LoadReport] | None:
        """Ask for our JSON and for SGLang's answers at once: SGLang's own /health is slow."""
        own = watch.worker.source(LoadFormat.LANEWAY)
        ours = self._loop.create_task(watch.worker.load(own, until))
        try:
            theirs = await self._sglang_says(watch, until, ready=ready)
            # A loop that many workers keep busy is given the time to read what it was sent.
            with suppress(TimeoutError):
                async with Patience(_OWN_HEALTH_GRACE_S) if theirs else nullcontext():
                    await asyncio.wait((ours,))
            if not ours.done():
                return theirs
            fault = ours.exception()
            if isinstance(fault, NotReady):
                raise fault
            return theirs if fault else (own, ours.result())
        finally:
            ours.cancel()
            await asyncio.gather(ours, return_exceptions=True)

    async def _sglang_says(
        self, watch: Watch, until: float, *, ready: bool
    ) -> tuple[Source, LoadReport] | None:
        alive = ready
        for load_format in SGLANG_FORMATS:
            source = watch.worker.source(load_format)
            try:
                return source, await watch.worker.load(source, until)
            except NoReport:
                alive = True  # it answered
            except UpstreamFailed as exc:
                if not alive:
                    raise Dead(f"GET {source.format.target}: {exc}") from exc
        return None

    async def _describe(self, watch: Watch, until: float) -> None:
        """Report the worker's models now; what /server_info knows follows, as that can hang."""
        if not watch.describing:
            models = await watch.worker.described_models(until)
            if models.models:
                self._on_described(watch, merged(models, watch.described))
            watch.description = self._spawn(self._describe_server(watch, models))

    def _describe_again(self, watch: Watch) -> None:
        """Ask beside the poll what the worker is, when it is time to."""
        if watch.polls_to_description > 0:
            watch.polls_to_description -= 1
        elif watch.gaps and not watch.describing:  # the quick way would end in the full one
            watch.description = self._spawn(self._describe_anew(watch))
        elif not watch.describing:
            question = watch.description_question
            if question is None:
                question = watch.description_question = self._question(
                    watch,
                    watch.worker.spec.url,
                    watch.worker.descriptive_requests(),
                    partial(self._quickly_described, watch),
                )
            if question.line.question is None:
                self._quick.ask(question)

    def _quickly_described(self, watch: Watch, bodies: Bodies | None) -> None:
        """Report what the worker says it is; if that is not all there is, ask again in full."""
        answers = None if bodies is None else hash(tuple(bodies))
        if answers is not None and answers == watch.answers:
            watch.describe_later(complete=True)
            self._on_described(watch, watch.described)
            return
        models = UNKNOWN if bodies is None else describe_models(bodies[0])
        if bodies is None or not models.models:
            watch.description = self._spawn(self._describe_anew(watch))
        else:
            self._on_server_described(watch, models, describe_server_info(bodies[1]))
            watch.answers = None if watch.gaps else answers

    async def _describe_anew(self, watch: Watch) -> None:
        try:
            models = await watch.worker.described_models(self._until())
        except Dead:
            watch.polls_to_search = 0  # the next poll meets the refusal itself, and reports it
        else:
            await self._describe_server(watch, models)

    async def _describe_server(self, watch: Watch, models: WorkerDescription) -> None:
        """The second half of a description, `models` being the first."""
        server = await watch.worker.described_server(self._until())
        self._on_server_described(watch, models, server)

    def _on_server_described(
        self, watch: Watch, models: WorkerDescription, server: WorkerDescription
    ) -> None:
        watch.answers = None
        watch.describe_later(complete=bool(models.models) and server != UNKNOWN)
        described = merged(server, models, watch.described)
        if not described.models and watch.gaps == 1:
            _log.warning("worker %s: does not say its models; asking again", watch.worker_id)
        self._on_described(watch, described)
        if described != watch.described:
            watch.described = described
            _log.info("worker %s: %s", watch.worker_id, described)

    def _until(self) -> float:
        return self._loop.time() + self._settings.timeout_s

    def _on_described(self, watch: Watch, described: WorkerDescription) -> None:
        self._events.on_worker_described(
            watch.worker_id,
            models=described.models,
            kv_total_tokens=described.kv_total_tokens,
            concurrency_max=described.max_running_requests,
            kv_bytes_per_token=described.kv_bytes_per_token,
            priority_order=described.priority_order,
        )


def _reason_of(exc: Dead) -> Reason | None:
    """Why there was no answer; None: there was one."""
    cause = exc.__cause__
    return cause.reason if isinstance(cause, UpstreamFailed) else None
