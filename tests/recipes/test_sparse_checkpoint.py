"""Is a checkpoint of 30 B weights planned from what its files say, without reading them?

Its files are sparse: they have headers, and behind them nothing that takes room on a disk.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attention.reference import Attention
from models import weights
from models.checkpoint import INDEX
from models.decoder import Decoder
from models.ops.reference import Ops
from models.packing import LAYOUTS
from models.stored_parts import in_parts
from recipes.__main__ import main
from recipes.build.decoders import shape_of
from recipes.build.families import config_in
from recipes.schema.recipe import ROOT
from tests.models.packed_checkpoints import AWQ
from tests.recipes.published import QWEN3_30B_A3B

NUM_FILES = 4
RECIPE = "recipes/qwen3_moe/qwen3_30b_a3b_910b_tp2.yaml"
Tensors = dict[str, tuple[str, tuple[int, ...]]]
BYTES = {"BF16": 2, "F16": 2, "I32": 4}


def tensors_of(path: Path, is_packed: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of everything that the published checkpoint has."""
    config = config_in(path)
    for name, (outputs, inputs) in {name: (outs, ins) for name, ins, outs in config.linears()}.items():
        if is_packed and name != "lm_head":
            groups = inputs // 128
            yield f"{name}.qweight", "I32", (inputs, outputs // 8)
            yield f"{name}.qzeros", "I32", (groups, outputs // 8)
            yield f"{name}.scales", "F16", (groups, outputs)
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


def written(path: Path, is_packed: bool = False) -> int:
    """Write the checkpoint; the bytes of its tensors."""
    path.mkdir()
    said = {"quantization_config": AWQ | {"group_size": 128}} if is_packed else {}
    (path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | said))
    tensors, places, total = list(tensors_of(path, is_packed)), {}, 0
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


def grown_bytes(before_kib: int) -> int:
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib)


def test_it_is_planned_without_being_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MODELS", str(tmp_path))
    num_bytes = written(tmp_path / "Qwen3-30B-A3B")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    main(["show", RECIPE])
    assert grown_bytes(before) < 2**28
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    norms, routers = 2 * (48 * (2 * 2048 + 2 * 128) + 2048), 48 * 128 * 2048 * 4  # held by both of two ranks
    of_a_rank = (num_bytes - norms - routers // 2) / 2 + norms + routers
    assert f"weights {of_a_rank / 2**30:,.2f} GiB" in lines
    assert "experts 128 in each of 48 layers, 8 for a token" in "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("is_packed", [False, True])
def test_all_of_it_is_accounted_for_without_being_read(is_packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    written(path, is_packed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = config_in(path)
    decoder = Decoder(config, Ops(), Attention(shape_of(16, config), "meta"))
    places = in_parts(weights.places_by_name(decoder), config.stored_form, path)
    found = weights.accounted(path, places, places, lambda name: False)
    assert sorted(name for names in found.values() for name in names) == sorted(places)
    assert len(places) == (18_867 if not is_packed else 18_867 + 2 * 48 * (4 + 3 * 128))
    assert grown_bytes(before) < 2**30
    lost = f"model.layers.7.mlp.experts.3.up_proj.{LAYOUTS['awq'].scale if is_packed else 'weight'}"
    more = places | {f"{lost}.2": places[lost]}
    with pytest.raises(ValueError, match=f"missing: {lost}.2"):
        weights.accounted(path, more, more, lambda name: False)
