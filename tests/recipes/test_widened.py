"""The tiny model with heads for many ranks computes what the tiny model does, and its ranks divide it."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from models.parallel.share import Share
from recipes.assembly.families import share_of
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load
from recipes.tiny.corpus import held_out_sums
from recipes.tiny.widened import WEIGHTS, main, widen
from tests.lazy import transformers


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("widened") / "eight"
    main([str(target), "--ranks", "8"])
    return target


def logits(folder: Path, **changed: torch.Tensor) -> torch.Tensor:
    """What transformers computes for held-out sums, in float32, with some weights changed."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in changed.items():
            weights[name].copy_(weight)
        asked = [torch.tensor([tokenizer.encode(f"{a}+{b}=")]) for a, b in held_out_sums(8)]
        return torch.cat([model(input_ids=ids).logits[0, -1] for ids in asked])


def test_it_computes_what_the_tiny_model_does(eight: Path) -> None:
    config = json.loads((eight / "config.json").read_text(encoding="utf-8"))
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (16, 8)
    expected = logits(WEIGHTS)
    assert torch.allclose(logits(eight), expected, atol=1e-4)
    # Heads of two copies in each other's place do not go unnoticed
    weights = load_file(eight / "model.safetensors")
    for part in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{part}_proj.weight"
        copies = list(weights[name].float().chunk(8))
        copies[0], copies[1] = copies[1], copies[0]
        assert not torch.allclose(logits(eight, **{name: torch.cat(copies)}), expected, atol=0.1), part


def test_eight_ranks_of_a_910b_divide_it_evenly(eight: Path) -> None:
    asked = [f"model.path={eight}", "parallel.tensor=8"]
    recipe = load("recipes/tiny/npu.yaml", asked)
    for rank in range(8):
        config, share = share_of(recipe, rank)
        assert share == Share(rank, 8)
        assert (config.num_heads // share.tensors, config.num_kv_heads // share.tensors) == (2, 1)
        assert plan_memory(recipe, config, 2**30, share=share).num_pages == 128
    with pytest.raises(ValueError, match="8 tensor ranks cannot share 2 query heads"):
        share_of(load("recipes/tiny/npu.yaml", asked[1:]), 0)


def test_weights_without_room_are_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = (WEIGHTS / "model.safetensors").stat().st_size  # the tiny model's own are copied first
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"^{tmp_path}/wide cannot be written: .*; free some space"):
            widen(tmp_path / "wide", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(eight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is there and not empty; name a new directory"):
        widen(eight, 2)
    with pytest.raises(SystemExit):
        main([str(eight / "x"), "--ranks", "6"])
    assert "invalid choice: 6" in capsys.readouterr().err
