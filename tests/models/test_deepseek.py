"""DeepSeek's experts, latents and heads are chosen, kept and shared as its checkpoints mean it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.latent import LatentAttention
from devices.ascend_limits import product
from kv_cache.device.storage import KVCache, LayerPages
from models.checkpoint import weights
from models.config import DecoderConfig, MixtureConfig
from models.decoder import Decoder
from models.layers.latent import LatentSelfAttention
from models.ops.cpu.ops import CpuOps
from models.ops.reference import Ops
from models.parallel.share import Share
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in, decoder_config
from recipes.assembly.scoring import score
from tests.device_kinds import has_npu, npu, operators
from tests.lazy import transformers
from tests.models.families import VARIANTS, expected_logprobs, make
from tests.models.test_shared_weights import Rank
from tests.recipes.published import DEEPSEEK_V2_LITE, DEEPSEEK_V3

TOKENS = torch.randint(0, 160, (120,), generator=torch.Generator().manual_seed(5)).tolist()
GROUPS = {"num_groups": 4, "num_chosen_groups": 2}
ROUTERS = {
    "V2": MixtureConfig(12, 3, 8, False, scale=1.7),
    "V2 by groups": MixtureConfig(12, 3, 8, False, **GROUPS),
    "V3": MixtureConfig(
        12, 5, 8, True, scores="sigmoid", group_best=2, is_corrected=True, scale=2.5, **GROUPS
    ),
    "V3, not normalised": MixtureConfig(12, 4, 8, False, scores="sigmoid", is_corrected=True),
}


def checkpoint(name: str, root: Path, **options: Any) -> tuple[Any, Path]:
    variant = next(each for each in VARIANTS if each.name == name)
    return make(replace(variant, saved_as=torch.float32, options=variant.options | options), root)


@pytest.mark.parametrize(("name", "eps"), [("deepseek_v2", 1e-6), ("deepseek_v3", 0.1)])
def test_a_prompt_scores_as_in_transformers(name: str, eps: float, tmp_path: Path) -> None:
    """The norms of latents have an eps of their own."""
    model, path = checkpoint(name, tmp_path, rms_norm_eps=eps)
    expected = expected_logprobs(model, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [TOKENS]).logprobs, expected, rtol=0, atol=1e-4)


def theirs(name: str, x: Tensor, router: Tensor, correction: Tensor) -> Tensor:
    """Transformers' weight of every expert for every token; 0 of those that are not chosen."""
    config = ROUTERS[name]
    of_v2 = transformers.models.deepseek_v2.modeling_deepseek_v2
    of_v3 = transformers.models.deepseek_v3.modeling_deepseek_v3
    made: Any = of_v3.DeepseekV3TopkRouter if name.startswith("V3") else of_v2.DeepseekV2TopkRouter
    module = made.__new__(made)
    torch.nn.Module.__init__(module)
    module.top_k, module.num_experts, module.hidden_dim = config.num_chosen, config.num_experts, x.shape[1]
    module.weight = torch.nn.Parameter(router)
    module.routed_scaling_factor, module.norm_topk_prob = config.scale, config.normalizes
    module.num_group, module.topk_group = config.num_groups, config.num_chosen_groups
    module.topk_method = "greedy" if config.num_groups == 1 else "group_limited_greedy"
    module.e_score_correction_bias = correction
    with torch.no_grad():
        _, shares, chosen = module(x)
    return torch.zeros(len(x), config.num_experts).scatter(1, chosen, shares)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("npu", marks=[pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="")])],
)
def test_experts_are_chosen_and_weighed_as_in_transformers(name: str, kind: Any) -> None:
    """Corrections of below -1 bring scores below the 0 that a hidden group must not have."""
    generator = torch.Generator().manual_seed(3)
    x, router = (torch.randn(size, 16, generator=generator) for size in (200, 12))
    correction = torch.randn(12, generator=generator) * 0.4 - 1.5
    config = ROUTERS[name]
    ops = CpuOps()
    if kind == "npu":
        ops, _ = operators("npu", "fused", shape_of(128, decoder_config(DEEPSEEK_V2_LITE)))
    device = "npu:0" if kind == "npu" else "cpu"
    bias = correction.to(device) if config.is_corrected else None
    shares, chosen = ops.route(x.to(device), router.to(device), bias, config)
    ours = torch.zeros(200, 12).scatter(1, chosen.cpu().long(), shares.cpu())
    torch.testing.assert_close(ours, theirs(name, x, router, correction), rtol=1e-5, atol=1e-6)


def test_a_token_has_the_numbers_that_were_published() -> None:
    """A latent of 512 and a rope key of 64, in bfloat16, in each of 61 layers, on every tensor rank."""
    config = decoder_config(DEEPSEEK_V3)
    assert config.kv_bytes_per_token() == config.kv_bytes_per_token(16) == 70_272
    assert config.num_parameters / 1e9 == pytest.approx(671.03, abs=0.01)
    assert config.num_active_parameters / 1e9 == pytest.approx(37.55, abs=0.01)
    assert decoder_config(DEEPSEEK_V2_LITE).num_parameters / 1e9 == pytest.approx(15.71, abs=0.01)


@pytest.mark.parametrize("int8_cache", [False, True])
def test_what_is_planned_is_what_is_allocated(int8_cache: bool, tmp_path: Path) -> None:
    config = replace(config_in(checkpoint("deepseek_v2", tmp_path)[1]), int8_cache=int8_cache)
    attention = LatentAttention(shape_of(16, config))
    cache = KVCache([LayerPages(attention.new_planes)] * config.num_layers, 16, [9], [2])
    assert 16 * config.kv_bytes_per_token() * 9 == sum(each.nbytes for each in cache.tensors)
    decoder = Decoder(config, Ops(), attention)
    assert config.weight_bytes == sum(each.nbytes for each in decoder.parameters())


def attended(config: DecoderConfig, path: Path, rank: int, size: int) -> LatentSelfAttention:
    share = Share(rank, size)
    group = Rank(rank, size)
    decoder = Decoder(config, Ops(), LatentAttention(shape_of(16, share.part(config))), group)
    weights.load(decoder, path)
    attention = decoder.layers[1].attention
    assert isinstance(attention, LatentSelfAttention)
    return attention


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_ranks_have_heads_of_their_own_and_all_latents(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)[1]
    config = config_in(path)
    whole, *parts = (attended(config, path, rank, size) for rank, size in ((0, 1), (0, 2), (1, 2)))
    assert whole.up.packed is not None
    for ours in ("keys", "values"):
        held = torch.cat([getattr(part.up.packed, ours) for part in parts])
        assert torch.equal(held, getattr(whole.up.packed, ours))
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(2))
    *_, latents = whole.qkv(x)
    for part in parts:
        torch.testing.assert_close(part.qkv(x)[-1], latents)


def test_layers_that_predict_further_tokens_are_left_unread(tmp_path: Path) -> None:
    config = replace(config_in(checkpoint("deepseek_v3", tmp_path)[1]), num_unread_layers=1)
    share = Share()
    assert share.is_elsewhere("model.layers.3.eh_proj.weight", config)
    assert not share.is_elsewhere("model.layers.2.mlp.gate.weight", config)
    assert not share.is_elsewhere("model.layers.4.eh_proj.weight", config)


def test_shapes_that_fused_attention_does_not_take_are_refused() -> None:
    shape = shape_of(128, decoder_config(DEEPSEEK_V3))
    product("910B", "").check(shape)
    with pytest.raises(ValueError, match=r"each device has 96 heads of the model; .* a power of two"):
        product("910B", "").check(replace(shape, num_heads=96))
    with pytest.raises(ValueError, match="are 256, 64, 128, 128; fused attention takes 512, 64, 128"):
        product("910C", "").check(replace(shape, head_dim=256))
    with pytest.raises(ValueError, match="latent attention, whose operators the 310P lacks"):
        product("310P", "").check(replace(shape, dtype=torch.float16))


@pytest.mark.npu
@pytest.mark.skipif(npu() != "virtual", reason="it is about the stand-in, which is not here")
def test_pages_of_a_wrong_size_are_refused() -> None:
    shape = shape_of(100, decoder_config(DEEPSEEK_V2_LITE))
    with pytest.raises(ValueError, match=r"cache\.page_size is 100"):
        operators("npu", "fused", shape)[1].check()
