"""What the connections of the listening side share, and the requests that they take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from router.config import Config
from router.core import claims
from router.core.types import Endpoint, Priority
from router.errors import Reason, Refused
from router.runtime.edge import Edge
from router.runtime.heads import Headers, HeadRules, RequestHead, no_cors
from router.runtime.ids import request_ids
from router.runtime.relay import Exchange
from router.tenant_settings import TierName
from router.wire import BodyReader

ROUTES: Final[dict[bytes, Endpoint]] = {
    b"/v1/chat/completions": Endpoint.CHAT,
    b"/v1/completions": Endpoint.COMPLETIONS,
    b"/generate": Endpoint.GENERATE,
    b"/v1/messages": Endpoint.MESSAGES,
    b"/v1/responses": Endpoint.RESPONSES,
    b"/v1/embeddings": Endpoint.EMBEDDINGS,
    b"/encode": Endpoint.OTHER,
    b"/classify": Endpoint.OTHER,
    b"/rerank": Endpoint.OTHER,
    b"/invocations": Endpoint.CHAT,
    b"/tokenize": Endpoint.OTHER,
    b"/detokenize": Endpoint.OTHER,
    b"/v1/messages/count_tokens": Endpoint.OTHER,
    b"/v1/classify": Endpoint.OTHER,
    b"/v1/rerank": Endpoint.OTHER,
    b"/v1/score": Endpoint.OTHER,
    b"/v1/decisions": Endpoint.OTHER,
    b"/v1/tokenize": Endpoint.OTHER,
    b"/v1/detokenize": Endpoint.OTHER,
    b"/v1/audio/transcriptions": Endpoint.OTHER,
}
_FORM_ROUTES: Final = frozenset((b"/v1/audio/transcriptions",))
Authenticate = Callable[[Headers], str]
Proxied = Callable[[Headers], tuple[str, TierName | None]]
OnRefused = Callable[[Reason, str, bytes], None]  # why, the request's id and target


def allow_all(headers: Headers) -> str:  # noqa: ARG001 - the signature of Authenticate
    """Let everybody in under one name."""
    return "anonymous"


def unheard(reason: Reason, request_id: str, target: bytes) -> None:
    """Hear of a refusal and do nothing."""


def all_alike(headers: Headers) -> tuple[str, TierName | None]:
    """The same for what a proxy brings."""
    return allow_all(headers), None


def trust_nobody(host: str | None) -> bool:  # noqa: ARG001 - the signature of Front.trusts
    """Take no peer for a proxy whose word counts."""
    return False


class Standing(NamedTuple):
    """The class of a request, what its answer says of that, and the models it may ask for."""

    priority: Priority = Priority.P1
    answer_line: bytes = b""
    models: frozenset[str] | None = None  # None: any


_NO_STANDING: Final = Standing()
_Claim = tuple[str, Priority | None, TierName | None]  # tenant, class, and what a proxy says
_STANDINGS_MAX: Final = 20_000


class Standings(dict[_Claim, Standing]):
    """The standing of each claim, by one configuration."""

    __slots__ = ("_config",)

    def __init__(self, config: Config) -> None:
        self._config = config

    def __missing__(self, key: _Claim) -> Standing:
        """Judge a claim that is new."""
        tenant, claim, tier = key
        config = self._config
        classes, settings = config.classes, config.tenants.get(tenant)
        priority, clamped = claims.granted(settings, claim, classes, tier)
        line = b""
        if clamped or priority.name != classes.default:
            said = f"; claimed={claim.name}" if clamped and claim is not None else ""
            line = f"{claims.HEADER}: {priority.name}{said}\r\n".encode()
        if len(self) >= _STANDINGS_MAX:
            self.clear()
        models = None if settings is None else claims.allowed(settings, config.models)
        made = self[key] = Standing(priority, line, models)
        return made


@dataclass(kw_only=True)
class Front:
    """What all connections share.

    `authenticate` names the tenant of lower-case headers or raises Refused; `proxied` does that for
    a peer that `trusts` is true of, and says the tier. `on_refused` hears of requests that ended
    before the core knew of them. `connections_possible` is how many clients this process has files
    for. `cors` makes of the settings what gives the header lines of an
    answer to a page of an origin.
    """

    config: Config
    driver: Edge
    authenticate: Authenticate = allow_all
    trusts: Callable[[str | None], bool] = trust_nobody
    proxied: Proxied = all_alike
    on_refused: OnRefused = unheard
    cors: Callable[[Config], Callable[[bytes], bytes]] = lambda config: no_cors  # noqa: ARG005
    connections_possible: int = sys.maxsize
    ids: Callable[[], str] = field(default_factory=request_ids)
    rules: HeadRules = field(init=False)
    readers: dict[bytes, BodyReader] = field(init=False)
    body_bytes_max: int = field(init=False)
    bodies_bytes_max: int = field(init=False)
    connections_max: int = field(init=False)
    standings: Standings = field(init=False)

    def __post_init__(self) -> None:
        self._take_over(self.config)

    def on_config(self, config: Config) -> None:
        """Serve by these settings from the next head on; what is being read is judged already."""
        self._take_over(config)
        for client in self.driver.clients:
            client.rules_changed()

    def _take_over(self, config: Config) -> None:
        self.config = config
        self.standings = Standings(config)
        self.rules = HeadRules(
            request_id_headers=config.server.request_id_headers,
            pass_credentials=config.auth.pass_credentials,
            ending_headers=(config.auth.tenant_header, config.auth.tier_header),
            cors=self.cors(config),
            router_id=self.driver.upstreams.router_id,
        )
        self.body_bytes_max = config.server.body_bytes_max
        self.bodies_bytes_max = config.server.bodies_bytes_max
        self.connections_max = min(config.server.connections_max, self.connections_possible)
        self.readers = {
            path: BodyReader(endpoint, config.prefix, forms=path in _FORM_ROUTES)
            for path, endpoint in ROUTES.items()
        }


def not_allowed(tenant: str, model: str | None) -> Refused:
    """Refuse a request for a model that is not the tenant's to use."""
    which = "name a model: not every one" if model is None else f"the model {model!r:.200}"
    return Refused(Reason.FORBIDDEN, f"{which} is not open to the tenant {tenant}", param="model")


def bodies_full() -> Refused:
    """Refuse a request for whose body there is no memory now."""
    return Refused(Reason.BODIES_FULL, "The router holds too many requests; try again later.")


class _Nobody:
    """Stands for the event by which uvicorn wakes a request's handler: nobody waits."""

    def set(self) -> None:
        """Wake nobody."""


class Taken:
    """A request that is not ASGI's, from its head to the end of its answer.

    Its public attributes are those of uvicorn's cycles that uvicorn looks at, and ours.
    """

    __slots__ = (
        "body",
        "complete",
        "disconnected",
        "exchange",
        "head",
        "keep_alive",
        "refused",
        "response_complete",
        "size",
        "standing",
        "started",
        "tenant",
        "unread",
    )
    message_event: ClassVar[_Nobody] = _Nobody()
    tenant: str  # known when it was let in
    disconnected: bool  # uvicorn says so, and nobody asks

    def __init__(self, head: RequestHead, *, keep_alive: bool) -> None:
        self.head = head
        self.keep_alive = keep_alive
        self.standing = _NO_STANDING
        self.body: list[bytes | memoryview] = []  # more than one if the first is a view
        self.size = 0  # of what is kept here of the body; counted among the driver's
        self.complete = False  # the whole body is here
        self.unread = False  # and never will be
        self.started = False
        self.refused: Refused | None = None  # decided before the body was complete
        self.exchange: Exchange | None = None
        self.response_complete = False

    @classmethod
    def unreadable(cls, refused: Refused) -> Taken:
        """Stand for a request of which not even the head could be read."""
        taken = cls(RequestHead(), keep_alive=False)
        taken.refuse_unread(refused)
        return taken

    def refuse_unread(self, refused: Refused) -> None:
        """Refuse without reading the rest; the connection can't serve another request then."""
        self.refused = refused.with_traceback(None)  # its frames hold what was read
        self.unread = True
        self.keep_alive = False
        self.body.clear()

    @property
    def answer_lines(self) -> bytes:
        """What every answer to it carries: CORS, and its class where that needs saying."""
        return self.head.answer_lines + self.standing.answer_line

    def whole_body(self) -> bytes:
        """Return the body and keep it no longer."""
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        assert type(body) is bytes
        self.body.clear()
        return body
