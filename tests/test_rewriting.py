"""Bodies of degraded requests: what is cut, what marks a request that must not be, what stays."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import PrefixSettings
from router.core.types import Endpoint
from router.errors import Refused
from router.wire import BodyReader, rewritten

CHAT, COMPLETIONS, GENERATE = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE
MESSAGES, RESPONSES = Endpoint.MESSAGES, Endpoint.RESPONSES


def cut(endpoint: Endpoint, body: dict[str, Any], to: int = 256) -> dict[str, Any]:
    made: dict[str, Any] = orjson.loads(
        rewritten(orjson.dumps(body), endpoint, max_tokens=to, model=None)
    )
    return made


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        (CHAT, {}, {"max_tokens": 256}),
        (CHAT, {"max_tokens": 900}, {"max_tokens": 256}),
        (CHAT, {"max_tokens": None}, {"max_tokens": 256}),
        (CHAT, {"max_completion_tokens": 900}, {"max_completion_tokens": 256}),
        (
            CHAT,
            {"max_completion_tokens": 900, "max_tokens": 100},
            {"max_completion_tokens": 256, "max_tokens": 100},
        ),
        (COMPLETIONS, {"max_tokens": 900}, {"max_tokens": 256}),
        (MESSAGES, {"max_tokens": 900}, {"max_tokens": 256}),
        (RESPONSES, {"max_output_tokens": 900}, {"max_output_tokens": 256}),
        (RESPONSES, {}, {"max_output_tokens": 256}),
        (GENERATE, {}, {"sampling_params": {"max_new_tokens": 256}}),
        (GENERATE, {"sampling_params": None}, {"sampling_params": {"max_new_tokens": 256}}),
        (
            GENERATE,
            {"sampling_params": {"max_new_tokens": 900, "top_p": 0.5}},
            {"sampling_params": {"max_new_tokens": 256, "top_p": 0.5}},
        ),
        (
            GENERATE,
            {"sampling_params": [{"max_new_tokens": 900}, {"max_new_tokens": 0}, {}]},
            {
                "sampling_params": [
                    {"max_new_tokens": 256},
                    {"max_new_tokens": 0},
                    {"max_new_tokens": 256},
                ]
            },
        ),
        (CHAT, {"max_tokens": 900, "min_tokens": 500}, {"max_tokens": 256, "min_tokens": 256}),
        (CHAT, {"max_tokens": 900, "min_tokens": 5}, {"max_tokens": 256, "min_tokens": 5}),
        (
            GENERATE,
            {"sampling_params": {"max_new_tokens": 900, "min_new_tokens": 500}},
            {"sampling_params": {"max_new_tokens": 256, "min_new_tokens": 256}},
        ),
    ],
)
def test_each_family_is_cut_by_its_own_field(
    endpoint: Endpoint, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert cut(endpoint, body) == expected


def test_a_limit_that_is_lower_already_stays() -> None:
    assert cut(CHAT, {"max_tokens": 10}) == {"max_tokens": 10}


def test_another_model_is_named_in_place() -> None:
    body = b'{"messages": [], "model": "large", "stream": true}'
    made = rewritten(body, CHAT, max_tokens=None, model="small")
    assert made == b'{"messages":[],"model":"small","stream":true}'


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(others=st.dictionaries(st.text(), JSON, max_size=6), most=st.integers(1, 10_000))
def test_everything_else_stays(others: dict[str, Any], most: int) -> None:
    ours = {"max_tokens", "max_completion_tokens", "min_tokens", "min_new_tokens", "model"}
    body = {name: value for name, value in others.items() if name not in ours}
    raw = orjson.dumps({**body, "model": "m", "max_tokens": 10_000})
    made = orjson.loads(rewritten(raw, CHAT, max_tokens=most, model="small"))
    assert made == {**body, "model": "small", "max_tokens": most}
    assert list(made) == [*body, "model", "max_tokens"]


def test_a_body_too_deep_to_be_written_is_refused() -> None:
    body = b'{"max_tokens": 900, "x": ' + b"[" * 600 + b"]" * 600 + b"}"
    orjson.loads(body)
    with pytest.raises(Refused, match="nested too deeply"):
        rewritten(body, CHAT, max_tokens=5, model=None)


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(
    ("endpoint", "body", "structured"),
    [
        (CHAT, {}, False),
        (CHAT, {"response_format": {"type": "text"}}, False),
        (CHAT, {"response_format": None, "tools": [], "regex": ""}, False),
        (CHAT, {"response_format": {"type": "json_object"}}, True),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, True),
        (CHAT, {"tools": [{"type": "function"}]}, True),
        (CHAT, {"regex": "a+"}, True),
        (CHAT, {"ebnf": "root ::= x"}, True),
        (CHAT, {"structural_tag": "{}"}, True),
        (CHAT, {"text": {"format": SCHEMA}}, False),  # no field of this family
        (COMPLETIONS, {"json_schema": "{}"}, True),
        (COMPLETIONS, {"prompt": "x"}, False),
        (MESSAGES, {"tools": [{"name": "f"}]}, True),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        (MESSAGES, {"thinking": {"type": "disabled"}}, False),
        (MESSAGES, {"output_config": {"effort": "low"}}, False),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, True),
        (RESPONSES, {"text": {"verbosity": "low"}}, False),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, False),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, True),
        (GENERATE, {"text": "a prompt"}, False),
        (GENERATE, {"sampling_params": {"top_p": 1}}, False),
        (GENERATE, {"sampling_params": {"json_schema": "{}"}}, True),
        (GENERATE, {"sampling_params": [{}, {"regex": "a"}]}, True),
        (Endpoint.OTHER, {"text": "x"}, False),
    ],
)
def test_structured_output_is_recognised(
    endpoint: Endpoint, body: dict[str, Any], structured: bool
) -> None:
    reader = BodyReader(endpoint, PrefixSettings())
    spec = reader.read(b"application/json", orjson.dumps(body), request_id="r", tenant="t")
    assert spec.structured is structured
    assert not spec.fixed


def test_a_form_is_fixed() -> None:
    reader = BodyReader(Endpoint.OTHER, PrefixSettings(), forms=True)
    kind = b"multipart/form-data; boundary=b"
    assert reader.read(kind, b"--b--", request_id="r", tenant="t").fixed
