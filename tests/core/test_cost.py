"""What is learnt of a model's tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.cost import CostModel, ModelCost, OutputLengths
from router.core.types import Endpoint, Usage
from router.model_settings import ModelSettings
from tests.core.builders import request_spec, ticket


@given(st.lists(st.integers(0, 200_000), min_size=20, max_size=300), st.floats(0.5, 0.999))
def test_a_quantile_covers_its_share_and_errs_by_less_than_a_fifth(
    lengths: list[int], share: float
) -> None:
    histogram = OutputLengths()
    for tokens in lengths:
        histogram.add(tokens)
    found = histogram.quantile(share)
    assert found is not None
    rank = min(len(lengths) - 1, max(0, -int(-share * len(lengths) // 1) - 1))
    exact = max(1, sorted(lengths)[rank])
    assert exact <= found <= exact * 1.19 + 1


@given(st.lists(st.integers(0, 200_000), min_size=20, max_size=300))
def test_a_quantile_that_is_asked_for_at_each_answer_is_the_same(lengths: list[int]) -> None:
    asked, unasked = OutputLengths(), OutputLengths()
    for tokens in lengths:
        asked.add(tokens)
        asked.quantile(0.9)
        unasked.add(tokens)
    assert asked.quantile(0.9) == unasked.quantile(0.9)


def test_old_answers_fade() -> None:
    histogram = OutputLengths()
    for _ in range(5_000):
        histogram.add(2_000)
    for _ in range(20_000):
        histogram.add(50)
    assert (histogram.quantile(0.9) or 0) < 100


@given(st.floats(0.5, 20), st.floats(0.5, 20))
def test_the_ratio_converges_to_the_truth(first: float, true: float) -> None:
    cost = ModelCost(ModelSettings(bytes_per_token=first))
    for _ in range(200):
        cost.learn_prompt(prompt_bytes=int(1_000 * true), prompt_tokens=1_000)
    assert 1 / cost.tokens_per_byte == pytest.approx(true, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), max_size=50))
def test_no_usage_makes_estimates_absurd(pairs: list[tuple[int, int]]) -> None:
    cost = ModelCost(ModelSettings())
    for prompt_bytes, prompt_tokens in pairs:
        cost.learn_prompt(prompt_bytes=prompt_bytes, prompt_tokens=prompt_tokens)
    assert 1 / 64 <= cost.tokens_per_byte <= 4


def test_short_prompts_teach_nothing() -> None:
    cost = ModelCost(ModelSettings())
    cost.learn_prompt(prompt_bytes=8, prompt_tokens=40)
    assert cost.tokens_per_byte == 0.25


def test_only_served_models_have_an_entry_and_keep_what_they_learnt() -> None:
    costs = CostModel({})
    costs.serve(["a", "b"])
    costs.of("a").outputs.add(5)
    learnt = costs.of("a")
    costs.of("client text")
    assert len(costs) == 2
    costs.serve(["a"])
    assert costs.of("a") is learnt
    assert costs.of("b") is costs.of("client text") is costs.of(None)


def test_settings_are_found_by_any_name_of_the_model() -> None:
    costs = CostModel({"org/llama": ModelSettings(aliases=("llama",), bytes_per_token=2.0)})
    costs.serve(["llama"])
    assert costs.of("llama").tokens_per_byte == 0.5
    costs.configure({"llama": ModelSettings(output_tokens_default=7)})
    assert costs.of("llama").output_tokens_default == 7


def test_output_is_learnt_per_sequence_and_only_where_there_is_any() -> None:
    costs = CostModel({})
    costs.serve(["m"])
    for _ in range(30):
        usage = Usage(prompt_tokens=10, output_tokens=400)
        costs.learn(ticket(spec=request_spec(samples=4)), usage)
        embedding = ticket(spec=request_spec(endpoint=Endpoint.EMBEDDINGS))
        costs.learn(embedding, Usage(output_tokens=9_999))
    assert 100 <= (costs.of("m").outputs.quantile(0.99) or 0) <= 119
