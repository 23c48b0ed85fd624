"""`scripts.top` reports in one line why a server cannot be watched."""

from __future__ import annotations

import io
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from recipes.schema.server_section import ServerSection
from scripts.top import main
from serving.engine.messages import Ready
from serving.engine.supervisor import Supervisor
from serving.metrics.exposition import Exposition
from serving.metrics.server_stats import ServerStats
from serving.terminal_view import frame, parse
from tests.serving.test_supervisor import FACTS

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def greeter() -> Iterator[str]:
    """Where somebody speaks, and no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 mail.example at your service\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:80", "'127.0.0.1:80' is no URL; it begins with http:// or https://"),
        ("http://127.0.0.1:80x", "'http://127.0.0.1:80x' is no URL: nonnumeric port"),
        ("http://a b", "'http://a b' is no URL: .* write http://HOST:PORT"),
        (NOWHERE, f"{NOWHERE} does not answer: .*Connection refused"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        main([url, "--once"])


def test_a_port_where_nobody_speaks_http(greeter: str) -> None:
    with pytest.raises(OSError, match=f"{greeter} does not answer in HTTP; is it the port of this server"):
        main([greeter, "--once"])


@pytest.mark.parametrize(
    ("silent_s", "shown"),
    [(-1000.0, "engine up,"), (1000.0, "engine slow, silent 1000.0 s of 5.0 s,"), (None, "engine down,")],
)
def test_an_engine_that_is_overdue_is_shown_as_such(silent_s: float | None, shown: str) -> None:
    stats = ServerStats()
    stats.model = "tiny"
    if silent_s is not None:
        keeper = Supervisor(lambda life: [], ServerSection(), lambda message: None, lambda reason: None)
        keeper._begin(Ready(FACTS), 0.0)
        keeper.become("ready")
        keeper.silence.heard_s = time.monotonic() - silent_s
        stats.ready(FACTS, 0.0)
        stats._heard_s = time.monotonic() - max(0.0, silent_s)
        stats.is_slow = lambda: keeper.status == "slow"
        stats.silence_limit_s = lambda: keeper.silence.limit_s
    exposition = Exposition(stats, "tiny", lambda: None)
    exposition.read()
    now = parse(exposition.text().decode(), 1.0)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(frame(now, now))
    assert shown in re.sub(r"10\d\d\.\d", "1000.0", console.export_text())


def test_no_refusal_tells_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret\n")
    with pytest.raises(OSError, match=r"does not answer: .*Connection refused"):
        main([NOWHERE, "--once"])
    monkeypatch.setenv("API_KEY", "secret\nsecret")
    with pytest.raises(ValueError, match="API_KEY must be one word") as refusal:
        main([NOWHERE, "--once"])
    assert "secret" not in str(refusal.value)
