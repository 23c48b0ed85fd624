"""What cannot be watched is told in one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from scripts.top import main

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
    with pytest.raises(
        OSError, match=f"{greeter} does not answer in HTTP; is it the port of a server of ours"
    ):
        main([greeter, "--once"])


@pytest.mark.parametrize("every", ["0", "-1", "inf", "nan", "1e300"])
def test_readings_are_some_time_apart(every: str) -> None:
    with pytest.raises(ValueError, match=r"--every is \S+ s; it must be above 0, at most 3600"):
        main([NOWHERE, "--once", "--every", every])


def test_no_refusal_tells_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret\n")
    with pytest.raises(OSError, match=r"does not answer: .*Connection refused"):
        main([NOWHERE, "--once"])
    monkeypatch.setenv("API_KEY", "secret\nsecret")
    with pytest.raises(ValueError, match="API_KEY must be one word") as refusal:
        main([NOWHERE, "--once"])
    assert "secret" not in str(refusal.value)
