"""Tenants by name: their keys, what a proxy may say of them, and who is nobody's tenant."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.auth import Authenticator
from router.config import Config
from router.errors import Reason, Refused
from router.tenant_settings import digest_of

Headers = list[tuple[bytes, bytes]]
ACME, BETA = "lw-acme", "lw-beta"
TENANTS: dict[str, Any] = {
    "acme": {"keys": [digest_of(ACME), digest_of("lw-acme-2")]},
    "beta": {"keys": [digest_of(BETA)], "disabled": True},
    "by-proxy": {},
}
PROXIES: dict[str, Any] = {"trusted_proxies": ["10.0.0.0/8", "127.0.0.1", "fd00::/8"]}


def authenticator(auth: dict[str, Any] | None = None, **tenants: Any) -> Authenticator:
    config = Config.model_validate({"auth": auth or PROXIES, "tenants": tenants or TENANTS})
    return Authenticator(config.auth, config.tenants)


def bearer(key: str) -> Headers:
    return [(b"authorization", f"Bearer {key}".encode())]


def named(tenant: str) -> Headers:
    return [(b"x-laneway-tenant", tenant.encode())]


def refusal(keys: Authenticator, headers: Headers, *, trusted: bool = False) -> Reason:
    with pytest.raises(Refused) as caught:
        keys.caller(headers, trusted=trusted)
    return caught.value.reason


def test_each_key_of_a_tenant_is_the_tenants() -> None:
    keys = authenticator()
    assert keys.tenant(bearer(ACME)) == keys.tenant(bearer("lw-acme-2")) == "acme"
    assert refusal(keys, bearer("lw-else")) is Reason.UNAUTHORIZED
    assert refusal(keys, []) is Reason.UNAUTHORIZED


def test_a_disabled_tenant_is_told_so_and_opens_no_admin_route() -> None:
    keys = authenticator({"admin_keys": ["admin"]})
    assert refusal(keys, bearer(BETA)) is Reason.FORBIDDEN
    with pytest.raises(Refused) as caught:
        keys.admit_admin(bearer(BETA), client_host="10.0.0.1")
    assert caught.value.reason is Reason.FORBIDDEN


def test_a_key_of_the_general_list_is_disabled_by_its_name() -> None:
    name = "key-" + digest_of("sk-1").removeprefix("sha256:")[:8]
    keys = authenticator({"api_keys": ["sk-1", "sk-2"]}, **{name: {"disabled": True}})
    assert refusal(keys, bearer("sk-1")) is Reason.FORBIDDEN
    assert keys.tenant(bearer("sk-2")).startswith("key-")


@pytest.mark.parametrize(
    ("host", "trusted"),
    [
        ("10.1.2.3", True),
        ("127.0.0.1", True),
        ("::ffff:10.1.2.3", True),
        ("fd00::1", True),
        ("11.0.0.1", False),
        ("127.0.0.2", False),
        ("testclient", False),
        ("", False),
        (None, False),
    ],
)
def test_only_listed_addresses_are_proxies(host: str | None, trusted: bool) -> None:
    assert authenticator().trusts(host) is trusted
    assert not authenticator({"api_keys": ["k"]}).trusts(host)


def test_a_proxy_names_the_tenant_and_nobody_else_does() -> None:
    keys = authenticator()
    assert keys.caller(named("by-proxy"), trusted=True) == "by-proxy"
    assert refusal(keys, named("by-proxy")) is Reason.UNAUTHORIZED
    assert refusal(keys, named("nobody"), trusted=True) is Reason.UNAUTHORIZED
    assert refusal(keys, named("anonymous"), trusted=True) is Reason.UNAUTHORIZED
    assert refusal(keys, named("beta"), trusted=True) is Reason.FORBIDDEN
    assert refusal(keys, [*named("acme"), *named("by-proxy")], trusted=True) is Reason.BAD_REQUEST


def test_a_key_decides_whatever_a_proxy_says() -> None:
    keys = authenticator()
    for trusted in (True, False):
        assert keys.caller([*bearer(ACME), *named("by-proxy")], trusted=trusted) == "acme"
        assert (
            refusal(keys, [*bearer("lw-else"), *named("by-proxy")], trusted=trusted)
            is Reason.UNAUTHORIZED
        )


def test_the_tier_is_a_proxys_word() -> None:
    keys = authenticator()
    said = [*named("by-proxy"), (b"x-user-tier", b" Premium ")]
    assert keys.proxied(said) == ("by-proxy", "premium")
    assert keys.proxied(named("by-proxy")) == ("by-proxy", None)
    with pytest.raises(Refused, match="premium, standard, free, offline"):
        keys.proxied([*named("by-proxy"), (b"x-user-tier", b"gold")])


def test_who_shows_no_key_is_anonymous_only_where_that_is_allowed() -> None:
    keys = authenticator({"allow_anonymous": True})
    assert keys.caller([]) == "anonymous"
    assert refusal(keys, bearer("lw-else")) is Reason.UNAUTHORIZED
    shut = authenticator({"allow_anonymous": True}, **TENANTS, anonymous={"disabled": True})
    assert refusal(shut, []) is Reason.FORBIDDEN
    assert refusal(authenticator({}, anonymous={"disabled": True}), []) is Reason.FORBIDDEN


def test_without_keys_a_proxy_names_tenants_and_shown_keys_tell_the_others_apart() -> None:
    keys = authenticator(PROXIES, **{"by-proxy": {}})
    assert keys.caller([*bearer("any"), *named("by-proxy")], trusted=True) == "by-proxy"
    assert keys.caller(bearer("any"), trusted=True) == keys.caller(bearer("any"))
    assert keys.caller(bearer("any")).startswith("key-")
    assert keys.caller(named("by-proxy")) == "anonymous"


def test_another_configuration_counts_from_the_next_request_on() -> None:
    keys = authenticator()
    config = Config.model_validate({"tenants": {"beta": {"keys": [digest_of(BETA)]}}})
    keys.configure(config.auth, config.tenants)
    assert keys.tenant(bearer(BETA)) == "beta"
    assert refusal(keys, bearer(ACME)) is Reason.UNAUTHORIZED
