"""Where a configuration comes from: a file, environment variables, flags; the later wins.

The sources are merged into one document, which is validated whole: a faulty one is refused with
every fault under its path. The environment and the flags are those of the start; the file may be
read again while the router runs. Layer 0.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from router.config import BadConfig, Config, faults_of
from router.config_env import from_environment
from router.yaml_text import CHARS_MAX, BadYaml, read_yaml

Document = dict[str, Any]
# More than any text that is read; what is longer is refused by its length.
_FILE_BYTES_MAX: Final = 4 * CHARS_MAX + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSource:
    """The sources of one router. `overrides` are settings by section, as flags give them."""

    path: Path | None = None
    overrides: Document = field(default_factory=dict)
    worker_urls: tuple[str, ...] = ()  # beside the workers that the other sources name
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self) -> bytes:
        """What the file holds; nothing where there is none. Raises BadConfig."""
        if self.path is None:
            return b""
        try:
            with open(self.path, "rb", opener=_opened) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise BadConfig([f"{self.path}: it is not a regular file"])
                return file.read(_FILE_BYTES_MAX)
        except OSError as exc:
            raise BadConfig([f"{self.path}: {exc.strerror or exc}"]) from exc

    def document(self, text: bytes) -> Document:
        """Merge the sources, `text` being what the file holds. Raises BadConfig."""
        document = {} if self.path is None else _parsed(self.path, text)
        environment, faults = from_environment(Config, self.environment)
        if faults:
            raise BadConfig([*faults, *_faults_in(_merged(document, environment))])
        document = _merged(_merged(document, environment), self.overrides)
        if self.worker_urls and isinstance(known := document.get("workers", []), list | tuple):
            added = [{"url": url} for url in dict.fromkeys(self.worker_urls)]
            document["workers"] = [*known, *added]
        return document


def _opened(path: str, flags: int) -> int:
    """Open without waiting: a pipe's writer may never come, and nothing ends a thread's wait."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def load_config(path: Path | None = None, overrides: Document | None = None) -> Config:
    """Read the configuration: file (when given), environment, then `overrides` (flags).

    Raises BadConfig with every fault, also for certificates that cannot be used: no worker or
    client has to come for that to be noticed.
    """
    return load(ConfigSource(path=path, overrides=overrides or {})).config


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration with what it was made of, so that it can be made again."""

    config: Config
    document: Document
    source: ConfigSource
    text: bytes = b""  # of the file

    @classmethod
    def of(cls, config: Config) -> Loaded:
        """One that was made in the program: it has no sources but itself."""
        return cls(config, config.model_dump(exclude_unset=True), ConfigSource(environment={}))


def load(source: ConfigSource) -> Loaded:
    """Read all sources. Raises BadConfig with every fault, as `load_config`."""
    text = source.read()
    document = source.document(text)
    return Loaded(validated(document), document, source, text)


class _FromDocument(Config):
    """A configuration that takes nothing from the environment by itself."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keep the arguments only."""
        return (init_settings,)


def validated(document: Document) -> Config:
    """The configuration that `document` describes. Raises BadConfig with every fault."""
    if odd := [name for name in document if name.startswith("_")]:  # pydantic's own arguments
        raise BadConfig([f"{name}: there is no such setting" for name in odd])
    try:
        config = _FromDocument(**document)
    except ValidationError as exc:
        raise BadConfig(list(faults_of(exc))) from exc
    if faults := list(_certificate_faults(config)):
        raise BadConfig(faults)
    return config


def _faults_in(document: Document) -> list[str]:
    try:
        validated(document)
    except BadConfig as exc:
        return exc.faults
    return []


def _merged(under: Document, over: Mapping[str, Any]) -> Document:
    """`under` with `over` laid upon it, mapping by mapping."""
    out = dict(under)
    for name, value in over.items():
        below = out.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        out[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return out


def _parsed(path: Path, text: bytes) -> Document:
    try:
        document = read_yaml(text.decode())
    except UnicodeDecodeError as exc:
        raise BadConfig([f"{path}: not YAML: {exc}"]) from exc
    except BadYaml as exc:
        raise BadConfig([f"{path}: {fault}" for fault in exc.faults]) from exc
    if document is None:
        return {}
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise BadConfig([f"{path}: the top level is a mapping of section names"])
    return document


def _is_odd(path: Path) -> bool:
    """Whether something is there that is no file."""
    return path.exists() and not path.is_file()


def _certificate_faults(config: Config) -> Iterator[str]:
    tls, upstream, redis = config.server.tls, config.upstream, config.redis.tls
    files = {
        "server.tls.cert_path": tls.cert_path, "server.tls.key_path": tls.key_path,
        "server.tls.client_ca_path": tls.client_ca_path,
        "upstream.ca_path": upstream.ca_path, "upstream.cert_path": upstream.cert_path,
        "upstream.key_path": upstream.key_path, "redis.tls.ca_path": redis.ca_path,
        "redis.tls.cert_path": redis.cert_path, "redis.tls.key_path": redis.key_path,
    }  # fmt: skip
    # To open a pipe would wait for somebody to write into it.
    odd = [f"{name}: {path} is no file" for name, path in files.items() if path and _is_odd(path)]
    if odd:
        yield from odd
        return
    for path, ca_path in (
        ("server.tls.client_ca_path", tls.client_ca_path),
        ("upstream.ca_path", upstream.ca_path),
        ("redis.tls.ca_path", redis.ca_path),
    ):
        if ca_path is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_path)
            except OSError as exc:  # SSLError is one
                yield f"{path}: {ca_path}: {exc.strerror or exc}"
            except ValueError as exc:  # no file can have such a name
                yield f"{path}: {ca_path}: {exc}"
    for path, cert_path, key_path in (
        ("server.tls", tls.cert_path, tls.key_path),
        ("upstream", upstream.cert_path, upstream.key_path),
        ("redis.tls", redis.cert_path, redis.key_path),
    ):
        if cert_path is not None:
            try:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                # Without a password of ours, a terminal would be asked for one.
                context.load_cert_chain(cert_path, key_path, password="")
            except (OSError, ValueError) as exc:
                yield f"{path}: {cert_path} with {key_path}: {exc}"
