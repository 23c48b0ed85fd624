"""Which requests come in at all, and whose are they?

What every request passes before its body is read: keys, the size of the body, an id for its answer and the
log, and a JSON error for a defect inside. Written for ASGI itself, because each layer of a framework delays
every event of a stream.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from continuous_batching.refusal import BadRequest, shown
from models.file_bounds import MOST_JSON_BYTES, read_bounded
from recipes.schema.verb import in_one_line
from serving.api.bodies import BodyMemory
from serving.api.errors import DEFECT, error_response, response_of
from serving.failures import ShutDown
from serving.metrics.server_stats import TRACE_HEADERS

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health", "/ready")  # a page that asks for the key, and the paths of probes
GATEWAY = "*"  # in the place of a key's tenant: it may name the tenant of each request
_LOCAL = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True, slots=True)
class Client:
    """Who sent a request: its key, which alone may see and end it, the tenant whose share it counts against,
    and the salt that separates its pages. Without keys, all of these are "".
    """

    owner: str
    tenant: str
    salt: str
    names_tenants: bool  # as a gateway, which knows its own clients

    def tenant_for(self, named: str | None, user: str | None) -> str:
        """Whose share a request counts against that names a tenant, or a user, or neither.

        Raises BadRequest where the key may not name another tenant than its own: it would dodge its share.
        """
        if self.names_tenants:
            return named or user or self.tenant
        if named and named != self.tenant:
            raise BadRequest(
                "tenant",
                f"is {shown(named)}, and this key has a tenant of its own",
                value=named,
                fix=f"leave it out; a key whose tenant is {GATEWAY} in the keys file may name others",
            )
        return self.tenant

    def salted(self, own: str) -> str:
        """Its salt with the request's own, which is hashed so that the length is always the same."""
        return f"{self.salt}:{hashlib.sha256(own.encode()).hexdigest()[:32]}" if self.salt else own


ANYBODY = Client("", "", "", names_tenants=True)


def can_be_sent(key: str) -> bool:
    """Whether every client can send this key."""
    return key.isascii() and key.isprintable() and len(key.split()) == 1


def key_of_environment() -> str:
    """API_KEY, or "" without one; raises ValueError for one that no client could send."""
    given = os.environ.get("API_KEY", "")
    key = given.strip()  # it may come from a file with a line break
    if given and not can_be_sent(key):
        raise ValueError("API_KEY must be one word of printable ASCII; correct or unset it")
    return key


class ApiKeys:
    """The keys that open the server; with none, it is open to all who reach it.

    A key without a tenant is a tenant of its own, whose name no line of a keys file can hold.
    """

    def __init__(self, tenant_of: Mapping[str, str], *, share_prefixes: bool = False) -> None:
        self._known = []
        for number, (key, tenant) in enumerate(tenant_of.items(), 1):
            digest = hashlib.sha256(key.encode()).digest()
            salt = "" if share_prefixes else hashlib.sha256(b"salt" + digest).hexdigest()[:32]
            owner, is_gateway = f"key {number}", tenant == GATEWAY
            own = owner if is_gateway or not tenant else tenant
            self._known.append((digest, Client(owner, own, salt, names_tenants=is_gateway)))

    @staticmethod
    def read(path: str) -> dict[str, str]:
        """Keys and their tenants from a file: `KEY` or `KEY TENANT # COMMENT` a line; raises ValueError."""
        tenant_of: dict[str, str] = {}
        try:
            text = read_bounded(Path(path), MOST_JSON_BYTES).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is wrong; save it as such") from error
        except OSError as error:
            raise OSError(f"--api-keys {in_one_line(error)}") from error
        for number, line in enumerate(text.splitlines(), 1):
            words = list(takewhile(lambda word: not word.startswith("#"), line.split()))
            if not words:
                continue
            if len(words) > 2:
                raise ValueError(
                    f"{path}:{number}: a line is KEY or KEY TENANT, and this has {len(words)} words"
                )
            if not can_be_sent(words[0]):
                raise ValueError(f"{path}:{number}: this key cannot be sent; it must be of printable ASCII")
            if words[0] in tenant_of:
                raise ValueError(f"{path}:{number}: this key stands there twice")
            tenant_of[words[0]] = words[1] if len(words) == 2 else ""
        if not tenant_of:
            raise ValueError(f"{path} holds no key; write one a line")
        return tenant_of

    @property
    def are_needed(self) -> bool:
        """Whether a request must have one."""
        return bool(self._known)

    def client(self, authorization: str | None) -> Client | None:
        """The sender of this header, or None if unknown. Takes the same time for every wrong key."""
        if not self._known:
            return ANYBODY
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "replace")).digest()
        found = None
        for known, client in self._known:
            if hmac.compare_digest(known, digest):
                found = client
        return found if scheme.lower() == "bearer" else None


class AccessControl:
    """Wraps an application; `on_response` gets the status of each response at its end.

    A server for this machine alone (`is_local`) answers to no other host name: otherwise a page in a browser
    here could read it, through a name of its own that it lets point here (DNS rebinding).
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        max_body_bytes: int,
        memory: BodyMemory,
        on_response: Callable[[int], None],
        *,
        is_local: bool,
    ) -> None:
        self._app = app
        self._is_local = is_local
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._memory = memory
        self._on_response = on_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        assert scope["type"] == "http", "the server is started without others"
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        state = scope.setdefault("state", {})
        name = state["request_id"] = given if _ID.fullmatch(given) else uuid.uuid4().hex
        traced = ("traceparent", "tracestate") if b"traceparent" in headers else ()
        TRACE_HEADERS.set({each: headers.get(each.encode(), "") for each in traced})
        start_s, status = time.monotonic(), 499  # remains where the client went away first

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
                if refusal is not None and b"expect" in headers:  # its body may never come
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        refusal = self._refusal(scope, headers, state)
        try:
            if refusal is not None:
                await refusal(scope, receive, send_on)
            else:
                await self._measured(scope, receive, send_on)
        except asyncio.CancelledError:  # the server ends; uvicorn would answer with 500
            if status == 499:
                await response_of(ShutDown())(scope, receive, send_on)
        except Exception:
            log.exception("%s: a defect of the server", name, extra={"fields": {"request_id": name}})
            if status == 499:
                await error_response(500, DEFECT)(scope, receive, send_on)
        finally:
            if scope["path"] not in OPEN_PATHS:  # a probe is no request
                self._on_response(status)
            took_ms = 1e3 * (time.monotonic() - start_s)
            path = scope["raw_path"].decode("latin-1")  # as received: without line breaks
            shown = {"request_id": name, "method": scope["method"], "path": path, "status": status}
            log.info(
                "%s %s %s %d %.1f ms",
                *shown.values(),
                took_ms,
                extra={"fields": shown | {"took_ms": round(took_ms, 1)}},
            )

    def _refusal(self, scope: Scope, headers: dict[bytes, str], state: dict[str, object]) -> ASGIApp | None:
        if self._is_local and not _LOCAL.fullmatch(headers.get(b"host", "localhost")):
            return error_response(
                403, "without keys this server answers at localhost alone; ask there, or give it --api-keys"
            )
        client = self._keys.client(headers.get(b"authorization"))
        if client is None and scope["path"] not in OPEN_PATHS:
            return error_response(401, "the key is missing or wrong; send Authorization: Bearer KEY")
        state["client"] = client
        encodings = [value for name, value in scope["headers"] if name == b"content-encoding"]
        if any(value.strip().lower() not in (b"", b"identity") for value in encodings):
            return error_response(415, "a body is read as it comes; send it without Content-Encoding")
        if headers.get(b"expect", "100-continue").lower() != "100-continue":
            return error_response(417, "Expect may only be 100-continue; leave it out")
        length = headers.get(b"content-length", "0")
        is_long = length.isdecimal() and (len(length) > 18 or int(length) > self._max_body_bytes)
        return error_response(413, self._too_long()) if is_long else None

    def _too_long(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes (server.max_body_mib); shorten it"

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application read the body as far as its size and that of all bodies may be."""
        num_bytes, num_held = 0, 0

        async def measured() -> Message:
            nonlocal num_bytes, num_held
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_long())
            self._memory.take(size)
            num_held += size
            return message

        def forget() -> None:
            nonlocal num_held
            self._memory.num_bytes -= num_held
            num_held = 0

        scope["state"]["body_is_read"] = forget
        try:
            await self._app(scope, measured, send)
        finally:
            forget()


class HeadAndOptions:
    """Wraps an application that knows GET and POST only.

    HEAD is GET without the body; OPTIONS answers with the methods of a path, which a 405 names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        method = scope.get("method")
        if method not in ("HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        is_sent = False  # all that is to be sent

        async def listen() -> Message:
            return {"type": "http.disconnect"} if is_sent else await receive()  # ends a stream

        async def send_on(message: Message) -> None:
            nonlocal is_sent
            if is_sent:
                return
            if message["type"] == "http.response.start":
                is_sent = method == "HEAD" or message["status"] == 405
                if method == "OPTIONS" and is_sent:
                    allowed = [header for header in message["headers"] if header[0] == b"allow"]
                    message = {**message, "status": 204, "headers": allowed}
            await send(message)
            if is_sent:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, listen, send_on)
