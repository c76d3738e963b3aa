"""The configuration in force, and the one way in which it is replaced.

What is in force is the document of file, environment and flags with an overlay of patches on top.
Whoever changes one of the two (the file's watch, SIGHUP, the admin API, other routers) comes
through here: the whole is validated, every holder of settings takes it over within one turn of the
loop, and what was in force before is remembered. A fault anywhere leaves everything as it was.

The last word on each setting counts: a patch wins over the file, until the file changes that very
setting. What a patch took away whole, a tenant for one, stays away until the file takes it away,
too: changes inside it don't bring it back. Patches live as long as the process, or as `config_sync`
keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from router.config import BadConfig, Config
from router.config_overlay import check_patch, patch_between, patched, paths_of, without
from router.config_source import Document, Loaded, validated
from router.config_versions import (
    CHANGES_MAX,
    FIXED,
    Change,
    ConfigSourceName,
    ConfigVersion,
    as_running,
    changes_between,
    digest_of,
    fixed_changes,
)

_log = logging.getLogger(__name__)

_LOGGED_MAX: Final = 20


def _nested(paths: Iterable[str]) -> Document:
    """A patch that speaks of these settings."""
    patch: Document = {}
    for path in paths:
        section, _, name = path.partition(".")
        if name:
            patch.setdefault(section, {})[name] = None
        else:
            patch[section] = None
    return patch


_FIXED: Final = _nested(FIXED)


class NoSuchVersion(LookupError):
    """A version that never was, or is forgotten."""


class LastKey(Exception):
    """An admin's change after which everybody could call: no caller's key would be left."""


@dataclass(frozen=True, slots=True)
class Author:
    """Who changes the configuration, and by what way."""

    source: ConfigSourceName
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A configuration that could be in force."""

    base: Document
    overlay: Document
    document: Document
    config: Config
    digest: str
    changes: tuple[Change, ...]
    waiting: tuple[Change, ...]  # for a restart
    warnings: tuple[str, ...]  # what holds by it, though not as it reads


def _nothing(config: Config) -> Iterable[str]:  # noqa: ARG001 - the signature of a check
    return ()


class LiveConfig:
    """Holds the configuration of one router. All calls come from its event loop.

    `on_config` are the holders of settings, in the order in which they take over; `on_version`
    hears afterwards. `check` says why a valid configuration cannot be used here, `warn` what of one
    that can be used is hardly meant.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        check: Callable[[Config], Iterable[str]] = _nothing,
        warn: Callable[[Config], Iterable[str]] = _nothing,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = loaded.source
        self.config = loaded.config
        self.on_config: list[Callable[[Config], None]] = []
        self.on_version: list[Callable[[ConfigVersion], None]] = []
        self.on_overlay: list[Callable[[Author], None]] = []  # patched or answered here
        self.shared = False  # other routers have the same patches, and keep them
        self.counts: Counter[tuple[ConfigSourceName, str]] = Counter()
        self.file_faults: tuple[str, ...] = ()  # why what the file holds now is not in force
        self.waiting: tuple[Change, ...] = ()  # what the sources say, and only a restart can do
        self.warnings = tuple(warn(loaded.config))
        self._check = check
        self._warn = warn
        self._clock = clock
        self._base = loaded.document
        self._overlay: Document = {}
        start = Author("start", "start")
        self.version = self._version(1, start, (), loaded.document, digest_of(loaded.config))
        self._history: deque[ConfigVersion] = deque([self.version], loaded.config.live.history_max)

    @property
    def base(self) -> Mapping[str, Any]:
        """What file, environment and flags say; with its secrets."""
        return self._base

    @property
    def overlay(self) -> Mapping[str, Any]:
        """What was patched; with its secrets."""
        return self._overlay

    @property
    def history(self) -> list[ConfigVersion]:
        """The versions that are remembered, newest first."""
        return list(reversed(self._history))

    # Ways in. Each returns what changed and raises BadConfig, having changed nothing; those that
    # the API uses raise LastKey, too. Thousands of tenants take the better part of a second to
    # validate: what has `aside` in its name does that in a thread, and no stream waits.

    def take(self, document: Document, author: Author) -> Proposal:
        """The sources say something else now; patches that they answer are over."""
        return self._at_once(author, lambda: self._taken(document))

    async def take_aside(self, document: Document, author: Author) -> Proposal:
        """As `take`."""
        return await self._aside(author, lambda: self._taken(document))

    def patch(self, patch: Mapping[str, Any], author: Author, *, dry_run: bool = False) -> Proposal:
        """Lay a merge patch over what is in force. With `dry_run`, only say what it would do."""
        return self._at_once(author, lambda: self._patched(patch, author), dry_run=dry_run)

    async def patch_aside(
        self, patch: Mapping[str, Any], author: Author, *, dry_run: bool = False
    ) -> Proposal:
        """As `patch`."""
        return await self._aside(author, lambda: self._patched(patch, author), dry_run=dry_run)

    def apply(self, overlay: Mapping[str, Any], author: Author) -> Proposal:
        """Replace all patches by `overlay`; what is in force already changes nothing."""
        return self._at_once(author, lambda: self._applied(overlay, author))

    async def apply_aside(
        self, overlay: Callable[[], Mapping[str, Any]], author: Author, *, dry_run: bool = False
    ) -> Proposal:
        """As `apply`; `overlay` is asked again when something else changed meanwhile."""
        return await self._aside(author, lambda: self._applied(overlay(), author), dry_run=dry_run)

    def rollback(self, number: int, author: Author, *, dry_run: bool = False) -> Proposal:
        """Bring back the settings of an earlier version, by patches over the present file.

        Raises NoSuchVersion, too.
        """
        return self._at_once(author, lambda: self._rolled_back(number, author), dry_run=dry_run)

    async def rollback_aside(
        self, number: int, author: Author, *, dry_run: bool = False
    ) -> Proposal:
        """As `rollback`."""
        return await self._aside(author, lambda: self._rolled_back(number, author), dry_run=dry_run)

    # Inside. What makes a proposal changes nothing and may run in a thread.

    def _at_once(
        self, author: Author, made: Callable[[], Proposal], *, dry_run: bool = False
    ) -> Proposal:
        with self._refusals_counted(author):
            return self._finished(made(), author, dry_run=dry_run)

    async def _aside(
        self, author: Author, made: Callable[[], Proposal], *, dry_run: bool = False
    ) -> Proposal:
        with self._refusals_counted(author):
            held = self._base, self._overlay, self.config
            try:
                proposal = await asyncio.to_thread(made)
            except Exception:
                if self._holds(*held):
                    raise
            else:
                if self._holds(*held):
                    return self._finished(proposal, author, dry_run=dry_run)
            # Something else changed meanwhile: whatever was found counts no more.
            return self._finished(made(), author, dry_run=dry_run)

    def _holds(self, base: Document, overlay: Document, config: Config) -> bool:
        """Whether these are what is in force."""
        return self._base is base and self._overlay is overlay and self.config is config

    @contextmanager
    def _refusals_counted(self, author: Author) -> Iterator[None]:
        try:
            yield
        except (BadConfig, LastKey):
            self.counts[author.source, "refused"] += 1
            raise

    def _finished(self, proposal: Proposal, author: Author, *, dry_run: bool) -> Proposal:
        if not dry_run:
            self._commit(proposal, author)
        applied = proposal.changes and not dry_run
        self.counts[author.source, "applied" if applied else "unchanged"] += 1
        return proposal

    def _taken(self, document: Document) -> Proposal:
        said = patch_between(self._base, document)
        overlay = without(self._overlay, said, self._base)
        if over := sorted({*paths_of(self._overlay)} - {*paths_of(overlay)}):
            _log.info("the file has the last word now on %s", _listed(over))
        return self._propose(document, overlay)

    def _patched(self, patch: Mapping[str, Any], author: Author) -> Proposal:
        check_patch(patch)
        document = patched(patched(self._base, self._overlay), patch)
        proposal = self._propose(self._base, patch_between(self._base, document))
        self._refuse_fixed(proposal)
        self._refuse_open(proposal, author)
        return proposal

    def _applied(self, overlay: Mapping[str, Any], author: Author) -> Proposal:
        proposal = self._propose(self._base, dict(overlay))
        self._refuse_open(proposal, author)
        return proposal

    def _rolled_back(self, number: int, author: Author) -> Proposal:
        earlier = next((version for version in self._history if version.number == number), None)
        if earlier is None:
            raise NoSuchVersion(number)
        overlay = without(patch_between(self._base, earlier.document), _FIXED)
        proposal = self._propose(self._base, overlay)
        if proposal.digest != earlier.digest:
            raise BadConfig(
                [f"version {number}: it has settings that only the file can bring back: an empty "
                 "one where the default is not empty, or one that cannot change now"]
            )  # fmt: skip
        self._refuse_open(proposal, author)
        return proposal

    def _propose(self, base: Document, overlay: Mapping[str, Any]) -> Proposal:
        document = patched(base, overlay)
        wanted = validated(document)
        config = as_running(wanted, self.config)
        if faults := list(self._check(config)):
            raise BadConfig(faults)
        changes = changes_between(self.config, config)
        return Proposal(
            base=base,
            overlay=patch_between(base, document),  # without words that change nothing
            document=document,
            config=config,
            digest=digest_of(config) if changes else self.version.digest,
            changes=changes,
            waiting=fixed_changes(changes_between(config, wanted)),
            warnings=tuple(self._warn(config)),
        )

    def _refuse_fixed(self, proposal: Proposal) -> None:
        """A patch is gone after a restart, so what needs one must not be patched."""
        asked = [change for change in proposal.waiting if change not in self.waiting]
        if asked:
            raise BadConfig(
                [f"{change.path}: it cannot change while the router runs ({_why(change.path)}); "
                 "set it in the file and restart" for change in asked]
            )  # fmt: skip

    def _refuse_open(self, proposal: Proposal, author: Author) -> None:
        """One request must not open the router to everybody; whoever owns the file may."""
        opens = self.config.has_user_keys and not proposal.config.has_user_keys
        if opens and author.source == "api":
            raise LastKey

    def _commit(self, proposal: Proposal, author: Author) -> None:
        if proposal.changes:
            self._hand_over(proposal.config)
        said_here = author.source != "cluster" and proposal.overlay != self._overlay
        self._base, self._overlay = proposal.base, proposal.overlay
        if proposal.waiting != self.waiting:
            self.waiting = proposal.waiting
            for change in proposal.waiting:
                _log.warning("a restart is needed for %s (%s)", change, _why(change.path))
        if proposal.changes:
            self._new_version(proposal, author)
        for text in proposal.warnings:
            if text not in self.warnings:
                _log.warning("%s", text)
        self.warnings = proposal.warnings
        if said_here:
            for hear in self.on_overlay:
                hear(author)

    def _new_version(self, proposal: Proposal, author: Author) -> None:
        self.config = proposal.config
        number = self.version.number + 1
        self.version = self._version(
            number, author, proposal.changes, proposal.document, proposal.digest
        )
        if self._history.maxlen != self.config.live.history_max:
            self._history = deque(self._history, self.config.live.history_max)
        self._history.append(self.version)
        _log.info(
            "configuration version %d (%s) by %s: %s",
            number, self.version.digest, author.name, _listed(list(map(str, proposal.changes))),
        )  # fmt: skip
        for hear in self.on_version:
            hear(self.version)

    def _hand_over(self, config: Config) -> None:
        """Let every holder take `config` over; if one cannot, all keep what they had."""
        done: list[Callable[[Config], None]] = []
        try:
            for take_over in self.on_config:
                done.append(take_over)
                take_over(config)
        except Exception as exc:
            _log.exception("a new configuration could not be taken over")
            for take_over in reversed(done):
                self._take_back(take_over)
            raise BadConfig(["the router failed to take it over; its log has more"]) from exc

    def _take_back(self, take_over: Callable[[Config], None]) -> None:
        """One holder that cannot go back must not keep the others from it."""
        try:
            take_over(self.config)
        except Exception:
            _log.exception("a holder failed to go back to version %d", self.version.number)

    def _version(
        self,
        number: int,
        author: Author,
        changes: tuple[Change, ...],
        document: Document,
        digest: str,
    ) -> ConfigVersion:
        return ConfigVersion(
            number=number,
            digest=digest,
            at=self._clock(),
            source=author.source,
            who=author.name,
            changes=changes[:CHANGES_MAX],
            changes_total=len(changes),
            document=document,
            overlay=self._overlay,
        )


def _why(path: str) -> str:
    return next(why for fixed, why in FIXED.items() if f"{path}.".startswith(f"{fixed}."))


def _listed(items: list[str]) -> str:
    more = len(items) - _LOGGED_MAX
    return "; ".join(items[:_LOGGED_MAX]) + (f"; and {more} more" if more > 0 else "")
