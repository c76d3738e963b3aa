"""One simulated worker: the engine, a clock, and the answers in progress.

A single timer follows the engine: while anybody streams it fires at every step, else at the next
event. Each firing advances the engine to the clock's time and writes to every stream what it has
gained; when the process falls behind, a chunk simply carries several tokens, as with SGLang.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from random import Random
from time import time
from typing import Final

from workers.engine import Engine
from workers.engine_model import Admission, Event, EventKind
from workers.sim import answers
from workers.sim.answers import GenerateShape, OpenAIShape, Sequence, Shape
from workers.sim.asks import Api, Ask
from workers.sim.faults import Faults
from workers.sim.http_server import Exchange
from workers.sim.intake import Intake, WorkerOptions
from workers.sim.messages import MessagesShape
from workers.sim.reports import Snapshot
from workers.sim.responses import ResponsesShape
from workers.sim.text import TokenRing

_SHAPES: Final[Mapping[Api, Callable[[Ask, TokenRing], Shape]]] = {
    Api.GENERATE: GenerateShape,
    Api.MESSAGES: MessagesShape,
    Api.RESPONSES: ResponsesShape,
}
TICK_S_MIN: Final = 0.001  # steps shorter than this share a chunk
THROUGHPUT_WINDOW_S: Final = 1.0


class Answer:
    """One inference request and the sequences that make up its answer."""

    __slots__ = ("ask", "chunks", "exchange", "headed", "open", "sequences", "shape")

    def __init__(self, exchange: Exchange, ask: Ask, shape: Shape) -> None:
        self.exchange = exchange
        self.ask = ask
        self.shape = shape
        self.sequences: list[Sequence] = []
        self.open = 0  # sequences that have not ended
        self.headed = False
        self.chunks = 0

    def send(self, data: bytes) -> None:
        """Write one event; the head goes first."""
        if not self.headed:
            self.headed = True
            self.exchange.start()
        if data:
            self.exchange.write(data)
            self.chunks += 1


class SimulatedWorker:
    """Serves inference requests in real time."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.faults = Faults()
        self.draining = False
        self.idle = asyncio.Event()  # set while no request is in progress
        self.idle.set()
        self.requests_total = 0
        self.chunks_total = 0
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(options)
        self._random = Random(options.seed + 1)  # of injected errors
        self._ring = TokenRing(options.seed)
        self._step_pause_s = 0.0
        self._frozen: Snapshot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0  # uvloop's handles do not always tell
        self.engine = Engine(options.profile, options.engine)
        self._epoch = self._ticked_at = self._loop.time()
        self._live: dict[str, tuple[Answer, Sequence]] = {}
        self._streams: dict[Answer, None] = {}
        self._aborted_total = self._prompt_tokens_total = 0
        self._ttft_mean_s: float | None = None
        self._measured = (self._epoch, 0, 0.0)  # when, tokens then, tokens/s before

    # -- requests ---------------------------------------------------------------------------

    def serve(self, exchange: Exchange, ask: Ask) -> None:
        """Answer an inference request, now or later. Raises BadAsk."""
        answer = Answer(exchange, ask, _SHAPES.get(ask.api, OpenAIShape)(ask, self._ring))
        answer.sequences = self._intake.sequences(ask, self.engine)
        answer.open = len(answer.sequences)
        exchange.on_gone = lambda: self._forget(answer)
        self.requests_total += 1
        # Further samples of a prompt follow when the first one has put it into the prefix cache.
        now = self.engine_now()
        for sequence in answer.sequences[:: ask.samples]:
            if not self._submit(answer, sequence, now):
                return
        if ask.stream:
            self._streams[answer] = None
            exchange.on_writable = lambda: self._pump(answer)
            if (first := answer.shape.at_once(answer.sequences[0])) is not None:
                answer.send(first)
        self._arm()

    def _submit(self, answer: Answer, sequence: Sequence, now: float) -> bool:
        """Queue one sequence; False, and the exchange is answered, when the engine refuses."""
        request = sequence.request
        sequence.submitted = True
        admission = self.engine.submit(request, now=now)
        if admission is Admission.ACCEPTED:
            self._live[request.id] = (answer, sequence)
            self.idle.clear()
            self._prompt_tokens_total += request.prompt_tokens
            return True
        assert admission is Admission.QUEUE_FULL, "the context fits into the pool"
        sequence.error = answers.QUEUE_FULL
        self._fail(answer, sequence)
        return False

    # -- time -------------------------------------------------------------------------------

    def engine_now(self) -> float:
        """The engine's time, in its seconds since it began."""
        return (self._loop.time() - self._epoch) * self.options.time_scale

    def monotonic(self) -> float:
        """The worker's monotonic clock, in seconds."""
        return self._loop.time()

    def _arm(self) -> None:
        """Set the timer for the next step that matters; one that is sooner stays."""
        at = self.engine.next_step_at() if self._streams else self.engine.next_event_at()
        if at == math.inf:
            return
        when = max(self._epoch + at / self.options.time_scale, self._ticked_at + TICK_S_MIN)
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        """Bring the engine to now, everybody what it has for them, and set the timer anew."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ticked_at = self._loop.time()
        for event in self.engine.advance(self.engine_now()):
            found = self._live.get(event.request.id)
            if found is not None and event.kind is not EventKind.RETRACTED:
                self._take_event(event, *found)
        for answer in list(self._streams):
            self._pump(answer)
        if not self._live:
            self.idle.set()
        self._arm()

    def _take_event(self, event: Event, answer: Answer, sequence: Sequence) -> None:
        request = event.request
        if event.kind is EventKind.FIRST_TOKEN:
            ttft_s = (event.at - request.submitted_at) / self.options.time_scale
            mean = self._ttft_mean_s
            self._ttft_mean_s = ttft_s if mean is None else mean + (ttft_s - mean) / 16
        if event.kind is not EventKind.ABORTED:
            self._submit_siblings(answer, sequence)
        if event.kind is EventKind.FIRST_TOKEN:
            return
        del self._live[request.id]
        sequence.made = request.kept_tokens
        match event.kind:
            case EventKind.FINISHED:
                whole = sequence.made >= request.max_new_tokens
                sequence.ending = "length" if whole else "stop"
            case EventKind.ABORTED:
                sequence.ending = "abort"
                self._aborted_total += 1
            case _:
                sequence.error = answers.EVICTED
                self._aborted_total += 1
        if sequence.error is None:
            self._end(answer)
        else:
            self._fail(answer, sequence)

    def _submit_siblings(self, answer: Answer, sequence: Sequence) -> None:
        """The first sample has its prompt in the prefix cache now: let the others follow."""
        samples = answer.ask.samples
        if sequence.index % samples:
            return
        for sibling in answer.sequences[sequence.index + 1 : sequence.index + samples]:
            if not sibling.submitted and not self._submit(answer, sibling, self.engine_now()):
                return

    # -- answers ----------------------------------------------------------------------------

    def _end(self, answer: Answer) -> None:
        """One more sequence of `answer` has ended."""
        answer.open -= 1
        if not answer.ask.stream and not answer.open:
            answer.exchange.respond(200, self._document(answer))

    def _document(self, answer: Answer) -> bytes:
        match answer.ask.api:
            case Api.EMBEDDINGS:
                return answers.embeddings(answer.ask, answer.sequences)
            case Api.RERANK:
                return answers.rerank(answer.ask, answer.sequences)
            case _:
                return answer.shape.plain(answer.sequences)

    def _pump(self, answer: Answer) -> None:
        """Write what a stream has gained, as far as its client takes it."""
        exchange = answer.exchange
        for sequence in answer.sequences:
            if exchange.ended or not exchange.writable:
                return
            if not sequence.closed:
                self._pump_sequence(answer, sequence)
            if answer.chunks >= (self.faults.reset_after_chunks or math.inf):
                self._forget(answer)
                exchange.reset()
                return
        if not answer.open and exchange.writable:
            self._complete(answer)

    def _pump_sequence(self, answer: Answer, sequence: Sequence) -> None:
        made = sequence.made
        if sequence.ending is None:
            made = self.engine.generated_tokens(sequence.request)
            if made == sequence.sent:
                return
        if not sequence.opened:
            sequence.opened = True
            answer.send(answer.shape.opening(sequence))
        if sequence.ending is None:
            answer.send(answer.shape.piece(sequence, made))
        else:
            sequence.closed = True
            answer.send(answer.shape.closing(sequence))
        sequence.sent = made
        self.chunks_total += 1

    def _complete(self, answer: Answer) -> None:
        if answer.ask.include_usage and isinstance(answer.shape, OpenAIShape):
            answer.send(answer.shape.usage_event(answer.sequences))
        answer.send(answer.shape.end_mark)
        self._streams.pop(answer, None)
        answer.exchange.finish()

    def _fail(self, answer: Answer, sequence: Sequence) -> None:
        """The engine threw out `sequence`, and with it the whole answer."""
        self._forget(answer)
        if answer.ask.stream:
            answer.send(answer.shape.failure(sequence))
            answer.send(answer.shape.end_mark)
            answer.exchange.finish()
        else:
            answer.exchange.respond(*answer.shape.refusal(sequence.error or ""))

    def _forget(self, answer: Answer) -> None:
        """Abort what the engine still has of `answer`; nobody waits for it any more."""
        self._streams.pop(answer, None)
        now = self.engine_now()
        for sequence in answer.sequences:
            if self._live.pop(sequence.request.id, None) is not None:
                self.engine.abort(sequence.request.id, now=now)
                self._aborted_total += 1
        if not self._live:
            self.idle.set()
        self._arm()

    # -- operations -------------------------------------------------------------------------

    def abort(self, rid: str) -> None:
        """Abort as SGLang: `rid` must be live, and all that begin with it go with it."""
        if rid in self._live:
            self._abort([live for live in self._live if live.startswith(rid)])

    def abort_all(self) -> None:
        """Abort every request."""
        self._abort(list(self._live))

    def _abort(self, rids: list[str]) -> None:
        now = self.engine_now()
        for rid in rids:
            answer, sequence = self._live[rid]
            self.engine.abort(rid, now=now)
            first = sequence.index
            for sibling in answer.sequences[first + 1 : first + answer.ask.samples]:
                if not sibling.submitted:
                    sibling.submitted, sibling.ending = True, "abort"
                    answer.open -= 1
        self._tick()

    def slow_down(self, pause_s: float | None) -> None:
        """Add a pause to every step, as SGLang's /slow_down; None takes it back."""
        self._step_pause_s = pause_s or 0.0
        self._apply_speed()

    def set_faults(self, faults: Faults) -> None:
        """Misbehave in this way from now on."""
        frozen = faults.freeze_figures or faults.stall
        self._frozen = (self._frozen or self.snapshot()) if frozen else None
        self.faults = faults
        self._apply_speed()

    def draws_error(self) -> bool:
        """Whether the next request gets an injected error."""
        rate = self.faults.error_rate
        return rate > 0 and self._random.random() < rate

    def flush_cache(self) -> bool:
        """Forget cached prefixes; False while requests are in progress."""
        return self.engine.flush_cache(now=self.engine_now())

    def close(self) -> None:
        """Lose everything, as a process that ends; the caller breaks the connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._live.clear()
        self._streams.clear()
        self.engine = Engine(self.options.profile, self.options.engine)

    def _apply_speed(self) -> None:
        now = self.engine_now()
        pause_s = self._step_pause_s * self.options.time_scale
        self.engine.set_speed(slow_ratio=self.faults.slow_factor, pause_s=pause_s, now=now)
        self.engine.set_paused(self.faults.hang or self.faults.stall, now=now)
        self._tick()

    def snapshot(self) -> Snapshot:
        """Return the figures of now, or the frozen ones."""
        if self._frozen is not None:
            return self._frozen
        self._tick()
        now = self._loop.time()
        figures = self.engine.figures()
        since, tokens, rate = self._measured
        if now - since >= THROUGHPUT_WINDOW_S:
            rate = (figures.generated_tokens_total - tokens) / (now - since)
            self._measured = (now, figures.generated_tokens_total, rate)
        return Snapshot(
            figures=figures,
            settings=self.options.engine,
            taken_at=time(),
            taken_monotonic=now,
            tokens_per_s=rate,
            ttft_mean_s=self._ttft_mean_s,
            requests_total=self.requests_total,
            aborted_total=self._aborted_total,
            prompt_tokens_total=self._prompt_tokens_total,
            ready=not self.draining,
        )
