"""Finding a field of a multipart form."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.forms import form_field

TYPE = b"multipart/form-data; boundary=B"
MODEL = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
FILE = (
    b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n'
    b"Content-Type: audio/wav\r\n\r\n\x00\xff\r\n--\r\n\r\nname=model\r\n"
)
END = b"--B--\r\n"


@pytest.mark.parametrize(
    "body",
    [
        MODEL + END,
        FILE + MODEL + END,
        MODEL + FILE + END,
        MODEL + MODEL.replace(b"whisper", b"second") + END,
        b"preamble\r\n" + FILE + MODEL + END + b"epilogue",
        MODEL.replace(b'"model"', b"model") + END,
        MODEL.replace(b"Content-Disposition: ", b"X: y\r\ncontent-disposition:") + END,
    ],
    ids=range(7),
)
def test_a_field_is_found_wherever_it_stands(body: bytes) -> None:
    assert form_field(TYPE, body, "model") == "whisper"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (TYPE, FILE + END),
        (TYPE, b""),
        (TYPE, MODEL),  # cut
        (TYPE, MODEL.replace(b"whisper", b"\xff") + END),
        (TYPE, MODEL.replace(b"whisper", b"x" * 5_000) + END),
        (TYPE, FILE * 64 + MODEL + END),
        (b"multipart/form-data", MODEL + END),
        (b"multipart/form-data; boundary=", MODEL + END),
        (b"multipart/form-data; boundary=C", MODEL + END),
        (b"text/plain; boundary=B", MODEL + END),
        (b"", MODEL + END),
    ],
    ids=range(11),
)
def test_what_is_not_there_or_cannot_be_read_is_none(content_type: bytes, body: bytes) -> None:
    assert form_field(content_type, body, "model") is None


def test_a_client_librarys_form_is_understood() -> None:
    request = httpx.Request(
        "POST",
        "http://h",
        data={"language": "en", "model": "große/whisper"},
        files={"file": ("a.wav", b"\x00" * 100_000)},
    )
    content_type = request.headers["content-type"].encode()
    assert form_field(content_type, request.read(), "model") == "große/whisper"


@given(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([MODEL, FILE, END, b"--B", b"\r\n", b"\r\n\r\n", b"model", b'"', b";"])
    ),
)
def test_no_bytes_break_it(junk: bytes, parts: list[bytes]) -> None:
    for content_type in (TYPE, junk, TYPE + junk):
        form_field(content_type, junk + b"".join(parts), "model")
        form_field(content_type, b"".join(parts) + junk, "model")
