"""The text of checkpoints that read images, too, is served as if it had been saved alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.request import Request, SamplingParams
from recipes.assembly.engine import build
from recipes.assembly.families import decoder_config
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.lazy import transformers
from tests.models.families import VARIANTS, VOCABULARY, _fill, generated, make

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "pad_token_id": None,
    "eos_token_id": None,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
NEW = 12


def mistral3() -> Any:
    text = transformers.MistralConfig(**SIZES, sliding_window=None)
    tower = transformers.PixtralVisionConfig(**TOWER)
    config = transformers.Mistral3Config(
        text_config=text, vision_config=tower, tie_word_embeddings=False, image_token_index=5
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**SIZES, sliding_window=9, layer_types=["sliding_attention"] * 2)
    tower = transformers.SiglipVisionConfig(**TOWER)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=tower, mm_tokens_per_image=4, eos_token_id=None
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def served(path: Path, prompt: list[int]) -> list[int]:
    """The greedy tokens that follow a prompt, which is computed in chunks."""
    recipe = load(
        ROOT / "recipes/any/cpu.yaml",
        [
            f"model.path={path}",
            "model.dtype=float32",
            "device.compile=false",
            "device.threads=1",
            "cache.num_pages=40",
            "cache.page_size=8",
            "cache.memory_gib=null",
            "scheduler.max_batch_tokens=12",
            "scheduler.num_slots=2",
        ],
    )
    engine = build(recipe).engine
    request = Request(
        "one", np.array(prompt), SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    )
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.answer.tolist()


@pytest.mark.parametrize("made", [mistral3, gemma3])
@pytest.mark.parametrize("is_new", [False, True], ids=["as it is written", "under the newer names"])
def test_the_text_is_read_and_the_tower_is_not(made: Callable[[], Any], is_new: bool, tmp_path: Path) -> None:
    model = made().eval()
    model.config._attn_implementation = "eager"
    _fill(model, seed=3, norm=0.0 if made is gemma3 else 1.0)
    model.save_pretrained(tmp_path)
    if is_new:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        renamed = {
            name.replace("language_model.model.", "model.language_model.")
            .replace("language_model.lm_head.", "lm_head.")
            .replace("vision_tower.", "model.vision_tower.")
            .replace("multi_modal_projector.", "model.multi_modal_projector."): tensor
            for name, tensor in tensors.items()
        }
        assert renamed.keys() != tensors.keys()
        save_file(renamed, file)
    prompt = np.random.default_rng(1).integers(6, VOCABULARY, 30).tolist()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    assert served(tmp_path, prompt) == tokens[len(prompt) :]


def test_kimi_k25s_text_is_a_deepseek_v3(tmp_path: Path) -> None:
    """As the published files have it: the quantisation, the end and the type are said at either level."""
    (variant,) = (each for each in VARIANTS if each.name == "deepseek_v3")
    model, path = make(variant, tmp_path)
    config = json.loads((path / "config.json").read_text())
    text = config | {"model_type": "kimi_k2"}
    outer = {"model_type": "kimi_k25", "dtype": text.pop("dtype"), "eos_token_id": 7}
    (path / "config.json").write_text(json.dumps(outer | {"text_config": text, "vision_config": {}}))
    for file in path.glob("*.safetensors"):
        tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
        tensors |= {f"vision_tower.{file.stem}": torch.zeros(2), f"mm_projector.{file.stem}": torch.zeros(2)}
        save_file(tensors, file)
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.', '"language_model.model.'))
    assert decoder_config(json.loads((path / "config.json").read_text())).eos_token_ids == (7,)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 30).tolist()
    assert served(path, prompt) == generated(model, prompt, NEW)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": None}, "has text_config: None; it must be the configuration of the text model"),
        (
            {"text_config": {"model_type": "qwen2"}},
            "has text_config.model_type: 'qwen2'; supported are mistral",
        ),
    ],
)
def test_another_text_is_refused_by_its_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decoder_config({"model_type": "mistral3", "text_config": SIZES} | change)


def test_the_outer_level_counts_where_both_say_it() -> None:
    text = SIZES | {"model_type": "mistral", "tie_word_embeddings": True, "dtype": "float16"}
    said = {"model_type": "mistral3", "text_config": text}
    assert decoder_config(said).tie_embeddings
    assert decoder_config(said).dtype == "float16"
    other = decoder_config(said | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"})
    assert not other.tie_embeddings
    assert other.dtype == "bfloat16"
