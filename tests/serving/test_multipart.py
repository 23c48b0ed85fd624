"""A form that a client uploads is read as it was written."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from borders.refusal import BadRequest
from serving.api.files import read_form
from tests.thorough import cases

_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1, max_size=20)
_CONTENTS = st.tuples(_NAMES | st.none(), st.binary() | st.just(b"\r\n--"))


@settings(max_examples=cases(30, 1000))
@given(st.dictionaries(_NAMES, _CONTENTS, min_size=1, max_size=16))
def test_a_form_is_read_as_it_was_written(fields: dict[str, tuple[str | None, bytes]]) -> None:
    request = httpx.Request("POST", "http://a", files=[*fields.items()])
    form = read_form(request.headers["content-type"], request.read())
    assert [each.content for each in form.values()] == [content for _, content in fields.values()]
    if all(name.isalnum() and name.isascii() for name in fields):
        assert [*form] == [*fields]
        plain = [name for name, _ in fields.values()]
        if all(name is None or (name.isalnum() and name.isascii()) for name in plain):
            assert [each.filename for each in form.values()] == plain


@given(st.binary(max_size=60))
def test_a_form_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_form("multipart/form-data; boundary=b", body.replace(b"--b", b""))
    with pytest.raises(BadRequest):
        read_form("multipart/form-data", body)


@pytest.mark.parametrize("many", [";", ';"'])
def test_a_long_type_is_refused_unread(many: str) -> None:
    """The standard library's time for one is quadratic."""
    with pytest.raises(BadRequest, match="must be a form"):
        read_form("multipart/form-data; boundary=b" + many * 4096, b"--b--")


_UNREADABLE = [
    "idna''%ff",
    "undefined''x",
    "punycode''%ff",
    "\x00''ab",
    "utf-8''b; {}*0=a",
    "utf-8''b; {}*0*=''a",
]


@pytest.mark.parametrize("value", _UNREADABLE)
def test_a_header_that_the_standard_library_fails_to_read_is_refused(value: str) -> None:
    head = f"content-disposition: form-data; name=file; filename*={value.format('filename')}"
    for kind, body in (
        ("multipart/form-data; boundary=b", f"--b\r\n{head}\r\n\r\nx\r\n--b--\r\n"),
        (f"multipart/form-data; boundary*={value.format('boundary')}", "--b--"),
    ):
        with pytest.raises(BadRequest, match="cannot be read"):
            read_form(kind, body.encode())
