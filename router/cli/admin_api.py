"""How commands ask a running router: its address, its admin key, and what goes wrong."""

from __future__ import annotations

from typing import Annotated, Any, Final, NoReturn

import httpx
import typer
from pydantic import SecretStr

from router.cli.common import stop
from router.contract import visible_key

RouterUrl = Annotated[
    str, typer.Option("--router", envvar="LANEWAY_ROUTER", help="Base URL of the router.")
]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", envvar="LANEWAY_ADMIN_KEY", help="Its admin key.")
]
DEFAULT_ROUTER: Final = "http://127.0.0.1:30000"
_TIMEOUT_S: Final = 10.0


def call(
    method: str, router: str, path: str, admin_key: str | None, *, body: Any = None
) -> dict[str, Any]:
    """The JSON object that a router answers; ends with a message when there is none."""
    if "://" not in router:
        stop(f"laneway: --router wants a URL, as http://{router}", status=2)
    headers = {} if admin_key is None else {"authorization": f"Bearer {checked_key(admin_key)}"}
    try:
        answer = httpx.request(
            method, router.rstrip("/") + path, headers=headers, json=body, timeout=_TIMEOUT_S,
            trust_env=False,
        )  # fmt: skip
        document = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        stop(f"laneway: no router answers at {router}: {str(exc) or type(exc).__name__}", status=1)
    except ValueError:
        stop_as_strange(router)
    if answer.is_error:
        error = document.get("error") if isinstance(document, dict) else None
        detail = error["message"] if isinstance(error, dict) else answer.text[:200]
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            detail += " (an admin key: --admin-key or LANEWAY_ADMIN_KEY)"
        stop(f"laneway: {answer.status_code}: {detail}", status=1)
    if not isinstance(document, dict):
        stop_as_strange(router)
    return document


def checked_key(admin_key: str) -> str:
    """The same key, or the end of the command where it cannot go into a request head."""
    try:
        return visible_key(SecretStr(admin_key)).get_secret_value()
    except ValueError as exc:
        stop(f"laneway: --admin-key: {exc}", status=2)


def stop_as_strange(router: str) -> NoReturn:
    """End: whatever listens there is no router."""
    stop(f"laneway: {router} answers, but not as a Laneway router does", status=1)
