"""Plain HTTP as the tests speak it: answers of fixed length, streams read event by event."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import httpx

from .kit import MODEL_NAME

PROMPT: Final = "Say something."
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
# Two servers and seven clients may share two cores: a deadline is for hangs, not for speed.
TIMEOUT_S: Final = 120.0


def chat_body(tokens: int, **more: object) -> dict[str, object]:
    """Return a chat request whose answer has exactly `tokens` tokens."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": MODEL_NAME, "messages": messages, "max_tokens": tokens, "ignore_eos": True}
    return body | more


def generate_body(tokens: int, **more: object) -> dict[str, object]:
    """Return a native request whose answer has exactly `tokens` tokens, always the same ones."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return {"text": PROMPT, "sampling_params": sampling, **more}


def get(url: str) -> httpx.Response:
    return httpx.get(url, trust_env=False, verify=False, timeout=TIMEOUT_S)


def post(url: str, body: object, *, timeout_s: float = TIMEOUT_S) -> httpx.Response:
    return httpx.post(url, json=body, trust_env=False, verify=False, timeout=timeout_s)


class Stream(NamedTuple):
    """An open SSE answer."""

    response: httpx.Response
    events: Iterator[str]  # the data of each event, in order, "[DONE]" included

    @property
    def worker_id(self) -> str:
        return self.response.headers["x-laneway-worker"]

    def json_events(self) -> list[dict[str, Any]]:
        """Read to the end and return the events that are JSON."""
        return [json.loads(data) for data in self.events if data != "[DONE]"]


@contextmanager
def open_stream(url: str, body: dict[str, object]) -> Iterator[Stream]:
    """Send `body` as a streamed request; leaving the context closes the connection."""
    with (
        httpx.Client(trust_env=False, verify=False, timeout=TIMEOUT_S) as client,
        client.stream("POST", url, json=body | {"stream": True}) as response,
    ):
        yield Stream(response, _events(response))


def _events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
