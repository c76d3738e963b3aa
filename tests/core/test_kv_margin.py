"""What the size of a token in KV memory changes: the margin in bytes that every pool keeps free."""

from __future__ import annotations

from typing import Any

import pytest

from router.contract import WorkerId
from router.errors import Reason
from tests.core.builders import LLAMA_8B, Bench, bench, plain_config, runs, waits

W1 = WorkerId("w1")


def said(b: Bench, kv_bytes_per_token: float | None, name: str = "w1") -> None:
    """A worker says the size of a token."""
    b.core.on_worker_described(
        WorkerId(name),
        models=(),
        kv_total_tokens=None,
        concurrency_max=None,
        kv_bytes_per_token=kv_bytes_per_token,
        now=b.now,
    )
    b.take()


def usable(b: Bench, name: str = "w1") -> tuple[int | None, int | None]:
    view = b.view(name)
    return view.kv_bytes_per_token, view.kv_usable_tokens


def test_the_margin_counts_once_the_size_of_a_token_is_known_and_stays() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=10_000)
    assert usable(b) == (None, 9_200)
    said(b, 2**18)
    assert usable(b) == (2**18, 7_952)  # 2,048 tokens are 512 MiB
    said(b, None)
    assert usable(b) == (2**18, 7_952)


@pytest.mark.parametrize("models", [("m",), ("alias",), ("adapter", "m")])
def test_what_settings_say_of_a_model_wins_over_its_workers(models: tuple[str, ...]) -> None:
    b = bench(models={"m": {"kv": LLAMA_8B, "aliases": ["alias"]}})
    b.join("w1", models=models, kv_total_tokens=20_000)
    b.join("w2", models=("other",), kv_total_tokens=20_000)
    for name in ("w1", "w2"):
        said(b, 2**18, name)
    assert usable(b, "w1") == (2**17, 15_904)
    assert usable(b, "w2") == (2**18, 17_952)


@pytest.mark.parametrize(
    ("headroom", "tokens"),
    [({}, 15_904), ({"kv_margin_mb": 0}, 18_400), ({"kv_ratio_max": 0.5}, 10_000)],
)
def test_new_settings_hold_at_once(headroom: dict[str, Any], tokens: int) -> None:
    b = bench()
    b.join("w1", kv_total_tokens=20_000)
    settings = plain_config(headroom=headroom, models={"m": {"kv": LLAMA_8B}})
    b.core.on_config(settings, now=b.now)
    assert usable(b) == (2**17, tokens)


@pytest.mark.parametrize("prompt_tokens", range(700, 800, 7))
def test_what_is_too_large_and_what_is_taken_part_at_the_same_size(prompt_tokens: int) -> None:
    """A pool of which the margin takes its quarter: 750 of 1,000 tokens."""
    b = bench(headroom={"output_reserve_tokens": 0})
    b.join("w1", kv_total_tokens=1_000)
    said(b, 2**20)
    asked = b.ask(prompt_bytes=4 * (prompt_tokens - 1))
    assert asked.prompt_tokens == prompt_tokens
    if prompt_tokens <= 750:
        assert runs(asked)
    else:
        assert b.refusal(asked).reason is Reason.TOO_LARGE


def test_a_small_pool_is_filled_to_three_quarters_and_given_back() -> None:
    b = bench()
    b.join("w1", kv_total_tokens=1_000)
    said(b, 2**20)
    first, second, third, fourth = (b.ask() for _ in range(4))  # 200 tokens each
    assert [runs(made) for made in (first, second, third)] == [True] * 3
    assert waits(fourth)
    assert b.view("w1").kv_reserved_tokens == 600
    b.end(first)
    assert runs(fourth)
    for made in (second, third, fourth):
        b.end(made)
    assert b.view("w1").kv_reserved_tokens == 0


def test_a_waiter_that_the_margin_makes_too_large_is_refused() -> None:
    b = bench(headroom={"output_reserve_tokens": 0})
    b.join("w1", kv_total_tokens=1_000, concurrency_max=1)
    b.ask()
    waiting = b.ask(prompt_bytes=4 * 800)
    assert waits(waiting)
    said(b, 2**20)
    assert b.refusal(waiting).reason is Reason.TOO_LARGE
