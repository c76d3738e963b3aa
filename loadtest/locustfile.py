"""Open-loop load on a router, with locust: `locust -f loadtest/locustfile.py --headless -u 1 ...`.

Requests leave at the moments that the scenario names, whether or not earlier answers have come: a
router that slows down does not thereby get less to do. One locust user is one generator of such
requests; `--rate` is the rate of all users together, so `-u` is the number of generators and 1 is
enough until a core is full (`--processes 2 -u 2`). Times are counted from the moment a request was
due, so a late generator cannot make a slow router look good.

Each answer is read to its end and gives three rows per lane: `first token`, `inter token` (mean
per answer) and `end`. Whatever a user would not accept is a failure of `end`, and of `first token`
too if none came: a status other than 200, an error event, a stream without `[DONE]`.

At the end locust waits `--stop-timeout` (here 60 s unless given) for running answers; those that
take longer are not in the figures, and a warning says how many they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from http.client import HTTPException
from itertools import count
from typing import Any, Final

import gevent
from gevent.event import Event
from gevent.pool import Pool
from locust import User, constant, events, task

from loadtest.arrivals import WorkItem, work
from loadtest.client import RouterClient
from loadtest.prompts import prompt_text
from loadtest.scenarios import SCENARIOS, lane_of
from loadtest.streaming import StreamFailed, StreamMeter

log = logging.getLogger("laneway.load")

LATE_S: Final = 0.1  # a generator that is later than this is worth a warning
_stopping = Event()
_user_numbers: Iterator[int] = count()


def add_arguments(parser: Any) -> None:
    """Declare the settings of this load test; each is also an environment variable."""
    parser.set_defaults(stop_timeout="60")

    def setting(name: str, about: str, **how: Any) -> None:
        variable = "LANEWAY_LOAD_" + name.upper().replace("-", "_")
        parser.add_argument(f"--{name}", help=about, env_var=variable, **how)

    setting("scenario", "What is sent.", choices=sorted(SCENARIOS), default="mixed")
    setting("rate", "Requests per second; left out: the scenario's own.", type=float)
    setting("seed", "Equal seeds send equal requests at equal moments.", default="1")
    setting("api-key", "Bearer key for the router.", default="", is_secret=True)
    setting("model", "Model to ask for; left out: the first that is listed.", default="")
    setting("in-flight-max", "Answers awaited at once per user.", type=int, default=5_000)
    setting("silence-timeout", "Seconds without a byte until failed.", type=float, default=120.0)


def on_init(**_: Any) -> None:
    """Let `--run-time` count from here, not from before the imports."""
    gevent.get_hub().loop.update_now()


def on_test_start(**_: Any) -> None:
    """Let the users of a new run send, numbered from 0."""
    global _user_numbers  # noqa: PLW0603 - locust builds users itself; there is no other place
    _stopping.clear()
    _user_numbers = count()


def on_test_stopping(**_: Any) -> None:
    """Let no further request leave; running answers go on until the stop timeout."""
    _stopping.set()


events.init_command_line_parser.add_listener(add_arguments)
events.init.add_listener(on_init)
events.test_start.add_listener(on_test_start)
events.test_stopping.add_listener(on_test_stopping)


class OpenLoopUser(User):
    """A generator of requests at the moments of its scenario."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Read the settings and find the model."""
        options = self.environment.parsed_options
        runner = self.environment.runner
        assert runner is not None
        scenario = SCENARIOS[options.scenario]
        rate_per_s = scenario.rate_per_s if options.rate is None else options.rate
        self._flows = scenario.at_rate(rate_per_s / max(1, options.num_users or 1)).flows
        worker = getattr(runner, "worker_index", 0)
        self._seed = f"{options.seed}/{worker}/{next(_user_numbers)}"
        self._client = RouterClient(
            str(self.host or ""), api_key=options.api_key, timeout_s=options.silence_timeout
        )
        self._model = options.model or self._client.first_model()
        self._answers = Pool(options.in_flight_max)
        self._latest_s = 0.0

    def on_stop(self) -> None:
        """Say what the figures do not hold."""
        if self._latest_s > LATE_S:
            log.warning("this generator was up to %.2f s late: it is overloaded", self._latest_s)
        if len(self._answers):
            log.warning("%d answers had not ended and are not counted", len(self._answers))
            self._answers.kill()
        self._client.close()

    @task
    def send(self) -> None:
        """Send until the test stops, then wait for the answers that are still running."""
        began_at = time.monotonic()
        for item in work(self._flows, seed=self._seed):
            due_at = began_at + item.at_s
            if _stopping.wait(max(0.0, due_at - time.monotonic())):
                break
            self._latest_s = max(self._latest_s, time.monotonic() - due_at)
            if self._answers.full():
                self._report(item, due_at, StreamMeter(), StreamFailed("load generator is full"))
                continue
            self._answers.spawn(self._answer, item, due_at)
            gevent.sleep(0)
        else:
            _stopping.wait()  # every window of the scenario is over
        self._answers.join()

    def _answer(self, item: WorkItem, due_at: float) -> None:
        meter = StreamMeter()
        failure: Exception | None = None
        try:
            self._client.stream("/v1/chat/completions", self._body(item), meter)
            meter.check_ended()
        except (StreamFailed, OSError, HTTPException) as exc:
            failure = exc
        self._report(item, due_at, meter, failure)

    def _body(self, item: WorkItem) -> dict[str, Any]:
        return {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": item.max_tokens,
            "messages": [{"role": "user", "content": prompt_text(item, seed=self._seed)}],
        }

    def _report(
        self, item: WorkItem, due_at: float, meter: StreamMeter, failure: Exception | None
    ) -> None:
        lane, now = lane_of(item.max_tokens), time.monotonic()
        first_at = meter.first_token_at
        if first_at is not None:
            self._fire(f"{lane} first token", first_at - due_at, None)
        elif failure is not None:
            self._fire(f"{lane} first token", now - due_at, failure)
        if failure is None and meter.inter_token_s is not None:
            self._fire(f"{lane} inter token", meter.inter_token_s, None)
        self._fire(f"{lane} end", now - due_at, failure, tokens=meter.output_tokens or meter.events)

    def _fire(
        self, name: str, seconds: float, failure: Exception | None, *, tokens: int = 0
    ) -> None:
        self.environment.events.request.fire(
            request_type="SSE",
            name=name,
            response_time=seconds * 1000,
            response_length=tokens,  # so that locust's size columns are tokens
            exception=failure,
            context={},
        )
