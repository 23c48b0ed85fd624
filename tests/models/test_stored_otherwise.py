"""Checkpoints that rotate a part of each head, or store several linears as one, are read as meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention.reference import Attention
from models.checkpoint import weights
from models.config import RopeConfig
from models.decoder import Decoder
from models.layers.linear import Linear
from models.layers.rope import Rope, head_order
from models.ops.reference import Ops
from models.parallel.share import Share
from models.quantization import Quantization
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import score
from tests.models.families import VARIANTS, Variant, expected_logprobs, make
from tests.models.test_shared_weights import Rank

FAMILIES = ("gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "internlm3", "phi3")
TOKENS = torch.randint(0, 160, (90,), generator=torch.Generator().manual_seed(5)).tolist()


# The last of each family; test_decoder.py has all
@pytest.mark.parametrize(
    "variant",
    {each.family: each for each in VARIANTS if each.family in FAMILIES}.values(),
    ids=lambda v: v.name,
)
def test_a_prompt_scores_as_in_transformers(variant: Variant, tmp_path: Path) -> None:
    model, path = make(replace(variant, saved_as=torch.float32), tmp_path)
    expected = expected_logprobs(model, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [TOKENS]).logprobs, expected, rtol=0, atol=1e-4)


def decoder(path: Path, rank: int = 0, size: int = 1, quantization: Quantization | None = None) -> Decoder:
    config, share = replace(config_in(path), quantization=quantization), Share(rank, size)
    made = Decoder(config, Ops(), Attention(shape_of(16, share.part(config))), Rank(rank, size))
    made.pack = lambda: None
    weights.load(made, path)
    return made


def linears(made: Decoder, layer: int) -> list[Linear]:
    return [made.layers[layer].attention.qkv, made.layers[layer].mlp.gate_up]


@pytest.mark.parametrize("name", ["glm4", "phi3"])
def test_joined_linears_are_quantised_row_by_row_as_they_are_read(name: str, tmp_path: Path) -> None:
    path = make(next(each for each in VARIANTS if each.name == name), tmp_path)[1]
    for rank, size in ((0, 1), (1, 2)):
        plain, quantised = decoder(path, rank, size), decoder(path, rank, size, Quantization(is_stored=False))
        for linear, read in zip(linears(quantised, 1), linears(plain, 1), strict=True):
            assert linear.weight is not None
            assert linear.weight_scale is not None
            assert read.weight is not None
            assert linear.weight.dtype == torch.int8
            scale = linear.weight_scale.view(-1, 1)
            torch.testing.assert_close(scale[:, 0] * 127, read.weight.abs().amax(1))
            assert ((linear.weight * scale - read.weight).abs() <= 0.5001 * scale).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [4, 6, 8])
def test_every_dimension_of_a_head_has_one_place(dim: int, interleaved: bool) -> None:
    config = RopeConfig("default", 100.0, dim, width=8, interleaved=interleaved)
    order = head_order(config)
    found = list(range(8)) if order is None else order.tolist()
    assert sorted(found) == list(range(8))
    turned = set(range(dim))
    pairs = [(found[at], found[at + 4]) for at in range(4)]
    assert all((one in turned) == (other in turned) for one, other in pairs)
    together = [{2 * at, 2 * at + 1} if interleaved else {at, at + dim // 2} for at in range(dim // 2)]
    assert [{*pair} for pair in pairs if pair[0] in turned] == together
    rope = Rope(config)
    rope.tabulate(20, torch.float32)
    cos, sin = rope.cos_sin(torch.arange(20), None, torch.float32)
    assert bool((cos[:, dim // 2 : 4] == 1).all())
    assert bool((sin[:, dim // 2 : 4] == 0).all())


def test_what_is_stored_joined_is_not_quantised_offline(tmp_path: Path) -> None:
    path = make(next(each for each in VARIANTS if each.name == "phi3"), tmp_path)[1]
    with pytest.raises(ValueError, match=r"stores linears joined \(qkv_proj and gate_up_proj\); set"):
        quantize(path, tmp_path / "int8")
