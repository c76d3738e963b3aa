"""Answers in SGLang's shapes, plain and as server-sent events. Pure.

Here are those of chat, completions, /generate, embeddings and rerank.

The pieces of a stream are cut from byte strings that are made once per sequence, because they are
written many thousand times a second. The shapes were taken from a running SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from workers.engine_model import EngineRequest
from workers.sim.asks import Api, Ask
from workers.sim.text import TokenRing

DONE: Final = b"data: [DONE]\n\n"
QUEUE_FULL: Final = "The request queue is full."
EVICTED: Final = "The request is aborted by a higher priority request."
STOP_TOKEN: Final = 2


@dataclass(slots=True, eq=False)
class Sequence:
    """One generated sequence of an answer."""

    request: EngineRequest
    ask: Ask
    index: int
    offset: int  # where its text begins in the ring
    created: int  # wall clock, seconds
    received_at: float  # wall clock
    time_scale: float  # engine seconds per second
    made: int = 0  # tokens generated
    sent: int = 0  # tokens written to the client
    ending: str | None = None  # length, stop or abort, once it has ended
    error: str | None = None  # why the engine threw it out
    submitted: bool = False  # the engine has it, or had it
    opened: bool = False  # its opening was written
    closed: bool = False  # its last piece was written


class Shape(Protocol):
    """How an answer is written. One of each per answer."""

    end_mark: bytes  # comes behind all of a stream

    def at_once(self, sequence: Sequence) -> bytes | None:
        """Return the event that comes before any token; None: the head waits for one, too."""
        ...

    def opening(self, sequence: Sequence) -> bytes:
        """Return the event before the first token; may be empty."""
        ...

    def piece(self, sequence: Sequence, made: int) -> bytes:
        """Return the event that brings the client from `sequence.sent` to `made` tokens."""
        ...

    def closing(self, sequence: Sequence) -> bytes:
        """Return the event(s) that bring the rest and the finish reason."""
        ...

    def failure(self, sequence: Sequence) -> bytes:
        """Return the event(s) for a sequence that the engine threw out."""
        ...

    def plain(self, sequences: Several[Sequence]) -> bytes:
        """Return the whole answer."""
        ...

    def refusal(self, message: str) -> tuple[int, bytes]:
        """Return status and body where the engine has no room, or threw it out."""
        ...


def _data(document: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(document) + b"\n\n"


def named_event(document: dict[str, Any]) -> bytes:
    """Return an event that has the name of its document's type."""
    kind = document["type"].encode()
    return b"event: %b\ndata: %b\n\n" % (kind, orjson.dumps(document))


def matched_stop(sequence: Sequence) -> int | None:
    """Return the token that ended the sequence, if one did."""
    return STOP_TOKEN if sequence.ending == "stop" else None


def usage(sequences: Several[Sequence], samples: int) -> dict[str, Any]:
    """Return usage over all sequences; a prompt with several samples counts once."""
    prompts = sequences[::samples]
    prompt_tokens = sum(s.request.prompt_tokens for s in prompts)
    output_tokens = sum(s.made for s in sequences)
    cached_tokens = sum(s.request.cached_tokens for s in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def _service_unavailable(message: str) -> bytes:
    """The body of the 503 by which SGLang refuses a request or throws it out."""
    kind = {"type": "503", "param": None, "code": 503}
    return orjson.dumps({"object": "error", "message": message, **kind})


class OpenAIShape:
    """Chat and completions."""

    end_mark = DONE

    def __init__(self, ask: Ask, ring: TokenRing) -> None:
        self._ask = ask
        self._ring = ring
        self._chat = ask.api is Api.CHAT
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def at_once(self, sequence: Sequence) -> None:
        """The status waits for the first token."""

    def opening(self, sequence: Sequence) -> bytes:
        """Chat names the role first."""
        if not self._chat:
            return b""
        return self._chunk(sequence, {"role": "assistant", "content": ""}, None)

    def piece(self, sequence: Sequence, made: int) -> bytes:
        """One chunk of text."""
        text = self._ring.text(sequence.offset, sequence.sent, made - sequence.sent)
        if self._ask.usage_always:
            sequence.made = made
            return self._chunk(sequence, {"content": text.decode()}, None)
        before, after = self._frames.get(sequence.index) or self._frame(sequence)
        return before + text + after

    def closing(self, sequence: Sequence) -> bytes:
        """Chat ends with an empty delta; completions with the last text."""
        if not self._chat:
            rest = self._ring.text(sequence.offset, sequence.sent, sequence.made - sequence.sent)
            return self._chunk(sequence, {"content": rest.decode()}, sequence.ending)
        rest = self.piece(sequence, sequence.made) if sequence.made > sequence.sent else b""
        return rest + self._chunk(sequence, {}, sequence.ending)

    def failure(self, sequence: Sequence) -> bytes:
        """Streams that are thrown out answer 200 and an error event."""
        error = {
            "object": "error",
            "message": sequence.error,
            "type": "SERVICE_UNAVAILABLE",
            "param": None,
            "code": 503,
        }
        return _data({"error": error})

    def usage_event(self, sequences: Several[Sequence]) -> bytes:
        """The chunk that include_usage asks for."""
        total = usage(sequences, self._ask.samples)
        if not self._chat:
            total.pop("completion_tokens_details")
        return _data({**self._head(sequences[0]), "choices": [], "usage": total})

    def plain(self, sequences: Several[Sequence]) -> bytes:
        """The whole answer."""
        head = self._head(sequences[0])
        head["object"] = "chat.completion" if self._chat else "text_completion"
        return orjson.dumps(
            {
                **head,
                "choices": [self._choice(sequence) for sequence in sequences],
                "usage": usage(sequences, self._ask.samples),
                "metadata": {"weight_version": "default"},
            }
        )

    def refusal(self, message: str) -> tuple[int, bytes]:
        """As SGLang's 503."""
        return 503, _service_unavailable(message)

    def _choice(self, sequence: Sequence) -> dict[str, Any]:
        text = self._ring.text(sequence.offset, 0, sequence.made).decode()
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        return {
            "index": sequence.index,
            **({"message": message} if self._chat else {"text": text}),
            "logprobs": None,
            "finish_reason": sequence.ending,
            "matched_stop": matched_stop(sequence),
        }

    def _head(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "id": sequence.request.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": sequence.created,
            "model": self._ask.model,
        }

    def _chunk(self, sequence: Sequence, delta: dict[str, Any], ending: str | None) -> bytes:
        if self._chat:
            told: dict[str, Any] = {"delta": {"reasoning_content": None, **delta}}
        else:
            told = {"text": delta["content"]}
        choice = {
            "index": sequence.index,
            **told,
            "logprobs": None,
            "finish_reason": ending,
            "matched_stop": matched_stop(sequence) if ending else None,
        }
        chunk = {**self._head(sequence), "choices": [choice]}
        if self._ask.usage_always and delta.get("content"):
            chunk["usage"] = usage([sequence], 1)
        elif not self._chat:
            chunk["usage"] = None
        return _data(chunk)

    def _frame(self, sequence: Sequence) -> tuple[bytes, bytes]:
        mark = "\x00"
        before, after = self._chunk(sequence, {"content": mark}, None).split(b"\\u0000")
        self._frames[sequence.index] = (before, after)
        return before, after


class GenerateShape:
    """SGLang's own /generate: each event repeats the text and the token ids so far."""

    end_mark = DONE

    def __init__(self, ask: Ask, ring: TokenRing) -> None:
        self._ask = ask
        self._ring = ring
        self._so_far: dict[int, tuple[bytes, bytes]] = {}

    def at_once(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """Nothing but the head."""
        return b""

    def opening(self, sequence: Sequence) -> bytes:  # noqa: ARG002
        """Nothing comes before the first token."""
        return b""

    def piece(self, sequence: Sequence, made: int) -> bytes:
        """Everything until `made`."""
        text, ids = self._so_far.get(sequence.index, (b"", b""))
        count = made - sequence.sent
        text += self._ring.text(sequence.offset, sequence.sent, count)
        new_ids = orjson.dumps(self._ring.ids(sequence.offset, sequence.sent, count))[1:-1]
        ids = ids + b"," + new_ids if ids and new_ids else ids + new_ids
        self._so_far[sequence.index] = (text, ids)
        sequence.made = made
        meta = orjson.dumps(self._meta(sequence))
        index = b',"index":%d' % sequence.index if self._is_list else b""
        return b'data: {"text":"%b","output_ids":[%b],"meta_info":%b%b}\n\n' % (
            text,
            ids,
            meta,
            index,
        )

    def closing(self, sequence: Sequence) -> bytes:
        """The last event carries the finish reason."""
        return self.piece(sequence, sequence.made)

    def failure(self, sequence: Sequence) -> bytes:
        """Thrown out: an ordinary event with the reason in its meta_info."""
        return self.piece(sequence, sequence.made)

    def plain(self, sequences: Several[Sequence]) -> bytes:
        """One document, or a list for a batch."""
        documents = [
            {
                "text": self._ring.text(sequence.offset, 0, sequence.made).decode(),
                "output_ids": self._ring.ids(sequence.offset, 0, sequence.made),
                "meta_info": self._meta(sequence),
            }
            for sequence in sequences
        ]
        return orjson.dumps(documents if self._is_list else documents[0])

    def refusal(self, message: str) -> tuple[int, bytes]:
        """As SGLang's 503."""
        return 503, _service_unavailable(message)

    @property
    def _is_list(self) -> bool:
        return self._ask.is_batch or self._ask.samples > 1

    def _meta(self, sequence: Sequence) -> dict[str, Any]:
        request, scale = sequence.request, sequence.time_scale
        meta: dict[str, Any] = {
            "id": request.id,
            "finish_reason": _finish_reason(sequence),
            "prompt_tokens": request.prompt_tokens,
            "weight_version": "default",
            "num_retractions": request.retractions,
            "reasoning_tokens": 0,
            "completion_tokens": sequence.made,
            "cached_tokens": request.cached_tokens,
            "dp_rank": None,
        }
        if request.started_at is not None:
            meta["queue_time"] = (request.started_at - request.submitted_at) / scale
        if request.finished_at is not None and sequence.error is None:
            meta["e2e_latency"] = (request.finished_at - request.submitted_at) / scale
            meta["request_received_ts"] = sequence.received_at
            if request.first_token_at is not None:
                first_s = (request.first_token_at - request.submitted_at) / scale
                decoding_s = (request.finished_at - request.first_token_at) / scale
                meta["first_token_latency"] = first_s
                meta["decode_throughput"] = (sequence.made - 1) / decoding_s if decoding_s else 0.0
        return meta


def _finish_reason(sequence: Sequence) -> dict[str, Any] | None:
    if sequence.error is not None:
        return {
            "type": "abort",
            "message": sequence.error,
            "status_code": 503,
            "err_type": "SERVICE_UNAVAILABLE",
        }
    match sequence.ending:
        case None:
            return None
        case "length":
            return {"type": "length", "length": sequence.made}
        case "stop":
            return {"type": "stop", "matched": STOP_TOKEN}
        case _:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def embeddings(ask: Ask, sequences: Several[Sequence]) -> bytes:
    """Vectors that depend on the text only, so that equal inputs compare equal."""
    vectors = [_vector(prompt) for prompt in ask.prompts]
    tokens = sum(sequence.request.prompt_tokens for sequence in sequences)
    return orjson.dumps(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": vector, "index": index}
                for index, vector in enumerate(vectors)
            ],
            "model": ask.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _vector(prompt: bytes) -> list[float]:
    """Sixteen letter counts, normalised: crude, but close texts have close vectors."""
    counts = [0] * 16
    for byte in prompt:
        counts[byte % 16] += 1
    norm = sum(count * count for count in counts) ** 0.5 or 1.0
    return [round(count / norm, 6) for count in counts]


def rerank(ask: Ask, sequences: Several[Sequence]) -> bytes:
    """Documents by the share of the query's words that they contain."""
    query = set(ask.prompts[0].decode().split("\n", 1)[0].lower().split())
    scored = [
        (len(query & set(document.lower().split())) / (len(query) or 1), index)
        for index, document in enumerate(ask.documents)
    ]
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return orjson.dumps(
        [
            {
                "score": score,
                "document": ask.documents[index],
                "index": index,
                "meta_info": {
                    "id": sequences[index].request.id,
                    "prompt_tokens": sequences[index].request.prompt_tokens,
                },
            }
            for score, index in scored
        ]
    )
