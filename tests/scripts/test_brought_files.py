"""Checkpoints as people bring them are answered by the command that users run, with transformers' tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import weights
from models.checkpoint.files import SINGLE
from scripts.generate import main
from tests.lazy import transformers
from tests.models.families import VARIANTS, generated, make
from tests.models.test_packed_weights import stored

PROMPT, NUM_NEW = [3, 1, 4, 1, 5, 9, 2, 6], 12
SMALL = ["cache.memory_gib=0.05", "device.compile=false", "device.threads=1", "model.dtype=float32"]


def of(name: str, root: Path) -> Path:
    return make(next(each for each in VARIANTS if each.name == name), root)[1]


def tied_head_alone(root: Path) -> Path:
    path = of("qwen3", root)
    tensors = load_file(path / SINGLE)
    tensors[weights.HEAD] = tensors.pop(weights.EMBEDDING)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    return path


def greedy_by_its_file(root: Path) -> Path:
    path = of("llama", root)
    said = {"do_sample": True, "top_k": 1, "repetition_penalty": 1.6}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def answer(path: Path, root: Path) -> list[int]:
    """What scripts.generate answers to a request that names no way to sample."""
    source, target = root / "in.jsonl", root / "out.jsonl"
    asked = {"id": "a", "prompt_token_ids": PROMPT, "max_tokens": NUM_NEW, "ignore_eos": True, "seed": 3}
    source.write_text(json.dumps(asked) + "\n")
    arguments = ["recipes/any/cpu.yaml", f"model.path={path}", *SMALL]
    main([*arguments, "--input", str(source), "--output", str(target)])
    found: list[int] = json.loads(target.read_text())["token_ids"]
    return found


@pytest.mark.parametrize("made", [tied_head_alone, greedy_by_its_file])
def test_the_tokens_are_those_of_generate(made: Callable[[Path], Path], tmp_path: Path) -> None:
    path = made(tmp_path)
    generation = path / "generation_config.json"
    if made is tied_head_alone:  # a checkpoint without sampling defaults draws; this one is asked not to
        generation.write_text(json.dumps({"do_sample": True, "top_k": 1}))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "pad_token_id": 0}
    options["attention_mask"] = torch.ones(1, len(PROMPT), dtype=torch.long)
    right = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert answer(path, tmp_path) == right


def test_gptq_of_a_file_of_its_own_is_answered(tmp_path: Path) -> None:
    model, path = stored("llama", "gptq", tmp_path)
    hf = json.loads((path / "config.json").read_text())
    (path / "quantize_config.json").write_text(json.dumps(hf.pop("quantization_config")))
    (path / "config.json").write_text(json.dumps(hf))
    (path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert answer(path, tmp_path) == generated(model, PROMPT, NUM_NEW)[0]
