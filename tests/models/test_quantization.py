"""W8A8 gives exact products and the nearest int8, reads compressed-tensors' layout, and saves memory.

Its bytes are counted as they are held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from devices.int8 import quantize_rows
from devices.shapes import AttentionShape
from models.checkpoint import weights
from models.checkpoint.files import SINGLE
from models.decoder import Decoder
from models.ops.cpu.ops import CpuOps
from models.ops.reference import Ops
from models.quantization import ACTIVATIONS, WEIGHTS, Quantization, quantization
from recipes.assembly.families import decoder_config, read
from tests import device_kinds
from tests.device_kinds import Kind, Way, on_each
from tests.each_of import each_of
from tests.models.families import VARIANTS, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.test_weights import bare

IMPLEMENTATIONS = [Ops, CpuOps]
JSON = Quantization().in_json()
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def checkpoint(name: str, root: Path) -> Path:
    """A small random checkpoint in one file."""
    variant = next(each for each in VARIANTS if each.name == name)
    return make(replace(variant, shard_size="5GB", saved_as=torch.float32), root)[1]


def stored_in_int8(path: Path) -> None:
    """Quantise a checkpoint as its layout says, with a loop of its own for what is nearest."""
    tensors = load_file(path / SINGLE)
    for name in [name for name in tensors if name.split(".")[-2] in LINEARS and name.endswith("weight")]:
        weight = tensors[name].double()
        scale = weight.abs().max(1, keepdim=True)[0].float() / 127
        tensors[name] = torch.round(weight.float() / scale).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, path / SINGLE)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": JSON}))


@each_of("kind", IMPLEMENTATIONS)
@each_of("inputs", [1, 48, 1024, 1025, 4096])
def test_products_are_exact_at_the_ends_of_the_range(kind: type[Ops], inputs: int) -> None:
    generator = torch.Generator().manual_seed(inputs)
    ops = kind()
    for num_rows in (1, 2, 9):
        rows = torch.randint(-127, 128, (num_rows, inputs), generator=generator, dtype=torch.int8)
        weight = torch.randint(-128, 128, (33, inputs), generator=generator, dtype=torch.int8)
        rows[0], weight[0], weight[1] = 127, -128, 127
        weight[1, 0] = 126  # so that the sum is odd, which float32 cannot hold beyond 2**24
        packed = ops.pack_int8(weight.clone(), torch.ones(33), None)
        exact = rows.to(torch.int64) @ weight.to(torch.int64).t()
        assert torch.equal(ops.int8_product(rows, packed[0]).long(), exact)
    assert exact[0, 0] == -128 * 127 * inputs


def test_rows_are_quantised_to_the_nearest_step_of_their_own_scale() -> None:
    x = torch.tensor(
        [[1.0, -2.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0], [-3e-3, 1e-5, 2e-3, 3e-3], [1e-42, 0, 0, 0]]
    )
    rows, scale = quantize_rows(x)
    assert rows[0].tolist() == [64, -127, 0, 32]  # 63.5 and 31.75 of 127ths of two
    assert scale[0].item() == pytest.approx(2 / 127)
    assert not rows[1].any()
    assert scale.isfinite().all()
    assert rows[2].tolist() == [-127, 0, 85, 127]
    assert not rows[3].any()
    assert ((rows * scale - x).abs() <= scale / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_spoils_only_itself(bad: float) -> None:
    ops, x = Ops(), torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    packed = ops.pack_int8(*weight_of(8, 16), None)
    clean = ops.linear_int8(x, packed)
    x[1, 4] = bad
    spoilt = ops.linear_int8(x, packed)
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])


def weight_of(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale = quantize_rows(
        torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs))
    )
    return weight, scale[:, 0]


@pytest.mark.parametrize("kind", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_is_the_product_of_what_was_quantised(kind: type[Ops], dtype: torch.dtype) -> None:
    ops, generator = kind(), torch.Generator().manual_seed(1)
    x = torch.randn(5, 200, generator=generator).to(dtype)
    (weight, scale), bias = weight_of(24, 200), torch.randn(24, generator=generator).to(dtype)
    found = ops.linear_int8(x, ops.pack_int8(weight.clone(), scale, bias))
    rows, row_scale = quantize_rows(x)
    expected = (rows.double() * row_scale) @ (weight.double() * scale[:, None].double()).t() + bias.double()
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
    assert found.dtype == dtype


@pytest.mark.parametrize("device", on_each("fused"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_device_multiplies_as_it_is_defined(
    device: tuple[Kind, Way], dtype: torch.dtype, has_bias: bool
) -> None:
    shape = AttentionShape(4, 2, 64, 128, 1.0, dtype, (None,))
    (ops, attention), plain = device_kinds.operators(*device, shape), Ops()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 192, generator=generator).to(dtype)
    (weight, scale), bias = weight_of(96, 192), torch.randn(96, generator=generator).to(dtype)
    given = [weight, scale, bias if has_bias else None]
    expected = plain.linear_int8(x, plain.pack_int8(*given))
    there = [None if each is None else each.to(attention.device) for each in given]
    found = ops.linear_int8(x.to(attention.device), ops.pack_int8(*there)).cpu()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", on_each("fused"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_each_device_norms_and_gates_in_int8_as_it_is_defined(
    device: tuple[Kind, Way], dtype: torch.dtype, has_bias: bool
) -> None:
    shape = AttentionShape(4, 2, 64, 128, 1.0, dtype, (None,))
    (ops, attention), plain = device_kinds.operators(*device, shape), Ops()
    generator = torch.Generator().manual_seed(3)
    x, residual = (torch.randn(5, 192, generator=generator).to(dtype) for _ in range(2))
    gamma = (1 + torch.randn(192, generator=generator) / 10).to(dtype)
    biases = [torch.randn(n, generator=generator).to(dtype) if has_bias else None for n in (128, 192)]
    given = [[*weight_of(n, m), bias] for (n, m), bias in zip(((128, 192), (192, 64)), biases)]
    results = []
    for each, place in ((plain, torch.device("cpu")), (ops, attention.device)):
        there = [[None if part is None else part.clone().to(place) for part in parts] for parts in given]
        normed, total = each.add_rms_norm_int8(*(part.to(place) for part in (x, residual, gamma)), 1e-5)
        packed = [each.pack_int8(*parts) for parts in there]
        found = each.mlp_int8(normed, *packed), each.linear_int8(normed, packed[0]), total
        results.append([part.cpu() for part in found])
    for found, expected in zip(*results):
        assert found.dtype == dtype
        size = float(expected.float().abs().max())
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * size)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3"])
def test_a_quantised_checkpoint_is_the_plain_one_quantised_at_load(name: str, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path)
    plain = decoder_config(read(path))
    at_load = bare(replace(plain, quantization=Quantization(is_stored=False)))
    weights.load(at_load, path)
    stored_in_int8(path)
    stored = bare(decoder_config(read(path)))
    weights.load(stored, path)
    pairs = list(zip(linears(at_load), linears(stored)))
    assert len(pairs) == 4 * plain.num_layers + 1
    for (label, ours), (_, theirs) in pairs:
        assert ours.form == ("plain" if label == "head" else "quantize")
        for one, other in zip(ours.packed, theirs.packed):
            assert one is other is None or torch.equal(one, other), label
    assert torch.equal(at_load.embedding, stored.embedding)


def linears(decoder: Decoder) -> Iterator[tuple[str, Any]]:
    yield from ((name, module) for name, module in decoder.named_modules() if hasattr(module, "packed"))


def held_bytes(decoder: Decoder) -> int:
    """Of all weights, a tied one counted once."""
    held = {
        part.data_ptr(): part.nbytes
        for _, linear in linears(decoder)
        for part in linear.packed
        if part is not None
    }
    rest = {
        each.data_ptr(): each.nbytes for key, each in decoder.named_parameters() if not key.endswith("bias")
    }
    return sum((held | rest).values())


def test_a_checkpoint_is_accounted_for(tmp_path: Path) -> None:
    path = checkpoint("llama_biased", tmp_path)
    stored_in_int8(path)
    tensors = load_file(path / SINGLE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].float()
    scale = tensors.pop("model.layers.0.self_attn.q_proj.weight_scale")
    tensors["model.layers.0.self_attn.q_proj.weight_zero_point"] = torch.zeros_like(scale)
    save_file(tensors, path / SINGLE)
    with pytest.raises(ValueError, match="are not those of") as caught:
        weights.load(bare(decoder_config(read(path))), path)
    assert f"wrongly typed: {name} is F32, not one of I8" in str(caught.value)
    assert "missing: model.layers.0.self_attn.q_proj.weight_scale" in str(caught.value)
    assert "surplus: model.layers.0.self_attn.q_proj.weight_zero_point" in str(caught.value)


def test_what_compressed_tensors_writes_is_read() -> None:
    written = json.loads(WRITTEN)
    assert quantization({"quantization_config": written}) == Quantization(("lm_head", "re:.*down_proj"))
    assert quantization({"quantization_config": JSON}) == Quantization()
    assert quantization({}) is quantization({"quantization_config": None}) is None
    found = Quantization(("lm_head", "re:.*down_proj"))
    assert not found.covers("lm_head")
    assert not found.covers("model.layers.0.mlp.down_proj")
    assert found.covers("model.layers.0.mlp.up_proj")


# What compressed-tensors 0.20 dumps of its preset W8A8
WRITTEN = """
{"config_groups": {"group_0": {"targets": ["Linear"],
"weights": {"num_bits": 8, "type": "int", "symmetric": true, "group_size": null, "strategy": "channel",
"dynamic": false},
"input_activations": {"num_bits": 8, "type": "int", "symmetric": true, "group_size": null, "strategy":
"token", "dynamic": true}, "output_activations": null, "format": null}},
"quant_method": "compressed-tensors", "kv_cache_scheme": null, "format": "int-quantized",
"quantization_status": "initialized", "global_compression_ratio": null,
"ignore": ["lm_head", "re:.*down_proj"],
"moe_sparsity_config": null}
"""


def group(**changes: Any) -> dict[str, Any]:
    base = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ACTIVATIONS}
    return {"config_groups": {"g": base | changes}}


@each_of(
    "changes, words",
    [
        ({"quant_method": "exl2"}, "quantization_config.quant_method: 'exl2'"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method: 'bitsandbytes'"),
        ({"format": "marlin-24"}, "quantization_config.format: 'marlin-24'"),
        ({"format": "float-quantized"}, "quantization_config.format: 'float-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: {'num_bits': 8}"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"config_groups": {}}, "config_groups: not one group"),
        ({"ignore": [3]}, r"ignore: \[3\]"),
        ({"ignore": [r"re:(\w|.)*x"]}, "a repeated group"),
        ({"ignore": ["re:" + ".*" * 5]}, "more than 4 repeats"),
        ({"ignore": ["lm_head"] * 2**15}, "32768 entries"),
        (group(targets=["re:.*mlp"]), "config_groups.g: more or less than"),
        (group(format="pack-quantized"), "g.format: 'pack-quantized'"),
        (group(input_activations=None), "g.input_activations: None"),
        (group(input_activations=ACTIVATIONS | {"dynamic": False}), "dynamic: False in place of True"),
        (group(input_activations=ACTIVATIONS | {"strategy": "tensor"}), "'tensor' in place of 'token'"),
        (group(weights=WEIGHTS | {"num_bits": 4}), "weights.num_bits: 4 in place of 8"),
        (group(weights=WEIGHTS | {"strategy": "group"}), "weights.strategy: 'group' in place of 'channel'"),
        (group(weights=WEIGHTS | {"symmetric": False}), "weights.symmetric: False in place of True"),
        (group(weights=WEIGHTS | {"type": "float"}), "weights.type: 'float' in place of 'int'"),
    ],
)
def test_any_other_scheme_is_refused_by_its_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        quantization({"quantization_config": JSON | changes})
    assert "python -m scripts.quantize" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_linears_that_are_multiplied_as_one_are_quantised_as_one(tmp_path: Path) -> None:
    hf = read(checkpoint("llama_biased", tmp_path))
    said = JSON | {"ignore": ["lm_head", "model.layers.1.self_attn.k_proj"]}
    with pytest.raises(ValueError, match="of layer 1, which are multiplied as one: leave out all"):
        decoder_config(hf | {"quantization_config": said})


def test_a_layer_with_a_state_has_groups_of_its_own(tmp_path: Path) -> None:
    variant = next(each for each in RECURRENT_VARIANTS if each.name == "kimi_linear")
    hf = read(make(variant, tmp_path)[1])
    block = "model.layers.0.self_attn."
    names = [name for name, *_ in decoder_config(hf).linears() if name.startswith(block)]
    assert f"{block}g_a_proj" in names
    said = JSON | {"ignore": names}
    assert decoder_config(hf | {"quantization_config": said}).quantization == Quantization(tuple(names))
    said = JSON | {"ignore": [f"{block}g_a_proj"]}
    with pytest.raises(ValueError, match=r"some of self_attn\.b_proj, .*g_a_proj of layer 0, which are mult"):
        decoder_config(hf | {"quantization_config": said})
