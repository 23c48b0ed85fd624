"""Write failures and refusals as HTTP errors, in the format that OpenAI's clients read or in Anthropic's.

Which of them a client reads follows from the path that it asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from borders.refusal import TOO_LONG, BadRequest
from serving.failures import Failure

_KINDS = {  # types that differ from OpenAI's two usual ones, for mistakes of the client and of the server
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    499: "aborted_error",
    503: "service_unavailable_error",
}
ANTHROPICS_PATHS = "/v1/messages"
_ANTHROPICS_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
DEFECT = "a defect of the server; its log tells more"
_LONGEST = 500  # most characters of a message, which may quote the client's text


class NotFound(Failure):
    """The model or the request that a client names does not exist."""

    status = 404

    @classmethod
    def of_model(cls, asked: str, served: Sequence[str]) -> NotFound:
        """Return the failure for a model that is not served."""
        return cls(f"there is no model {asked!r}; this server serves {', '.join(map(repr, served))}")


class OtherModel(Failure):
    """An answer that was begun with another model or adapter cannot go on here."""

    status = 409


class Forbidden(Failure):
    """The client's key is not an operator's."""

    status = 403


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> bytes:
    """Return the JSON of an error."""
    shown = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}..."
    kind = _KINDS.get(status, "internal_error" if status >= 500 else "invalid_request_error")
    error = {"message": whole(shown), "type": kind, "param": param and whole(param), "code": code or status}
    return msgspec.json.encode({"error": error})


def whole(text: str) -> str:
    """Replace lone surrogates in a text, which a client may send and which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def anthropics_error(status: int, message: str, request_id: str | None, code: str | None = None) -> bytes:
    """Return the JSON of an error as Anthropic's clients read it, in an answer or in an event of a stream."""
    shown = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}..."
    kind = _ANTHROPICS_KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": whole(shown)}
    if code is not None:
        error["details"] = {"error_code": code}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def for_anthropic(failure: Failure | BadRequest) -> tuple[int, str]:
    """Return the status and the message of a failure.

    The refusal of a prompt that is too long begins as Anthropic's, by which Claude Code knows that it has to
    shorten the conversation.
    """
    if not isinstance(failure, BadRequest):
        return failure.status, str(failure)
    if failure.code == TOO_LONG and failure.field != "max_tokens":
        return 400, f"prompt is too long: {failure.value} tokens > {failure.limit} maximum"
    return 400, str(failure)


class ErrorResponse(Response):
    """A response that consists of an error; Anthropic's clients get `message` and `code` in their form."""

    def __init__(
        self, status: int, body: bytes, headers: dict[str, str], message: str, code: str | None
    ) -> None:
        super().__init__(body, status, headers, "application/json")
        self._message = message
        self._code = code

    def become_of(self, scope: Scope) -> None:
        """Take the format that belongs to the path."""
        if scope.get("path", "").startswith(ANTHROPICS_PATHS):
            request_id = scope.get("state", {}).get("request_id")
            self.body = anthropics_error(self.status_code, self._message, request_id, self._code)
            self.headers["content-length"] = str(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error in the format that belongs to the path."""
        self.become_of(scope)
        await super().__call__(scope, receive, send)


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    retry_after_s: float | None = None,
    code: str | None = None,
    for_anthropic: str | None = None,
) -> ErrorResponse:
    """Return a response that consists of an error; Anthropic's clients may be told another message."""
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    body = error_body(status, message, param, code)
    return ErrorResponse(status, body, headers, for_anthropic or message, code)


def body_of(failure: Failure | BadRequest) -> bytes:
    """Return the JSON of a failure within a stream."""
    if isinstance(failure, BadRequest):
        return error_body(400, str(failure), failure.field, failure.code)
    return error_body(failure.status, str(failure), code=failure.code)


def response_of(failure: Failure | BadRequest) -> ErrorResponse:
    """Return the response for a failure that occurs before any part of the answer was sent."""
    message = for_anthropic(failure)[1]
    if isinstance(failure, BadRequest):
        return error_response(400, str(failure), failure.field, code=failure.code, for_anthropic=message)
    return error_response(
        failure.status, str(failure), retry_after_s=failure.retry_after_s, code=failure.code
    )


def install(app: FastAPI) -> None:
    """Make the application answer every exception in this format."""

    @app.exception_handler(Exception)
    async def defect(_: Request, __: Exception) -> Response:
        return error_response(500, DEFECT)

    @app.exception_handler(Failure)
    @app.exception_handler(BadRequest)
    async def failed(request: Request, failure: Failure | BadRequest) -> Response:
        request.state.failure = failure  # A status has many reasons; who asks in this process sees which.
        return response_of(failure)

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> Response:
        return error_response(400, *_first(error.errors()))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        messages = {
            400: "the body cannot be read as JSON: it is not UTF-8, or too deep, or has too long an integer",
            404: f"there is no {request.scope['path']}{_meant(request)}",
            405: f"{request.method} is not allowed here",
        }
        response = error_response(error.status_code, messages.get(error.status_code, str(error.detail)))
        response.headers.update(error.headers or {})
        return response


def _meant(request: Request) -> str:
    """Return the suffix for a path that lacks its /v1, has it twice, or ends in a slash."""
    given = request.scope["path"]
    path = given.rstrip("/")
    while path.startswith("/v1/v1/"):
        path = path.removeprefix("/v1")
    known = {route.path for route in request.app.routes if isinstance(route, Route)} - {given}
    return next((f"; did you mean {each}?" for each in (path, f"/v1{path}") if each in known), "")


def _first(errors: Any) -> tuple[str, str | None]:
    """Return one line for the first of pydantic's errors, and the field that it is about."""
    error = errors[0]
    kind, place = error["type"], [str(each) for each in error["loc"] if each != "body"]
    if kind == "json_invalid":
        at = "".join(f" at character {int(index) + 1}" for index in place)
        return f"the body is not JSON: {error.get('ctx', {}).get('error', error['msg'])}{at}", None
    if kind == "refused":  # raised by one of our own body classes
        return error["msg"], error["ctx"]["field"]
    if kind == "missing" and not place:
        return "the body is missing; it must be a JSON object", None
    if kind == "model_attributes_type" and not place:
        return "the body must be a JSON object, sent with Content-Type: application/json", None
    if not place:
        return error["msg"], None
    name = _name(error["loc"])
    messages = dict.fromkeys(
        each["msg"] for each in errors if _name(each["loc"]) == name
    )  # a union has several
    message = " or ".join(messages).replace("or Input should be", "or")
    return f"{name}: {message[:1].lower()}{message[1:]}", place[0]


def _name(place: Any) -> str:
    """Return a place in a body as its sender would write it, such as `stop[0]`."""
    first, *rest = [str(each) for each in place if each != "body"] or [""]
    return first + "".join(f"[{each}]" for each in rest if each.isdigit())
