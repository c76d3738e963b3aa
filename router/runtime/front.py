"""What the connections of the listening side share, and the requests that they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

from router.config import Config, PrefixSettings
from router.core import claims
from router.core.types import Endpoint, Priority
from router.errors import Reason, Refused
from router.runtime.driver import Driver
from router.runtime.heads import Headers, HeadRules, RequestHead, no_cors
from router.runtime.ids import RequestIds
from router.runtime.relay import Exchange
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
OnRefused = Callable[[Reason, str, bytes], None]  # why, the request's id and target


def allow_all(headers: Headers) -> str:  # noqa: ARG001 - the signature of Authenticate
    """Let everybody in under one name."""
    return "anonymous"


def unheard(reason: Reason, request_id: str, target: bytes) -> None:
    """Hear of a refusal and do nothing."""


class Standing(NamedTuple):
    """The class of a request, and what its answer says of that."""

    priority: Priority = Priority.P1
    answer_line: bytes = b""


_NO_STANDING: Final = Standing()
_STANDINGS_MAX: Final = 20_000


@dataclass(kw_only=True)
class Front:
    """What all connections share.

    `authenticate` names the tenant of lower-case headers or raises Refused. `on_refused` hears of
    requests that ended before the core knew of them. `cors` makes of the settings what gives the
    header lines of an answer to a page of an origin.
    """

    config: Config
    driver: Driver
    authenticate: Authenticate = allow_all
    on_refused: OnRefused = unheard
    cors: Callable[[Config], Callable[[bytes], bytes]] = lambda config: no_cors  # noqa: ARG005
    ids: RequestIds = field(default_factory=RequestIds)
    rules: HeadRules = field(init=False)
    readers: dict[bytes, BodyReader] = field(init=False)
    body_bytes_max: int = field(init=False)
    bodies_bytes_max: int = field(init=False)
    _standings: dict[tuple[str, Priority | None], Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take_over()

    def on_config(self, config: Config) -> None:
        """Serve by these settings from the next head on; what is being read is judged already."""
        self.config = config
        self._take_over()
        for client in self.driver.clients:
            client.forget_head()

    def _take_over(self) -> None:
        self._standings.clear()
        self.rules = HeadRules(
            request_id_headers=self.config.server.request_id_headers,
            pass_credentials=self.config.auth.pass_credentials,
            cors=self.cors(self.config),
            router_id=self.driver.upstreams.router_id,
        )
        self.body_bytes_max = self.config.server.body_bytes_max
        self.bodies_bytes_max = self.config.server.bodies_bytes_max
        self.readers = {
            path: BodyReader(endpoint, self.config.prefix, forms=path in _FORM_ROUTES)
            for path, endpoint in ROUTES.items()
        }

    def standing(self, tenant: str, claim: Priority | None) -> Standing:
        """The class of a tenant's request that claims `claim`, or none."""
        return self._standings.get((tenant, claim)) or self._new_standing(tenant, claim)

    def _new_standing(self, tenant: str, claim: Priority | None) -> Standing:
        classes = self.config.classes
        priority, clamped = claims.granted(self.config.tenants.get(tenant), claim, classes)
        line = b""
        if clamped or priority.name != classes.default:
            said = f"; claimed={claim.name}" if clamped and claim is not None else ""
            line = f"{claims.HEADER}: {priority.name}{said}\r\n".encode()
        if len(self._standings) >= _STANDINGS_MAX:
            self._standings.clear()
        made = self._standings[tenant, claim] = Standing(priority, line)
        return made


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
        "http_1_0",
        "keep_alive",
        "lines",
        "reader",
        "refused",
        "response_complete",
        "size",
        "standing",
        "started",
        "target",
        "tenant",
        "unread",
    )
    message_event: ClassVar[_Nobody] = _Nobody()

    def __init__(
        self,
        reader: BodyReader,
        target: bytes,
        head: RequestHead,
        lines: bytes,
        http_1_0: bool,
    ) -> None:
        self.reader = reader
        self.target = target
        self.head = head
        self.lines = lines  # of the head for the worker
        self.http_1_0 = http_1_0
        self.keep_alive = False
        self.tenant = ""
        self.standing = _NO_STANDING
        self.body: list[bytes] = []
        self.size = 0  # of what is kept here of the body; counted among the driver's
        self.complete = False  # the whole body is here
        self.unread = False  # and never will be
        self.started = False
        self.refused: Refused | None = None  # decided before the body was complete
        self.exchange: Exchange | None = None
        self.response_complete = False
        self.disconnected = False

    @classmethod
    def unreadable(cls, refused: Refused) -> Taken:
        """Stand for a request of which not even the head could be read."""
        taken = cls(_NO_READER, b"", RequestHead(), b"", False)
        taken.refuse_unread(refused)
        return taken

    def refuse_unread(self, refused: Refused) -> None:
        """Refuse without reading the rest; the connection can't serve another request then."""
        self.refused = refused
        self.unread = True
        self.keep_alive = False
        self.body.clear()

    @property
    def answer_lines(self) -> bytes:
        """What every answer to it carries: CORS, and its class where that needs saying."""
        line = self.standing.answer_line
        return self.head.answer_lines + line if line else self.head.answer_lines

    def whole_body(self) -> bytes:
        """Return the body and keep it no longer."""
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.body.clear()
        return body


_NO_READER: Final = BodyReader(Endpoint.OTHER, PrefixSettings())
