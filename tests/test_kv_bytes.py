"""The size of a token in KV memory, as /server_info tells it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.load_formats import describe_server_info


def kv_bytes(*pools: Any, **flags: Any) -> float | None:
    """What a server with these ranks' `memory_usage` says a token takes."""
    states = [{"memory_usage": pool} for pool in pools]
    info = {"max_total_num_tokens": 400_000, "internal_states": states, **flags}
    return describe_server_info(orjson.dumps(info)).kv_bytes_per_token


# As release 0.5.23 says it on a CPU, of a model whose tokens take 256 bytes.
TINY_POOL = {
    "weight": -0.001,
    "kvcache": 0.095,
    "startup_available": 21.245,
    "token_capacity": 400_000,
    "token_capacity_swa": None,
    "graph": {"prefill": 0.0, "decode": 0.0},
}
POOL = {"weight": 15.0, "kvcache": 12.5, "token_capacity": 102_400}  # 128 KiB a token


def test_the_bytes_of_a_token_are_the_pools_over_its_tokens() -> None:
    assert kv_bytes(TINY_POOL, tp_size=1) == pytest.approx(256, rel=0.01)
    assert kv_bytes(POOL) == 131_072


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ({"tp_size": 1, "pp_size": 1, "dp_size": 1}, 1),
        ({"tp_size": 8}, 8),  # each GPU's pool has its heads of every token
        ({"tp_size": 4, "pp_size": 2}, 8),  # its heads of its layers
        ({"tp_size": 2, "dp_size": 2}, 2),  # two engines of two GPUs
        ({"tp_size": 8, "dp_size": 2, "enable_dp_attention": True}, 4),  # each token in four
        ({"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 1),
        ({"tp_size": "8", "pp_size": None, "dp_size": -1}, 1),
    ],
)
def test_a_token_is_counted_in_all_gpus_that_hold_a_part_of_it(
    flags: dict[str, Any], gpus: int
) -> None:
    assert kv_bytes(*[POOL] * 2, **flags) == gpus * 131_072


@pytest.mark.parametrize(
    "pools",
    [
        [],
        [None],
        [3],
        [{}],
        [{**POOL, "kvcache": 0.0}],  # too small for the digits that are shown
        [{**POOL, "kvcache": -1.0}],
        [{**POOL, "kvcache": "12"}],
        [{**POOL, "kvcache": True}],
        [{**POOL, "kvcache": 1e308}],
        [{**POOL, "token_capacity": 0}],
        [{**POOL, "token_capacity": None}],
        [{"token_capacity": 102_400}],
    ],
)
def test_a_token_of_no_known_size_has_none_and_not_zero(pools: list[Any]) -> None:
    assert kv_bytes(*pools) is None
