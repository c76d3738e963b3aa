"""What the commands share: how they stop, how they read settings and flags of several values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn

import typer
from rich.console import Console

from router.config import BadConfig
from router.config_source import ConfigSource, Loaded, load
from router.contract import Lane, lanes_named
from router.yaml_text import BadYaml, read_yaml

# Flags that take several values after one name, as sglang-router's do.
_SEVERAL: Final = frozenset(("--worker-urls",))


def spread(args: Sequence[str]) -> list[str]:
    """Repeat a flag of several values before each: `--worker-urls A B` becomes two flags."""
    out: list[str] = []
    flag, values = None, 0
    for arg in args:
        if flag is not None and not arg.startswith("-"):
            out += [flag, arg]
            values += 1
            continue
        if flag is not None and values == 0:
            out.append(flag)  # left without a value, for the parser to complain about
        name, equals, _ = arg.partition("=")
        flag = name if name in _SEVERAL else None
        values = 1 if equals else 0
        if flag is None or equals:
            out.append(arg)
    if flag is not None and values == 0:
        out.append(flag)
    return out


def say(message: str) -> None:
    """Print `message` on standard output as it is: no markup, no colours, no wrapping."""
    Console(highlight=False, soft_wrap=True).print(message, markup=False)


def stop(message: str, *, status: int) -> NoReturn:
    """End the command with `message` on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(message, markup=False)
    raise typer.Exit(status)


def read_sources(source: ConfigSource) -> Loaded:
    """Read the configuration, or end with every fault and status 2."""
    try:
        return load(source)
    except BadConfig as exc:
        stop_faulty(exc.faults)


def stop_faulty(faults: Sequence[str]) -> NoReturn:
    """End the command with every fault of a configuration, and status 2."""
    listed = "\n".join(f"  {fault}" for fault in faults)
    stop(f"laneway: the configuration cannot be used:\n{listed}", status=2)


def lanes_or_stop(word: str) -> list[str]:
    """The lanes that `--lanes WORD` says, or the end of the command with status 2."""
    try:
        lanes = lanes_named(word)
    except ValueError as exc:
        stop(f"laneway: --lanes: {exc}", status=2)
    return [lane.value for lane in Lane if lane in lanes]


def overrides_of(flags: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """Settings by section from flags by (section, name); None: the flag was not given."""
    out: dict[str, Any] = {}
    for (section, name), value in flags.items():
        if value is not None:
            out.setdefault(section, {})[name] = value
    return out


def set_path(overrides: dict[str, Any], text: str) -> None:
    """Add `PATH=VALUE` to `overrides`; the value is read as YAML. Ends with status 2 otherwise."""
    path, equals, value = text.partition("=")
    *sections, name = path.split(".")
    where = overrides
    for section in sections:
        where = where.setdefault(section, {}) if isinstance(where, dict) else where
    if not equals or not all((*sections, name)) or not isinstance(where, dict):
        stop(f"laneway: --set wants PATH=VALUE, as queue.depth_max=500, not {text!r}", status=2)
    try:
        where[name] = read_yaml(value)
    except BadYaml as exc:
        stop(f"laneway: --set {path}: {exc}", status=2)
