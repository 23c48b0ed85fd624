"""The text of checkpoints that read images, too, is served as if it had been saved alone."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.request import Request, SamplingParams
from models.checkpoint.files import open_checkpoint
from models.checkpoint_names import TOWERS
from models.quantization import covers
from recipes.assembly.engine import build
from recipes.assembly.families import config_in, decoder_config
from recipes.assembly.int8_checkpoint import BESIDE_A_TEXT, quantize
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.lazy import peft, transformers
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
# The published form of the 4B model: what it leaves out are the defaults of the class
GEMMA3_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


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


def served(path: Path, prompt: list[int], *overrides: str, adapter: int = 0) -> list[int]:
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
            *overrides,
        ],
    )
    engine = build(recipe).engine
    request = Request(
        "one",
        np.array(prompt),
        SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.answer.tolist()


def test_a_head_that_is_stored_is_used_where_the_levels_of_the_file_disagree(tmp_path: Path) -> None:
    """transformers saves its default of the whole, which ties them, beside a text that is not tied."""
    mistral3().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert not config_in(tmp_path).tie_embeddings
    tensors = load_file(tmp_path / "model.safetensors")
    (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
    del tensors[head]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert config_in(tmp_path).tie_embeddings


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


def merged(model: Any, folder: Path, **options: Any) -> Any:
    """The model with an adapter of peft's merged into it, which peft saves in the folder."""
    torch.manual_seed(4)
    with warnings.catch_warnings():  # peft and copies of models ask torch for what will be no more
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(deepcopy(model), peft.LoraConfig(r=4, lora_alpha=8, **options))
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if "lora_" in name:
                    weight.copy_(torch.randn(weight.shape))
        wrapped.save_pretrained(folder)
        return wrapped.merge_and_unload().eval()


def renamed(folder: Path, before: str, after: str) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    other = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    assert other.keys() != tensors.keys()
    save_file(other, file)


BEFORE = "base_model.model."


@pytest.mark.parametrize(
    ("made", "name", "pattern"),
    [
        (
            *(mistral3, f"{BEFORE}model.language_model.layers."),
            r"^model\.language_model\.layers\.1\.self_attn\.q_proj",
        ),
        (
            *(gemma3, f"{BEFORE}language_model.model.layers."),
            r"^language_model\.model\.layers\.1\.self_attn\.q_proj",
        ),
        (gemma3, f"{BEFORE}model.layers.", "^model.layers.1.self_attn.q_proj"),
        (mistral3, f"{BEFORE}layers.", "^layers.1.self_attn.q_proj"),
    ],
    ids=["nested", "nested, older", "text", "text without a head"],
)
def test_adapters_of_the_whole_and_of_its_text_are_read(
    made: Callable[[], Any], name: str, pattern: str, tmp_path: Path
) -> None:
    """What they add to the tower has no effect on a text."""
    model = made().eval()
    model.config._attn_implementation = "eager"
    _fill(model, seed=3, norm=0.0 if made is gemma3 else 1.0)
    with torch.no_grad():  # else a tied model repeats its last token, whatever layers add
        model.get_input_embeddings().weight.mul_(0.1)
    model.save_pretrained(tmp_path)
    nested = r"^model\.language_model\.layers\.1\.self_attn\.q_proj"
    right = merged(
        model,
        tmp_path / "a",
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={nested: 2},
        alpha_pattern={nested: 3},
    )
    file = tmp_path / "a/adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"rank_pattern": {pattern: 2}, "alpha_pattern": {pattern: 3}}))
    nested = f"{BEFORE}model.language_model.layers."
    assert any("vision_tower" in each for each in load_file(tmp_path / "a/adapter_model.safetensors"))
    if name != nested:
        renamed(tmp_path / "a", nested, name)
    prompt = np.random.default_rng(1).integers(6, VOCABULARY, 30).tolist()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            tokens.append(int(right(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    places = ["adapters.most=1", "adapters.rank=4", f"adapters.folders={{a: {tmp_path / 'a'}}}"]
    assert served(tmp_path, prompt, *places, adapter=1) == tokens[len(prompt) :]
    assert served(tmp_path, prompt, *places) != tokens[len(prompt) :]


def test_an_adapter_under_two_names_is_refused(tmp_path: Path) -> None:
    model = gemma3()
    model.save_pretrained(tmp_path)
    merged(model, tmp_path / "a", target_modules=["q_proj"])
    file = tmp_path / "a/adapter_model.safetensors"
    tensors = load_file(file)
    twice = {name.replace("model.language_model.", "model."): each.clone() for name, each in tensors.items()}
    save_file(tensors | twice, file)
    places = ["adapters.most=1", "adapters.rank=4", f"adapters.folders={{a: {tmp_path / 'a'}}}"]
    with pytest.raises(RecipeError, match=r"has both model\.language_model\.layers\..* and model\.layers"):
        served(tmp_path, [1], *places)


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


def test_sizes_that_a_published_text_leaves_out_are_those_of_its_class() -> None:
    config = decoder_config(GEMMA3_4B)
    said = transformers.Gemma3Config(**GEMMA3_4B).text_config
    assert config.num_heads == said.num_attention_heads
    assert config.num_kv_heads == said.num_key_value_heads
    assert config.vocab_size == said.vocab_size
    assert config.hidden_size == said.hidden_size == 2560
    assert [each.window is None for each in config.layers] == [
        kind == "full_attention" for kind in said.layer_types
    ]
    assert (config.tie_embeddings, config.dtype, config.eos_token_ids) == (True, "bfloat16", (1, 106))


def test_a_quantised_text_keeps_its_names_beside_its_tower(tmp_path: Path) -> None:
    """Others, who read images, too, find everything where it was; they may name the head as it is stored."""
    plain, made = tmp_path / "plain", tmp_path / "made"
    model = mistral3()
    _fill(model, seed=3, norm=1.0)
    model.save_pretrained(plain)
    quantize(plain, made)
    before, after = (load_file(each / "model.safetensors") for each in (plain, made))
    scales = {name for name in after if name.endswith("_scale")}
    assert scales == {
        f"language_model.model.layers.{layer}.{linear}_proj.weight_scale"
        for layer in range(2)
        for linear in (
            *(f"self_attn.{each}" for each in "qkvo"),
            *(f"mlp.{e}" for e in ("gate", "up", "down")),
        )
    }
    assert after.keys() - scales == before.keys()
    assert all(after[name].equal(before[name]) for name in before if "language" not in name)
    config = json.loads((made / "config.json").read_text())
    prompt = np.random.default_rng(1).integers(6, VOCABULARY, 30).tolist()
    at_load = served(plain, prompt, "model.quantization=w8a8")
    for ignore in (config["quantization_config"]["ignore"], ["re:vision.*", "language_model.lm_head"]):
        config["quantization_config"]["ignore"] = ignore
        (made / "config.json").write_text(json.dumps(config))
        assert served(made, prompt) == at_load


@pytest.mark.parametrize("tower", TOWERS)
def test_no_tower_is_said_to_be_quantised(tower: str) -> None:
    for before in ("", "model."):
        assert not covers(f"{before}{tower.removeprefix('model.')}blocks.0.attn.qkv", BESIDE_A_TEXT)
    assert covers("model.language_model.layers.0.self_attn.q_proj", BESIDE_A_TEXT)


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    stored, plain = "language_model.model.norm.weight", "model.norm.weight"
    save_file({stored: torch.ones(2), plain: torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"has both {stored} and {plain}"):
        open_checkpoint(tmp_path / "model.safetensors")
