"""A checkpoint of 30 B weights is planned from what its files say, without reading the weights.

Its files are sparse: they have headers, and behind them nothing that takes room on a disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.reference import Attention
from models.checkpoint import weights
from models.checkpoint.files import INDEX
from models.checkpoint.stored_parts import in_parts
from models.decoder import Decoder
from models.ops.reference import Ops
from models.packing import LAYOUTS
from recipes.__main__ import main
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import config_in
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.models.packed_checkpoints import AWQ
from tests.peak_memory import forget_peak, peak_bytes
from tests.recipes.published import GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B, QWEN3_30B_A3B_GPTQ
from tests.thorough import cases

NUM_FILES = 4
RECIPE = "recipes/qwen3_moe/qwen3_30b_a3b_910b_tp2.yaml"
Tensor = tuple[str, str, tuple[int, ...]]  # name, type and shape
BYTES = {"BF16": 2, "F16": 2, "I32": 4, "U8": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": QWEN3_30B_A3B,
    "awq": QWEN3_30B_A3B | {"quantization_config": AWQ | {"group_size": 128}},
    "gptq": QWEN3_30B_A3B_GPTQ,
}


def tensors_of(path: Path, form: str) -> Iterator[Tensor]:
    """Everything that the published checkpoint has."""
    config = config_in(path)
    for name, (outputs, inputs) in {name: (outs, ins) for name, ins, outs in config.linears()}.items():
        if form != "plain" and name != "lm_head":
            groups = inputs // 128
            words = (inputs, outputs // 8) if form == "awq" else (inputs // 8, outputs)
            yield f"{name}.qweight", "I32", words
            yield f"{name}.qzeros", "I32", (groups, outputs // 8)
            yield f"{name}.scales", "F16", (groups, outputs)
            if form == "gptq":
                yield f"{name}.g_idx", "I32", (inputs,)
        else:
            yield f"{name}.weight", "BF16", (outputs, inputs)
    hidden = config.hidden_size
    yield "model.embed_tokens.weight", "BF16", (config.vocab_size, hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        yield f"{prefix}input_layernorm.weight", "BF16", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", "BF16", (hidden,)
        yield f"{prefix}self_attn.q_norm.weight", "BF16", (config.head_dim,)
        yield f"{prefix}self_attn.k_norm.weight", "BF16", (config.head_dim,)
        yield f"{prefix}mlp.gate.weight", "BF16", (QWEN3_30B_A3B["num_experts"], hidden)


def gpt_oss_tensors(hf: dict[str, Any]) -> Iterator[Tensor]:
    """Everything that the hub's files of gpt-oss have, the experts in MXFP4."""
    hidden, inner, experts = hf["hidden_size"], hf["intermediate_size"], hf["num_local_experts"]
    heads, kv_heads = (hf[f"num_{each}_heads"] * hf["head_dim"] for each in ("attention", "key_value"))
    yield "model.embed_tokens.weight", "BF16", (hf["vocab_size"], hidden)
    yield "lm_head.weight", "BF16", (hf["vocab_size"], hidden)
    yield "model.norm.weight", "BF16", (hidden,)
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", "BF16", (hidden,)
        sides = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
        for name, shape in sides.items():
            yield f"{prefix}self_attn.{name}_proj.weight", "BF16", shape
            yield f"{prefix}self_attn.{name}_proj.bias", "BF16", shape[:1]
        yield f"{prefix}self_attn.sinks", "BF16", (hf["num_attention_heads"],)
        yield f"{prefix}mlp.router.weight", "BF16", (experts, hidden)
        yield f"{prefix}mlp.router.bias", "BF16", (experts,)
        for name, (outputs, inputs) in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
            stack = f"{prefix}mlp.experts.{name}_proj"
            yield f"{stack}_blocks", "U8", (experts, outputs, inputs // 32, 16)
            yield f"{stack}_scales", "U8", (experts, outputs, inputs // 32)
            yield f"{stack}_bias", "BF16", (experts, outputs)


def written(path: Path, form: str = "plain") -> int:
    """Write the checkpoint of Qwen3-30B-A3B in one of these forms; the bytes of its tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIGS[form]))
    return sparse(path, list(tensors_of(path, form)))


def sparse(path: Path, tensors: list[Tensor]) -> int:
    """Write files that hold these tensors beside the config; the bytes of the tensors."""
    places, total = {}, 0
    for number in range(NUM_FILES):
        header, at, file = {}, 0, path / f"model-{number}.safetensors"
        for name, dtype, shape in tensors[number::NUM_FILES]:
            size = BYTES[dtype] * torch.Size(shape).numel()
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            places[name], at = file.name, at + size
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + at)
        total += at
    (path / INDEX).write_text(json.dumps({"weight_map": places}))
    return total


def test_it_is_planned_without_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MODELS", str(tmp_path))
    num_bytes = written(tmp_path / "Qwen3-30B-A3B")
    before = forget_peak()
    main(["show", RECIPE])
    assert peak_bytes() - before < 2**28
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    norms, routers = 2 * (48 * (2 * 2048 + 2 * 128) + 2048), 48 * 128 * 2048 * 4  # held by both of two ranks
    of_a_rank = (num_bytes - norms - routers // 2) / 2 + norms + routers
    assert f"weights {of_a_rank / 2**30:,.2f} GiB" in lines
    assert "experts 128 in each of 48 layers, 8 for a token" in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("form", cases(["plain"], list(CONFIGS)))
def test_all_of_it_is_accounted_for_without_being_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    written(path, form)
    before = forget_peak()
    config = config_in(path)
    decoder = Decoder(config, Ops(), Attention(shape_of(16, config), "meta"))
    places = in_parts(weights.destinations_by_name(decoder), config.stored_form, path)
    found = weights.accounted(path, places, places, lambda name: False)
    assert sorted(name for names in found.values() for name in names) == sorted(places)
    more_of_a_linear = {"plain": 0, "awq": 2, "gptq": 3}[form]
    assert len(places) == 18_867 + more_of_a_linear * 48 * (4 + 3 * 128)
    assert peak_bytes() - before < 2**30
    lost = f"model.layers.7.mlp.experts.3.up_proj.{'weight' if form == 'plain' else LAYOUTS[form].scale}"
    more = places | {f"{lost}.2": places[lost]}
    with pytest.raises(ValueError, match=f"missing: {lost}.2"):
        weights.accounted(path, more, more, lambda name: False)


def held_bytes(tensors: list[Tensor], ranks: int) -> float:
    """What one of so many ranks holds of them: routers are in float32, and they and norms on every rank, as
    are biases that are added to sums; of what is in 4 bits each number has two bytes, but in words of int32.
    """
    total = 0.0
    for name, dtype, shape in tensors:
        size = float(BYTES[dtype] * torch.Size(shape).numel())
        is_whole = any(
            part in name for part in ("norm", "router", "mlp.gate.", "o_proj.bias", "down_proj_bias")
        )
        if "router" in name or "mlp.gate." in name:
            size *= 2
        if name.endswith(("_blocks", ".qzeros")):
            size *= 4
        if name.endswith(("proj_scales", ".g_idx")):
            size = 0
        total += size if is_whole else size / ranks
    return total


@pytest.mark.parametrize(
    ("recipe", "hf", "ranks"),
    [
        ("qwen3_moe/qwen3_30b_a3b_910b_w4a16", QWEN3_30B_A3B_GPTQ, 1),
        ("gpt_oss/gpt_oss_20b_910b", GPT_OSS_20B, 1),
        ("gpt_oss/gpt_oss_120b_910b_tp8", GPT_OSS_120B, 8),
    ],
    ids=lambda each: each.rpartition("/")[2] if isinstance(each, str) else "",
)
def test_what_is_packed_is_planned_as_what_becomes_of_it(
    recipe: str,
    hf: dict[str, Any],
    ranks: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MODELS", str(tmp_path))
    path = Path(load(f"recipes/{recipe}.yaml").model.path or "")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(hf))
    tensors = list(tensors_of(path, "gptq") if "qwen3" in recipe else gpt_oss_tensors(hf))
    sparse(path, tensors)
    before = forget_peak()
    main(["show", f"recipes/{recipe}.yaml"])
    assert peak_bytes() - before < 2**28
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if " GiB" in line)
    assert said["weights"].startswith(f"{held_bytes(tensors, ranks) / 2**30:,.2f} GiB")
