"""Compiled operators that find no memory raise an error that a step can fail by, and end no process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attention.cpu.latent import compiled_latents
from models.ops.cpu.rowwise import rowwise

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


def test_draws_without_memory_for_a_vocabulary_s_weights() -> None:
    ops = rowwise()
    if isinstance(ops, str):
        pytest.skip(ops)
    logits, row = torch.zeros(2, MANY), torch.zeros(2, dtype=torch.int64)
    limits = {"uniform": torch.tensor([0.25, 0.5]), "sharpness": torch.ones(2)}
    with little_memory(), pytest.raises(MemoryError, match="no memory for the weights"):
        ops.draw(logits, row, row, limits)
    # Of equal weights, a quarter and half of them are before the drawn ones
    assert ops.draw(logits, row, row, limits).tolist() == [MANY // 4, MANY // 2]


def test_queries_without_memory_for_their_scores() -> None:
    latents = compiled_latents()
    if isinstance(latents, str):
        pytest.skip(latents)
    query, held, rope = torch.ones(1, 1, 2), torch.ones(MANY, 1), torch.ones(MANY, 1)
    with little_memory(), pytest.raises(RuntimeError, match="allocate"):
        latents.attend(query, held, rope, MANY - 1, 1.0)
    assert latents.attend(query, held, rope, MANY - 1, 1.0).item() == pytest.approx(1.0)
