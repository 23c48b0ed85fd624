"""Replicas that come and go while a router runs: none is sent what it cannot answer, and nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import Any

import pytest

from serving.api.access import OPEN_PATHS
from serving.api.api_keys import ANYBODY, ApiKeys, Rights
from serving.router.server import FleetApplication
from tests.serving.router.test_fleet_models import CHAT, READY, Routed
from tests.serving.router.test_proxy import run
from tests.serving.router.waiting import end, until


class Held:
    """Answers each request of a replica with its number, once it is let."""

    def __init__(self, number: int) -> None:
        self.number, self.num_asked, self.lets = number, 0, asyncio.Event()
        self.lets.set()

    async def __call__(self, writer: asyncio.StreamWriter) -> None:
        self.num_asked += 1
        await self.lets.wait()
        body = json.dumps({"by": self.number}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))


class Joined(Routed):
    """A router whose replicas, which answer as these do, are added by orders."""

    are_there = False

    def __init__(self, *held: Held) -> None:
        super().__init__(*(READY | {"other": each} for each in held))

    async def order(self, order: str, number: int) -> tuple[int, Any]:
        return await self.ask(f"/fleet/{order}?{self.urls[number]}")

    async def chat(self) -> tuple[int, Any]:
        return await self.ask(CHAT, {})


def test_who_comes_is_asked_and_who_leaves_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a leaving replica is at comes to its end; then it is forgotten, and its number is another's."""
    monkeypatch.setattr("serving.router.membership._LOOKS_S", 0.001)

    async def test() -> None:
        one, two, three = (Held(number) for number in range(3))
        async with Joined(one, two, three) as fleet:

            async def told() -> dict[str, dict[str, Any]]:
                return {
                    each["url"]: each for each in (await fleet.ask("/fleet", method="GET"))[1]["replicas"]
                }

            assert (await fleet.chat())[0] == 503
            for number in (0, 1):
                assert (await fleet.order("add", number))[0] == 200
            await until(lambda: fleet.routing.is_open.sum() == 2)
            one.lets.clear()
            asking = [asyncio.ensure_future(fleet.chat()) for _ in range(4)]
            await until(lambda: one.num_asked >= 1 and one.num_asked + two.num_asked == 4)
            asked = one.num_asked
            status, said = await fleet.order("remove", 0)
            assert (status, said["open"]) == (200, asked)
            assert (await told())[fleet.urls[0]]["leaves"]
            assert [await fleet.chat() for _ in range(3)] == [(200, {"by": 1})] * 3
            assert one.num_asked == asked
            await asyncio.sleep(0.2)  # many looks
            one.lets.set()
            answers = await asyncio.gather(*asking)
            assert [status for status, _ in answers] == [200] * 4
            assert [said["by"] for _, said in answers].count(0) == asked, "to its end, and not elsewhere"
            await until(lambda: fleet.members.find(fleet.urls[0]) is None)
            assert [*(await told())] == [fleet.urls[1]]
            assert f'replica="{fleet.urls[0]}"' not in fleet.figures.as_metrics()
            await fleet.order("add", 2)
            assert len(fleet.members.replicas) == fleet.routing.count == 2
            await until(lambda: fleet.routing.is_open.sum() == 2)
            await fleet.order("remove", 1)
            assert await fleet.chat() == (200, {"by": 2})

    run(test)


def test_who_is_to_stay_after_all_stays() -> None:
    async def test() -> None:
        one = Held(0)
        async with Joined(one) as fleet:
            await fleet.order("add", 0)
            await until(lambda: bool(fleet.routing.is_open[0]))
            one.lets.clear()
            asking = asyncio.ensure_future(fleet.chat())
            await until(lambda: one.num_asked == 1)
            for order, is_open in (("remove", False), ("add", True)):
                await fleet.order(order, 0)
                assert bool(fleet.routing.is_open[0]) == is_open
            one.lets.set()
            assert await asking == await fleet.chat() == (200, {"by": 0})

    run(test)


def test_the_addresses_of_a_name_are_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is away ends none of them."""
    found: list[str] | OSError = ["10.0.0.1", "fd00::1"]

    async def test() -> None:
        fleet, looks = Routed(), 0
        fleet.join()

        async def getaddrinfo(name: str, port: int, **options: Any) -> Any:
            nonlocal looks
            looks += 1
            assert (name, port) == ("replicas", 8000)
            if isinstance(found, OSError):
                raise found
            return [(0, 0, 0, "", (address, port)) for address in found]

        monkeypatch.setattr("serving.router.membership._RESOLVES_S", 0.001)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        following = asyncio.ensure_future(fleet.members.follow("http://replicas:8000"))

        async def there() -> dict[str, bool]:
            since = looks
            await until(lambda: looks >= since + 2)
            return {each.url: each.leaves for each in fleet.members.replicas}

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


def test_an_address_stays_while_anything_still_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What leaves one name may be in another, or given by itself; what an operator removes is neither."""
    found = {name: [f"10.0.0.{number}" for number in range(5)] for name in ("one", "two")}
    looks = dict.fromkeys(found, 0)

    async def getaddrinfo(name: str, port: int, **options: Any) -> Any:
        looks[name] += 1
        return [(0, 0, 0, "", (address, port)) for address in found[name]]

    async def test() -> None:
        fleet = Routed()
        urls = [f"http://10.0.0.{number}:8000" for number in range(5)]
        fleet.join(*urls[:2])
        monkeypatch.setattr("serving.router.membership._RESOLVES_S", 0.001)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        following = [asyncio.ensure_future(fleet.members.follow(f"http://{name}:8000")) for name in found]

        async def leaving() -> list[bool]:
            since = dict(looks)
            await until(lambda: all(looks[name] >= since[name] + 2 for name in looks))
            return [each.leaves for each in fleet.members.replicas]

        assert await leaving() == [False] * 5
        fleet.members.remove(urls[1])
        fleet.members.add(urls[2])
        fleet.members.remove(urls[4])
        found["one"] = []
        assert await leaving() == [False, True, False, False, True]
        found["two"] = []
        assert await leaving() == [False, True, False, True, True]
        for each in following:
            await end(each)

    run(test)


def test_an_address_is_the_same_with_a_slash_at_its_end() -> None:
    async def test() -> None:
        fleet, url = Routed(), "http://127.0.0.1:9"
        with pytest.raises(ValueError, match="appears twice"):
            fleet.join(url, f"{url}/")
        fleet.join(f"{url}/")
        for order, leaves in (("add", False), ("remove", True), ("add", False)):
            for each in (url, f"{url}/"):
                status, said = await fleet.ask(f"/fleet/{order}?{each}")
                assert (status, said["replica"], said["leaves"]) == (200, url, leaves)
        assert [each.url for each in fleet.members.replicas] == [url]

    run(test)


def test_paths_that_are_open_to_all_take_no_body() -> None:
    """Without a key, bodies that never end would fill the router's memory."""

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def test() -> None:
        async with Routed(READY) as fleet:
            await fleet.all_ready()
            for path, method in itertools.product(OPEN_PATHS, ("POST", "PUT", "OPTIONS", "HEAD", "GET")):
                heads = []

                async def send(message: Any, heads: list[Any] = heads) -> None:
                    heads += [message] if "status" in message else []

                scope = {"type": "http", "method": method, "path": path, "headers": [], "state": {}}
                await fleet.app(scope, receive, send)
                wanted = {"HEAD": 200, "GET": 200, "OPTIONS": 204}.get(method, 405)
                assert heads[0]["status"] == wanted, (path, method)
                is_told = (b"allow", b"GET, HEAD, OPTIONS") in heads[0]["headers"]
                assert is_told == (wanted != 200)
            assert fleet.replicas[0].num_sent == 0

    run(test)


def test_only_operators_see_the_lengths_of_all_prompts() -> None:
    async def test() -> None:
        one = Held(0)
        async with Joined(one) as fleet:
            await fleet.order("add", 0)
            await until(lambda: bool(fleet.routing.is_open[0]))
            await fleet.ask(CHAT, {"messages": [{"role": "user", "content": "x" * 600}]})
            keys = ApiKeys({"tenant": Rights(max_priority=0), "gateway": Rights("*"), "operator": Rights()})
            clients = [keys.client(f"Bearer {key}") for key in ("tenant", "gateway", "operator")]
            told = [(await fleet.ask("/fleet", method="GET", client=each))[1] for each in (*clients, ANYBODY)]
            assert [len(each["choices"]) for each in told] == [0, 1, 1, 1]
            assert [each["replicas"][0]["sent"] for each in told] == [1] * 4

    run(test)


@pytest.mark.parametrize("order", ["add", "remove", "drain", "resume"])
def test_orders_are_for_operators(order: str) -> None:
    """Whoever can add a replica reads the prompts that go there."""

    async def test() -> None:
        fleet, url = Routed(), "http://127.0.0.1:9"
        fleet.join(url)
        path = f"/fleet/{order}?{url}"
        keys = ApiKeys({"tenant": Rights(max_priority=0), "gateway": Rights("*"), "operator": Rights()})
        for key, allowed in (("tenant", 403), ("gateway", 200), ("operator", 200)):
            assert (await fleet.ask(path, client=keys.client(f"Bearer {key}")))[0] == allowed
        assert (await fleet.ask(path, headers=[(b"origin", b"http://example.com")]))[0] == 403
        for wrong in ("", "ftp://a:1", "http://a", "http://a:99999", "http://:80"):
            assert (await fleet.ask(f"/fleet/{order}?{wrong}"))[0] == (400 if order == "add" else 404)
        assert [each.url for each in fleet.members.replicas] == [url]
        fleet.app = FleetApplication(fleet.proxy, fleet.members, fleet.figures, is_local=False)
        assert (await fleet.ask(path, client=ANYBODY))[0] == 403, "anybody reaches it"

    run(test)
