"""The benchmark's rig: it must see faults in answers, count all CPU, and hide nothing."""

from __future__ import annotations

import asyncio
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.bench.client import Job, Plan, latency
from loadtest.bench.peers import STAMP_NAME, Unavailable, Wheel, environment_of
from loadtest.bench.plots import plotted
from loadtest.bench.procfs import cpu_between, cpu_snapshot, memory, tree
from loadtest.bench.profiling import self_samples
from loadtest.bench.report import faulty, line_json, read_lines, report
from loadtest.bench.results import (
    Absent,
    LatencyResult,
    Line,
    LoadResult,
    Measured,
    Memory,
    PhaseCost,
    Round,
    Run,
)
from loadtest.bench.stand import RoundFailed, standing
from loadtest.bench.subjects import Subject, UnknownSubject, chosen, subject_makers
from loadtest.bench.worker import FakeWorker, listen

TOKENS = 8
REQUESTS = 6

Fault = Callable[[bytes], bytes]


@dataclass
class Proxy:
    """A relay to one worker that changes each answer on its way."""

    worker_url: str
    fault: Fault

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            while request := await read_message(reader):
                _, host, port = self.worker_url.replace("/", "").split(":")
                upstream, to_upstream = await asyncio.open_connection(host, port)
                with closing(to_upstream):
                    to_upstream.write(request)
                    answer = await read_message(upstream)
                changed = self.fault(answer)
                writer.write(changed)
                if len(changed) < len(answer) and not ends_well(changed):
                    return


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """A whole HTTP message; nothing at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            return head + await reader.readuntil(b"\r\n0\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        return head + await reader.readexactly(int(length.group(1)) if length else 0)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def ends_well(answer: bytes) -> bool:
    return answer.endswith((b"\r\n0\r\n\r\n", b"}"))


def frames(answer: bytes) -> list[bytes]:
    """The chunks of a chunked answer, framing included; its head comes first."""
    head, body = answer.split(b"\r\n\r\n", 1)
    return [head + b"\r\n\r\n", *re.findall(rb"[0-9a-f]+\r\ndata: [^\n]*\n\n\r\n|0\r\n\r\n", body)]


def same(answer: bytes) -> bytes:
    return answer


def drop_a_chunk(answer: bytes) -> bytes:
    parts = frames(answer)
    return b"".join(parts[:4] + parts[5:])


def drop_done(answer: bytes) -> bytes:
    return b"".join(part for part in frames(answer) if b"[DONE]" not in part)


def swap_two_chunks(answer: bytes) -> bytes:
    parts = frames(answer)
    return b"".join([*parts[:4], parts[5], parts[4], *parts[6:]])


def repeat_a_chunk_for_the_next(answer: bytes) -> bytes:
    parts = frames(answer)
    return b"".join([*parts[:5], parts[4], *parts[6:]])


def change_a_byte_of_a_chunk(answer: bytes) -> bytes:
    parts = frames(answer)
    parts[4] = parts[4].replace(b"chat.completion.chunk", b"chat.completion.chunx")
    return b"".join(parts)


def cut_the_stream(answer: bytes) -> bytes:
    return b"".join(frames(answer)[:5])


def change_a_byte_of_the_body(answer: bytes) -> bytes:
    return answer.replace(b"lazy", b"hazy", 1)


def write_the_body_anew(answer: bytes) -> bytes:
    head, body = answer.split(b"\r\n\r\n", 1)
    spaced = body.replace(b'":', b'": ')
    return head.replace(b"%d" % len(body), b"%d" % len(spaced)) + b"\r\n\r\n" + spaced


def answer_500(answer: bytes) -> bytes:
    return answer.replace(b"200 OK", b"500 No", 1)


def answer_twice(answer: bytes) -> bytes:
    return answer + answer


def answer_no_http(answer: bytes) -> bytes:
    return answer.replace(b"HTTP/1.1", b"HTCP/1.1", 1)


def url_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()
    return f"http://{host}:{port}"


async def load_through(fault: Fault, *, stream: bool, interval_ms: float = 0) -> LoadResult:
    """What the client says of answers that went through `fault`."""
    worker = await listen(FakeWorker(0, interval_ms=interval_ms), 0)
    proxy = Proxy(url_of(worker), fault)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    url = url_of(server)
    plan = Plan(url=url, requests=REQUESTS, connections=2, stream=stream, tokens=TOKENS)
    try:
        return await Job(plan).run()
    finally:
        server.close()
        worker.close()


@pytest.mark.parametrize("interval_ms", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_finds_no_fault_in_faithful_relaying(
    stream: bool, interval_ms: float
) -> None:
    result = await load_through(same, stream=stream, interval_ms=interval_ms)
    assert (result.ended, result.bad, result.altered) == (REQUESTS, 0, 0), result.samples
    assert result.chunks == (REQUESTS * TOKENS if stream else 0)


@pytest.mark.parametrize("fault", [drop_a_chunk, drop_done, cut_the_stream, answer_500])
async def test_the_client_calls_a_broken_stream_bad(fault: Fault) -> None:
    result = await load_through(fault, stream=True)
    assert (result.ended, result.bad) == (REQUESTS, REQUESTS)
    assert result.samples


@pytest.mark.parametrize(
    "fault", [swap_two_chunks, repeat_a_chunk_for_the_next, change_a_byte_of_a_chunk]
)
async def test_the_client_calls_a_changed_stream_altered(fault: Fault) -> None:
    result = await load_through(fault, stream=True)
    assert (result.bad, result.altered) == (0, REQUESTS)


@pytest.mark.parametrize("fault", [change_a_byte_of_the_body, write_the_body_anew])
async def test_the_client_calls_a_changed_completion_altered(fault: Fault) -> None:
    result = await load_through(fault, stream=False)
    assert (result.bad, result.altered) == (0, REQUESTS)


@pytest.mark.parametrize("fault", [answer_500, answer_no_http])
async def test_the_client_calls_a_failed_completion_bad(fault: Fault) -> None:
    result = await load_through(fault, stream=False)
    assert (result.ended, result.bad) == (REQUESTS, REQUESTS)


async def test_the_client_finds_an_answer_too_many() -> None:
    result = await load_through(answer_twice, stream=False)
    assert result.bad > 0


async def test_a_router_that_is_not_there_is_bad() -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    url = url_of(server)
    server.close()
    await server.wait_closed()
    assert (await Job(Plan(url=url, requests=1)).run()).bad == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_latency_is_the_difference_to_the_direct_way(stream: bool) -> None:
    worker = await listen(FakeWorker(0), 0)
    url = url_of(worker)
    plan = Plan(url=url, requests=2, stream=stream, tokens=TOKENS)
    result = await latency(plan, plan)
    worker.close()
    assert (result.bad, result.altered) == (0, 0)
    assert result.direct_us
    assert result.router_us
    assert result.added_p50_us == round(result.router_us.p50 - result.direct_us.p50, 1)


async def test_requests_that_come_at_a_rate_wait_for_a_connection() -> None:
    """What each waited is part of its latency, else a slow router would seem fast."""
    worker = await listen(FakeWorker(0, interval_ms=10), 0)
    plan = Plan(
        url=url_of(worker), requests=REQUESTS, connections=1, stream=True, tokens=TOKENS,
        requests_per_s=1e6,
    )  # fmt: skip
    result = await Job(plan).run()
    worker.close()
    assert (result.ended, result.bad, result.altered) == (REQUESTS, 0, 0), result.samples
    assert result.latency_us
    assert result.latency_us.max > (REQUESTS - 1) * TOKENS * 10_000


async def test_requests_that_come_at_a_rate_do_not_come_faster() -> None:
    worker = await listen(FakeWorker(0), 0)
    result = await Job(Plan(url=url_of(worker), requests=20, requests_per_s=100)).run()
    worker.close()
    assert (result.ended, result.bad, result.altered) == (20, 0, 0), result.samples
    assert result.requests_per_s < 200


async def test_each_connection_shows_one_of_the_keys() -> None:
    job = Job(Plan(url="http://127.0.0.1:1", requests=1, keys=("a", "b")))
    connections = [job.next_number() for _ in range(4)]
    for _ in range(2):
        sent = [job._next_request(number) for number in connections]
        shown = [re.findall(rb"authorization: Bearer (.)\r\n", request) for request in sent]
        assert shown == [[b"a"], [b"b"], [b"a"], [b"b"]]


BUSY_S = 0.3
BUSY_CHILD = f"""
import time
while time.process_time() < {BUSY_S}: pass
print("done", flush=True)
input()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_cpu_accounting_sees_a_busy_child() -> None:
    counted_s = children_cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, BUSY_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin
        assert parent.stdout
        before = cpu_snapshot(parent.pid)
        assert parent.stdout.readline() == b"done\n"
        after = cpu_snapshot(parent.pid)
        assert len(tree(parent.pid)) == memory(parent.pid).processes == 2
        parent.communicate(b"\n")
    used = cpu_between(before, after)
    kernel_says_s = children_cpu_s() - counted_s
    assert BUSY_S <= used.cpu_us / 1e6 <= kernel_says_s * 1.05 + 0.02
    parent_alone = {key: ns for key, ns in after.items() if key[0] == parent.pid}
    assert cpu_between(before, parent_alone).cpu_us / 1e6 <= used.cpu_us / 1e6 - BUSY_S


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_thread_that_ended_is_told() -> None:
    use = cpu_between({(1, 1): 5_000, (1, 2): 7_000}, {(1, 1): 9_000, (1, 3): 1_000})
    assert (use.cpu_us, use.threads_ended) == (5.0, 1)


def test_a_router_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    subject = Subject(
        name="dead",
        version="0",
        command=("{python}", "-c", "import sys; sys.exit('port {port} is cursed')"),
    )
    cause = pytest.raises(RoundFailed, match=r"ended with status 1: .*is cursed")
    with cause, standing(subject, inside=tmp_path):
        pytest.fail("it stands")


WHEEL = Wheel("peer", "1.0")


def test_an_interrupted_installation_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    asked: list[str] = []

    def interrupted(environment: Path, _: str) -> None:
        environment.mkdir()
        (environment / "half").touch()
        raise KeyboardInterrupt

    def whole(environment: Path, requirement: str) -> None:
        asked.append(requirement)
        environment.mkdir()

    with pytest.raises(KeyboardInterrupt):
        environment_of(WHEEL, folder=tmp_path, install=interrupted)
    environment = environment_of(WHEEL, folder=tmp_path, install=whole)
    assert not (environment / "half").exists()
    assert environment_of(WHEEL, folder=tmp_path, install=whole) == environment
    assert asked == ["peer==1.0"]
    (environment / STAMP_NAME).write_text("made by another Python")
    environment_of(WHEEL, folder=tmp_path, install=whole)
    assert len(asked) == 2


def test_a_wheel_that_cannot_be_had_leaves_nothing_behind(tmp_path: Path) -> None:
    def refused(environment: Path, requirement: str) -> None:
        environment.mkdir()
        raise Unavailable(f"{requirement}: no such release")

    with pytest.raises(Unavailable, match=r"peer==1\.0: no such release"):
        environment_of(WHEEL, folder=tmp_path, install=refused)
    assert not (tmp_path / "peer-1.0").exists()


def test_subjects_are_chosen_by_name_first_word_or_pattern() -> None:
    makers = subject_makers(["mine=x --port {port}"])
    assert list(chosen(makers, only=["sglang-router", "mine"], skip=["*cache_aware"])) == [
        "sglang-router round_robin",
        "mine",
    ]
    assert makers["mine"]().command == ("x", "--port", "{port}")


def test_a_misspelt_subject_is_refused() -> None:
    with pytest.raises(UnknownSubject, match="'ngnix' matches none of"):
        chosen(subject_makers([]), only=["ngnix"], skip=[])


def measured(us_request: float, *, bad: int = 0, threads_ended: int = 0) -> Measured:
    """A round whose figures are all the same multiple of `us_request`."""

    def phase(times: float) -> PhaseCost:
        load = LoadResult(
            started=9,
            ended=9,
            bad=bad,
            altered=0,
            wall_s=1.0,
            requests_per_s=9.0,
            reads=9,
            reconnects=0,
            latency_us=None,
            first_byte_us=None,
            chunks=0,
            chunks_per_s=0,
            reads_per_chunk=None,
            chunk_way_us=None,
            samples=["bad: status 500"] if bad else [],
        )
        return PhaseCost(
            load=load,
            router_us=us_request * times,
            worker_us=8.0,
            client_us=9.0,
            threads_ended=threads_ended,
        )

    way = LatencyResult(
        bad=0,
        altered=0,
        count=9,
        direct_us=None,
        router_us=None,
        added_p50_us=20.0,
        added_p90_us=30.0,
        added_p99_us=None,
    )
    return Measured(
        start_s=0.1,
        warm_up_faults=0,
        json=phase(1),
        burst=phase(3),
        paced=phase(66),
        big=None,
        latency=way,
        chunk_latency=way,
        chunk_us=us_request / 2,
        memory_at_start=Memory(pss_mb=5.0, processes=1, threads=1),
        memory_peak_mb=7.0,
        memory=Memory(pss_mb=6.0, processes=1, threads=1),
        idle_ratio=0.001,
    )


def one_round(name: str, number: int, result: Measured | None, error: str | None = None) -> Round:
    return Round(
        name=name,
        version="1.2",
        number=number,
        calibration_us=(6_000.0, 6_100.0),
        measured=result,
        error=error,
    )


def test_the_report_gives_medians_ratios_and_hides_nothing(tmp_path: Path) -> None:
    run = Run(
        date="today", commit="abc", machine="2 cores", python="Python", options={"tokens": 64}
    )
    lines: list[Line] = [
        run,
        Absent(name="smg round_robin", reason="smg==1.13.0: no such release"),
        *(one_round("nginx", n, measured(us)) for n, us in enumerate((10, 14, 90), start=1)),
        *(one_round("laneway", n, measured(us)) for n, us in enumerate((20, 28, 29), start=1)),
        one_round("laneway", 4, None, "the router ended\nwith status 1"),
        one_round("vllm-router round_robin", 1, measured(40, bad=1, threads_ended=2)),
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(line_json(line) + "\n" for line in lines))
    assert read_lines(path) == lines
    text = report(lines)
    assert "| nginx | 1.2 | 3 | 14 | 10-90 | 71429 | 7.0 |" in text
    assert "### Times nginx" in text
    assert "| laneway | 2.00 | 2.00 | 2.00 |  | 1.00 |" in text
    assert "- **smg round_robin: missing.** smg==1.13.0: no such release" in text
    assert "- **laneway: round 4 failed.** the router ended with status 1" in text
    assert "6 threads ended under load" in text
    assert "vllm-router round_robin, round 1: bad: status 500" in text
    assert faulty(lines)
    assert not faulty(lines[:4])


def test_the_picture_says_what_was_measured_and_when(tmp_path: Path) -> None:
    run = Run(date="2026-11-29", commit="abc1234", machine="2 cores", python="3.11", options={})
    lines: list[Line] = [run, one_round("gone", 1, None, "did not start")]
    lines += (one_round(name, 1, measured(40.0)) for name in ("laneway", "nginx"))
    plotted(lines, tmp_path / "run.svg")
    drawn = (tmp_path / "run.svg").read_text()
    for text in ("2026-11-29, commit abc1234", "laneway", "nginx", "CPU us per request of 1.5 kB"):
        assert f"<!-- {text}" in drawn
    assert "gone" not in drawn


def test_samples_are_counted_by_the_innermost_frame() -> None:
    samples = self_samples("main;loop;write 5\nmain;loop;read 2\nmain;write 1\n")
    assert samples == {"write": 6, "read": 2}
