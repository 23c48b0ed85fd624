"""Pages come by Mooncake's own transfer engine over TCP, and a link that ends leaves nothing of it behind.

The package is an optional requirement: without it, or a library of the system that it needs, these tests are
skipped, but for those of what is refused.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kv_cache.exchange import mooncake
from kv_cache.exchange.mooncake import Mooncake
from recipes.schema.recipe_error import RecipeError
from recipes.schema.server_section import ServerSection
from serving.engine.page_exchange import transports_of
from tests.patience import PATIENCE_S
from tests.serving.page_pair import Pair, alone, prompts

HERE = "127.0.0.1"
# In a process of its own: exposes a window, says where it is, and lives until it is ended
OWNER = f"""
import sys
from kv_cache.exchange.mooncake import Mooncake
window = Mooncake({HERE!r}, "tcp").expose(1 << 16)
print(window.description.decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def transport() -> Mooncake:
    try:
        return Mooncake(HERE, "tcp")
    except ImportError as error:
        pytest.skip(f"Mooncake's transfer engine is not installed: {error}")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HERE, port)) == 0


def open_sockets() -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(each).startswith("socket:")
    return found


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "what must come did not"
        time.sleep(0.01)


def test_bytes_arrive_until_either_side_closes_its_link(transport: Mooncake) -> None:
    before, size = open_sockets(), 1 << 16
    window = transport.expose(size)
    window.memory[:] = 0
    reach, other = (transport.reach(window.description, size) for _ in range(2))
    data = np.random.default_rng(3).integers(0, 256, 5000, dtype=np.uint8)
    assert reach.put(100, data) is None
    assert window.memory[100:5100].tolist() == data.tolist()
    assert not window.memory[5100:].any()
    with pytest.raises(OSError, match="wrote nothing"):
        transport.reach(window.description, 2 * size).put(size, data)
    reach.close()
    with pytest.raises(OSError, match="the link has ended"):
        reach.put(0, data)
    port, memory = int(window.description.decode().split("@")[0].split(":")[1]), window.memory
    assert is_listening(port)
    window.close()
    until(lambda: not is_listening(port))
    memory[:] = 7  # it may be used for something else now
    with pytest.raises(OSError, match="wrote nothing"):
        other.put(0, data)
    assert (memory == 7).all()
    other.close()
    del reach, other
    until(lambda: open_sockets() <= before)


def test_a_window_whose_process_was_killed_is_an_error(transport: Mooncake) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        lines = iter(owner.stdout.readline, "")
        description = next(each.strip() for each in lines if each.startswith(f"{HERE}:"))
        reach = transport.reach(description.encode(), 1 << 16)
        reach.put(0, np.ones(100, np.uint8))
        owner.send_signal(signal.SIGKILL)
        owner.wait(PATIENCE_S)
        with pytest.raises(OSError, match="wrote nothing"):
            reach.put(0, np.ones(100, np.uint8))
        reach.close()
    finally:
        owner.kill()
        owner.wait(PATIENCE_S)
        owner.stdin.close()
        owner.stdout.close()


def test_answers_are_those_of_an_engine_alone(transport: Mooncake) -> None:
    before = open_sockets()
    pair = Pair(transport="mooncake", transports={"mooncake": transport})
    assert pair.serve(prompts(5)) == alone(prompts(5))
    counters = pair.answers.scheduler.counters
    assert counters.arrived_pages > 0
    assert counters.missed_pages == 0
    pair.settle()
    pair.close()
    until(lambda: open_sockets() <= before)


def test_what_is_no_window_is_refused(transport: Mooncake) -> None:
    for wrong in (b"", b"127.0.0.1:1", b"127.0.0.1:99999@1", b"a/b:1@1", b"a:1@-1", "a:1@\u0661".encode()):
        with pytest.raises(ValueError, match="HOST:PORT@ADDRESS"):
            transport.reach(wrong, 10)


@pytest.mark.parametrize("protocol", ["rdma", "ascend"])
def test_a_protocol_without_a_device_is_refused(
    protocol: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine itself would use TCP."""
    monkeypatch.setattr(mooncake, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(mooncake, "_DAVINCI", tmp_path / "davinci_manager")
    asked = ServerSection(
        page_transport="mooncake", mooncake_host=HERE, mooncake_protocol=protocol, pages_open=True
    )
    with pytest.raises(RecipeError, match=r"server\.mooncake_protocol.*(no device|no NPU)"):
        transports_of(asked)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    asked = ServerSection(page_transport="mooncake", mooncake_host=HERE, pages_open=True)
    with pytest.raises(RecipeError, match=r"setup\.sh mooncake installs it"):
        transports_of(asked)
