"""A bad configuration file changes nothing for ever; what is not set up does not act."""

from __future__ import annotations

import yaml

from tests.field.harness import Field
from tests.field.wire import eventually

CONFIG = {"live": {"poll_s": 0.05}}


async def test_one_bad_reload_does_not_stop_the_next(field: Field) -> None:
    """CF01."""
    path = field.router.config_path
    good = yaml.safe_load(path.read_text())
    try:
        path.write_text("queue: {depth_max: [")
        await eventually(lambda: "is refused" in field.router.log(), what="the fault is logged")
        assert await field.metric("laneway_config_file_faulty") == 1
        assert await field.metric("laneway_config_changes_total", outcome="refused") == 1
        path.write_text(yaml.safe_dump({**good, "queue": {"depth_max": 7}}))

        async def taken() -> bool:
            return await field.metric("laneway_queue_length_max", lane="short") == 7

        await eventually(taken, what="the mended file is in force")
        assert field.router.log().count("is refused") == 1
    finally:
        path.write_text(yaml.safe_dump(good))

        async def as_before() -> bool:
            return await field.metric("laneway_queue_length_max", lane="short") != 7

        await eventually(as_before, what="the first file is in force")


async def test_without_redis_nothing_asks_for_it(field: Field) -> None:
    """CF05."""
    await field.worker()
    mark = len(field.router.log())
    answers = await field.chats(50)
    assert {answer.status for answer in answers} == {200}
    said = [line for line in field.router.log()[mark:].splitlines() if not line.startswith("{")]
    assert said == []
