"""Watches the configuration file and takes over what it says.

The file is read through its path and told by its content: a ConfigMap is replaced by swapping a
symbolic link, which neither its time nor its inode shows in a way to rely on. What is being written
must be the same at two reads before it counts. A fault is logged once for what the file holds, the
configuration in force stays, and the watch goes on, so that a mended file is taken.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from router.config import BadConfig, Config
from router.config_source import Document, Loaded
from router.config_versions import Change
from router.runtime.live_config import Author, LiveConfig

_log = logging.getLogger(__name__)

# A writer that takes longer between two pieces of the file has to replace it whole.
_SETTLE_S: Final = 0.2
_FAULTS_LOGGED_MAX: Final = 20


class ConfigWatch:
    """Looks at the file every `live.poll_s`, and when told to."""

    def __init__(self, live: LiveConfig, loaded: Loaded) -> None:
        self._live = live
        self._seen = loaded.text
        self._trouble: list[str] | None = None  # why it could not be read the last time
        self._told = False  # to read it whatever it holds
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        live.on_config.append(self._on_config)

    def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def read_again(self) -> None:
        """Take the file over now, as SIGHUP asks, and say what came of it."""
        self._told = True
        self._wake.set()

    def _on_config(self, config: Config) -> None:  # noqa: ARG002 - it is read from `live`
        self._wake.set()  # the time between two looks may be another one

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._live.config.live.poll_s or None):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            told, self._told = self._told, False
            try:
                await self.look(told=told)
            except Exception:
                _log.exception("looking at the configuration file failed")

    async def look(self, *, told: bool = False) -> None:
        """Take the file over if it changed; `told`: in any case, and without waiting."""
        source, path = self._live.source, self._live.source.path
        if path is None:
            if told:
                _log.warning("told to read the configuration again, but there is no file")
            return
        try:
            text = await asyncio.to_thread(source.read)
            if not told and text != self._seen:
                await asyncio.sleep(_SETTLE_S)
                if await asyncio.to_thread(source.read) != text:
                    return  # it is being written: the next look sees more
        except BadConfig as exc:
            self._unreadable(exc.faults, told=told)
            return
        if self._trouble is not None:
            self._trouble = None
            self._live.file_faults = ()
            _log.info("configuration file %s can be read again", path)
        elif text == self._seen and not told:
            return
        self._seen = text
        author = Author("signal", "SIGHUP") if told else Author("file", str(path))
        await self._take(text, author)

    async def _take(self, text: bytes, author: Author) -> None:
        live = self._live
        try:
            # Parsing a long file takes seconds, which no stream should have to wait.
            document = await asyncio.to_thread(self._document, text)
        except BadConfig as exc:
            live.counts[author.source, "refused"] += 1
            self._refused(exc.faults)
            return
        try:
            proposal = await live.take_aside(document, author)
        except BadConfig as exc:
            self._refused(exc.faults)
            return
        was_faulty, live.file_faults = bool(live.file_faults), ()
        if not proposal.changes and (was_faulty or author.source == "signal"):
            _log.info(
                "the configuration file says what is in force: nothing changed%s",
                _restart_needed(proposal.waiting),
            )

    def _document(self, text: bytes) -> Document:
        source = self._live.source
        if not text.strip():
            # A writer that truncates the file first: taken for a wish, every worker would go.
            raise BadConfig([f"{source.path}: it is empty"])
        return source.document(text)

    def _refused(self, faults: list[str]) -> None:
        self._live.file_faults = tuple(faults)
        more = len(faults) - _FAULTS_LOGGED_MAX
        listed = "; ".join(faults[:_FAULTS_LOGGED_MAX]) + (f"; {more} more" if more > 0 else "")
        _log.warning(
            "the configuration file is refused, version %d stays in force: %s",
            self._live.version.number, listed,
        )  # fmt: skip

    def _unreadable(self, faults: list[str], *, told: bool) -> None:
        if faults != self._trouble or told:
            self._trouble = faults
            self._live.counts["file", "refused"] += 1
            self._refused(faults)


def _restart_needed(waiting: tuple[Change, ...]) -> str:
    paths = [change.path for change in waiting]
    return f"; a restart is still needed for {', '.join(paths)}" if paths else ""
