"""Answers that a client could not take as the worker sent them.

A worker's bytes normally pass as they are. Not so when the client speaks HTTP/1.0 and the worker
sends chunks, when an answer ends only with its connection, or when it is compressed for a client
that did not ask for it. Such an answer is taken apart and framed anew, still piece by piece.
"""

from __future__ import annotations

import zlib
from typing import Final

from router.runtime.heads import AnswerHead, Framing, RequestHead

_PIECE_BYTES_MAX: Final = 64 * 1024
_LAST_CHUNK: Final = b"0\r\n\r\n"
_NONE: Final = Framing.NONE
_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED
_CODINGS: Final = {b"gzip": b"gzip", b"x-gzip": b"gzip", b"deflate": b"deflate"}


class MalformedBody(ValueError):
    """A compressed body that is not what its head says, or ends too early."""


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def reframer_for(head: AnswerHead, client: RequestHead) -> Reframer | None:
    """Return what makes `head`'s body fit for the client; None when it fits as it is."""
    framing = head.framing
    fits = framing is _LENGTH or framing is _NONE or (framing is _CHUNKED and not client.http_1_0)
    if fits and head.encoding is None:
        return None
    coding = None if head.encoding is None else _CODINGS.get(head.encoding)
    decode = coding is not None and framing is not _NONE and not client.accepts(coding)
    if fits and not decode:
        return None
    return Reframer(decode=decode, chunked=not client.http_1_0)


class Reframer:
    """Takes payload, gives pieces of bounded size in the client's framing."""

    __slots__ = ("_inflate", "_more", "_pending", "chunked", "decodes")

    def __init__(self, *, decode: bool, chunked: bool) -> None:
        self.decodes = decode
        self.chunked = chunked  # else the end of the connection ends the answer
        self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32) if decode else None
        self._pending = b""
        self._more = False  # the decoder holds output that did not fit into the last piece

    @property
    def framing_line(self) -> bytes:
        """The header that announces the framing."""
        return b"transfer-encoding: chunked\r\n" if self.chunked else b""

    def feed(self, payload: bytes) -> None:
        """Add what the worker sent."""
        self._pending = self._pending + payload if self._pending else payload

    def take(self) -> bytes:
        """Return the next decoded piece, empty when more must be fed. Raises MalformedBody."""
        if self._inflate is None:
            piece, self._pending = self._pending, b""
            return piece
        piece = b""
        while not piece and (self._pending or self._more):
            piece = self._inflated()
        return piece

    def framed(self, piece: bytes) -> bytes:
        """Return `piece` as it is sent."""
        return chunk(piece) if self.chunked else piece

    def end(self) -> bytes:
        """Return what is sent last. Raises MalformedBody when the body is not complete."""
        if self._inflate is not None and not self._inflate.eof:
            raise MalformedBody("the compressed body ends too early")
        return _LAST_CHUNK if self.chunked else b""

    def _inflated(self) -> bytes:
        assert self._inflate is not None
        try:
            piece = self._inflate.decompress(self._pending, _PIECE_BYTES_MAX)
        except zlib.error as exc:
            raise MalformedBody(str(exc)) from exc
        self._pending = self._inflate.unconsumed_tail
        self._more = len(piece) == _PIECE_BYTES_MAX
        if self._inflate.eof and self._inflate.unused_data:
            # Another member follows in the same body.
            self._pending = self._inflate.unused_data
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
        return piece
