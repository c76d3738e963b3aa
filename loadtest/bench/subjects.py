"""The routers that are measured: how each is started before two workers.

A command or a file is a template: {port} is the router's port, {aux} a second free one, {b1} {b2}
the workers' base URLs, {p1} {p2} their ports, {worker_specs} {agent_specs} YAML of all workers,
{connections} how many nginx may have open, {dir} a scratch folder, {python} this interpreter.
All run with the settings that they ship with, logs at their default level; ours with keys, tenants
and limits beside.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Final

from loadtest.bench.features import EVERY_FEATURE
from loadtest.bench.peers import (
    SGLANG_ROUTER,
    SMG,
    VLLM_ROUTER,
    Unavailable,
    Wheel,
    environment_of,
    nginx_program,
    nginx_version,
)

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = "laneway"
INTERPRETED: Final = "laneway-interpreted"
NGINX: Final = "nginx"
BASELINES: Final = (NGINX, "sglang-router round_robin")

# Keep-alive on both sides and no buffering of answers: what a proxy for streams needs.
_NGINX_CONF: Final = """
worker_processes 1;
error_log {dir}/error.log;
pid {dir}/nginx.pid;
events {{ worker_connections {connections}; }}
http {{
  access_log off;
  client_body_buffer_size 1m;
  keepalive_requests 100000000;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/fastcgi; uwsgi_temp_path {dir}/uwsgi; scgi_temp_path {dir}/scgi;
  upstream workers {{
    least_conn;
    {nginx_servers}
    keepalive 256;
    keepalive_requests 100000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
_SERVE: Final = (
    *("serve", "--port", "{port}", "--config", "{dir}/laneway.yaml"),
    *("--worker-urls", "{b1}", "{b2}"),
)
_OWN_FILES: Final = {"laneway.yaml": EVERY_FEATURE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A router, ready to be started."""

    name: str
    version: str
    command: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)  # name in {dir} -> template
    environment: Mapping[str, str] = field(default_factory=dict)
    start_s_max: float = 60.0


# Makes a subject, its wheel installed if need be; raises Unavailable.
Maker = Callable[[], Subject]


class UnknownSubject(Exception):
    """A name that matches no subject."""


def subject_makers(commands: list[str]) -> dict[str, Maker]:
    """Every subject by name: ours, nginx, the peers, and one for each `NAME=COMMAND`."""
    makers: dict[str, Maker] = {
        OURS: _compiled,
        INTERPRETED: _interpreted,
        NGINX: _nginx,
        "sglang-router round_robin": lambda: _sglang_router("round_robin"),
        "sglang-router cache_aware": lambda: _sglang_router("cache_aware"),
        "vllm-router round_robin": lambda: _binary_peer(VLLM_ROUTER, "vllm-router"),
        "smg round_robin": lambda: _binary_peer(SMG, "smg", "launch"),
    }
    for text in commands:
        name, equals, command = text.partition("=")
        if not equals or not name.strip() or not command.strip():
            raise UnknownSubject(f"{text!r} is not NAME=COMMAND")
        makers[name.strip()] = _given(name.strip(), command)
    return makers


def chosen(makers: Mapping[str, Maker], *, only: list[str], skip: list[str]) -> dict[str, Maker]:
    """The subjects that match a pattern of `only` (all if empty) and none of `skip`.

    A pattern is a whole name, its first word, or has wildcards. Raises UnknownSubject for one
    that matches nothing: a misspelt peer must not silently be left out.
    """
    for pattern in only + skip:
        if not any(_matches(name, pattern) for name in makers):
            raise UnknownSubject(f"{pattern!r} matches none of: {', '.join(makers)}")
    return {
        name: maker
        for name, maker in makers.items()
        if (not only or any(_matches(name, pattern) for pattern in only))
        and not any(_matches(name, pattern) for pattern in skip)
    }


def commit() -> str:
    """The commit that is measured, with a plus sign if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) or name.partition(" ")[0] == pattern


def _compiled() -> Subject:
    """Ours as it is deployed."""
    try:
        subprocess.run([str(ROOT / "scripts" / "compiled")], check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        raise Unavailable(f"the compiled build was not made: {exc}") from exc
    program = str(ROOT / ".venv-compiled" / "bin" / "laneway")
    return Subject(
        name=OURS,
        version=f"{metadata.version(OURS)} ({commit()}), compiled",
        command=(program, *_SERVE),
        files=_OWN_FILES,
        environment={"PYTHONPATH": ""},  # where the sources may be found
    )


def _interpreted() -> Subject:
    """The sources as they are."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return Subject(
        name=INTERPRETED,
        version=f"{metadata.version(OURS)} ({commit()})",
        command=("{python}", "-m", "router", *_SERVE),
        files=_OWN_FILES,
        environment={"PYTHONPATH": os.pathsep.join(paths)},
    )


def _nginx() -> Subject:
    program = nginx_program()
    return Subject(
        name=NGINX,
        version=nginx_version(program),
        command=(program, "-c", "{dir}/nginx.conf", "-p", "{dir}", "-g", "daemon off;"),
        files={"nginx.conf": _NGINX_CONF},
    )


def _sglang_router(policy: str) -> Subject:
    python = environment_of(SGLANG_ROUTER) / "bin" / "python"
    return Subject(
        name=f"sglang-router {policy}",
        version=SGLANG_ROUTER.version,
        command=(str(python), "-m", "sglang_router.launch_router", *_peer_flags(policy)),
    )


def _binary_peer(wheel: Wheel, program: str, *words: str) -> Subject:
    path = environment_of(wheel) / "bin" / program
    return Subject(
        name=f"{wheel.name} round_robin",
        version=wheel.version,
        command=(str(path), *words, *_peer_flags("round_robin")),
    )


def _peer_flags(policy: str) -> list[str]:
    """sglang-router's flags; the others descend from it and have kept them."""
    flags = "--host 127.0.0.1 --port {port} --prometheus-port {aux} --worker-urls {b1} {b2}"
    return [*flags.split(), "--policy", policy]


def _given(name: str, command: str) -> Maker:
    words = tuple(shlex.split(command))
    return lambda: Subject(name=name, version=f"`{command}`", command=words)


def this_python() -> str:
    """This interpreter with its version, and the versions of what the rig stands on."""
    parts = [f"Python {sys.version.split()[0]}"]
    parts += [f"{name} {metadata.version(name)}" for name in ("uvloop", "httptools", "uvicorn")]
    return ", ".join(parts)
