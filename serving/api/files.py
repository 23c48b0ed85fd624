"""Serve `/v1/files`: clients upload files of requests, and list, read and delete files.

A file is uploaded as a form, `multipart/form-data` (RFC 7578).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from borders.field_types import LONGEST_NAME
from borders.refusal import BadRequest, abbreviate_json
from serving.api.batch_runner import Batches
from serving.api.errors import NotFound
from serving.api.streamed import StreamedResponse
from serving.batches.lines import split_lines
from serving.batches.store import BatchStore, StoredBatch, StoredFile
from serving.failures import Failure

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
    if len(content_type) > _LONGEST_HEAD:  # the standard library is slow to read a long one
        raise BadRequest(None, _NO_FORM)
    kind = _parsed("content-type", content_type)
    with _refused_if_unreadable():
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
        with _refused_if_unreadable():
            name, filename = _names(head) if is_whole and len(head) <= _LONGEST_HEAD else (None, None)
        if name is None:
            raise BadRequest(None, "a field of the form has no name; give it one in Content-Disposition")
        if name in fields:
            raise BadRequest(name, "appears twice in the form; send it once")
        fields[name] = FormField(content, filename)
    return fields


@contextmanager
def _refused_if_unreadable() -> Iterator[None]:
    """Raise BadRequest for a header that the standard library fails to read: its charset, or its parts."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise BadRequest(None, "a header of the form cannot be read; write it in UTF-8") from error


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


PATH = "/v1/files"
MOST_LISTED = 10_000
_PIECE_BYTES = 2**20
_FIELDS = {"file", "purpose"}

Stored = TypeVar("Stored", StoredFile, StoredBatch)


class NoSpace(Failure):
    """The store of files is full."""

    status = 413


def files_router(batches: Batches, route: type[APIRoute]) -> APIRouter:
    """Return a router with the routes."""
    routes = APIRouter(route_class=route, prefix=PATH)

    @routes.post("")
    async def upload(request: Request) -> dict[str, Any]:
        """Store a file of requests."""
        kept = partial(
            _kept,
            owner=request.state.client.lasting,
            content_type=request.headers.get("content-type", ""),
            body=await request.body(),
        )
        return described(await batches.call(kept))

    @routes.get("")
    async def files(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> dict[str, Any]:
        """List the files of this key, the newest first unless asked otherwise."""
        owner = request.state.client.lasting
        place = None if after is None else (await _found(batches, after, owner)).place
        found = partial(
            BatchStore.files,
            owner=owner,
            after=place,
            most=limit + 1,
            is_ascending=order == "asc",
            purpose=purpose,
        )
        return listed(await batches.call(found), limit, described)

    @routes.get("/{file_id}")
    async def retrieve(file_id: str, request: Request) -> dict[str, Any]:
        """Describe a file."""
        return described(await _found(batches, file_id, request.state.client.lasting))

    @routes.get("/{file_id}/content", response_class=Response)
    async def content(file_id: str, request: Request) -> Response:
        """Return the content of a file."""
        file = await _found(batches, file_id, request.state.client.lasting)
        pieces = _pieces(batches, file)
        response = StreamedResponse(pieces, lambda: None, asyncio.Event().wait, "application/jsonl")
        response.headers["content-length"] = str(
            file.num_bytes
        )  # otherwise half of a file that is deleted meanwhile would look complete
        return response

    @routes.delete("/{file_id}")
    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        """Delete a file, unless a batch reads it."""
        file = await _found(batches, file_id, request.state.client.lasting)
        await batches.call(partial(BatchStore.delete, file=file))
        return {"id": file.id, "object": "file", "deleted": True}

    return routes


def _kept(store: BatchStore, owner: str, content_type: str, body: bytes) -> StoredFile:
    content, filename = _uploaded(read_form(content_type, body))
    try:
        return store.add_file(owner, filename, split_lines(content))
    except ValueError as error:
        raise BadRequest("file", str(error), fix="send one request of JSON a line") from error
    except sqlite3.OperationalError as error:
        if "full" not in str(error):
            raise
        raise NoSpace(f"the file cannot be stored, {error}: delete files that are not needed") from error


def _uploaded(form: Mapping[str, FormField]) -> tuple[bytes, str]:
    """Return the file of a form and its name; raises BadRequest for a form that asks for anything else."""
    for name in sorted(form.keys() - _FIELDS):
        raise BadRequest(abbreviate_json(name).strip('"'), "is not supported", fix="leave it out")
    purpose, file = (form.get(name) for name in ("purpose", "file"))
    given = "" if purpose is None else purpose.content.decode("utf-8", "replace")
    if given != "batch":
        raise BadRequest("purpose", value=given, limit='"batch"')
    if file is None or not file.filename:
        raise BadRequest("file", "is missing; it must be a file with a name")
    return file.content, file.filename[-LONGEST_NAME:]


async def _found(batches: Batches, file_id: str, owner: str) -> StoredFile:
    found = await batches.call(partial(BatchStore.file, file_id=file_id, owner=owner))
    if found is None:
        raise NotFound(f"there is no file {file_id[:128]!r}")
    return found


async def _pieces(batches: Batches, file: StoredFile) -> AsyncGenerator[bytes, None]:
    number = 0
    while lines := await batches.call(
        partial(BatchStore.content, file=file, after=number, most_bytes=_PIECE_BYTES)
    ):
        number = lines[-1][0]
        yield b"".join(text for _, text in lines)


def described(file: StoredFile) -> dict[str, Any]:
    """Describe a file in the form of OpenAI's API."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.made_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }


def listed(found: list[Stored], most: int, describe: Any) -> dict[str, Any]:
    """Return a page of at most `most` entries; `found` has one more if there is a next page."""
    page = found[:most]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    return {
        "object": "list",
        "data": [describe(each) for each in page],
        **ends,
        "has_more": len(found) > most,
    }
