"""The demo's clients: chats that arrive by themselves, whether or not earlier ones have ended.

Arrivals are a seeded Poisson process (open loop: a slow answer does not hold the next request
back) with a burst now and then, so that the queue has something to do. Each answer is read as a
stream, and its first token is timed at the client. Chats of a burst are counted apart: they wait
for each other, and would hide how soon the others begin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import httpx
import orjson

CHATS_MAX: Final = 400
BURST_EVERY_S: Final = 9.0
_WORDS: Final = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "two",
    "cats",
    "look",
    "on",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request in the mix."""

    name: str
    per_s: float
    max_tokens: tuple[int, int]  # smallest and largest
    prompt_words: tuple[int, int]
    burst: int  # this many more at every burst


BURST: Final = "burst"
MIX: Final = (
    Kind(name="chat", per_s=7.0, max_tokens=(16, 96), prompt_words=(10, 200), burst=50),
    Kind(name="essay", per_s=1.2, max_tokens=(300, 600), prompt_words=(30, 800), burst=3),
)


CHAT: Final = MIX[0]
# How answers are counted: by lane, and those of the short lane that came in a burst apart.
GROUPS: Final = ("short", BURST, "long")


@dataclass(slots=True)
class Tally:
    """What the clients saw. What was sent runs, or has one of the outcomes."""

    sent: int = 0
    not_sent: int = 0  # as too many ran
    running: int = 0
    tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    first_tokens: Counter[str] = field(default_factory=Counter)  # answers that began, by group
    # The last first-token times by group, in seconds.
    ttft_s: dict[str, deque[float]] = field(
        default_factory=lambda: {group: deque(maxlen=2_000) for group in GROUPS}
    )
    by_worker: Counter[str] = field(default_factory=Counter)


def percentile(values: deque[float], share: float) -> float | None:
    """The value below which `share` of `values` lie; None when there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


Begin = Callable[[dict[str, Any], bool], asyncio.Task[None]]


class Load:
    """Sends the mix to `base_url` until `stop` is called."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str,
        seed: int = 1,
        burst_every_s: float = BURST_EVERY_S,
    ) -> None:
        self.tally = Tally()
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._random = Random(seed)
        self._burst_every_s = burst_every_s
        self._chats: set[asyncio.Task[None]] = set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Send until `stopping` is set, then drop the answers that still run."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with (
            httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):

            def begin(body: dict[str, Any], in_burst: bool) -> asyncio.Task[None]:
                return group.create_task(self._chat(client, body, in_burst=in_burst))

            senders = [group.create_task(self._send_forever(kind, begin)) for kind in MIX]
            await stopping.wait()
            for task in (*senders, *self._chats):
                task.cancel()

    async def _send_forever(self, kind: Kind, begin: Begin) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        burst_at = next_at + self._burst_every_s / 2
        while True:
            next_at += self._random.expovariate(kind.per_s)
            if next_at > burst_at:
                burst_at += self._burst_every_s
                for _ in range(kind.burst):
                    self._start(kind, begin, in_burst=True)
            await asyncio.sleep(next_at - loop.time())
            self._start(kind, begin, in_burst=False)

    def _start(self, kind: Kind, begin: Begin, *, in_burst: bool) -> None:
        if len(self._chats) >= CHATS_MAX:
            self.tally.not_sent += 1
            return
        chat = begin(self._body(kind), in_burst)
        self._chats.add(chat)
        chat.add_done_callback(self._chats.discard)

    def _body(self, kind: Kind) -> dict[str, Any]:
        words = self._random.choices(_WORDS, k=self._random.randint(*kind.prompt_words))
        return {
            "model": self._model,
            "stream": True,
            "max_tokens": self._random.randint(*kind.max_tokens),
            "messages": [
                {"role": "system", "content": "You are a helpful assistant. " * 20},
                {"role": "user", "content": " ".join(words)},
            ],
        }

    async def _chat(
        self, client: httpx.AsyncClient, body: dict[str, Any], *, in_burst: bool
    ) -> None:
        tally = self.tally
        tally.sent += 1
        tally.running += 1
        outcome = "still running at the end"
        try:
            outcome = await self._read(client, body, in_burst=in_burst)
        except httpx.HTTPError as exc:
            outcome = f"lost: {type(exc).__name__}"
        except (ValueError, KeyError) as exc:
            outcome = f"broken: not an event ({type(exc).__name__})"
        finally:
            tally.running -= 1
            tally.outcomes[outcome] += 1

    async def _read(
        self, client: httpx.AsyncClient, body: dict[str, Any], *, in_burst: bool
    ) -> str:
        """Read one answer; return how it ended."""
        started_at = time.monotonic()
        async with client.stream("POST", self._url, json=body) as answer:
            if answer.status_code != 200:
                reason = answer.headers.get("x-laneway-reason", "")
                return f"{answer.status_code} {reason}".strip()
            lane = answer.headers.get("x-laneway-lane", "")
            group = BURST if in_burst and lane == "short" else lane
            self.tally.by_worker[answer.headers.get("x-laneway-worker", "?")] += 1
            first = True
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return "answered"
                if not line.startswith("data: "):
                    continue
                event = orjson.loads(line[6:])
                if "error" in event:
                    return f"broken: {event['error'].get('code')}"
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    self.tally.tokens += 1
                    if first:
                        first = False
                        self.tally.first_tokens[group] += 1
                        self.tally.ttft_s[group].append(time.monotonic() - started_at)
        return "broken: no [DONE]"
