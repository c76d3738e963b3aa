"""Who may call: API keys for inference, separate admin keys, and nothing else opens admin routes.

A presented key is hashed and looked up among the digests of the configured keys: how long that
takes says nothing about any key. The name of a tenant is made from the digest, so no key is ever
written to a log. With no admin keys the admin routes are open to this machine only, and to no web
page that a browser on this machine may show: what a page can make a browser send (a form, an image,
a name that its owner points at this machine) is told by the headers that a page cannot choose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import Enum, auto
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from router.config import AuthSettings, Config
from router.errors import Reason, Refused

ANONYMOUS: Final = "anonymous"
SHOWN_MAX: Final = 1_000
_SHOWN_BYTES_MAX: Final = 4_096
HeaderList = Iterable[tuple[bytes, bytes]]
# A proxy on this machine forwards others' requests: then the peer's address is not who asks.
_FORWARDED: Final = (b"x-forwarded-for", b"forwarded", b"x-real-ip")
# What a browser says of whose wish a request is: the user's own, or that of a page from here.
_OWN_SITES: Final = (b"none", b"same-origin")


class Access(Enum):
    """What a route asks of its caller."""

    OPEN = auto()  # health
    USER = auto()  # inference and what belongs to it
    ADMIN = auto()
    METRICS = auto()  # open, unless the settings ask for an admin key
    ADMIN_OLD_FORM = auto()  # the same where GET changes something: for scripts, for no browser


class Authenticator:
    """Checks the keys of the configuration in force."""

    def __init__(self, settings: AuthSettings) -> None:
        self._shown: dict[bytes, str] = {}  # callers by what they showed, where no keys are set
        self._take(settings)

    def on_config(self, config: Config) -> None:
        """Use these keys from the next request on."""
        self._take(config.auth)

    def _take(self, settings: AuthSettings) -> None:
        self.metrics_open = settings.metrics_open
        self._users = _by_digest(settings.api_keys)
        self._admins = _by_digest(settings.admin_keys)

    def tenant(self, headers: HeaderList) -> str:
        """Return the tenant who sends an inference request with these lower-case `headers`.

        Raises Refused: UNAUTHORIZED without a known key, FORBIDDEN for an admin key.
        """
        if not self._users:
            return ANONYMOUS
        digest = _presented(headers)
        tenant = self._users.get(digest) if digest else None
        if tenant is None:
            if digest in self._admins:
                raise Refused(Reason.FORBIDDEN, "this key is for admin routes only")
            raise Refused(Reason.UNAUTHORIZED, _unauthorized(digest))
        return tenant

    def caller(self, headers: HeaderList) -> str:
        """The same, and where no keys are set, the key that is shown tells callers apart.

        Nobody vouches for such a key, so it names its bearer and opens nothing. Only the first
        `SHOWN_MAX` keys get a name; who comes later is anonymous.
        """
        if self._users:
            return self.tenant(headers)
        for name, value in headers:
            if name in (b"authorization", b"x-api-key"):
                return self._shown.get(value) or self._new_caller(headers, value)
        return ANONYMOUS

    def _new_caller(self, headers: HeaderList, value: bytes) -> str:
        digest = _presented(headers)
        if not digest or len(self._shown) >= SHOWN_MAX or len(value) > _SHOWN_BYTES_MAX:
            return ANONYMOUS
        name = self._shown[value] = _name_of(digest)
        return name

    def is_admin(self, headers: HeaderList) -> bool:
        """Whether `headers` carry an admin key."""
        return _presented(headers) in self._admins

    def admin_name(self, headers: HeaderList) -> str:
        """Who an admin request with these headers is from, for those who read what was done."""
        return self._admins.get(_presented(headers), "this machine")

    def admit_admin(
        self,
        headers: HeaderList,
        *,
        client_host: str | None,
        access: Access = Access.ADMIN,
    ) -> None:
        """Let an admin request with these lower-case `headers` pass, or raise Refused."""
        if not self._admins:
            _admit_local(dict(headers), client_host)
            if access is Access.ADMIN_OLD_FORM:
                _refuse_browser(dict(headers))
            return
        digest = _presented(headers)
        if digest in self._admins:
            return
        if digest in self._users:
            raise Refused(Reason.FORBIDDEN, "this key does not open admin routes")
        raise Refused(Reason.UNAUTHORIZED, _unauthorized(digest))


def _by_digest(keys: Iterable[SecretStr]) -> dict[bytes, str]:
    digests = (sha256(key.get_secret_value().encode()).digest() for key in keys)
    return {digest: _name_of(digest) for digest in digests}


def _name_of(digest: bytes) -> str:
    return f"key-{digest.hex()[:8]}"


def _presented(headers: HeaderList) -> bytes:
    """The digest of the key in `headers`; empty when there is none.

    OpenAI's clients send `Authorization: Bearer KEY`, Anthropic's `x-api-key: KEY`.
    """
    key = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                key = rest.strip()
                break
        elif name == b"x-api-key":
            key = value.strip()
    return sha256(key).digest() if key else b""


def _unauthorized(digest: bytes) -> str:
    return "this key is not known" if digest else "no API key: send `Authorization: Bearer KEY`"


def _admit_local(headers: dict[bytes, bytes], client_host: str | None) -> None:
    if client_host is None or not is_loopback(client_host):
        raise Refused(
            Reason.FORBIDDEN, "admin routes are open to this machine only; set auth.admin_keys"
        )
    if any(name in headers for name in _FORWARDED):
        raise Refused(
            Reason.FORBIDDEN, "admin routes are not open through a proxy; set auth.admin_keys"
        )
    host = headers.get(b"host")
    if host is not None and not _is_local("//" + host.decode("latin-1")):
        raise Refused(
            Reason.FORBIDDEN,
            "admin routes are open under a loopback address or localhost only; set auth.admin_keys",
        )
    refuse_page(headers.items())


def refuse_page(headers: HeaderList) -> None:
    """Raise Refused for what a page of somebody else made a browser send."""
    named = dict(headers)
    origin = named.get(b"origin")
    foreign = origin is not None and not _is_local(origin.decode("latin-1"))
    if foreign or named.get(b"sec-fetch-site", b"none") not in _OWN_SITES:
        raise Refused(
            Reason.FORBIDDEN, "admin routes are not open to web pages; set auth.admin_keys"
        )


def _refuse_browser(headers: dict[bytes, bytes]) -> None:
    """Raise Refused for any browser, as following a link must not change anything."""
    browser = headers.get(b"user-agent", b"").startswith(b"Mozilla/")
    if browser or any(name.startswith(b"sec-fetch-") for name in headers):
        raise Refused(Reason.FORBIDDEN, "this form is not open to browsers; use /workers")


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine by itself."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
