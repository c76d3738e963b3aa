"""Why a request did not get its answer, and how HTTP says it.

Outcomes that are expected are values of `Reason`; `Refused` carries one to the edge. STATUS is
the only table from reasons to status codes, `error_body` the only place where an error's JSON is
made. Layer 0: this module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import orjson


class Reason(StrEnum):
    """Why a request was refused, failed or aborted. Closed, so it is safe as a metric label."""

    BAD_REQUEST = "bad_request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    CONFLICT = "conflict"
    REMOVED = "removed"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TIMEOUT = "body_timeout"
    TOO_LARGE = "too_large"
    HEAD_TOO_LARGE = "head_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    LOOP_DETECTED = "loop_detected"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    SHED = "shed"
    RATE_LIMITED = "rate_limit_exceeded"  # OpenAI's own code
    LIMITS_UNKNOWN = "limits_unknown"
    NO_WORKERS = "no_workers"
    SHUTTING_DOWN = "shutting_down"
    RESTARTING = "restarting"
    RELAY_LOST = "relay_lost"
    CONNECTIONS_FULL = "connections_full"
    BODIES_FULL = "bodies_full"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_OVERLOADED = "upstream_overloaded"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    UPSTREAM_PROTOCOL = "upstream_protocol"
    ABORTED = "aborted"
    INTERNAL = "internal_error"


# 429: capacity exists but is contended or spent, so waiting helps. 503: there is none.
# Clients back off and autoscalers scale on the difference; tests pin every row.
STATUS: Final[Mapping[Reason, int]] = {
    Reason.BAD_REQUEST: 400,
    Reason.UNAUTHORIZED: 401,
    Reason.FORBIDDEN: 403,
    Reason.NOT_FOUND: 404,
    Reason.METHOD_NOT_ALLOWED: 405,
    Reason.MODEL_NOT_FOUND: 404,
    Reason.CONFLICT: 409,
    Reason.REMOVED: 410,  # an operator removed this worker; its agent must not bring it back
    Reason.BODY_TOO_LARGE: 413,
    Reason.BODY_TIMEOUT: 408,
    Reason.TOO_LARGE: 413,  # costs more than a worker or a full bucket holds; waiting never helps
    Reason.HEAD_TOO_LARGE: 431,
    Reason.UNSUPPORTED_MEDIA: 415,
    Reason.LOOP_DETECTED: 508,  # the request has been in this router before
    Reason.QUEUE_FULL: 429,
    Reason.QUEUE_TIMEOUT: 429,
    Reason.SHED: 429,  # its class is turned away so that more urgent ones are served
    Reason.RATE_LIMITED: 429,
    Reason.LIMITS_UNKNOWN: 503,  # the store of the limits is away, and may not be done without
    Reason.NO_WORKERS: 503,
    Reason.SHUTTING_DOWN: 503,
    Reason.RESTARTING: 503,  # the process that decides is gone, and another one not there yet
    Reason.RELAY_LOST: 502,  # the process that held the client's connection died: only in the log
    Reason.CONNECTIONS_FULL: 503,
    Reason.BODIES_FULL: 503,
    Reason.UPSTREAM_UNREACHABLE: 502,
    Reason.UPSTREAM_ERROR: 502,
    Reason.UPSTREAM_OVERLOADED: 503,
    Reason.UPSTREAM_TIMEOUT: 504,
    Reason.UPSTREAM_PROTOCOL: 502,
    Reason.ABORTED: 499,  # by /abort_request; no standard status says so, this one is customary
    Reason.INTERNAL: 500,
}

# Statuses that carry Retry-After.
BUSY: Final = frozenset((429, 503))

# OpenAI's error types, by status.
_TYPE: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

REASON_HEADER: Final = "x-laneway-reason"
# Where nobody knows better: every 429 and 503 says when to come back.
RETRY_AFTER_DEFAULT_S: Final = 1


class Refused(Exception):
    """A request that will not be forwarded, with everything its answer says.

    `retry_after_s` is seconds until a retry makes sense, None where waiting does not help.
    `param` names the offending body field, as OpenAI does. `more_headers` have lower-case names.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        retry_after_s: float | None = None,
        param: str | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        self.param = param
        self._more_headers = more_headers or {}

    @property
    def status(self) -> int:
        """The HTTP status of this refusal."""
        return STATUS[self.reason]

    def headers(self) -> dict[str, str]:
        """The headers that say more of this refusal, names in lower case."""
        named = {REASON_HEADER: self.reason.value, **self._more_headers}
        if self.status in BUSY:
            wait_s = self.retry_after_s
            value = RETRY_AFTER_DEFAULT_S if wait_s is None else retry_after_value(wait_s)
            named["retry-after"] = str(value)
        elif self.status == STATUS[Reason.UNAUTHORIZED]:
            named["www-authenticate"] = "Bearer"
        return named

    def body(self) -> bytes:
        """The JSON body of this refusal, in OpenAI's shape."""
        return error_body(self.reason, self.message, param=self.param)


def error_type(reason: Reason) -> str:
    """OpenAI's `type` for `reason`: a class of faults, coarser than the reason itself."""
    status = STATUS[reason]
    if status in _TYPE:
        return _TYPE[status]
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(reason: Reason, message: str, *, param: str | None = None) -> bytes:
    """Return the JSON of an error in OpenAI's shape; `code` is the reason's own name."""
    error = {"message": message, "type": error_type(reason), "param": param, "code": reason.value}
    return orjson.dumps({"error": error})


def error_event(reason: Reason, message: str) -> bytes:
    """Return the SSE event that ends a stream which broke after its first byte.

    No `[DONE]` and no finish_reason follow it: both would claim success.
    """
    return b"data: " + error_body(reason, message) + b"\n\n"


def retry_after_value(retry_after_s: float) -> int:
    """Seconds for the Retry-After header: rounded up, at least 1."""
    return max(1, -int(-retry_after_s // 1))
