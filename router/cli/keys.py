"""`laneway keys`: make API keys. A key is shown once; the configuration holds its digest."""

from __future__ import annotations

import secrets
import sys
from typing import Annotated, Final

import typer
from pydantic import SecretStr, TypeAdapter, ValidationError

from router.cli.common import say, stop
from router.contract import visible_key
from router.tenant_settings import TenantName, digest_of

keys_app = typer.Typer(help="Make API keys.", no_args_is_help=True, rich_markup_mode=None)
_KEY_PREFIX: Final = "lw-"
_RANDOM_BYTES: Final = 32
_INPUT_CHARS_MAX: Final = 65_536

Tenant = Annotated[
    str, typer.Option("--tenant", metavar="NAME", help="Whose key it is; for the lines shown.")
]


@keys_app.command("new")
def new(tenant: Tenant = "NAME") -> None:
    """Make a key: it is shown this once, with the lines that go into the configuration."""
    _check_name(tenant)
    key = _KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    say(f"key     {key}\ndigest  {digest_of(key)}\n\n{_lines(tenant, key)}")


@keys_app.command("digest")
def digest(tenant: Tenant = "NAME") -> None:
    """Say the digest of a key that there is already; it is read from standard input."""
    _check_name(tenant)
    key, *more = sys.stdin.read(_INPUT_CHARS_MAX).split("\n", 1)
    key = key.strip()
    if not key:
        stop("laneway: no key came on standard input: echo KEY | laneway keys digest", status=2)
    if "".join(more).strip():
        stop("laneway: one key, please: standard input has more than one line", status=2)
    try:
        visible_key(SecretStr(key))
    except ValueError as exc:
        stop(f"laneway: {exc}", status=2)
    say(f"digest  {digest_of(key)}\n\n{_lines(tenant, key)}")


def _lines(tenant: str, key: str) -> str:
    return f"tenants:\n  {tenant}:\n    keys: [{digest_of(key)!r}]"


def _check_name(tenant: str) -> None:
    try:
        TypeAdapter(TenantName).validate_python(tenant)
    except ValidationError as exc:
        message = exc.errors()[0]["msg"].removeprefix("Value error, ")
        stop(f"laneway: --tenant: {message}", status=2)
