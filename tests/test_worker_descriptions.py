"""What a worker says it is: its models and sizes, and nothing from garbage."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.load_formats import (
    WorkerDescription,
    describe_model_info,
    describe_models,
    describe_server_info,
    merged,
)
from tests.test_load_formats import JSON, fits


def test_models_are_described_with_adapters_and_the_longest_context() -> None:
    body = orjson.dumps(
        {
            "object": "list",
            "data": [
                {"id": "base", "object": "model", "root": "base", "max_model_len": 2048},
                {"id": "adapter", "object": "model", "parent": "base", "max_model_len": None},
                {"id": "base"},
                {"id": ""},
                {"id": 5},
                "x",
            ],
        }
    )
    assert describe_models(body) == WorkerDescription(
        models=("base", "adapter"), context_tokens=2048
    )


@pytest.mark.parametrize(
    ("info", "models"),
    [
        ({"model_path": "/m/llama", "served_model_name": "llama"}, ("llama",)),
        ({"model_path": "/m/llama"}, ("/m/llama",)),
        ({"model_path": None}, ()),
    ],
)
def test_model_info_names_the_served_model(info: dict[str, Any], models: tuple[str, ...]) -> None:
    assert describe_model_info(orjson.dumps(info)).models == models


SERVER_INFO = {
    "model_path": "/m/llama",
    "api_key": "sk-worker-secret",
    "admin_api_key": "sk-admin-secret",
    "launch_command": "python -m sglang.launch_server --api-key sk-worker-secret",
    "max_running_requests": 64,
    "max_queued_requests": 32,
    "max_total_num_tokens": 10_000,
    "context_length": 4096,
    "dp_size": 2,
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": False,
    "internal_states": [
        {"effective_max_running_requests_per_dp": 20},
        {"effective_max_running_requests_per_dp": 20},
    ],
    "version": "0.5.23",
}


def test_server_info_is_read_for_all_ranks() -> None:
    assert describe_server_info(orjson.dumps(SERVER_INFO)) == WorkerDescription(
        context_tokens=4096,
        kv_total_tokens=20_000,
        max_running_requests=40,
        priority_scheduling=True,
        low_priority_values_first=False,
        version="0.5.23",
    )


def test_server_info_falls_back_to_the_limit_that_was_set() -> None:
    info = {**SERVER_INFO, "internal_states": [{}, {}]}
    assert describe_server_info(orjson.dumps(info)).max_running_requests == 64


def test_the_keys_inside_server_info_are_not_kept() -> None:
    assert "secret" not in repr(describe_server_info(orjson.dumps(SERVER_INFO)))


@given(st.binary() | JSON.filter(fits).map(orjson.dumps))
def test_descriptions_of_garbage_are_unknown_and_never_raise(body: bytes) -> None:
    for describe in (describe_models, describe_model_info, describe_server_info):
        described = describe(body)
        assert described.kv_total_tokens is None or described.kv_total_tokens > 0
        assert described.kv_bytes_per_token is None or described.kv_bytes_per_token > 0
        assert all(isinstance(name, str) for name in described.models)


def test_the_earlier_description_wins_where_both_know() -> None:
    first = WorkerDescription(models=("a",), version="1")
    second = WorkerDescription(models=("b",), kv_total_tokens=5, version="2")
    assert merged(first, second) == WorkerDescription(models=("a",), kv_total_tokens=5, version="1")
