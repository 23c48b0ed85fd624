"""Keep the collections that a benchmark asks for from visiting what the tests have imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _collections_of_the_test_alone() -> Iterator[None]:
    """A benchmark collects garbage before each run that it times, a second each in a whole run."""
    gc.freeze()
    yield
    gc.unfreeze()
