"""Pass a request to a replica and its answer back, also when the replica is lost.

If nothing of the answer has been sent, a request goes to another replica when the first is lost or refuses
it. If an answer has begun, its client is told that it ends early: a stream by an error event in place of its
end, an answer of announced size by a connection that breaks. No request is ever sent to two replicas at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.types import Receive, Scope, Send

from continuous_batching.routing.routing import RoutedPrompt, Routing, Sent
from continuous_batching.routing.splitting import PROMPT_REPLICA_HEADER, PromptPlace, Splitting
from serving.api.api_keys import ANYBODY, Client
from serving.api.errors import error_body, error_response
from serving.router.fair_turns import FairTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.prompts import Prompts, RoutedBody
from serving.router.replicas import FleetReplica
from serving.router.upstream import HeaderLines, Lost, UpstreamAnswer

log = logging.getLogger("route")

SESSION_HEADER, TENANT_HEADER = b"x-session-id", b"x-tenant"
RETRY_S = 1.0
AGAIN_S = 0.05  # interval at which the request of a disconnected client is cancelled again
_ENDS = (b"data: [DONE]", b"data:[DONE]")
_WITH_DONE = ("/v1/chat/completions", "/v1/completions")  # the paths whose streams end with [DONE]
_GENERATIONS = (*_WITH_DONE, "/v1/responses")
_LONG_BYTES = 2**14  # a body of this size or more is read in a thread
_MOST_WHOLE_BYTES = 2**23  # most bytes of an answer that is held back until it is complete
_OWN = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"expect", b"te"}
_UNREADABLE = b"accept-encoding"  # the end of a compressed stream could not be told from a loss
_PROMPT_REPLICA = PROMPT_REPLICA_HEADER.encode()
_NOT_PASSED_ON = frozenset({*_OWN, _UNREADABLE, b"x-request-id", _PROMPT_REPLICA})
_NOT_SENT_BACK = frozenset({*_OWN, b"x-request-id", b"server", b"date"})
_ONCE = ("/v1/files", "/v1/batches")  # requests posted to these paths are never repeated
_ABORT = "/abort/"  # followed by a request's id, which only the replica that runs it knows
_DONE, _UNKNOWN = 200, 404
_NOT_NOW = (429, 502, 503)  # statuses after which another replica may accept the request
_NOTHING_ASKED, _NO_PROMPT = RoutedBody(), RoutedPrompt(0)


class Proxy:
    """Passes requests on; `prompts` reads their prompts, and `turns` decides when each is sent."""

    def __init__(
        self,
        routing: Routing,
        replicas: list[FleetReplica],
        prompts: Prompts,
        turns: FairTurns,
        figures: FleetFigures,
        splitting: Splitting | None = None,
    ) -> None:
        self._routing = routing
        self._replicas = replicas
        self._prompts = prompts
        self._turns = turns
        self._figures = figures
        self._splitting = splitting or Splitting(routing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        body = await _body(receive)
        if body is None:
            return
        if scope["method"] == "POST" and scope["path"].startswith(_ABORT):
            await self._abort(scope, send, body)
            return
        watch = ClientWatch(scope.setdefault("state", {}))
        try:
            await self._in_turn(scope, send, body)
        except asyncio.CancelledError:
            if not watch.is_gone:
                raise
        finally:
            watch.end()

    async def _in_turn(self, scope: Scope, send: Send, body: bytes) -> None:
        """Read what a request asks for, and send it on when its tenant has its turn."""
        asked, prompt = _NOTHING_ASKED, _NO_PROMPT
        client: Client = scope["state"].get("client") or ANYBODY
        if scope["method"] == "POST" and scope["path"] in _GENERATIONS:
            asked, prompt = await self._read(body, client)
        headers = dict(scope["headers"])
        named = headers.get(TENANT_HEADER, b"").decode("latin-1") or asked.tenant
        tenant = (named or asked.user or client.tenant) if client.names_tenants else client.tenant
        session = (
            f"{client.owner}\0{value.decode('latin-1')}" if (value := headers.get(SESSION_HEADER)) else ""
        )
        came_s = time.monotonic()
        await self._turns.enter(tenant, prompt.num_tokens)
        try:
            self._figures.waited(time.monotonic() - came_s)
            await self._send_on(scope, send, body, prompt, session)
        finally:
            self._turns.leave()

    async def _abort(self, scope: Scope, send: Send, body: bytes) -> None:
        """Ask all replicas at once to abort a request.

        The first replica that aborts it answers; otherwise one that refuses for any reason but not knowing
        the request; otherwise one that does not know it.
        """
        headers, path = _passed_on(scope), scope["raw_path"].decode("latin-1")

        async def ask(replica: FleetReplica) -> tuple[int, HeaderLines, bytes]:
            answer = await replica.server.ask("POST", path, headers, body)
            try:
                return answer.status, answer.headers, await _whole(answer)
            finally:
                replica.server.done(answer)

        there = [each for each in self._replicas if each.state not in ("lost", "refused", "gone")]
        asking = [asyncio.ensure_future(ask(each)) for each in there]
        said: tuple[int, HeaderLines, bytes] | None = None
        try:
            for coming in asyncio.as_completed(asking):
                with suppress(Lost):  # a lost replica's requests are lost with it, and their clients are told
                    answer = await coming
                    if said is None or said[0] == _UNKNOWN or answer[0] == _DONE:
                        said = answer
                    if answer[0] == _DONE:
                        break
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        if said is not None:
            await _send_whole(send, *said)
        else:
            why = "no replica could be reached; send the request again"
            await error_response(503, why, retry_after_s=RETRY_S)(scope, _nothing, send)

    async def _read(self, body: bytes, client: Client) -> tuple[RoutedBody, RoutedPrompt]:
        asked = self._prompts.asked(body)
        if len(body) < _LONG_BYTES or not self._prompts.page_size:
            return asked, self._prompts.read(body, asked, client)
        return asked, await asyncio.to_thread(self._prompts.read, body, asked, client)

    async def _send_on(
        self, scope: Scope, send: Send, body: bytes, prompt: RoutedPrompt, session: str
    ) -> None:
        """Send a request to one replica after the other, until one begins to answer."""
        headers = _passed_on(scope)
        raw = scope["raw_path"].decode("latin-1")
        path = f"{raw}?{query.decode('latin-1')}" if (query := scope["query_string"]) else raw
        is_once = scope["method"] == "POST" and scope["path"].startswith(_ONCE)
        tried: list[int] = []
        refusal: tuple[int, HeaderLines, bytes] | None = None
        while (sent := self._sent(prompt, session, tried)) is not None:
            replica = self._replicas[sent.replica]
            split = self._splitting.choose(prompt, sent, time.monotonic())
            self._figures.sent(replica, sent, prompt, split, is_again=bool(tried))
            tried.append(sent.replica)
            place = split.place
            by = [] if place is None else [(_PROMPT_REPLICA, place.endpoint.encode())]
            try:
                answer = await replica.server.ask(scope["method"], path, headers + by, body, is_once=is_once)
            except Lost as lost:
                self._end(replica, sent, place)
                replica.num_lost += 1
                if is_once and lost.may_be_done:
                    await self._may_be_done(scope, send, replica, lost)
                    return
                log.warning("%s: %s; nothing was answered, so it goes elsewhere", replica.url, lost)
                continue
            except BaseException:
                self._end(replica, sent, place)
                raise
            try:
                if answer.status in _NOT_NOW:
                    refusal = answer.status, answer.headers, await _whole(answer)
                    continue
                self._routing.begun(sent)
                if place is not None:
                    self._routing.ended(place.sent)
                if await self._forward(scope, send, answer, replica):
                    return
            except Lost as lost:
                replica.num_lost += 1
                if is_once:
                    await self._may_be_done(scope, send, replica, lost)
                    return
                log.warning("%s: %s; nothing was sent on, so it goes elsewhere", replica.url, lost)
            finally:
                replica.server.done(answer)
                self._end(replica, sent, place)
        self._figures.refused()
        if refusal is not None:
            await _send_whole(send, *refusal)
        else:
            why = "no replica can take a request now; send it again"
            await error_response(503, why, retry_after_s=RETRY_S)(scope, _nothing, send)

    async def _may_be_done(self, scope: Scope, send: Send, replica: FleetReplica, lost: Lost) -> None:
        log.warning("%s: %s; its client is told", replica.url, lost)
        why = f"the replica was lost ({lost}), and may have done this or not: check, or send it again"
        await error_response(502, why, code="replica_lost")(scope, _nothing, send)

    def _sent(self, prompt: RoutedPrompt, session: str, tried: list[int]) -> Sent | None:
        """Choose a replica for a request; one that computes prompts for others is the last resort."""
        now_s, apart = time.monotonic(), self._splitting.not_for_answers
        sent = self._routing.send(prompt, now_s, session, [*tried, *apart]) if apart else None
        return sent or self._routing.send(prompt, now_s, session, tried)

    def _end(self, replica: FleetReplica, sent: Sent, place: PromptPlace | None) -> None:
        replica.num_open -= 1
        self._routing.ended(sent)
        if place is not None:
            self._routing.ended(place.sent)

    async def _forward(self, scope: Scope, send: Send, answer: UpstreamAnswer, replica: FleetReplica) -> bool:
        """Send an answer on; raises Lost only where nothing of it was sent yet."""
        kinds = [value for name, value in answer.headers if name == b"content-type"]
        if not (kinds and kinds[0].startswith(b"text/event-stream")):
            await self._forward_whole(scope, send, answer, replica)
            return True
        unsent = await answer.next()
        await send({"type": "http.response.start", "status": answer.status, "headers": _kept(answer.headers)})
        last, wants_done = b"", answer.status == 200 and scope["path"] in _WITH_DONE
        try:
            while unsent:
                last = (last + unsent)[-64:] if len(unsent) < 64 else unsent[-64:]
                if answer.is_read:  # the end is sent with these bytes, so that the client wakes once for both
                    break
                await send({"type": "http.response.body", "body": unsent, "more_body": True})
                unsent = b""
                unsent = await answer.next()
            if wants_done and not last.rstrip().endswith(_ENDS):
                raise Lost("the stream ended before its end")
        except Lost as lost:
            self._record_loss(replica, lost)
            message = f"the replica was lost during the answer ({lost}); send the request again"
            unsent += b"" if last.endswith(b"\n\n") or not last else b"\n\n"
            unsent += _error_event(scope["path"], message)
        await send({"type": "http.response.body", "body": unsent})
        return True

    async def _forward_whole(
        self, scope: Scope, send: Send, answer: UpstreamAnswer, replica: FleetReplica
    ) -> None:
        """Send on an answer that is no event stream.

        It is held back until it is complete, unless it is very long.
        """
        parts, num_bytes = [], 0
        while num_bytes <= _MOST_WHOLE_BYTES and (part := await answer.next()):
            parts.append(part)
            num_bytes += len(part)
        if num_bytes <= _MOST_WHOLE_BYTES:
            await _send_whole(send, answer.status, answer.headers, b"".join(parts))
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": _kept(answer.headers)})
        part = b"".join(parts)
        try:
            while part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                part = await answer.next()
        except Lost as lost:
            self._record_loss(replica, lost)
            cut_off: Callable[[], None] = scope["state"]["cut_off"]
            cut_off()
            return
        await send({"type": "http.response.body", "body": b""})

    def _record_loss(self, replica: FleetReplica, lost: Lost) -> None:
        replica.num_lost += 1
        self._figures.cut_off()
        log.warning("%s: %s; its client is told", replica.url, lost)


class ClientWatch:
    """Cancels the task that creates it once the request's client disconnects, until `end`."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.is_gone = False
        self._state = state
        self._task = asyncio.current_task()
        self._again: asyncio.TimerHandle | None = None
        # serving.api.protocol calls it; a task that waits for the disconnect would cost more.
        state["when_gone"] = self._gone

    def end(self) -> None:
        """Stop watching."""
        del self._state["when_gone"]
        if self._again is not None:
            self._again.cancel()

    def _gone(self) -> None:
        assert self._task is not None, "made outside of a task"
        if self._again is not None:
            self._again.cancel()
        self.is_gone = True
        self._task.cancel()
        # `asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives just as it ends.
        self._again = self._task.get_loop().call_later(AGAIN_S, self._gone)


def _error_event(path: str, message: str) -> bytes:
    name = b"" if path in _WITH_DONE else b"event: error\n"
    return name + b"data: " + error_body(502, message, code="replica_lost") + b"\n\n"


def _passed_on(scope: Scope) -> HeaderLines:
    """Return the client's headers without those that concern only this connection."""
    headers = [each for each in scope["headers"] if each[0] not in _NOT_PASSED_ON]
    name = scope.get("state", {}).get("request_id")
    return [*headers, (b"x-request-id", name.encode())] if name else headers


def _kept(headers: HeaderLines) -> HeaderLines:
    return [each for each in headers if each[0] not in _NOT_SENT_BACK]


async def _whole(answer: UpstreamAnswer) -> bytes:
    """Return the body of a short answer; raises Lost for one that is too long."""
    parts, num_bytes = [], 0
    while part := await answer.next():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > _MOST_WHOLE_BYTES:
            raise Lost(f"it answered with more than {_MOST_WHOLE_BYTES} bytes")
    return b"".join(parts)


async def _send_whole(send: Send, status: int, headers: HeaderLines, body: bytes) -> None:
    kept = [*_kept(headers), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": kept})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client disconnected before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
