"""The features of gpt-oss are computed as in transformers; what is not supported is refused by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint.stacked_experts import unpacked
from models.ops.reference import Ops
from recipes.assembly.families import decoder_config
from recipes.assembly.int8_checkpoint import quantize
from recipes.assembly.scoring import score
from tests.attention.test_attention import shape
from tests.device_kinds import has_npu, operators
from tests.lazy import transformers
from tests.models.families import VARIANTS, expected_logprobs, make
from tests.models.test_published_files import GPT_OSS, MXFP4, theirs
from tests.models.test_stored_otherwise import decoder

TOKENS = torch.randint(0, 160, (90,), generator=torch.Generator().manual_seed(5)).tolist()


def test_the_gate_is_clamped_as_in_transformers() -> None:
    with torch.device("meta"):
        experts = transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts(theirs(GPT_OSS))
    gate_up = 10 * torch.randn(7, 20, generator=torch.Generator().manual_seed(2))
    by_turns = gate_up.view(7, 2, 10).transpose(1, 2).flatten(1)
    torch.testing.assert_close(Ops().clamped_swiglu(gate_up, 1.702, 7.0), experts._apply_gate(by_turns))


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
def test_without_the_clipped_gate_it_is_plain_torch() -> None:
    ops, attention = operators("npu", "fused", shape())
    gate_up = 5 * torch.randn(6, 48, device=attention.device)
    found = ops.clamped_swiglu(gate_up, 1.702, 7.0)
    ops.product = replace(ops.product, clips_swiglu=False)
    torch.testing.assert_close(ops.clamped_swiglu(gate_up, 1.702, 7.0), found)


def unpacked_by_transformers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights [experts, inputs, outputs] that blocks and scales stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes two seconds to import

    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


def drawn(*shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of weights [*, outputs, inputs] about as large as a layer has them."""
    *outer, inputs = shape
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 126, (*outer, inputs // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def test_every_byte_and_scale_stands_for_what_transformers_makes_of_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 8, 2, 16)
    for exponent in (1, 100, 127, 250):
        scales = torch.full((1, 8, 2), exponent, dtype=torch.uint8)
        expected = unpacked_by_transformers(blocks, scales)
        assert torch.equal(unpacked(blocks[0], scales[0]), expected[0].t())


def packed(folder: Path, *, are_apart: bool = False) -> tuple[Any, Path]:
    """A model of transformers, and its checkpoint with experts in MXFP4; its scales may lie apart."""
    variant = next(each for each in VARIANTS if each.name == "gpt_oss_half")
    variant = replace(variant, saved_as=torch.float32, shard_size="5GB")
    model, path = make(replace(variant, options=variant.options | {"hidden_size": 64}), folder)
    tensors = load_file(path / "model.safetensors")
    for name in [each for each in tensors if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        blocks, scales = drawn(count, outputs, inputs)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = unpacked_by_transformers(blocks, scales)
        model.get_parameter(name).data.copy_(made)
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": MXFP4}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").unlink()
    others = "b" if are_apart else "a"
    of_file = {name: f"{others if name.endswith('_scales') else 'a'}.safetensors" for name in tensors}
    for file in set(of_file.values()):
        save_file({name: tensors[name] for name in tensors if of_file[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of_file}))
    return model, path


@pytest.mark.parametrize("are_apart", [False, True])
def test_experts_in_mxfp4_score_as_in_transformers(are_apart: bool, tmp_path: Path) -> None:
    model, path = packed(tmp_path, are_apart=are_apart)
    expected = expected_logprobs(model, TOKENS)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    torch.testing.assert_close(score(path, [TOKENS]).logprobs, expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"stores experts joined; set model\.quantization: w8a8"):
        quantize(path, tmp_path / "int8")


def test_ranks_read_their_part_of_mxfp4(tmp_path: Path) -> None:
    """Of 96 inputs of `down`, 48 each: the second rank begins within a block."""
    path = packed(tmp_path)[1]
    whole, *parts = (decoder(path, *each) for each in ((0, 1), (0, 2), (1, 2)))
    for layer in range(3):
        held = [made.layers[layer].mlp.experts for made in (whole, *parts)]
        for number in held[0]:
            one, *cut = (each[number] for each in held)
            assert torch.equal(one.down.weight, torch.cat([each.down.weight for each in cut], 1))
            assert torch.equal(one.down.bias, cut[0].down.bias)
            assert not cut[1].down.bias.any()
            for name in ("weight", "bias"):
                gate, up = zip(*(getattr(each.gate_up, name).chunk(2) for each in cut))
                assert torch.equal(getattr(one.gate_up, name), torch.cat((*gate, *up)))
        sinks = [made.layers[layer].attention.sinks for made in (whole, *parts)]
        assert torch.equal(sinks[0], torch.cat(sinks[1:]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quant_method: 'awq'; mxfp4 is of"),
        ({"model_type": "qwen3_moe"}, "quant_method: 'mxfp4'; mxfp4 is of experts in one tensor"),
        ({"intermediate_size": 2890}, "intermediate_size: 2890; in mxfp4 it and hidden_size are multiples"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok: 33; there are 32 experts"),
        ({"layer_types": ["full_attention"]}, "for each of 24 layers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder_config(GPT_OSS | changes)
