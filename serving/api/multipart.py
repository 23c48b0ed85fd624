"""Parse an uploaded form, `multipart/form-data` (RFC 7578)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message

from borders.refusal import BadRequest

_MOST_FIELDS = 16
_LONGEST_HEAD = 4096
_NO_FORM = "the body must be a form with a file, sent with Content-Type: multipart/form-data"


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form; `filename` is None unless the field is a file."""

    content: bytes
    filename: str | None


def _parsed(header: str, value: str) -> Message:
    message = Message()
    message[header] = value
    return message


def read_form(content_type: str, body: bytes) -> Mapping[str, FormField]:
    """Return the fields by name; raises BadRequest."""
    kind = _parsed("content-type", content_type)
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary:
        raise BadRequest(None, _NO_FORM)
    # A boundary stands at the beginning of a line. A line break before the body makes that true of the first
    # one.
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    parts = (b"\r\n" + body).split(mark, _MOST_FIELDS + 1)[1:]
    if not parts or parts[-1].strip() != b"--":
        problem = f"the form is cut off, or has more than {_MOST_FIELDS} fields; send it again"
        raise BadRequest(None, problem)
    fields: dict[str, FormField] = {}
    for part in parts[:-1]:
        head, is_whole, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        name, filename = _names(head) if is_whole and len(head) <= _LONGEST_HEAD else (None, None)
        if name is None:
            raise BadRequest(None, "a field of the form has no name; give it one in Content-Disposition")
        if name in fields:
            raise BadRequest(name, "appears twice in the form; send it once")
        fields[name] = FormField(content, filename)
    return fields


def _names(head: bytes) -> tuple[str | None, str | None]:
    """Return the name of the field, and that of its file."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        header, _, value = line.partition(":")
        if header.strip().lower() == "content-disposition":
            disposition = _parsed("content-disposition", value.strip())
            if disposition.get_content_disposition() == "form-data":
                name = disposition.get_param("name", header="content-disposition")
                return (name if isinstance(name, str) else None), disposition.get_filename()
    return None, None
