"""The server's own end, asked for or sudden; and that it goes on where nothing can be written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from borders.framing import CutShort
from continuous_batching.recording.format import read_entries
from serving.engine.messages import BEGIN
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.serving.faults import Told, ask
from tests.serving.server import TINY, Server
from tests.serving.warm import start_session, start_speaking
from tests.thorough import cases, first_quick

HALF = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 100\r\nexpect: 100-continue\r\n\r\n"
)


async def in_flight(server: Server, number: int, num_tokens: int) -> list[Told]:
    """So many ask; when the engine has had all of them, the server is told to end; what they were told."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        body = {"prompt": "One day", "ignore_eos": True, "max_tokens": num_tokens}
        asked = [asyncio.ensure_future(ask(session, server.url, **body)) for _ in range(number)]
        until_s = time.monotonic() + PATIENCE_S
        while await num_entered(session, server.url) < number:
            assert time.monotonic() < until_s, "they do not come in"
            await asyncio.sleep(0.02)
        server.process.terminate()
        await asyncio.to_thread(server.wait_for, "ends: ")
        refused = await ask(session, server.url, prompt="1+1=")
        assert (refused.status, refused.error) == (503, "the server is shutting down")
        return await asyncio.gather(*asked)


async def num_entered(session: aiohttp.ClientSession, url: str) -> float:
    """Those that the engine has had: the first may have ended before the last come."""
    return total(await metrics(session, url), "cb_samples_total{")


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as response:
        return await response.text()


def num_in(text: str) -> float:
    """Samples in the engine when these metrics were written."""
    return total(text, "vllm:num_requests_running{") + total(text, "vllm:num_requests_waiting{")


def total(text: str, start: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("_", range(cases(1, 10)))
def test_sigterm_lets_requests_end(_: int) -> None:
    server = Server(TINY, "scheduler.num_slots=64").ready()
    told = asyncio.run(in_flight(server, 64, 60))
    assert server.wait() == 0
    assert all((each.status, len(each.tokens), each.error) == (200, 60, None) for each in told)


def test_a_server_that_says_that_it_listens_can_be_told_to_end() -> None:
    server = Server(TINY)
    server.process.terminate()
    assert server.wait() == 0


@pytest.mark.parametrize("said", [b"", BEGIN + b"\n"], ids=["waits", "starts"])
def test_an_engine_whose_server_was_killed_leaves_no_folder(said: bytes, tmp_path: Path) -> None:
    """Neither one that starts nor one that waits to take another's place."""
    (folder := tmp_path / "engine-1").mkdir()
    (folder / "socket").touch()
    command = [f"ipc://{folder}/socket", TINY]
    run = start_speaking("serving.engine.main", command, os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.stdin is not None
    assert run.stdout is not None
    with run.stdout:
        run.stdin.write(said)
        run.stdin.close()  # as the system does where the server ends
        assert run.wait(PATIENCE_S) == 0
    assert not folder.exists()


@pytest.mark.parametrize("signals", first_quick(1, [2, 1]))
def test_who_is_cut_off_is_told_to_come_again_and_who_looks_on_the_end(signals: int) -> None:
    """Within the time for those that drain, and at once where a second signal comes."""
    server = Server(TINY, f"server.drain_s={0.5 if signals == 1 else 60}").ready()
    body = {"prompt": "One day", "ignore_eos": True, "max_tokens": 1500, "n": 8}
    place = urlsplit(server.url)
    with (
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
        socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as sends,
        client.stream("GET", "/live") as live,
    ):
        seen = live.iter_lines()
        assert next(seen).startswith("data: ")
        sends.sendall(HALF)
        assert sends.recv(4096).startswith(b"HTTP/1.1 100 "), "the rest of its body is waited for"
        whole = pool.submit(client.post, "/v1/completions", json=body)
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            until_s = time.monotonic() + PATIENCE_S
            while num_in(client.get("/metrics").text) < 16:
                assert time.monotonic() < until_s, "it does not come in"
            server.process.terminate()
            server.wait_for("ends: ")
            if signals == 2:
                server.process.terminate()
            error = json.loads([*lines][-2].removeprefix("data: "))["error"]
        response = whole.result()
        if signals == 1:  # a second signal waits for nobody who looks on
            assert "data: " in "".join(seen), "to the end: a response that is cut off raises"
        head, _, answer = b"".join(iter(lambda: sends.recv(4096), b"")).partition(b"\r\n\r\n")
    assert server.wait() == 0
    assert response.status_code == 503
    assert head.startswith(b"HTTP/1.1 503 ")
    assert int(response.headers["retry-after"]) >= 1
    assert b"retry-after: " in head
    for each in (error, response.json()["error"], json.loads(answer)["error"]):
        assert (each["code"], each["type"]) == (503, "service_unavailable_error")
        assert each["message"] == "the server is shutting down"
    assert any("16 requests are cut off" in line for line in server.log) == (signals == 1)
    assert not [line for line in server.log if "Traceback" in line or "ASGI" in line]


@pytest.mark.slow
def test_a_full_disk_ends_a_recording_and_nothing_else(tmp_path: Path) -> None:
    record = tmp_path / "record"
    server = Server(TINY, f"scheduler.record={record}", limits={resource.RLIMIT_FSIZE: 10_000}).ready()
    body = {"prompt": "One day", "max_tokens": 150, "ignore_eos": True}
    for _ in range(3):
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert answer["usage"]["completion_tokens"] == 150
    server.wait_for("recording ended: .*record: .*serving goes on without it")
    os.kill(server.engine_pid, signal.SIGKILL)
    server.wait_until("/health", 503)
    server.ready()
    httpx.post(f"{server.url}/v1/completions", json=body | {"max_tokens": 20}, timeout=PATIENCE_S)
    assert server.close() == 0
    with record.open("rb") as full, pytest.raises(CutShort):
        list(read_entries(full))
    with Path(f"{record}.2").open("rb") as whole:  # closed in order, when the server ended
        assert len(list(read_entries(whole))) > 40
    assert sum(line.startswith("engine: recording ended") for line in server.log) == 1


@pytest.mark.slow
def test_a_log_that_cannot_be_written_stops_nothing() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = (TINY, "server.spare_engine=false", "--log-requests", "--port", str(port))
    with open("/dev/full", "wb") as full:
        process = start_session("scripts.serve", options, os.environ | {"OMP_NUM_THREADS": "1"}, full)
    try:
        until_s, status = time.monotonic() + PATIENCE_S, 0
        while status != 200:
            assert time.monotonic() < until_s, "it never becomes ready"
            with contextlib.suppress(httpx.ConnectError):  # it does not listen yet
                status = httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code
            time.sleep(0.05)
        told = httpx.post(f"{url}/v1/completions", json={"prompt": "1+1="}, timeout=PATIENCE_S)
        assert told.status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
