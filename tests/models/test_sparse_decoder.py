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
from attention.int8_sparse import latent_attention
from attention.sparse import top_positions
from kv_cache.device.storage import KVCache
from models.decoder import Decoder
from models.ops.reference import Ops
from recipes.assembly.decoders import layers_of, shape_of
from recipes.assembly.families import config_in, decoder_config, read
from recipes.assembly.scoring import score
from tests.models.families import expected_logprobs, make
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.test_identity import case_of, check, make_engine
from tests.recipes import published
from tests.thorough import cases, first_quick

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


@pytest.mark.parametrize(
    "name", first_quick(1, cases(["v32", "glm_5_shared", "glm_5_reads_all"], [*BY_NAME]))
)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path, gaps: list[float]) -> None:
    """Prompts are chunked on both sides of the first choice, prefixes shared and requests preempted."""
    case = case_of(replace(BY_NAME[name], saved_as=torch.float32), tmp_path)
    engine = make_engine(case.path, ("cpu", "fused"))
    gaps.clear()  # steps before the first request see the same few tokens again and again
    check(engine, case)
    assert bool(gaps) != name.endswith("reads_all")


def test_a_token_has_the_numbers_that_were_published() -> None:
    """A latent of 512, a rope key of 64 and an index key of 128, in bfloat16, on every tensor rank."""
    v32, glm = (decoder_config(each) for each in (published.DEEPSEEK_V3_2, published.GLM_5_1))
    assert v32.kv_bytes_per_token() == v32.kv_bytes_per_token(16) == 61 * (1152 + 256)
    assert glm.kv_bytes_per_token() == 78 * (1152 + 256)
    shared = decoder_config(published.GLM_5_1 | {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    num_own = sum(max(layer - 2, 0) % 4 == 0 for layer in range(78))
    assert shared.kv_bytes_per_token() == 78 * 1152 + num_own * 256
    assert v32.growing_kv_bytes_per_token == 61 * 256


@pytest.mark.parametrize("int8", [False, True], ids=["own type", "int8"])
@pytest.mark.parametrize("name", ["v32", "glm_5_shared"])
def test_what_is_planned_is_what_is_allocated(
    name: str, int8: bool, checkpoint: Callable[[str], Checkpoint]
) -> None:
    config = replace(config_in(checkpoint(name)[1]), int8_cache=int8)
    decoder = Decoder(config, Ops(), latent_attention(shape_of(16, config)))
    cache = KVCache(layers_of(decoder), 16, [9], [2])
    assert 16 * config.kv_bytes_per_token() * 9 == sum(each.nbytes for each in cache.tensors)
    assert config.weight_bytes == sum(each.nbytes for each in decoder.parameters())


def test_in_int8_a_token_has_a_row_of_656_bytes_and_an_index_key_with_a_scale() -> None:
    """The latent's 512, the rope key's 64 in bfloat16 and four scales; 128 and a float16 on full layers."""
    v32, glm = (
        replace(decoder_config(each | more), int8_cache=True)
        for each, more in (
            (published.DEEPSEEK_V3_2, {}),
            (published.GLM_5_1, {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        )
    )
    assert v32.kv_bytes_per_token() == v32.kv_bytes_per_token(16) == 61 * (656 + 128 + 2)
    assert glm.kv_bytes_per_token() == 78 * 656 + glm.num_indexers * (128 + 2)
    assert (v32.growing_kv_bytes_per_token, v32.attended_head_bytes) == (61 * 130, 656)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "it must be full"),
        ({"indexer_types": ["full", "other", "full"]}, "one of full or shared for each of 3 layers"),
        ({"indexer_types": None, "index_topk_pattern": "FS"}, "one of F or S for each of 3 layers"),
        ({"index_head_dim": 8}, "it must have as many"),
        ({"q_lora_rank": None}, "an indexer reads compressed queries"),
        ({"indexer_rope_interleave": False}, "it must be True, or left out"),
    ],
)
def test_indexers_that_cannot_be_computed_are_refused(
    said: dict[str, Any], words: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    hf = read(checkpoint("glm_5_shared")[1])
    with pytest.raises(ValueError, match=words):
        decoder_config(hf | said)
