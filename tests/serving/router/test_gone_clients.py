"""An application is told of a client that goes away, by the server's own protocol over a real socket."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from serving.router.proxy import ClientWatch
from serving.server import SignalFreeServer, configuration, listener_at
from tests.patience import PATIENCE_S

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("num_bytes", [0, 10, 10**5, 10**6])
def test_work_for_it_is_cancelled_whatever_it_has_sent(num_bytes: int) -> None:
    """Of a long body uvicorn stops to read, and would not see the end of the connection."""

    async def test() -> None:
        works, ended = asyncio.Event(), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            watch = ClientWatch(scope["state"])
            works.set()
            try:
                await asyncio.sleep(2 * PATIENCE_S)
            except asyncio.CancelledError:
                assert watch.is_gone
                ended.set()
            finally:
                watch.end()

        server = SignalFreeServer(configuration(app, 16))
        with listener_at("127.0.0.1", 0) as listener:
            serving = asyncio.ensure_future(server.serve([listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(HEAD % num_bytes)
            await asyncio.sleep(0.05)  # the application waits for the body
            writer.write(bytes(num_bytes))
            await works.wait()
            assert not ended.is_set()
            writer.transport.abort()
            await ended.wait()
            server.should_exit = True
            await serving

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))
