"""Simulated SGLang workers: `laneway worker --simulated 6 --port 31000`.

One process serves any number of them, each on its own port with its own engine. What they answer is
SGLang's surface with made-up text; how fast and how loaded they are comes from `workers.engine`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from errno import EACCES, EADDRINUSE
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from router.contract import Lane, lanes_named, normalized_url, visible_key
from workers.addresses import means_any, own_host_towards
from workers.engine_model import EngineSettings
from workers.listening import CannotListen
from workers.profiles import BadProfiles, load_profiles
from workers.sim.faults import BadFault, Faults, with_changes
from workers.sim.intake import WorkerOptions
from workers.sim.server import RouterAddress, SimulatedServer, run_simulated

_PORT_MAX: Final = 65_535

__all__ = ["RouterAddress", "SimulatedServer", "WorkerOptions", "main", "run_simulated"]


def main(
    arguments: Sequence[str] | None = None, *, command: str = "python -m workers.simulated"
) -> int:
    """Run until SIGTERM or Ctrl-C; return the exit status. 2: a flag cannot be used.

    `command` is what the messages call it.
    """
    args = _parser(command).parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per call to the router is noise
    try:
        options, faults = options_from(args), faults_from(args)
        lanes = [lanes_from(entry) for entry in args.lanes]
        routers = routers_from(args)
        ports = ports_from(args)
        public_host = public_host_from(args.host, routers)
    except (BadProfiles, BadFault, ValueError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(
                _serve(
                    options,
                    faults,
                    lanes,
                    routers,
                    host=args.host,
                    public_host=public_host,
                    ports=ports,
                    profile=args.profile,
                )
            )
    except CannotListen as exc:
        flag = "--port" if exc.errno in (EADDRINUSE, EACCES) else "--host"
        asked = f" (asked for: {ports[0]} to {ports[-1]})" if len(ports) > 1 and ports[0] else ""
        print(f"error: {exc}; choose another with {flag}{asked}", file=sys.stderr)
        return 1
    return 0


def ports_from(args: argparse.Namespace) -> list[int]:
    """Return the port of each worker; 0: a free one. Raises ValueError."""
    first, count = args.port, args.simulated
    if first and first + count - 1 > _PORT_MAX:
        raise ValueError(f"--port: there are not {count} ports from {first} on")
    return [first + index for index in range(count)] if first else [0] * count


def lanes_from(word: str) -> frozenset[Lane]:
    """Return the lanes that `word` names. Raises ValueError."""
    try:
        return lanes_named(word)
    except ValueError as exc:
        raise ValueError(f"--lanes: {exc}") from None


def options_from(args: argparse.Namespace) -> WorkerOptions:
    """Return the options that the flags say. Raises BadProfiles or ValueError."""
    profiles = load_profiles(args.profiles)
    if args.profile not in profiles:
        raise ValueError(f"no profile {args.profile!r}; there are {', '.join(profiles)}")
    profile = profiles[args.profile]
    if args.max_total_tokens is not None:
        profile = replace(profile, kv_total_tokens=args.max_total_tokens)
    engine = EngineSettings(
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        enable_priority_scheduling=args.enable_priority_scheduling,
        schedule_low_priority_values_first=args.schedule_low_priority_values_first,
        priority_scheduling_preemption_threshold=args.priority_scheduling_preemption_threshold,
    )
    return WorkerOptions(
        profile=profile,
        engine=engine,
        model=args.model,
        context_length=args.context_length,
        sglang_version=args.sglang_version,
        sglang_health=args.sglang_health,
        api_key=args.api_key,
        time_scale=args.time_scale,
        output_median_tokens=args.output_median,
        output_sigma=args.output_sigma,
        seed=args.seed,
    )


def faults_from(args: argparse.Namespace) -> Faults:
    """Return the faults that the flags say. Raises BadFault."""
    changes = {
        "slow_factor": args.slow_factor,
        "error_rate": args.error_rate,
        "kill_after_requests": args.kill_after_requests,
        "restart_after_s": args.restart_after,
        "reset_after_chunks": args.reset_after_chunks,
    }
    return with_changes(Faults(), {k: v for k, v in changes.items() if v is not None})


def routers_from(args: argparse.Namespace) -> list[RouterAddress]:
    """Return the routers that the flags name. Raises ValueError."""
    key = None if args.admin_key is None else SecretStr(args.admin_key)
    return [RouterAddress(url=normalized_url(url), admin_key=key) for url in args.register]


def public_host_from(host: str, routers: Sequence[RouterAddress]) -> str | None:
    """Return where routers reach what listens on all interfaces; None: where it listens.

    Raises ValueError.
    """
    if not routers or not means_any(host):
        return None
    try:
        return own_host_towards(routers[0].url)
    except ValueError as exc:
        raise ValueError(f"{exc}: give one of its addresses with --host") from exc


async def _serve(
    options: WorkerOptions,
    faults: Faults,
    lanes: Sequence[frozenset[Lane]],
    routers: Sequence[RouterAddress],
    *,
    host: str,
    public_host: str | None,
    ports: Sequence[int],
    profile: str,
) -> None:
    """Serve with the signals of a shell: the first drains, the second ends at once."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await run_simulated(
        options,
        ports=ports,
        host=host,
        public_host=public_host,
        lanes=lanes,
        faults=faults,
        register=routers,
        stop=stop,
        stop_now=stop_now,
        on_started=lambda servers: _say(servers, profile),
    )


def _say(servers: Sequence[SimulatedServer], profile: str) -> None:
    for server in servers:
        print(f"simulated worker ({profile}) on {server.url}", flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415 - does not exist on Windows
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _positive(text: str) -> int:
    number = _whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _port(text: str) -> int:
    number = _whole(text)
    if not 0 <= number <= _PORT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a port, 0 to {_PORT_MAX}")
    return number


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _positive_real(text: str) -> float:
    number = _real(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return number


def _version(text: str) -> str:
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not of the form 0.5.23")
    return text


def _key(text: str) -> str:
    try:
        return visible_key(SecretStr(text)).get_secret_value()
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _parser(command: str) -> argparse.ArgumentParser:
    # Without usage of its own, each message would begin with a page of flags.
    parser = argparse.ArgumentParser(
        prog=command, usage="%(prog)s [FLAGS]; --help shows them", description=__doc__
    )
    add = parser.add_argument
    add("--simulated", metavar="N", type=_positive, default=1, help="how many workers")
    add("--host", default="127.0.0.1")
    add(
        "--port",
        type=_port,
        default=31000,
        help="of the first one; the others follow; 0: free ones",
    )
    add("--profile", default="h100-8b", help="engine profile")
    add("--profiles", type=Path, help="a file of profiles instead of the built-in ones")
    add("--lanes", nargs="*", default=[], metavar="LANE", help="short, long or both, in turn")
    add(
        "--register",
        metavar="URL",
        action="append",
        default=[],
        help="a router to register at; may be repeated",
    )
    add(
        "--admin-key",
        metavar="KEY",
        type=_key,
        default=os.environ.get("LANEWAY_ADMIN_KEY"),
        help="of the routers; also LANEWAY_ADMIN_KEY",
    )
    add("--seed", type=_whole, default=0)
    add("--time-scale", type=_positive_real, default=1.0, help="2: engines twice as fast")
    add("--output-median", type=_positive, default=129, help="tokens of a median answer")
    add("--output-sigma", type=_positive_real, default=1.0, help="spread of answer lengths")
    sglang = parser.add_argument_group("as SGLang's flags")
    add = sglang.add_argument
    add("--model", default="sim-8b")
    add("--context-length", type=_positive, default=131_072)
    add("--max-total-tokens", type=_positive, help="size of the KV pool")
    add("--max-running-requests", type=_positive, default=2048)
    add("--max-queued-requests", type=_positive)
    add("--enable-priority-scheduling", action="store_true")
    add("--schedule-low-priority-values-first", action="store_true")
    add("--priority-scheduling-preemption-threshold", type=_whole, default=10)
    add("--api-key", type=_key)
    add("--sglang-version", type=_version, default="0.5.23", help="whose routes and load answers")
    add("--sglang-health", action="store_true", help="/health with an empty body, as SGLang's")
    _add_faults(parser)
    return parser


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults; more, and at run time, by POST /fault")
    add = group.add_argument
    add("--slow-factor", type=_positive_real)
    add("--error-rate", type=_real)
    add("--kill-after-requests", type=_positive)
    add("--restart-after", type=_real, metavar="SECONDS")
    add("--reset-after-chunks", type=_positive)


if __name__ == "__main__":
    sys.exit(main())
