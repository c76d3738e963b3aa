"""All that crosses between the router and its workers: `LoadReport` and `WorkerSpec`.

A `LoadReport` is what a worker (or the agent beside it) says of itself when polled. A figure that
is missing is None, "unknown", and never zero: an unknown worker must not look idle. The JSON form
carries `"format": "laneway.load/1"`, by which the prober tells it from SGLang's own answers; those
are read by `load_formats`. Layer 0: pure, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, NewType
from urllib.parse import unquote, urlsplit

import msgspec
import orjson
from msgspec import Meta
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from router.strict import Strict

WorkerId = NewType("WorkerId", str)

LOAD_FORMAT: Final = "laneway.load/1"
# Above this a count is a fault of the sender, not a load.
_COUNT_MAX: Final = 2**53
_LABELS_MAX: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,128}")
_URL_CHARS_MAX: Final = 1024
_HOST_CHARS_MAX: Final = 253  # RFC 1035 2.3.4


class Lane(StrEnum):
    """Which pool of workers a request belongs to; by max_tokens unless configured otherwise."""

    SHORT = "short"
    LONG = "long"


BOTH_LANES: Final = frozenset((Lane.SHORT, Lane.LONG))


def lanes_named(word: str) -> frozenset[Lane]:
    """Return the lanes that `word` says: short, long or both. Raises ValueError."""
    if word == "both":
        return BOTH_LANES
    try:
        return frozenset((Lane(word),))
    except ValueError:
        raise ValueError(f"{word!r:.80} is not short, long or both") from None


def word_for_lanes(lanes: Collection[str]) -> str:
    """Return the word that says `lanes`, which has one at least."""
    return "both" if len(lanes) == len(Lane) else str(next(iter(lanes)))


class MalformedReport(ValueError):
    """A load answer that cannot be believed: no JSON, no known figure, or an impossible one."""


# Figures as a worker's JSON has them, which is read in one step where all are in range; else figure
# by figure (`checked_figure`), which takes a little more.
_MOMENTS_MAX: Final = 16
ROUTERS_MAX: Final = 64  # in one report
_ROUTER_ID: Final = r"\A[0-9a-f]{1,64}\Z"
Count = Annotated[int, Meta(ge=0, le=_COUNT_MAX)]
Number = Annotated[float, Meta(ge=0, lt=_COUNT_MAX)]  # below it, so that none is rounded into range
Ratio = Annotated[float, Meta(ge=0, le=1)]
Moments = Annotated[tuple[Number, ...], Meta(max_length=_MOMENTS_MAX)]
_RouterId = Annotated[str, Meta(pattern=_ROUTER_ID)]


class Links(msgspec.Struct, frozen=True):
    """What a router could send to when it last said so."""

    router: _RouterId  # its id
    said_at: Number  # s, on its own clock: of two that name the same router the later one counts
    engines: Count  # that serve, of its own workers
    # That serve, of its own workers.
    routers: Annotated[tuple[_RouterId, ...], Meta(max_length=ROUTERS_MAX)]


class LoadReport(msgspec.Struct):
    """What one poll learned about a worker. Every figure may be None: unknown. Never changed.

    Sums over data-parallel ranks where a worker has several. `age_s` compares two moments of the
    worker's own clock (the answer's and the snapshot's): clocks of two machines are never compared.
    """

    running_requests: Count | None = None
    queued_requests: Count | None = None  # waiting in the engine, running ones excluded
    queued_uncached_tokens: Count | None = None  # prefill work that waits, cached prefix excluded
    max_running_requests: Count | None = None
    kv_used_tokens: Count | None = None  # evictable cache excluded
    kv_total_tokens: Count | None = None
    generation_tokens_per_s: Number | None = None
    cache_hit_ratio: Ratio | None = None
    ttft_mean_s: Number | None = None
    prefill_tokens_total: Count | None = None  # counter; with the next, seconds per prompt token
    prefill_busy_s_total: Number | None = None
    decode_moments: Moments | None = None  # SGLang's n, sum b, sum t, sum b2, sum bt, ...
    gpu_utilization_ratio: Ratio | None = None
    gpu_memory_used_bytes: Count | None = None
    gpu_memory_total_bytes: Count | None = None
    gpu_temperature_c: Number | None = None
    age_s: Number | None = None
    ready: bool | None = None  # None: the source does not say
    # Of a router, that reports for all behind it; None: it is an engine.
    workers: Count | None = None  # engines that serve there
    # Its own id, then those of the routers behind it.
    routers: Annotated[tuple[_RouterId, ...], Meta(min_length=1, max_length=ROUTERS_MAX)] | None = (
        None
    )
    # Its own, then those of the routers that requests can get to from there, the nearest first.
    links: Annotated[tuple[Links, ...], Meta(min_length=1, max_length=ROUTERS_MAX)] | None = None


_NAMES: Final = LoadReport.__struct_fields__
_RATIOS: Final = frozenset(("cache_hit_ratio", "gpu_utilization_ratio"))
_COUNTS: Final = frozenset(
    name for name in _NAMES if name.endswith(("_requests", "_tokens", "_bytes"))
) | {"prefill_tokens_total", "workers"}


def checked_report(figures: Mapping[str, Any]) -> LoadReport:
    """Build a LoadReport from raw figures by our names; None stays unknown.

    Raises MalformedReport, naming the figure, when one is not a finite, non-negative number, a
    ratio is above 1.05, or a count is absurdly large: a source that lies once is not believed.
    """
    return LoadReport(**{name: checked_figure(name, value) for name, value in figures.items()})


def checked_figure(name: str, value: Any) -> Any:
    """One figure of a report, as `checked_report` takes it."""
    return None if value is None else _checked(name, value)


def _checked(name: str, value: Any) -> Any:
    if name in _COUNTS:
        return int(_number(name, value))
    if name == "ready":
        if not isinstance(value, bool):
            raise MalformedReport(f"{name}: expected true or false, got {value!r:.80}")
        return value
    if name in _LISTS:
        return _LISTS[name](value)
    number = _number(name, value)
    if name in _RATIOS:
        if number > 1.05:
            raise MalformedReport(f"{name}: a ratio of {number} is above 1")
        return min(1.0, number)
    return number


def _checked_moments(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) > _MOMENTS_MAX:
        raise MalformedReport(f"decode_moments: expected a few numbers, got {value!r:.80}")
    return tuple(_number("decode_moments", item) for item in value)


def _checked_ids(value: Any, least: int = 1) -> tuple[str, ...]:
    ids = value if isinstance(value, list | tuple) else [None]
    known = [item for item in ids if isinstance(item, str) and re.match(_ROUTER_ID, item)]
    if not least <= len(ids) <= ROUTERS_MAX or len(known) != len(ids):
        raise MalformedReport(f"routers, links: expected ids, {ROUTERS_MAX} at most: {value!r:.80}")
    return tuple(known)


def _checked_links(value: Any) -> tuple[Links, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= ROUTERS_MAX:
        raise MalformedReport(f"links: expected 1 to {ROUTERS_MAX}, got {value!r:.80}")
    return tuple(_checked_link(item) for item in value)


def _checked_link(value: Any) -> Links:
    if not isinstance(value, dict):
        raise MalformedReport(f"links: expected objects, got {value!r:.80}")
    (router,) = _checked_ids([value.get("router")])
    said_at = _number("links", value.get("said_at"))
    engines = int(_number("links", value.get("engines")))
    return Links(router, said_at, engines, _checked_ids(value.get("routers"), 0))


_LISTS: Final[dict[str, Callable[[Any], Any]]] = {
    "decode_moments": _checked_moments,
    "routers": _checked_ids,
    "links": _checked_links,
}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedReport(f"{name}: expected a number, got {value!r:.80}")
    if not 0 <= value <= _COUNT_MAX:  # which NaN is not, either
        raise MalformedReport(f"{name}: {value!r:.80} is out of range")
    return value


def encode_report(report: LoadReport) -> bytes:
    """Return the JSON form of `report`, unknown figures left out."""
    figures = msgspec.to_builtins(report)
    known = {name: value for name, value in figures.items() if value is not None}
    return orjson.dumps({"format": LOAD_FORMAT, **known})


def decode_report(body: bytes) -> LoadReport:
    """Read the JSON form back. Unknown fields are ignored, so that agents may be newer.

    Raises MalformedReport when `body` is not such a report or holds an impossible figure.
    """
    if body.startswith(_BEGINS):
        try:
            return _DECODE(body)
        except msgspec.MsgspecError:
            pass  # to say what is wrong, or that all will do
    try:
        document = orjson.loads(body)
    except ValueError as exc:
        raise MalformedReport(f"not JSON: {exc}") from exc
    if not isinstance(document, dict) or document.get("format") != LOAD_FORMAT:
        raise MalformedReport(f"not a {LOAD_FORMAT} document")
    return checked_report({name: document[name] for name in _NAMES if name in document})


_DECODE: Final = msgspec.json.Decoder(LoadReport).decode
# As encoders write it that put no blanks between, and those that do.
_BEGINS: Final = (
    b'{"format":"%b",' % LOAD_FORMAT.encode(),
    b'{"format": "%b",' % LOAD_FORMAT.encode(),
)


def _visible(text: str) -> bool:
    """Whether `text` is visible ASCII throughout: it can go into a request head as it is."""
    return all("!" <= c <= "~" for c in text)


def visible_key(key: SecretStr) -> SecretStr:
    """Return `key`. Raises ValueError when it can't go into a request head as it is."""
    if not key.get_secret_value() or not _visible(key.get_secret_value()):
        raise ValueError("an API key is ASCII without blanks or control characters")
    return key


def normalized_url(url: str) -> str:
    """Return `url` as scheme://host:port[/path], IPv6 hosts in brackets, no trailing slash.

    Raises ValueError, saying what is wrong, for anything that is not a plain http(s) base URL.
    """
    if not url or not _visible(url):
        raise ValueError("a worker URL is ASCII without blanks or control characters")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"a worker URL starts with http:// or https://, not {url!r:.100}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a worker URL carries no user information; use api_key")
    if not parts.hostname:
        raise ValueError(f"no host in {url!r:.100}")
    if parts.query or parts.fragment:
        raise ValueError("a worker URL has no query and no fragment")
    try:
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"bad port in {url!r:.100}") from exc
    if port == 0:
        raise ValueError("port 0 is not an address")
    _check_host_and_path(parts.hostname, parts.path)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port or (443 if parts.scheme == "https" else 80)
    normal = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
    if len(normal) > _URL_CHARS_MAX:
        raise ValueError(f"a worker URL has {_URL_CHARS_MAX} characters or less")
    return normal


def _check_host_and_path(host: str, path: str) -> None:
    if len(host) > _HOST_CHARS_MAX:
        raise ValueError(f"a host has {_HOST_CHARS_MAX} characters or less")
    if {".", ".."} & set(unquote(path).split("/")):
        raise ValueError("the path of a worker URL has no . or .. between its slashes")


def checked_name(name: str) -> str:
    """Return a worker's name. Raises ValueError when it can't be a part of a path and a label."""
    if not _NAME.fullmatch(name) or not name.strip("."):
        raise ValueError(
            "a worker's name is 1 to 128 letters, digits and . _ : [ ] -, and not dots alone"
        )
    return name


Name = Annotated[str, AfterValidator(checked_name)]
Url = Annotated[str, AfterValidator(normalized_url)]
Label = Annotated[str, Field(max_length=256)]


def _off_is_no(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


class WorkerSpec(Strict):
    """A worker as an operator or an agent registers it.

    Left out: `id` is derived from the URL; `models` and `kv_total_tokens` are read from the worker
    itself; `lanes` are both.
    """

    url: Url = Field(description="Base URL of the SGLang server, e.g. http://10.0.0.7:30000.")
    id: Name | None = Field(None, description="Name in logs, metrics, admin.")
    models: tuple[Annotated[str, Field(min_length=1, max_length=512)], ...] = Field(
        (), max_length=256, description="Models it serves; empty: asked from the worker."
    )
    lanes: frozenset[Lane] = Field(
        BOTH_LANES, min_length=1, description="Lanes it serves: short, long or both."
    )
    health_url: Url | None = Field(
        None, description="Where an agent answers GET /health with the load report."
    )
    kv_total_tokens: int | None = Field(
        None, ge=1, le=_COUNT_MAX, description="KV pool in tokens; empty: asked from the worker."
    )
    concurrency_max: int | None = Field(
        None, ge=1, le=100_000, description="Requests at once; empty: the worker's own limit."
    )
    priority: int = Field(
        0, ge=-100, le=100, description="Workers with a higher one are filled first."
    )
    cost: float = Field(
        1.0, gt=0, le=1000, description="Multiplies its score: 2 makes it look twice as busy."
    )
    worker_type: Literal["regular", "prefill", "decode"] = Field(
        "regular", description="Whether it does all of a request, or one half of it."
    )
    pass_priority: Annotated[Literal["off", "header"], BeforeValidator(_off_is_no)] = Field(
        "off",
        description="header: tell it the class of each request, if its scheduler uses priorities; "
        "it must run with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1.",
    )
    labels: dict[Label, Label] = Field(
        default_factory=dict, max_length=_LABELS_MAX, description="Free text, shown with it."
    )
    api_key: Annotated[SecretStr, AfterValidator(visible_key)] | None = Field(
        None, description="Sent to the worker as a bearer token; never shown."
    )

    ttl_s: float | None = Field(
        None,
        ge=1,
        le=30 * 86_400,
        description="Forgotten after this long without an answered poll; empty: never. Agents set "
        "it, and by it a router tells their registrations from an operator's.",
    )

    @property
    def worker_id(self) -> WorkerId:
        """The id, given or derived: host:port, plus the path where there is one."""
        return WorkerId(self.id or self.url.split("://", 1)[1])


def encode_spec(spec: WorkerSpec) -> bytes:
    """Return the JSON that registers `spec`, defaults left out; this one shows the key."""
    body = spec.model_dump(mode="json", exclude_defaults=True)
    if spec.api_key is not None:
        body["api_key"] = spec.api_key.get_secret_value()
    return orjson.dumps(body)
