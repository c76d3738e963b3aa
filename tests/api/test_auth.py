"""Who may call: keys, schemes, and what is open to this machine only."""

from __future__ import annotations

from hashlib import sha256

import pytest

from router.api.auth import SHOWN_MAX, Access, Authenticator, is_loopback
from router.auth_settings import AuthSettings
from router.errors import Reason, Refused

USER, ADMIN = "sk-user", "sk-admin"
Headers = list[tuple[bytes, bytes]]


def authenticator(**keys: list[str]) -> Authenticator:
    return Authenticator(AuthSettings.model_validate(keys))


@pytest.fixture
def both() -> Authenticator:
    return authenticator(api_keys=[USER, "sk-user-2"], admin_keys=[ADMIN])


def bearer(key: str, scheme: str = "Bearer") -> Headers:
    return [(b"authorization", f"{scheme} {key}".encode())]


def refusal_of_user(keys: Authenticator, headers: Headers) -> Reason:
    with pytest.raises(Refused) as caught:
        keys.tenant(headers)
    return caught.value.reason


def refusal_of_admin(
    keys: Authenticator, headers: Headers, host: str | None = "10.0.0.1"
) -> Reason:
    with pytest.raises(Refused) as caught:
        keys.admit_admin(headers, client_host=host)
    return caught.value.reason


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
def test_the_scheme_is_case_blind(both: Authenticator, scheme: str) -> None:
    assert both.tenant(bearer(USER, scheme)).startswith("key-")


def test_anthropic_clients_may_send_x_api_key(both: Authenticator) -> None:
    assert both.tenant([(b"x-api-key", USER.encode())]) == both.tenant(bearer(USER))


def test_a_tenant_is_named_after_its_keys_digest_and_never_its_key(both: Authenticator) -> None:
    tenant = both.tenant(bearer(USER))
    assert tenant == "key-" + sha256(USER.encode()).hexdigest()[:8]
    assert tenant != both.tenant(bearer("sk-user-2"))


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer("sk-wrong"),
        bearer(""),
        bearer(USER[:-1]),
        bearer(USER + "x"),
        bearer(USER.upper()),
        [(b"authorization", b"Basic " + USER.encode())],
        [(b"authorization", USER.encode())],
        [(b"authorization", b"\xff\xfe")],
        [(b"x-tenant", USER.encode())],
    ],
)
def test_without_a_known_key_inference_is_unauthorized(
    both: Authenticator, headers: Headers
) -> None:
    assert refusal_of_user(both, headers) is Reason.UNAUTHORIZED


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ([], "no API key: send"),
        (bearer("sk-wrong"), "this key is not known"),
        ([(b"x-laneway-via", b"aa")], "auth.trusted_proxies"),
        ([(b"x-laneway-via", b"aa"), *bearer("sk-wrong")], "router in front sends a key"),
    ],
)
def test_who_comes_through_another_router_hears_whose_affair_it_is(
    both: Authenticator, headers: Headers, said: str
) -> None:
    with pytest.raises(Refused) as caught:
        both.tenant(headers)
    assert said in caught.value.message


def test_an_admin_key_is_no_user_key(both: Authenticator) -> None:
    assert refusal_of_user(both, bearer(ADMIN)) is Reason.FORBIDDEN


def test_without_keys_everyone_is_the_same_anonymous_tenant() -> None:
    assert authenticator().tenant([]) == authenticator().tenant(bearer("any")) == "anonymous"


def test_only_admin_keys_open_admin_routes(both: Authenticator) -> None:
    both.admit_admin(bearer(ADMIN), client_host="10.0.0.1")
    assert refusal_of_admin(both, bearer(USER)) is Reason.FORBIDDEN
    assert refusal_of_admin(both, bearer("sk-wrong")) is Reason.UNAUTHORIZED
    assert refusal_of_admin(both, []) is Reason.UNAUTHORIZED
    assert refusal_of_admin(both, [], host="127.0.0.1") is Reason.UNAUTHORIZED


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_admin_keys_this_machine_may_administer(host: str) -> None:
    authenticator(api_keys=[USER]).admit_admin([], client_host=host)


@pytest.mark.parametrize("host", ["10.0.0.1", "::2", "::ffff:10.0.0.1", "testclient", None])
def test_without_admin_keys_no_other_machine_may(host: str | None) -> None:
    assert refusal_of_admin(authenticator(), [], host=host) is Reason.FORBIDDEN


@pytest.mark.parametrize(
    "header",
    [
        (b"x-forwarded-for", b"10.0.0.9"),
        (b"forwarded", b"for=10.0.0.9"),
        (b"origin", b"https://evil.example"),
        (b"origin", b"null"),
        (b"origin", b"http://["),
        (b"host", b"evil.example"),
        (b"host", b"evil.example:30000"),
        (b"host", b"localhost.evil.example"),
        (b"host", b"0.0.0.0:30000"),
        (b"host", b""),
        (b"host", b"["),
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-site", b"same-site"),
    ],
)
def test_a_local_proxy_or_a_web_page_is_not_this_machine(header: tuple[bytes, bytes]) -> None:
    assert refusal_of_admin(authenticator(), [header], host="127.0.0.1") is Reason.FORBIDDEN


@pytest.mark.parametrize("host", [b"127.0.0.1:30000", b"localhost", b"LOCALHOST:1", b"[::1]:30000"])
@pytest.mark.parametrize("site", [b"none", b"same-origin"])
def test_the_users_own_wish_under_a_local_name_may_administer(host: bytes, site: bytes) -> None:
    headers = [(b"host", host), (b"sec-fetch-site", site)]
    authenticator().admit_admin(headers, client_host="127.0.0.1")


@pytest.mark.parametrize(
    "header",
    [
        (b"sec-fetch-site", b"none"),
        (b"sec-fetch-mode", b"navigate"),
        (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64)"),
    ],
)
def test_a_browser_that_follows_a_link_changes_nothing(header: tuple[bytes, bytes]) -> None:
    keys = authenticator()
    old_form = Access.ADMIN_OLD_FORM
    keys.admit_admin([(b"user-agent", b"curl/8")], client_host="127.0.0.1", access=old_form)
    with pytest.raises(Refused):
        keys.admit_admin([header], client_host="127.0.0.1", access=old_form)


def test_with_an_admin_key_a_host_and_a_page_are_whatever_they_are() -> None:
    headers = [*bearer(ADMIN), (b"host", b"router.example"), (b"sec-fetch-site", b"cross-site")]
    authenticator(admin_keys=[ADMIN]).admit_admin(headers, client_host="10.0.0.1")


def test_a_page_served_by_this_machine_may_administer() -> None:
    page = [(b"origin", b"http://localhost:30000")]
    authenticator().admit_admin(page, client_host="127.0.0.1")


def test_a_name_is_loopback_only_when_it_is_localhost() -> None:
    assert is_loopback("localhost")
    assert not is_loopback("localhost.evil.example")
    assert not is_loopback("0.0.0.0")


def test_without_keys_callers_are_told_apart_by_what_they_show() -> None:
    keys = authenticator()
    assert keys.caller([]) == "anonymous"
    name = keys.caller(bearer(USER))
    assert name == "key-" + sha256(USER.encode()).hexdigest()[:8]
    assert keys.caller([(b"x-api-key", USER.encode())]) == name
    assert keys.caller(bearer("sk-user-2")) != name
    assert keys.caller([(b"authorization", b"Basic abc")]) == "anonymous"
    assert keys.caller(bearer("x" * 10_000)) == "anonymous"
    assert keys.tenant(bearer(USER)) == "anonymous"  # a shown key opens nothing


def test_only_so_many_callers_get_a_name() -> None:
    keys = authenticator()
    names = {keys.caller(bearer(f"sk-{number}")) for number in range(SHOWN_MAX + 50)}
    assert len(names) == SHOWN_MAX + 1
    assert "anonymous" in names
    assert keys.caller(bearer("sk-0")).startswith("key-")


def test_with_keys_a_caller_is_its_tenant(both: Authenticator) -> None:
    assert both.caller(bearer(USER)) == both.tenant(bearer(USER))
    with pytest.raises(Refused):
        both.caller(bearer("unknown"))
