"""Compiled operators that find no memory raise an error that a step can fail by, and end no process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attention.cpu.latent import compiled_latents
from models.ops.cpu.rowwise import rowwise
from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S

SPARE = 16 << 20  # bytes that Python and torch may take beside what the operator asks for
MANY = 1 << 24  # numbers, of 64 MiB


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the process take SPARE bytes more, whatever it holds."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def draws() -> None:
    """Draw from a vocabulary whose weights find no memory, and then with memory."""
    ops = rowwise()
    assert not isinstance(ops, str)
    logits, row = torch.zeros(2, MANY), torch.zeros(2, dtype=torch.int64)
    limits = {"uniform": torch.tensor([0.25, 0.5]), "sharpness": torch.ones(2)}
    with little_memory(), pytest.raises(MemoryError, match="no memory for the weights"):
        ops.draw(logits, row, row, limits)
    # Of equal weights, a quarter and half of them are before the drawn ones
    assert ops.draw(logits, row, row, limits).tolist() == [MANY // 4, MANY // 2]


def queries() -> None:
    """Read latents whose scores find no memory, and then with memory."""
    latents = compiled_latents()
    assert not isinstance(latents, str)
    query, held, rope = torch.ones(1, 1, 2), torch.ones(MANY, 1), torch.ones(MANY, 1)
    with little_memory(), pytest.raises(RuntimeError, match="allocate"):
        latents.attend(query, held, rope, MANY - 1, 1.0)
    assert latents.attend(query, held, rope, MANY - 1, 1.0).item() == pytest.approx(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("compute", [draws, queries])
def test_an_error_is_raised_and_the_next_call_computes(compute: Callable[[], None]) -> None:
    """In a process of its own: the heap of one that has run other tests may hold as much as is asked for."""
    for found in (rowwise(), compiled_latents()):
        if isinstance(found, str):
            pytest.skip(found)
    code = f"from {__name__} import {compute.__name__}; {compute.__name__}(); print('right')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "right\n", done.stderr
