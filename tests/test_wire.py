"""Fields read from bodies, endpoint by endpoint; limits; prompts and their hashes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import PrefixSettings
from router.core.prefix import WHOLE_BYTES, blocks_of, bytes_of
from router.core.types import Endpoint, RequestSpec
from router.errors import Reason, Refused
from router.wire import SAMPLES_MAX, TOKENS_MAX, BodyReader

JSON = b"application/json"


def read(
    endpoint: Endpoint, body: Any, *, content_type: bytes | None = JSON, blocks_max: int = 128
) -> RequestSpec:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    reader = BodyReader(endpoint, PrefixSettings(blocks_max=blocks_max))
    return reader.read(content_type, data, request_id="r", tenant="t")


def read_or_refused(endpoint: Endpoint, body: bytes) -> RequestSpec | None:
    """Return what `read` does, None when it refuses; anything else is a failure."""
    try:
        return read(endpoint, body)
    except Refused:
        return None


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    ("endpoint", "body", "limit"),
    [
        (Endpoint.CHAT, {"max_tokens": 5}, 5),
        (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
        (Endpoint.COMPLETIONS, {"max_tokens": 5}, 5),
        (Endpoint.MESSAGES, {"max_tokens": 5}, 5),
        (Endpoint.RESPONSES, {"max_output_tokens": 5, "max_tokens": 9}, 5),
        (Endpoint.GENERATE, {"sampling_params": {"max_new_tokens": 5}}, 5),
        (Endpoint.GENERATE, {"sampling_params": {"max_new_tokens": 0}}, 1),
        (Endpoint.GENERATE, {"sampling_params": [{"max_new_tokens": 5}, {"max_new_tokens": 9}]}, 9),
        (Endpoint.GENERATE, {"sampling_params": [{"max_new_tokens": 5}, {}]}, None),
        (Endpoint.GENERATE, {"sampling_params": []}, None),
        (Endpoint.GENERATE, {"max_tokens": 5}, None),
        (Endpoint.EMBEDDINGS, {"max_tokens": 5}, None),
        (Endpoint.CHAT, {}, None),
        (Endpoint.CHAT, {"max_tokens": TOKENS_MAX}, TOKENS_MAX),
    ],
)
def test_each_family_has_its_own_token_limit(
    endpoint: Endpoint, body: dict[str, Any], limit: int | None
) -> None:
    assert read(endpoint, body).max_tokens == limit


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (Endpoint.CHAT, {"max_tokens": 5, "max_completion_tokens": -1}, "max_completion_tokens"),
        (Endpoint.CHAT, {"max_tokens": -1, "max_completion_tokens": 5}, "max_tokens"),
        (Endpoint.CHAT, {"max_tokens": TOKENS_MAX + 1}, "max_tokens"),
        (Endpoint.CHAT, {"n": 0}, "n"),
        (Endpoint.CHAT, {"n": True}, "n"),
        (Endpoint.CHAT, {"n": SAMPLES_MAX + 1}, "n"),
        (Endpoint.COMPLETIONS, {"best_of": "2"}, "best_of"),
        (Endpoint.GENERATE, {"sampling_params": 3}, "sampling_params"),
        (Endpoint.GENERATE, {"sampling_params": [1]}, "sampling_params"),
        (
            Endpoint.GENERATE,
            {"sampling_params": [{}, {"max_new_tokens": 1.0}]},
            "sampling_params[1].max_new_tokens",
        ),
        (Endpoint.GENERATE, {"text": 5}, "text"),
        (Endpoint.COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (Endpoint.RESPONSES, {"input": 5}, "input"),
        (Endpoint.CHAT, {"messages": [1]}, "messages"),
        (Endpoint.CHAT, {"messages": ""}, "messages"),
        (Endpoint.MESSAGES, {"messages": {}}, "messages"),
        (Endpoint.CHAT, {"model": ""}, "model"),
        (Endpoint.CHAT, {"model": "x" * 10_000}, "model"),
        (Endpoint.CHAT, {"model": ["m"]}, "model"),
        (Endpoint.CHAT, {"stream": 1}, "stream"),
    ],
)
def test_wrong_values_are_refused_by_name(
    endpoint: Endpoint, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(Refused) as refused:
        read(endpoint, body)
    assert (refused.value.reason, refused.value.param) == (Reason.BAD_REQUEST, param)
    assert param in refused.value.message


@pytest.mark.parametrize(
    ("endpoint", "body", "samples"),
    [
        (Endpoint.CHAT, {"n": 4}, 4),
        (Endpoint.COMPLETIONS, {"n": 2, "best_of": 3, "prompt": ["a", "b"]}, 6),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 1),
        (Endpoint.COMPLETIONS, {"prompt": [[1, 2], [3]]}, 2),
        (Endpoint.GENERATE, {"text": ["a"] * 3, "sampling_params": {"n": 2}}, 6),
        (Endpoint.GENERATE, {"input_ids": [[1], [2]]}, 2),
        (Endpoint.GENERATE, {"text": ["a"] * 10_000}, SAMPLES_MAX),
        (Endpoint.EMBEDDINGS, {"input": ["a", "b"]}, 2),
        (Endpoint.CHAT, {"n": None}, 1),
    ],
)
def test_samples_are_counted_over_prompts(
    endpoint: Endpoint, body: dict[str, Any], samples: int
) -> None:
    assert read(endpoint, body).samples == samples


@pytest.mark.parametrize(
    ("endpoint", "body", "size"),
    [
        (Endpoint.CHAT, chat("hello"), len("userhello")),
        (Endpoint.CHAT, {"messages": [{"role": "user", "content": "你好"}]}, 10),
        (Endpoint.CHAT, {"messages": [{"content": [{"type": "text", "text": "abc"}]}]}, 3),
        (Endpoint.CHAT, {"tools": [{"a": 1}]}, len(b'[{"a":1}]')),
        (Endpoint.MESSAGES, {"system": "sys", "messages": [{"content": "abc"}]}, 6),
        (Endpoint.MESSAGES, {"system": [{"type": "text", "text": "sys"}]}, 3),
        (Endpoint.RESPONSES, {"instructions": "do", "input": "abc"}, 5),
        (Endpoint.RESPONSES, {"input": [{"role": "user", "content": "abc"}]}, 7),
        (Endpoint.COMPLETIONS, {"prompt": "abc"}, 3),
        (Endpoint.COMPLETIONS, {"prompt": [1, 2, 3]}, 12),
        (Endpoint.GENERATE, {"text": "abc"}, 3),
        (Endpoint.GENERATE, {"input_ids": [7] * 10}, 40),
        (Endpoint.EMBEDDINGS, {"input": ["abc", "de"]}, 5),
        (Endpoint.OTHER, {"query": "abc", "documents": ["de"]}, 3 + len(b'["de"]')),
    ],
)
def test_a_prompt_is_measured_in_bytes_of_its_text(
    endpoint: Endpoint, body: dict[str, Any], size: int
) -> None:
    assert read(endpoint, body).prompt_bytes == size


def test_a_picture_counts_by_its_url_up_to_a_bound() -> None:
    def with_url(url: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}
        return {"messages": [{"content": [part]}]}

    small = "https://example.com/a.png"
    assert read(Endpoint.CHAT, with_url(small)).prompt_bytes == len(small) + 2
    assert read(Endpoint.CHAT, with_url("A" * 5_000_000)).prompt_bytes == 4096 + len("5000000")


def test_pictures_that_differ_late_do_not_share_a_prefix() -> None:
    def prefix(url: str) -> tuple[int, ...]:
        part = {"type": "image_url", "image_url": {"url": url}}
        return read(Endpoint.CHAT, {"messages": [{"content": [part, {"text": "x" * 999}]}]}).prefix

    assert prefix("A" * 9000)[:7] == prefix("A" * 9001)[:7]
    assert prefix("A" * 9000)[-1] != prefix("A" * 9001)[-1]


def test_a_form_shows_nothing_where_forms_are_taken() -> None:
    reader = BodyReader(Endpoint.OTHER, PrefixSettings(), forms=True)
    spec = reader.read(b"Multipart/Form-Data; boundary=x", b"\xff" * 10, request_id="r", tenant="")
    assert (spec.model, spec.max_tokens, spec.stream) == (None, None, False)


@pytest.mark.parametrize("forms", [True, False])
@pytest.mark.parametrize(
    "content_type",
    [b"application/x-www-form-urlencoded", b"text/plain; charset=utf-8", b"application/jsonl", b""],
)
def test_what_says_that_it_is_not_json_is_not_passed_on_unread(
    content_type: bytes, forms: bool
) -> None:
    reader = BodyReader(Endpoint.CHAT, PrefixSettings(), forms=forms)
    with pytest.raises(Refused) as caught:
        reader.read(content_type, orjson.dumps(chat("x")), request_id="r", tenant="t")
    assert (caught.value.reason, caught.value.status) == (Reason.UNSUPPORTED_MEDIA, 415)
    assert "application/json" in caught.value.message


def test_a_form_is_not_taken_where_json_is_wanted() -> None:
    with pytest.raises(Refused, match=r"this route wants application/json\."):
        read(Endpoint.CHAT, chat("x"), content_type=b"multipart/form-data; boundary=x")


def test_bytes_that_are_no_text_are_named_by_their_place() -> None:
    with pytest.raises(Refused, match="no UTF-8 text at byte 10"):
        read(Endpoint.CHAT, b'{"model":"\xff"}')


@pytest.mark.parametrize("content_type", [None, b"Application/JSON; charset=utf-8", b"a/b+json"])
def test_json_is_recognised_in_all_its_spellings(content_type: bytes | None) -> None:
    assert read(Endpoint.CHAT, chat("x"), content_type=content_type).model == "m"


@pytest.mark.parametrize("rid", ["job-1", None, ["a"], "x" * 300])
def test_a_rid_is_kept_when_it_is_one(rid: Any) -> None:
    assert read(Endpoint.GENERATE, {"rid": rid}).rid == (rid if rid == "job-1" else None)


@pytest.mark.parametrize("depth", [10, 200, 500, 2000])
@pytest.mark.parametrize("field", ["messages", "tools", "x"])
def test_nesting_of_any_depth_is_read_or_refused(depth: int, field: str) -> None:
    body = b'{"%b":[{"content":%b1%b}]}' % (field.encode(), b"[" * depth, b"]" * depth)
    assert read_or_refused(Endpoint.CHAT, body) is None or depth < 1000


def test_nested_parts_are_read_a_few_levels_deep() -> None:
    deep = b'[{"content":' * 400 + b'"x"' + b"}]" * 400
    assert read(Endpoint.CHAT, b'{"messages":[{"content":%b}]}' % deep).prompt_bytes == 0


# Long ones, too: each is its number so many times, in ASCII or not.
texts = st.text(max_size=3000) | st.builds(
    lambda sign, number, times: f"{sign}{number:06d}" * times,
    st.sampled_from(("x", "\u00e9", "\u4e2d")),
    st.integers(0, 10**6 - 1),
    st.integers(0, 8_000),
)


def hashed(text: str) -> list[bytes]:
    """What is hashed of a text, block by block and stride by stride."""
    data = text.encode()
    bounds = [bytes_of(blocks) for blocks in range(blocks_of(len(data)) + 1)]
    return [
        data[start:end] if end <= WHOLE_BYTES else data[start + 63 : end : 64]
        for start, end in pairwise(bounds)
    ]


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@given(head=texts, one=texts, two=texts)
def test_prompts_share_hashes_exactly_as_far_as_they_share_what_is_hashed(
    head: str, one: str, two: str
) -> None:
    first, second = (
        read(Endpoint.COMPLETIONS, {"prompt": head + t}, blocks_max=4096).prefix for t in (one, two)
    )
    a, b = hashed(head + one), hashed(head + two)
    assert (len(first), len(second)) == (len(a), len(b))
    assert shared(first, second) == shared(a, b) >= blocks_of(len(head.encode()))


@given(st.lists(texts, min_size=1, max_size=12))
def test_a_turn_that_is_appended_keeps_all_blocks_before_it(turns: list[str]) -> None:
    messages = [{"role": "user", "content": text} for text in turns]
    joined, before = "", tuple[int, ...]()
    for count in range(1, len(turns) + 1):
        spec = read(Endpoint.CHAT, {"messages": messages[:count]}, blocks_max=4096)
        joined = "".join(f"user{text}" for text in turns[:count])
        assert spec.prompt_bytes == len(joined.encode())
        assert len(spec.prefix) == blocks_of(spec.prompt_bytes)
        assert spec.prefix[: len(before)] == before
        before = spec.prefix
    assert before == read(Endpoint.COMPLETIONS, {"prompt": joined}, blocks_max=4096).prefix


@given(at=st.integers(0, 199_000), length=st.integers(1, 128), one=st.integers(0, 9))
def test_a_change_shows_in_the_block_where_it_is(at: int, length: int, one: int) -> None:
    text = "".join(f"{number:x}." for number in range(40_000))[:200_000]
    before = read(Endpoint.COMPLETIONS, {"prompt": text}).prefix

    def told(changed: str) -> int:
        return shared(before, read(Endpoint.COMPLETIONS, {"prompt": changed}).prefix)

    block = blocks_of(at)
    assert told(f"{text[:at]}{one}{text[at:]}") <= block + 1  # all behind it has moved
    assert told(f"{text[:at]}{text[at + length :]}") <= block + 1
    changed = f"{text[:at]}{'#' * length}{text[at + length :]}"
    assert told(changed) >= min(block, len(before))
    if at + length <= WHOLE_BYTES or length >= 64:  # where not, it may be between samples
        assert told(changed) <= block + 1


def test_hashes_depend_on_the_model_and_their_number_is_bounded() -> None:
    text = "x" * 100_000
    assert len(read(Endpoint.CHAT, chat(text), blocks_max=5).prefix) == 5
    assert len(read(Endpoint.CHAT, chat(text), blocks_max=70).prefix) == 70
    other = read(Endpoint.CHAT, chat(text, model="other"))
    assert other.prefix != read(Endpoint.CHAT, chat(text)).prefix


@pytest.mark.parametrize("blocks_max", [1, 64, 70, 4096])
@pytest.mark.parametrize("more", ["y" * 90_000, "\u00e9" * 90_000, ""])
@pytest.mark.parametrize("first", ["short", "x" * 33_000, "x" * 120_000])
def test_a_long_chat_is_measured_and_hashed_as_one_text(
    first: str, more: str, blocks_max: int
) -> None:
    messages = [{"role": "system", "content": first}, {"role": "user", "content": more}]
    joined = f"system{first}user{more}"
    one = read(Endpoint.CHAT, {"messages": messages}, blocks_max=blocks_max)
    other = read(Endpoint.COMPLETIONS, {"prompt": joined}, blocks_max=blocks_max)
    size = len(joined.encode())
    assert one.prompt_bytes == other.prompt_bytes == size
    assert one.prefix == other.prefix
    assert len(one.prefix) == min(blocks_max, blocks_of(size))


def test_without_prefix_settings_nothing_is_hashed() -> None:
    reader = BodyReader(Endpoint.CHAT, PrefixSettings(enabled=False))
    body = orjson.dumps(chat("x" * 5000))
    assert reader.read(JSON, body, request_id="r", tenant="t").prefix == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
names = st.sampled_from(
    [
        "model",
        "stream",
        "max_tokens",
        "messages",
        "prompt",
        "text",
        "input",
        "input_ids",
        "system",
        "sampling_params",
        "n",
        "tools",
        "instructions",
        "rid",
        "documents",
        "content",
    ]
)


@given(endpoint=st.sampled_from(Endpoint), body=st.dictionaries(names, json_values, max_size=6))
def test_any_json_object_is_either_read_or_refused(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    try:
        data = orjson.dumps(body)
    except TypeError:  # integers beyond 64 bits
        return
    spec = read_or_refused(endpoint, data)
    if spec is not None:
        assert spec.prompt_bytes >= 0
        assert 1 <= spec.samples <= SAMPLES_MAX
        assert spec.max_tokens is None or 1 <= spec.max_tokens <= TOKENS_MAX


chat_values = {
    "model": st.sampled_from(["m", "", None, 5]),
    "stream": st.sampled_from([True, False, None, 1]),
    "max_tokens": st.sampled_from([None, 0, 1, TOKENS_MAX, TOKENS_MAX + 1, True, 5.0, "5"]),
    "messages": json_values
    | st.lists(
        st.fixed_dictionaries(
            {"role": st.text(max_size=5), "content": st.text(max_size=512) | json_values},
            optional={"name": st.text(max_size=5)},
        )
    ),
}


@given(
    endpoint=st.sampled_from([Endpoint.CHAT, Endpoint.MESSAGES]),
    body=st.fixed_dictionaries({}, optional=chat_values),
)
def test_a_field_that_says_nothing_changes_nothing(
    endpoint: Endpoint, body: dict[str, Any]
) -> None:
    """A chat without it takes a shorter way through the reader."""

    def found(body: dict[str, Any]) -> RequestSpec | tuple[str | None, str]:
        try:
            return read(endpoint, body)
        except Refused as refused:
            return refused.param, refused.message

    try:
        orjson.dumps(body)
    except TypeError:  # integers beyond 64 bits
        return
    assert found(body) == found(body | {"tools": None})


def test_a_form_is_for_the_model_that_it_names() -> None:
    reader = BodyReader(Endpoint.OTHER, PrefixSettings(), forms=True)

    def model(value: bytes) -> str | None:
        part = b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + value
        body = part + b"\r\n--B--\r\n"
        form = b"multipart/form-data; boundary=B"
        return reader.read(form, body, request_id="r", tenant="t").model

    assert model(b"whisper") == "whisper"
    assert model(b"") is None
    with pytest.raises(Refused) as caught:
        model(b"x" * 513)
    assert caught.value.param == "model"
