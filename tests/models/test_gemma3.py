"""Gemma 3's own features are computed as in transformers; what is not supported is refused by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.decoder import Decoder
from models.parallel.group import ALONE
from recipes.assembly.families import decoder_config
from tests.device_kinds import Kind, on_each
from tests.each_of import each_of
from tests.models.families import VARIANTS, Variant, make, wide
from tests.models.tensor_rank import built

SMALL = {"model_type": "gemma3_text", "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4}
SMALL |= {"num_hidden_layers": 13, "intermediate_size": 96}


def gemma(name: str) -> Variant:
    return next(each for each in VARIANTS if each.name == name)


def decoder(variant: Variant, folder: Path, **more: Any) -> tuple[Any, Decoder]:
    model, path = make(variant, folder)
    made = built(path, ALONE, **more)[0]
    return model, made


def test_what_is_rounded_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    """1 + w is rounded once, and so is the root that scales embeddings."""
    model, made = decoder(gemma("gemma3_layer_types"), tmp_path, dtype="bfloat16")
    fresh = type(model)(model.config).to(torch.bfloat16)
    fresh.load_state_dict(model.state_dict())
    ids = torch.arange(160)
    assert torch.equal(made.embedded(ids), fresh.model.embed_tokens(ids))
    assert float(made.embedded(ids).float().norm() / made.embedding.float().norm()) > 6
    for ours, theirs in (
        (made.norm, fresh.model.norm),
        (made.layers[1].mlp_norm, fresh.model.layers[1].pre_feedforward_layernorm),
        (made.layers[1].attention_post_norm, fresh.model.layers[1].post_attention_layernorm),
        (made.layers[2].attention.key_norm, fresh.model.layers[2].self_attn.k_norm),
    ):
        assert torch.equal(ours, (1 + theirs.weight.float()).to(torch.bfloat16))


@pytest.mark.parametrize("pair", on_each("fused"))
def test_in_int8_it_is_gated_by_the_same_function(pair: tuple[Kind, str], tmp_path: Path) -> None:
    variant = wide(replace(gemma("gemma3"), saved_as=torch.float32))
    path = make(variant, tmp_path)[1]
    plain, there = built(path, ALONE)[0], built(path, ALONE, pair[0], int8_at_load=True, dtype="bfloat16")[0]
    rows = 2 * torch.randn(40, 48, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    exact = plain.layers[1].mlp(rows.float())
    found = there.layers[1].mlp(rows.to(there.attention.device)).float().cpu()
    distance = float((found - exact).norm() / exact.norm())
    assert distance < 0.03, "with silu in place of gelu it is 0.08"


@each_of(
    "changes, words",
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0; no published Gemma 3"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0; no published Gemma 3"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping: 0.0; no published Gemma 3"),
        ({"hidden_activation": "gelu"}, "hidden_activation: 'gelu'; it must be gelu_pytorch_tanh"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: 0; it must be an integer from 1"),
        ({"sliding_window": None}, "sliding layers need use_sliding_window: true and sliding_window"),
        ({"layer_types": ["full_attention"]}, "for each of 13 layers"),
        ({"rope_parameters": {"rope_type": "default"}}, "a mapping of full_attention and sliding_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention: 3; .* be a mapping"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling.rope_type: 'dynamic'; of layers",
        ),
        ({"rope_scaling": {"rope_type": "abf"}}, "rope_type: 'abf'; supported are default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scaling.type: 'linear'; .* call it rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "truncate": False}}, "scaling.truncate: False; .* be true"),
        (
            {"rope_parameters": {"sliding_attention": {"truncate": False}}},
            "attention.truncate: False; .* true",
        ),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "longrope"}}}, "'longrope'; of layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_config(SMALL | changes)
