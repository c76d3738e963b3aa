"""A real router whose configuration changes while it serves."""

from __future__ import annotations

import asyncio
import io
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.cli import main
from tests import redis_servers
from tests.e2e.router_process import RouterProcess, client_of, router_process, until_ready
from tests.e2e.streaming_worker import StreamingWorker, streaming_worker

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ADMIN = {"authorization": "Bearer sk-admin"}


class ConfigMap:
    """A folder as Kubernetes mounts it: the file is a link through a link that is swapped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.path = folder / "laneway.yaml"
        self.path.symlink_to("..data/laneway.yaml")

    def holds(self, document: dict[str, Any] | str) -> None:
        """Replace what the file holds, in one step."""
        self._count += 1
        version = self._folder / f"..{self._count}"
        version.mkdir()
        text = document if isinstance(document, str) else yaml.safe_dump(document)
        (version / "laneway.yaml").write_text(text)
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self._folder / "..data")


@pytest.fixture
async def worker() -> AsyncIterator[StreamingWorker]:
    async with streaming_worker() as running:
        running.release.set()
        yield running


@pytest.fixture
def mount(tmp_path: Path) -> ConfigMap:
    return ConfigMap(tmp_path)


def settings(worker: StreamingWorker, **more: Any) -> dict[str, Any]:
    return {
        "workers": [{"url": worker.url, "models": ["m"]}],
        "probe": {"interval_s": 0.1},
        "policy": {"slow_start_s": 0},
        "live": {"poll_s": 0.2},
        "auth": {"api_keys": ["sk-user"], "admin_keys": ["sk-admin"]},
        **more,
    }


async def chat(client: httpx.AsyncClient, key: str = "sk-user") -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code


async def until_status(client: httpx.AsyncClient, key: str, status: int) -> float:
    """Seconds until a chat with this key is answered so."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        while await chat(client, key) != status:  # noqa: ASYNC110 - no event there
            await asyncio.sleep(0.02)
    return loop.time() - began


async def test_a_swapped_file_is_taken_a_bad_one_is_not_and_a_mended_one_is(
    worker: StreamingWorker, mount: ConfigMap
) -> None:
    """Field case CF01, with keys that come and go on connections that stay."""
    mount.holds(settings(worker))
    async with (
        router_process("--config", str(mount.path)) as router,
        client_of(router) as client,
    ):
        await until_ready(client)
        assert [await chat(client), await chat(client, "sk-new")] == [200, 401]
        keys = {"api_keys": ["sk-new"], "admin_keys": ["sk-admin"]}
        mount.holds(settings(worker, auth=keys))
        assert await until_status(client, "sk-user", 401) < 2.0  # with 0.2 s between looks
        assert await chat(client, "sk-new") == 200
        mount.holds("auth: {api_keys: [sk-ev")
        await router.logged("is refused, version 2 stays in force")
        assert await chat(client, "sk-new") == 200
        assert "laneway_config_file_faulty 1.0" in (await client.get("/metrics")).text
        mount.holds(settings(worker, queue={"depth_max": 77}))
        await router.logged("configuration version 3")
        assert await chat(client) == 200
        shown = (await client.get("/config", headers=ADMIN)).json()
        assert (shown["version"]["number"], shown["version"]["source"]) == (3, "file")
        assert shown["config"]["queue"]["depth_max"] == 77
        text = (await client.get("/metrics")).text
        assert "laneway_config_file_faulty 0.0" in text
        assert "laneway_config_version 3.0" in text
        assert f'digest="{shown["version"]["digest"]}"' in text
        assert router.log.count("is refused") == 1
        assert "sk-new" not in router.log
        assert "Traceback" not in router.log


async def test_a_signal_has_the_file_read_at_once(worker: StreamingWorker, tmp_path: Path) -> None:
    path = tmp_path / "laneway.yaml"
    path.write_text(yaml.safe_dump(settings(worker, live={"poll_s": 0})))
    async with (
        router_process("--config", str(path)) as router,
        client_of(router, headers=ADMIN) as client,
    ):
        await until_ready(client)
        changed = settings(worker, live={"poll_s": 0}, server={"port": 9, "log_level": "debug"})
        path.write_text(yaml.safe_dump(changed))
        router.signal(signal.SIGHUP)
        await router.logged("configuration version 2")
        shown = (await client.get("/config")).json()
        assert shown["version"]["who"] == "SIGHUP"
        assert shown["config"]["server"]["log_level"] == "debug"
        # The port is that of a flag, which is above the file.
        assert shown["needs_restart"] == []
        router.signal(signal.SIGHUP)
        await router.logged("nothing changed")


async def test_patches_under_load_drop_no_request(
    worker: StreamingWorker, mount: ConfigMap
) -> None:
    mount.holds(settings(worker))
    async with (
        streaming_worker() as second,
        router_process("--config", str(mount.path)) as router,
        client_of(router) as client,
    ):
        second.release.set()
        await until_ready(client)
        over = asyncio.Event()

        async def load() -> list[int]:
            answers = []
            while not over.is_set():
                answers.append(await chat(client))
            return answers

        loads = [asyncio.create_task(load()) for _ in range(8)]
        listed = settings(worker)["workers"]
        for step in range(24):
            both = [*listed, {"url": second.url, "models": ["m"]}]
            patch = {
                "queue": {"depth_max": 500 + step},
                "tenants": {"a": {"weight": 2} if step % 2 else None},
                "workers": both if step % 3 else listed,
                "prefix": {"blocks_max": 32 + step},
                "server": {"request_id_headers": ["x-request-id", f"x-id-{step}"]},
                "upstream": {"connections_max": 100 + step},
            }
            answer = await client.patch("/config", json=patch, headers=ADMIN)
            assert answer.status_code == 200, answer.text
            if step % 3 == 2:  # the second worker serves before it is taken off the list again
                second.asked.clear()
                await asyncio.wait_for(second.asked.wait(), 10)
        for number in (5, 12, 1):
            body = {"version": number}
            answer = await client.post("/config/rollback", json=body, headers=ADMIN)
            assert answer.status_code == 200, answer.text
        over.set()
        answers = [status for task in loads for status in await task]
        assert len(answers) > 50
        assert set(answers) == {200}
        history = (await client.get("/config/history", headers=ADMIN)).json()["versions"]
        assert [version["number"] for version in history] == list(range(28, 0, -1))
        assert history[0]["digest"] == history[-1]["digest"]
        assert "Traceback" not in router.log


async def test_patches_end_with_the_process(worker: StreamingWorker, mount: ConfigMap) -> None:
    mount.holds(settings(worker))

    async def depth(router: RouterProcess, patch: dict[str, Any]) -> int:
        async with client_of(router, headers=ADMIN) as client:
            answer = await client.patch("/config", json=patch)
            assert "router ends" in answer.json()["lasts_until"]
            shown = (await client.get("/config")).json()
            return int(shown["config"]["queue"]["depth_max"])

    async with router_process("--config", str(mount.path)) as router:
        assert await depth(router, {"queue": {"depth_max": 7}}) == 7
    async with router_process("--config", str(mount.path)) as router:
        assert await depth(router, {}) == 1_000


async def test_the_command_line_changes_a_running_router(mount: ConfigMap) -> None:
    mount.holds({"queue": {"depth_max": 5}, "auth": {"admin_keys": ["sk-admin"]}})
    async with router_process("--config", str(mount.path)) as router:

        def run(*args: str) -> tuple[int, str]:
            out = io.StringIO()
            with redirect_stdout(out), redirect_stderr(out), pytest.raises(SystemExit) as ended:
                main(["config", *args, "--router", router.url, "--admin-key", "sk-admin"])
            return int(ended.value.code or 0), out.getvalue()

        async def config(*args: str) -> tuple[int, str]:
            return await asyncio.to_thread(run, *args)

        status, out = await config("patch", "--set", "queue.depth_max=7", "--dry-run")
        assert (status, out.splitlines()[0]) == (0, "queue.depth_max: 5 -> 7")
        patch = mount.path.with_name("patch.yaml")
        patch.write_text("queue: {depth_max: 9}\n")
        status, out = await config("patch", str(patch))
        assert "in force as version 2" in out
        status, out = await config("show")
        shown = yaml.safe_load(out)
        assert (status, shown["queue"]["depth_max"]) == (0, 9)
        assert '# patched: {"queue": {"depth_max": 9}}' in out
        assert "sk-admin" not in out
        status, out = await config("history")
        assert "  queue.depth_max: 5 -> 9" in out.splitlines()
        status, out = await config("rollback", "1")
        assert out.splitlines()[0] == "queue.depth_max: 9 -> 5"
        assert await config("rollback", "77") == (
            1, "laneway: 404: version 77 is not in the history\n",
        )  # fmt: skip
        status, out = await config("patch", "--set", "server.port=1")
        assert status == 1
        assert "server.port: it cannot change while the router runs (the socket is open)" in out


async def eventually(true: Callable[[], Awaitable[bool]]) -> float:
    """Seconds until `true` holds; each look is a round trip."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(10):
        while not await true():  # noqa: ASYNC110 - no event there
            await asyncio.sleep(0.02)
    return loop.time() - began


async def test_a_patch_at_one_router_holds_at_all_and_after_a_restart() -> None:
    with redis_servers.single() as server:
        flags = ("--set", "redis.mode=single", "--set", f"redis.urls=[{server.url}]")

        async def is_patched(client: httpx.AsyncClient) -> bool:
            shown = (await client.get("/config")).json()
            return bool(shown["config"]["queue"]["depth_max"] == 77)

        async with (
            router_process(*flags) as first,
            router_process(*flags) as second,
            client_of(first) as one,
            client_of(second) as other,
        ):
            answer = await one.patch("/config", json={"queue": {"depth_max": 77}})
            assert answer.json()["lasts_until"] == "the file changes the same setting"
            assert await eventually(lambda: is_patched(other)) < 2.0
            digest = answer.json()["version"]["digest"]

            async def all_say_so() -> bool:
                replicas = (await other.get("/replicas")).json()["replicas"]
                return [replica["config_version"] for replica in replicas] == [digest, digest]

            await eventually(all_say_so)
        async with router_process(*flags) as again, client_of(again) as client:
            assert await is_patched(client), "from the first request on"
            assert "Traceback" not in first.log + second.log + again.log
