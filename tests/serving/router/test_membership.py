"""Replicas that come and go while a router runs: none is sent what it cannot answer, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from continuous_batching.routing.routing import Routing
from serving.api.api_keys import ANYBODY, ApiKeys, Client, Rights
from serving.router.fair_turns import ModelTurns
from serving.router.fleet_figures import FleetFigures
from serving.router.membership import FleetMembers
from serving.router.prompts import Prompts
from serving.router.proxy import Proxy
from serving.router.server import FleetApplication
from tests.patience import PATIENCE_S
from tests.serving.router.waiting import end, until

Answered = tuple[int, dict[str, Any]]


class Replica:
    """A server that is ready, and answers each request with its port once it is let."""

    def __init__(self) -> None:
        self.lets, self.num_asked = asyncio.Event(), 0
        self.lets.set()
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self.url

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(size)
                if head.startswith(b"POST"):
                    self.num_asked += 1
                    await self.lets.wait()
                body = json.dumps({"by": self.url}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class Router:
    """A router's application, which is asked without a socket."""

    def __init__(self, *urls: str, is_local: bool = True) -> None:
        self.routing = Routing(len(urls), tells=False)
        self.routing.is_open[:] = False
        self.members = FleetMembers(urls, self.routing, [])
        turns = ModelTurns(lambda turn: 100)
        figures = FleetFigures(self.routing, self.members.replicas, turns)
        proxy = Proxy(self.routing, self.members.replicas, Prompts(), turns, figures)
        self.app = FleetApplication(proxy, self.members, figures, is_local=is_local)

    async def ask(
        self, method: str, path: str, client: Client = ANYBODY, headers: Any = ()
    ) -> tuple[int, bytes]:
        path, _, query = path.partition("?")
        sent, status = [], 0
        received = asyncio.Queue[dict[str, Any]]()
        received.put_nowait({"type": "http.request", "body": b"{}"})

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            sent.append(message.get("body", b""))

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "headers": headers,
        }
        await self.app(
            scope | {"query_string": query.encode(), "state": {"client": client}}, received.get, send
        )
        return status, b"".join(sent)

    async def chat(self) -> Answered:
        status, body = await self.ask("POST", "/v1/chat/completions")
        return status, json.loads(body)

    async def told(self) -> dict[str, dict[str, Any]]:
        _, body = await self.ask("GET", "/fleet")
        return {each["url"]: each for each in json.loads(body)["replicas"]}


@asynccontextmanager
async def running(replicas: list[Replica], *, are_there: bool) -> AsyncIterator[Router]:
    urls = [await each.start() for each in replicas]
    router = Router(*(urls if are_there else ()))
    watching = asyncio.ensure_future(router.members.watch(0))
    try:
        yield router
        assert not watching.done(), watching.exception()
    finally:
        await end(watching)
        for each in router.members.replicas:
            each.close()
        for replica in replicas:
            replica.server.close()
            for writer in replica.writers:
                writer.transport.abort()
        await asyncio.sleep(0.05)  # ends when both sides have closed


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_who_comes_is_asked_and_who_leaves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a leaving replica is at comes to its end; then it is forgotten, and its number is another's."""
    monkeypatch.setattr("serving.router.membership._LOOKS_S", 0.001)

    async def test() -> None:
        one, two, three = Replica(), Replica(), Replica()
        async with running([one, two, three], are_there=False) as router:
            assert (await router.chat())[0] == 503
            for url in (one.url, two.url):
                assert (await router.ask("POST", f"/fleet/add?{url}"))[0] == 200
            await until(lambda: router.routing.is_open.sum() == 2)
            one.lets.clear()
            asking = [asyncio.ensure_future(router.chat()) for _ in range(4)]
            await until(lambda: one.num_asked >= 1 and one.num_asked + two.num_asked == 4)
            asked = one.num_asked
            status, body = await router.ask("POST", f"/fleet/remove?{one.url}")
            assert (status, json.loads(body)["open"]) == (200, asked)
            assert (await router.told())[one.url]["leaves"]
            assert [await router.chat() for _ in range(3)] == [(200, {"by": two.url})] * 3
            assert one.num_asked == asked
            await asyncio.sleep(0.2)  # many looks
            one.lets.set()
            answers = await asyncio.gather(*asking)
            assert [status for status, _ in answers] == [200] * 4
            assert [by["by"] for _, by in answers].count(one.url) == asked, "to its end, and not elsewhere"
            await until(lambda: router.members.find(one.url) is None)
            assert [*(await router.told())] == [two.url]
            assert f'replica="{one.url}"'.encode() not in (await router.ask("GET", "/metrics"))[1]
            await router.ask("POST", f"/fleet/add?{three.url}")
            assert len(router.members.replicas) == router.routing.count == 2
            await until(lambda: router.routing.is_open.sum() == 2)
            await router.ask("POST", f"/fleet/remove?{two.url}")
            assert await router.chat() == (200, {"by": three.url})

    run(test)


def test_who_is_to_stay_after_all_stays() -> None:
    async def test() -> None:
        one = Replica()
        async with running([one], are_there=True) as router:
            await until(lambda: bool(router.routing.is_open[0]))
            one.lets.clear()
            asking = asyncio.ensure_future(router.chat())
            await until(lambda: one.num_asked == 1)
            for order, is_open in (("remove", False), ("add", True)):
                await router.ask("POST", f"/fleet/{order}?{one.url}")
                assert bool(router.routing.is_open[0]) == is_open
            one.lets.set()
            assert await asking == await router.chat() == (200, {"by": one.url})

    run(test)


def test_the_addresses_of_a_name_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is away ends none of them."""
    found: list[str] | OSError = ["10.0.0.1", "fd00::1"]

    async def test() -> None:
        router, looks = Router(), 0

        async def getaddrinfo(name: str, port: int, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            assert (name, port) == ("replicas", 8000)
            if isinstance(found, OSError):
                raise found
            return [(0, 0, 0, "", (address, port)) for address in found]

        monkeypatch.setattr("serving.router.membership._RESOLVES_S", 0.001)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        following = asyncio.ensure_future(router.members.follow("http://replicas:8000"))

        async def there() -> dict[str, bool]:
            since = looks
            await until(lambda: looks >= since + 2)
            return {each.url: each.leaves for each in router.members.replicas}

        nonlocal found
        both = {"http://10.0.0.1:8000": False, "http://[fd00::1]:8000": False}
        assert await there() == both
        found = socket.gaierror(socket.EAI_AGAIN, "no name server")
        assert await there() == both
        found = ["10.0.0.2", "fd00::1"]
        gone = {"http://10.0.0.1:8000": True, "http://10.0.0.2:8000": False}
        assert await there() == both | gone
        following.cancel()

    run(test)


@pytest.mark.parametrize("order", ["add", "remove", "drain", "resume"])
def test_orders_are_for_operators(order: str) -> None:
    """Whoever can add a replica reads the prompts that go there."""

    async def test() -> None:
        router, url = Router("http://127.0.0.1:9"), "http://127.0.0.1:9"
        open_to_all = Router(url, is_local=False)
        assert (await open_to_all.ask("POST", f"/fleet/{order}?{url}"))[0] == 403
        keys = ApiKeys({"tenant": Rights(max_priority=0), "gateway": Rights("*"), "operator": Rights()})
        for key, allowed in (("tenant", 403), ("gateway", 200), ("operator", 200)):
            client = keys.client(f"Bearer {key}")
            assert client is not None
            assert (await router.ask("POST", f"/fleet/{order}?{url}", client))[0] == allowed
        origin = [(b"origin", b"http://example.com")]
        assert (await router.ask("POST", f"/fleet/{order}?{url}", headers=origin))[0] == 403
        for wrong in ("", "ftp://a:1", "http://a", "http://a:99999", "http://:80"):
            status, _ = await router.ask("POST", f"/fleet/{order}?{wrong}")
            assert status == (400 if order == "add" else 404)
        assert [each.url for each in router.members.replicas] == [url]

    run(test)
