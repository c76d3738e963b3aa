"""A small HTTP client for load generators: keep-alive connections, streamed answers read by line.

Blocking, on `http.client`; under locust, gevent makes every wait give way to other requests. There
is no cap on connections, since a capped client measures itself. A kept connection that the server
closed meanwhile is replaced once, as browsers do.
"""

from __future__ import annotations

import json
import ssl
import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection, RemoteDisconnected
from typing import Any, Final
from urllib.parse import urlsplit

from loadtest.streaming import StreamFailed, StreamMeter, error_name

_ERROR_BYTES_MAX: Final = 64 * 1024


class RouterClient:
    """Sends requests to one base URL. Give it back with `close`."""

    def __init__(self, base_url: str, *, api_key: str = "", timeout_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--host is the router's URL, http://host:port, not {base_url!r:.100}")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._base_path = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tls = ssl.create_default_context() if self._secure else None
        self._idle: list[HTTPConnection] = []

    def close(self) -> None:
        """Close the connections that wait for a request."""
        while self._idle:
            self._idle.pop().close()

    def first_model(self) -> str:
        """The first model that the router lists. Raises StreamFailed when there is none."""
        connection, response = self._send("GET", "/v1/models", None)
        try:
            if response.status != 200:
                raise StreamFailed(f"GET /v1/models: {_refusal(response)}")
            models = json.loads(response.read()).get("data", [])
        finally:
            connection.close()
        if not models:
            raise StreamFailed("the router lists no model; name one with --model")
        return str(models[0]["id"])

    def stream(self, path: str, body: dict[str, Any], meter: StreamMeter) -> None:
        """POST `body` and feed `meter` with the answer's lines until its end.

        Raises StreamFailed for a status other than 200 and for error events; OSError and
        HTTPException as http.client does. The caller asks the meter whether the end was good.
        """
        connection, response = self._send("POST", path, json.dumps(body).encode())
        reusable = False
        try:
            if response.status != 200:
                raise StreamFailed(_refusal(response))
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise StreamFailed(f"content type {kind:.40}")
            while line := response.readline():
                meter.line(line, now=time.monotonic())
            reusable = meter.done and not response.will_close
        finally:
            if reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _send(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        if self._idle:
            connection = self._idle.pop()
            try:
                return connection, self._exchange(connection, method, path, body)
            except (RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                connection.close()  # it was closed while it lay idle
        connection = self._connection()
        try:
            return connection, self._exchange(connection, method, path, body)
        except BaseException:
            connection.close()
            raise

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, body: bytes | None
    ) -> HTTPResponse:
        connection.request(method, self._base_path + path, body, self._headers)
        return connection.getresponse()

    def _connection(self) -> HTTPConnection:
        if self._secure:
            return HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=self._tls
            )
        return HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _refusal(response: HTTPResponse) -> str:
    """A short text for an answer that is not 200: its status and the error's name."""
    body = response.read(_ERROR_BYTES_MAX)
    try:
        return f"{response.status} {error_name(json.loads(body))}"
    except ValueError:
        return f"{response.status}"
