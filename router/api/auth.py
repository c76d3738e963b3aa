"""Who may call: API keys for inference, separate admin keys, and nothing else opens admin routes.

A presented key is hashed and looked up among the digests of the configured keys: how long that
takes says nothing about any key. Its tenant has a name of its own, or one made from the digest, so
no key is ever written to a log. A proxy's word on whose request it brings counts only where the
proxy's address is a trusted one.

With no admin keys the admin routes are open to this machine only, and to no web page that a browser
on this machine may show: what a page can make a browser send (a form, an image, a name that its
owner points at this machine) is told by the headers that a page cannot choose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from hashlib import sha256
from typing import Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from router.auth_settings import AuthSettings
from router.config import Config
from router.errors import Reason, Refused
from router.runtime.loops import VIA_HEADER
from router.tenant_settings import (
    ANONYMOUS,
    CLASS_OF_TIER,
    DIGEST_PREFIX,
    TenantSettings,
    TierName,
    name_of,
)

SHOWN_MAX: Final = 1_000
_SHOWN_BYTES_MAX: Final = 4_096
HeaderList = Iterable[tuple[bytes, bytes]]
# A proxy on this machine forwards others' requests: then the peer's address is not who asks.
_FORWARDED: Final = (b"x-forwarded-for", b"forwarded", b"x-real-ip")
# What a browser says of whose wish a request is: the user's own, or that of a page from here.
_OWN_SITES: Final = (b"none", b"same-origin")
_TIERS: Final[Mapping[str, TierName]] = {tier: tier for tier in CLASS_OF_TIER}


class Access(Enum):
    """What a route asks of its caller."""

    OPEN = auto()  # health
    USER = auto()  # inference and what belongs to it
    CATALOG = auto()  # the same, and trusted proxies by themselves: what is served here
    ADMIN = auto()
    METRICS = auto()  # open, unless the settings ask for an admin key
    ADMIN_OLD_FORM = auto()  # the same where GET changes something: for scripts, for no browser


class Authenticator:
    """Says who sends a request, by the keys and the proxies of one configuration at a time."""

    def __init__(
        self, settings: AuthSettings, tenants: Mapping[str, TenantSettings] | None = None
    ) -> None:
        self._shown: dict[bytes, str] = {}  # callers by what they showed, where no keys are set
        self.configure(settings, tenants or {})

    def on_config(self, config: Config) -> None:
        """Go by the keys, tenants and proxies of `config` from the next request on."""
        self.configure(config.auth, config.tenants)

    def configure(self, settings: AuthSettings, tenants: Mapping[str, TenantSettings]) -> None:
        """Take over other settings, between two requests."""
        self._settings = settings
        self._tenants = tenants
        self.metrics_open = settings.metrics_open
        self._users = {digest: name_of(digest.hex()) for digest in map(_digest, settings.api_keys)}
        self._disabled: dict[bytes, str] = {}
        for name, tenant in tenants.items():
            known = self._disabled if tenant.disabled else self._users
            known |= {bytes.fromhex(key.removeprefix(DIGEST_PREFIX)): name for key in tenant.keys}
        for digest, name in list(self._users.items()):  # of a key that stands in auth.api_keys
            if (known_as := tenants.get(name)) is not None and known_as.disabled:
                self._disabled[digest] = self._users.pop(digest)
        self._admins = frozenset(map(_digest, settings.admin_keys))
        self.needs_keys = bool(self._users or self._disabled)
        nobody = tenants.get(ANONYMOUS)
        self._open = not self.needs_keys and not (nobody is not None and nobody.disabled)
        self._proxies = settings.trusted_proxies
        self._tenant_header = settings.tenant_header.encode()
        self._tier_header = settings.tier_header.encode()

    @property
    def tenant_header(self) -> bytes:
        """The header in which a trusted proxy names the tenant."""
        return self._tenant_header

    def trusts(self, host: str | None) -> bool:
        """Whether a peer at this address is a proxy whose word on tenants counts."""
        if not self._proxies or host is None:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in self._proxies)

    def tenant(self, headers: HeaderList, *, trusted: bool = False) -> str:
        """Return the tenant who sends an inference request with these lower-case `headers`.

        A key decides alone. Without one, a trusted proxy may name the tenant in a header.
        Raises Refused: UNAUTHORIZED without a known key or tenant, FORBIDDEN for an admin key and
        for a tenant that is disabled.
        """
        digest = _presented(headers) if self.needs_keys else b""
        tenant = self._users.get(digest)
        return self._without_key(digest, headers, trusted) if tenant is None else tenant

    def _without_key(self, digest: bytes, headers: HeaderList, trusted: bool) -> str:
        if digest:
            if digest in self._admins:
                raise Refused(Reason.FORBIDDEN, "this key is for admin routes only")
            if (name := self._disabled.get(digest)) is not None:
                raise _disabled(name)
            raise Refused(Reason.UNAUTHORIZED, _unauthorized(digest, headers))
        name = self._said(self._tenant_header, headers) if trusted else None
        # Whoever is named anonymous is nobody, unless there are settings for it.
        if name is not None and (name != ANONYMOUS or name in self._tenants):
            return self._enabled(name)
        if self.needs_keys and not self._settings.allow_anonymous:
            raise Refused(Reason.UNAUTHORIZED, _unauthorized(digest, headers))
        return self._enabled(ANONYMOUS)

    def _enabled(self, name: str) -> str:
        settings = self._tenants.get(name)
        if settings is None and name != ANONYMOUS:
            message = f"no tenant is named {name!r:.150} here, as a proxy in front says"
            raise Refused(Reason.UNAUTHORIZED, message)
        if settings is not None and settings.disabled:
            raise _disabled(name)
        return name

    def _said(self, wanted: bytes, headers: HeaderList) -> str | None:
        """What a header of a trusted proxy says; said twice, it must be the same."""
        values = {value.strip() for name, value in headers if name == wanted}
        if len(values) > 1:
            header = wanted.decode()
            raise Refused(Reason.BAD_REQUEST, f"{header} is given twice", param=header)
        return next((value.decode("latin-1") for value in values), None)

    def proxied(self, headers: HeaderList) -> tuple[str, TierName | None]:
        """Whose request a trusted proxy brings, and the tier that it says, if it does."""
        return self.caller(headers, trusted=True), self.tier(headers)

    def tier(self, headers: HeaderList) -> TierName | None:
        """The tier that a trusted proxy says. Raises Refused for a word that is none."""
        said = self._said(self._tier_header, headers)
        tier = None if said is None else _TIERS.get(said.lower())
        if said is not None and tier is None:
            header = self._tier_header.decode()
            message = f"{header}: expected one of {', '.join(_TIERS)}, not {said!r:.100}"
            raise Refused(Reason.BAD_REQUEST, message, param=header)
        return tier

    def caller(self, headers: HeaderList, *, trusted: bool = False) -> str:
        """The same as `tenant`, and where no keys are set, the key shown tells callers apart.

        Nobody vouches for such a key, so it names its bearer and opens nothing. Only the first
        `SHOWN_MAX` keys get a name; who comes later is anonymous.
        """
        if trusted or not self._open:
            tenant = self.tenant(headers, trusted=trusted)
            if tenant is not ANONYMOUS or self.needs_keys:
                return tenant
        for name, value in headers:
            if name in (b"authorization", b"x-api-key"):
                return self._shown.get(value) or self._new_caller(headers, value)
        return ANONYMOUS

    def _new_caller(self, headers: HeaderList, value: bytes) -> str:
        digest = _presented(headers)
        if not digest or len(self._shown) >= SHOWN_MAX or len(value) > _SHOWN_BYTES_MAX:
            return ANONYMOUS
        name = self._shown[value] = name_of(digest.hex())
        return name

    def is_admin(self, headers: HeaderList) -> bool:
        """Whether `headers` carry an admin key."""
        return _presented(headers) in self._admins

    def admin_name(self, headers: HeaderList) -> str:
        """Who an admin request with these headers is from, for those who read what was done."""
        digest = _presented(headers)
        return name_of(digest.hex()) if digest in self._admins else "this machine"

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
        if digest in self._users or digest in self._disabled:
            raise Refused(Reason.FORBIDDEN, "this key does not open admin routes")
        raise Refused(Reason.UNAUTHORIZED, _unauthorized(digest, headers))


def _disabled(name: str) -> Refused:
    return Refused(Reason.FORBIDDEN, f"the tenant {name} is disabled")


def _digest(key: SecretStr) -> bytes:
    return sha256(key.get_secret_value().encode()).digest()


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


def _unauthorized(digest: bytes, headers: HeaderList) -> str:
    """Why; where the request came through a router in front, it is that one's affair."""
    if any(name == VIA_HEADER for name, _ in headers):
        if digest:
            return (
                "the router in front sends a key that this one does not know (its api_key for it)"
            )
        return (
            "the router in front sends no API key: give it one for this worker (api_key), or list "
            "its address in auth.trusted_proxies here"
        )
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
