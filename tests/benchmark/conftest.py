"""The clock of the wall in these tests, which nobody sets."""

from __future__ import annotations

import time

import pytest


@pytest.fixture(autouse=True)
def even_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of the wall go as the monotonic one does.

    The gate refuses a result whose two clocks disagree, as they do where a machine was suspended, or was set
    right by its host while a test ran.
    """
    monotonic_s = time.monotonic
    ahead_s = time.time() - monotonic_s()
    monkeypatch.setattr(time, "time", lambda: ahead_s + monotonic_s())
