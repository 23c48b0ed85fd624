"""HTTP is encrypted where files say so, and either side believes only certificates of its authority."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvloop
from starlette.responses import PlainTextResponse

from serving import tls
from serving.router import server as router_server
from serving.router.replicas import ReplicaTrust, upstream_of
from serving.router.server import RouterOptions
from serving.router.upstream import Lost
from serving.server import SignalFreeServer, configuration, listener_at
from serving.tls import Handshakes, TlsFiles
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server, defects

FOLDER = Path(__file__).parent / "certificates"
AUTHORITY, STRANGERS = str(FOLDER / "authority.pem"), str(FOLDER / "stranger.pem")
BODY = {"prompt": "1+1=", "temperature": 0, "max_tokens": 1}


def files_of(name: str, client_authority: str | None = None) -> TlsFiles:
    return TlsFiles(str(FOLDER / f"{name}.pem"), str(FOLDER / f"{name}.key"), client_authority)


def options_of(name: str) -> list[str]:
    files = files_of(name)
    assert files.certificate is not None
    assert files.private_key is not None
    return ["--tls-certificate", files.certificate, "--tls-private-key", files.private_key]


def client_of(url: str, files: TlsFiles) -> httpx.Client:
    found = files.for_replicas(AUTHORITY)
    assert found is not None
    return httpx.Client(base_url=url, verify=found.context, timeout=PATIENCE_S, trust_env=False)


def wait_until_ready(client: httpx.Client) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < until_s, "it is never ready"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def replica() -> Iterator[Server]:
    """Answers only clients whose certificate is of the authority."""
    server = Server(TINY, *options_of("engine"), "--tls-client-authority", AUTHORITY)
    assert server.url.startswith("https://")
    with client_of(server.url, files_of("engine")) as client:
        wait_until_ready(client)
    yield server
    assert server.close() == 0


@pytest.mark.slow
def test_a_router_of_the_authority_is_answered(replica: Server) -> None:
    options = ["--replica", replica.url, "--tls-authority", AUTHORITY, *options_of("engine")]
    router = Server(*options, verb="scripts.route")
    with client_of(router.url, TlsFiles()) as client:  # the router asks its own clients for no certificate
        wait_until_ready(client)
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "2"
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert '"text":"2"' in lines[0]
        assert lines[-1] == "data: [DONE]"
    assert router.close() == 0


@pytest.mark.slow
def test_who_has_no_certificate_of_the_authority_gets_no_answer(replica: Server) -> None:
    for files in (TlsFiles(), files_of("stranger")):
        with client_of(replica.url, files) as client, pytest.raises(httpx.TransportError):
            client.get("/health")
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as plain, pytest.raises(httpx.TransportError):
        plain.get(f"http://127.0.0.1:{replica.port}/health")
    assert not defects(replica, 0), "strangers fill no log with tracebacks"


@pytest.mark.slow
def test_a_refusal_can_be_read_before_the_connection_ends(replica: Server) -> None:
    """Also where the client still sends what was refused: no direction of TLS can be ended alone."""
    found = files_of("engine").for_replicas(AUTHORITY)
    assert found is not None
    plain = socket.create_connection(("127.0.0.1", replica.port), PATIENCE_S)
    with found.context.wrap_socket(plain) as client:  # it takes the descriptor over
        client.sendall(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200)
        answer = b""
        while b"shorten them" not in answer:
            received = client.recv(1 << 16)
            assert received, answer
            answer += received
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("shown", "authority"), [("stranger", AUTHORITY), ("engine", STRANGERS)])
def test_a_router_asks_nothing_of_a_server_of_another_authority(shown: str, authority: str) -> None:
    async def test() -> None:
        num_connected = 0

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connected
            num_connected += 1
            writer.close()

        found = files_of(shown).for_clients()
        assert found is not None
        server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=found.context)
        port = server.sockets[0].getsockname()[1]
        trust = ReplicaTrust(tls=TlsFiles().for_replicas(authority))
        with pytest.raises(Lost, match=r"no connection: .*(CERTIFICATE_VERIFY_FAILED|verify failed)"):
            await upstream_of(f"https://127.0.0.1:{port}", trust).ask("GET", "/ready", [], b"")
        assert not num_connected
        server.close()
        await server.wait_closed()

    asyncio.run(test())


def test_connections_count_and_have_little_time_before_they_have_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Strangers that say nothing hold no more descriptors than there are places, and no place for long."""
    found, authority = files_of("engine").for_clients(), TlsFiles().for_replicas(AUTHORITY)
    assert found is not None
    assert authority is not None
    monkeypatch.setattr(tls, "HANDSHAKE_S", PATIENCE_S)

    async def end_of(reader: asyncio.StreamReader) -> bytes:
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE_S)
        except ConnectionError:
            return b""

    async def test() -> None:
        listener = listener_at("127.0.0.1", 0)
        port = listener.getsockname()[1]
        app = PlainTextResponse("hello")
        server = SignalFreeServer(configuration(app, 3), Handshakes(found, 3))
        serving = asyncio.ensure_future(server.serve([listener]))
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        reader, over = await asyncio.open_connection("127.0.0.1", port)
        assert not await end_of(reader), "one too many is closed although it has not said anything"
        over.close()
        silent.pop()[1].close()
        until_s = time.monotonic() + PATIENCE_S
        async with httpx.AsyncClient(verify=authority.context, trust_env=False, timeout=PATIENCE_S) as client:
            while True:  # the place of the one that has gone is free once the server has seen its end
                try:
                    answer = await client.get(f"https://127.0.0.1:{port}/")
                    break
                except httpx.TransportError:
                    assert time.monotonic() < until_s
        assert answer.text == "hello"
        monkeypatch.setattr(tls, "HANDSHAKE_S", 0.01)
        reader, late = await asyncio.open_connection("127.0.0.1", port)
        assert not await end_of(reader), "it says nothing, and its time is over"
        late.close()
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE_S)
        for reader, writer in silent:
            assert not await end_of(reader), "the server has ended"
            writer.close()

    uvloop.run(test())


class Hello(asyncio.Protocol):
    """Says hello and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(b"hello")
        transport.close()


def test_renewed_files_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By both sides, and all of them or none: a certificate is renewed before its key."""
    certificate, key, authority = (str(tmp_path / name) for name in ("a.pem", "a.key", "authority.pem"))

    def renew(path: str, name: str) -> None:
        """As Kubernetes does, by another file in its place."""
        shutil.copy(FOLDER / name, tmp_path / "new")
        os.replace(tmp_path / "new", path)

    for path, name in ((certificate, "engine.pem"), (key, "engine.key"), (authority, "authority.pem")):
        renew(path, name)
    ours, theirs = TlsFiles(certificate, key, authority).for_clients(), TlsFiles().for_replicas(authority)
    assert ours is not None
    assert theirs is not None

    async def shown(client: str) -> bytes | None:
        """The certificate that a client of this name is shown; None if either side refuses the other."""
        known, trusts = files_of(client), theirs.context
        assert known.certificate is not None
        trusts.load_cert_chain(known.certificate, known.private_key)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusts)
            answer = await asyncio.wait_for(reader.read(5), PATIENCE_S)
        except (ssl.SSLError, ConnectionError):
            return None
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return found if answer else None

    def of(name: str) -> bytes:
        return ssl.PEM_cert_to_DER_cert((FOLDER / f"{name}.pem").read_text())

    async def test() -> None:
        nonlocal port
        listener = listener_at("127.0.0.1", 0)
        port = listener.getsockname()[1]
        accepting = asyncio.ensure_future(Handshakes(ours, 9).accept(listener, Hello, ()))
        assert (await shown("engine"), await shown("stranger")) == (of("engine"), None)
        renew(certificate, "stranger.pem")
        for _ in range(2):
            ours.check()
        assert caplog.text.count("the files before their change are used: --tls-certificate") == 1
        assert await shown("engine") == of("engine")
        renew(key, "stranger.key")
        Path(key).rename(tmp_path / "away")
        ours.check()
        Path(tmp_path / "away").rename(key)
        renew(authority, "stranger.pem")
        assert await shown("engine") == of("engine"), "nobody has looked"
        ours.check()
        assert await shown("engine") is None, "the router knows the old authority alone"
        theirs.check()
        assert (await shown("engine"), await shown("stranger")) == (None, of("stranger"))
        accepting.cancel()
        await asyncio.wait([accepting])
        listener.close()

    port = 0
    uvloop.run(test())


def test_a_server_looks_at_its_files_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_RENEWAL_S", 0.001)
    found = files_of("engine").for_clients()
    assert found is not None

    async def test() -> None:
        looked, check = asyncio.Event(), found.check
        monkeypatch.setattr(found, "check", lambda: (check(), looked.set()))
        listener = listener_at("127.0.0.1", 0)
        server = SignalFreeServer(configuration(PlainTextResponse("hello"), 3), Handshakes(found, 3))
        serving = asyncio.ensure_future(server.serve([listener]))
        await asyncio.wait_for(looked.wait(), PATIENCE_S)
        server.should_exit = True
        await asyncio.wait_for(serving, PATIENCE_S)

    uvloop.run(test())


@pytest.mark.parametrize("authority", [None, AUTHORITY])
def test_a_router_looks_at_the_files_for_its_replicas(
    authority: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    async def serve(*given: Any) -> None:
        for each in given[5]:
            begun.append(each.__qualname__)
            each.close()

    monkeypatch.setattr(router_server, "_serve", serve)
    monkeypatch.setattr(router_server, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    router_server._run(
        RouterOptions(replicas=["https://127.0.0.1:1"] if authority else [], port=0, tls_authority=authority)
    )
    assert ("Tls.renew" in begun) == (authority is not None)


def test_files_that_cannot_be_used_are_named() -> None:
    certificate, key = str(FOLDER / "engine.pem"), str(FOLDER / "engine.key")
    for files, said in (
        (TlsFiles(certificate), "--tls-certificate needs --tls-private-key"),
        (TlsFiles(None, key), "--tls-private-key is read only with --tls-certificate"),
        (TlsFiles(None, None, AUTHORITY), "--tls-client-authority is read only with --tls-certificate"),
        (TlsFiles(certificate, str(FOLDER / "stranger.key")), "--tls-certificate, --tls-private-key: "),
        (TlsFiles(certificate, key, "/nowhere"), "--tls-client-authority /nowhere: No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            files.for_clients()
    with pytest.raises(ValueError, match="the router has no --tls-authority to know it by"):
        upstream_of("https://127.0.0.1:8001", ReplicaTrust())
    found = files_of("engine").for_clients()
    assert found is not None
    assert found.context.minimum_version >= ssl.TLSVersion.TLSv1_2
