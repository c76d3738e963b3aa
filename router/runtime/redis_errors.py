"""How asking Redis can fail. Apart from the client, which only a router that has a Redis loads."""

from __future__ import annotations

from typing import Final

NO_REDIS: Final = "what answers there is no Redis: it does not speak its protocol"


class RedisAway(Exception):
    """The server did not answer in time, or the guard is open; the message says which."""


class RedisRefused(Exception):
    """The server answered with an error, or holds what cannot be read; the message says which."""
