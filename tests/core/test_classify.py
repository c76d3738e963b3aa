"""Lane and token figures by endpoint and by what the body says."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from router.contract import Lane
from router.core.classify import Classifier
from router.core.cost import ModelCost
from router.core.types import Endpoint, RequestSpec
from router.model_settings import ModelSettings
from tests.core.builders import config, request_spec


def cost_of(answers: list[int] | None = None, **settings: Any) -> ModelCost:
    made = ModelCost(ModelSettings(**settings))
    for tokens in answers or []:
        made.outputs.add(tokens)
    return made


class Needs(NamedTuple):
    lane: Lane
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int


def needs(classifier: Classifier, spec: RequestSpec, cost: ModelCost) -> Needs:
    return Needs(*classifier.figures(spec, cost))


@pytest.mark.parametrize(
    ("endpoint", "max_tokens", "lane", "output"),
    [
        (Endpoint.CHAT, 1, Lane.SHORT, 1),
        (Endpoint.CHAT, 256, Lane.SHORT, 256),
        (Endpoint.CHAT, 257, Lane.LONG, 257),
        (Endpoint.CHAT, None, Lane.LONG, 512),  # runs to the context's end; nothing known yet
        (Endpoint.RESPONSES, None, Lane.LONG, 512),
        (Endpoint.MESSAGES, None, Lane.LONG, 512),
        (Endpoint.COMPLETIONS, None, Lane.SHORT, 16),  # SGLang's default
        (Endpoint.COMPLETIONS, 300, Lane.LONG, 300),
        (Endpoint.GENERATE, None, Lane.SHORT, 128),  # SGLang's default
        (Endpoint.GENERATE, 0, Lane.SHORT, 0),
        (Endpoint.EMBEDDINGS, None, Lane.SHORT, 0),
        (Endpoint.EMBEDDINGS, 4096, Lane.SHORT, 0),
        (Endpoint.OTHER, None, Lane.SHORT, 0),
        (Endpoint.CHAT, 9_223_372_036_854_775_807, Lane.LONG, 9_223_372_036_854_775_807),
        (Endpoint.CHAT, -5, Lane.SHORT, 0),
    ],
)
def test_lane_and_output(
    endpoint: Endpoint, max_tokens: int | None, lane: Lane, output: int
) -> None:
    spec = request_spec(endpoint=endpoint, max_tokens=max_tokens)
    figures = needs(Classifier(config()), spec, cost_of())
    assert (figures.lane, figures.output_tokens) == (lane, output)


def test_the_reservation_is_the_prompt_and_a_first_part_of_each_answer() -> None:
    classifier = Classifier(config(headroom={"output_reserve_tokens": 64}))
    spec = request_spec(prompt_bytes=3_996, max_tokens=10_000, samples=3)
    assert needs(classifier, spec, cost_of()).kv_tokens == 1_000 + 3 * 64
    spec = request_spec(prompt_bytes=3_996, max_tokens=10, samples=3)
    assert needs(classifier, spec, cost_of()).kv_tokens == 1_000 + 3 * 10


def test_history_replaces_the_default_once_it_is_known() -> None:
    spec = request_spec(max_tokens=None)
    classifier = Classifier(config(lanes={"output_quantile": 0.9}))
    few = cost_of([30] * 19)
    assert needs(classifier, spec, few).output_tokens == 512
    known = cost_of([30] * 95 + [900] * 5)
    figures = needs(classifier, spec, known)
    assert 30 <= figures.output_tokens <= 30 * 1.19
    assert figures.lane is Lane.SHORT


def test_a_known_context_bounds_the_answer() -> None:
    spec = request_spec(prompt_bytes=3_996, max_tokens=4_000)
    figures = needs(Classifier(config()), spec, cost_of(context_tokens=1_200))
    assert figures.output_tokens == 200
    over = request_spec(prompt_bytes=39_996, max_tokens=4_000)
    assert needs(Classifier(config()), over, cost_of(context_tokens=1_200)).output_tokens == 0
