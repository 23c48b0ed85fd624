"""Decoders with sparse latent attention give the tokens of transformers, however requests are served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attention.sparse
from attention.sparse import top_positions
from recipes.assembly.scoring import score
from tests.models.families import expected_logprobs, make
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.test_identity import case_of, check, make_engine

BY_NAME = {each.name: each for each in SPARSE_VARIANTS}
TOKENS = torch.randint(0, 160, (120,), generator=torch.Generator().manual_seed(5)).tolist()
Checkpoint = tuple[Any, Path]
NEAR = 1e-6  # scores that lie so near to each other may be ordered otherwise by a sum in another order


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(replace(BY_NAME[name], saved_as=torch.float32), folder))


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """By how much the worst chosen score exceeds the best of the others, in every row that leaves some out.

    A test that used near scores fails with that reason, whether or not its tokens were right.
    """
    found: list[float] = []

    def watched(scores: Tensor, most: int) -> Tensor:
        if scores.shape[1] > most:
            best = scores.topk(most + 1).values
            gap = best[:, most - 1] - best[:, most]
            found.extend(gap[best[:, most] > -torch.inf].tolist())
        return top_positions(scores, most)

    monkeypatch.setattr(attention.sparse, "top_positions", watched)
    yield found
    near = [gap for gap in found if gap < NEAR]
    assert not near, f"{len(near)} of {len(found)} choices lie within {NEAR}: choose another seed"


@pytest.mark.parametrize("name", BY_NAME)
def test_a_prompt_scores_as_in_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], gaps: list[float]
) -> None:
    model, path = checkpoint(name)
    expected = expected_logprobs(model, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [TOKENS]).logprobs, expected, rtol=0, atol=1e-4)
    assert bool(gaps) != name.endswith("reads_all")


@pytest.mark.parametrize("name", BY_NAME)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path, gaps: list[float]) -> None:
    """Prompts are chunked on both sides of the first choice, prefixes shared and requests preempted."""
    case = case_of(replace(BY_NAME[name], saved_as=torch.float32), tmp_path)
    engine = make_engine(case.path, ("cpu", "fused"))
    gaps.clear()  # steps before the first request see the same few tokens again and again
    check(engine, case)
    assert bool(gaps) != name.endswith("reads_all")
