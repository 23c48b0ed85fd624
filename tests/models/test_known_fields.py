"""Every field of transformers' configuration classes is read, has no effect there, or is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint.config_fields import FIXED, ConfigFields
from models.config import DecoderConfig
from recipes.assembly.engine import build
from recipes.assembly.families import FAMILIES, FIELDS, decoder_config
from recipes.schema.reader import load
from tests.each_of import each_of
from tests.lazy import transformers
from tests.models.families import CLASSES, VARIANTS, expected_logprobs, make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.sparse_variants import SPARSE_VARIANTS

# The first of each
OF_FAMILY = {each.family: each for each in reversed([*VARIANTS, *RECURRENT_VARIANTS, *SPARSE_VARIANTS])}
# Latents, and no number of key-value heads
SHARED_BY_HEADS = ("deepseek_v3", "glm4_moe_lite", "kimi_linear", "deepseek_v32", "glm_moe_dsa")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Stored = Callable[[str], tuple[Path, dict[str, Any]]]


def class_of(family: str) -> Any:
    return getattr(transformers, CLASSES[family][0])


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A family's checkpoint, which is made once and changed by no test, and what its config.json says."""
    made = cache(lambda family: make(OF_FAMILY[family], tmp_path_factory.mktemp("stored"))[1])
    return lambda family: (made(family), json.loads((made(family) / "config.json").read_text()))


def outcome(hf: dict[str, Any]) -> DecoderConfig | str:
    try:
        return decoder_config(hf)
    except ValueError as error:
        return str(error)


def test_each_family_states_its_fields() -> None:
    assert FIELDS.keys() == FAMILIES.keys()
    assert CLASSES.keys() == FAMILIES.keys() - {"kimi_k2"}, "Kimi's files are V3's"


@each_of("family", CLASSES)
def test_no_field_of_transformers_class_is_unknown(family: str) -> None:
    known = class_of(family)()
    names = known.to_dict().keys() | type(known).attribute_map.keys()
    assert FIELDS[family].unknown(dict.fromkeys(names)) == []


@each_of("family", CLASSES)
def test_what_a_family_reads_changes_its_decoder_or_is_refused(family: str, stored: Stored) -> None:
    hf, fields = stored(family)[1], FIELDS[family]
    if family == "deepseek_v2":
        hf |= {"topk_method": "group_limited_greedy"}
    if "use_sliding_window" in fields.read:
        hf |= {"use_sliding_window": True, "sliding_window": 9}
    for name in fields.read:
        is_of_layers = any(part in name for part in ("layer", "pattern", "interval", "first_k"))
        each = hf | {"layer_types": None, "mlp_layer_types": None} if is_of_layers else hf
        if name.startswith("index_"):  # a list says what each layer has
            each = each | {"indexer_types": None}
        if name in ("qkv_bias", "bias"):  # a second name of another field
            each = {key: value for key, value in each.items() if key not in ("attention_bias", "mlp_bias")}
        assert outcome(each | {name: {"no": "value"}}) != outcome(each), f"{name} is not read"


@each_of("family", CLASSES)
def test_what_is_left_out_is_what_transformers_takes(family: str, stored: Stored) -> None:
    hf, fields = stored(family)[1], FIELDS[family]
    # Without num_nextn_predict_layers no layer is passed over, which a file without the field has not; 128
    # keys beside fewer queries, V3's default, is nothing that transformers could compute
    apart = ["model_type", "eos_token_id", "num_nextn_predict_layers"]
    apart += ["num_key_value_heads"] if family in SHARED_BY_HEADS else []
    for name in class_of(family)().to_dict().keys() - {*apart}:
        if not fields.is_read(name):
            continue
        without = {key: value for key, value in hf.items() if key != name} | {"eos_token_id": None}
        try:
            theirs = outcome(class_of(family).from_dict(without).to_dict() | {"eos_token_id": None})
        except Exception:  # noqa: BLE001 - whatever transformers raises, there is nothing to compare with
            continue
        assert outcome(without) == theirs or f"has no {name};" in str(outcome(without)), name


@pytest.mark.parametrize("family", CLASSES)
def test_what_has_no_effect_here_has_none_there(family: str, stored: Stored, tmp_path: Path) -> None:
    kept, hf = stored(family)
    path = Path(shutil.copytree(kept, tmp_path / family))
    fields, known = FIELDS[family], class_of(family)()
    altered = {}
    for name, value in known.to_dict().items():
        if fields.reason(name) and name not in ("architectures", "return_dict", "transformers_version"):
            kinds = {bool: not value, int: 3, float: 0.5}
            altered |= {name: kinds[type(value)]} if type(value) in kinds else {}
    altered |= {"head_dim": 7} if "head_dim" in fields.irrelevant else {}
    assert len(altered) > 5
    assert decoder_config(hf | altered) == decoder_config(hf)
    seen = []
    for said in (hf, hf | altered):
        (path / "config.json").write_text(json.dumps(said))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        seen.append(expected_logprobs(model.eval(), PROMPT))
    assert torch.equal(*seen)


@each_of("family", FAMILIES)
def test_fields_that_cannot_be_honoured_are_refused_by_name(family: str, stored: Stored) -> None:
    hf = stored("deepseek_v3" if family == "kimi_k2" else family)[1] | {"model_type": family}
    plain = decoder_config(hf)
    for name, allowed in (FIXED | dict(FIELDS[family].fixed)).items():
        for value in allowed:
            assert decoder_config(hf | {name: value}) == plain
        with pytest.raises(ValueError, match=rf"has {name}: 'another'; it must be .*, or left out"):
            decoder_config(hf | {name: "another"})


@pytest.mark.parametrize(
    ("family", "other", "name", "value"),
    [
        ("deepseek_v2", "num_experts", "n_routed_experts", 8),
        ("deepseek_v3", "num_mtp_layers", "num_nextn_predict_layers", 1),
    ],
)
def test_a_field_may_have_its_other_name(
    family: str, other: str, name: str, value: int, stored: Stored
) -> None:
    """As by transformers' attribute_map."""
    assert class_of(family).attribute_map[other] == name
    hf = stored(family)[1]
    hf.pop(name, None)
    named = class_of(family).from_dict(hf | {other: value})
    assert getattr(named, name) == value
    assert outcome(hf | {other: value}) == outcome(hf | {name: value})
    with pytest.raises(ValueError, match=rf"has {other}: {value}; {name} says {value + 1}: remove one"):
        decoder_config(hf | {other: value, name: value + 1})


@pytest.mark.parametrize(
    ("family", "foreign"),
    [
        ("gemma2", {"use_sliding_window": False, "hidden_act": "silu"}),
        ("gemma3_text", {"use_sliding_window": False, "hidden_act": "gelu"}),
        ("qwen2", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"use_sliding_window": True, "num_nextn_predict_layers": 3, "use_qk_norm": True}),
        ("mistral", {"attention_bias": True, "use_sliding_window": False}),
    ],
)
def test_a_field_of_another_family_changes_nothing(
    family: str, foreign: dict[str, Any], stored: Stored
) -> None:
    hf = stored(family)[1]
    assert decoder_config(hf | foreign) == decoder_config(hf)


def test_sizes_that_follow_from_those_of_latents_are_those(stored: Stored) -> None:
    """transformers takes them from V3's file where it has them, and then fails on others."""
    hf = stored("deepseek_v3")[1]
    nope, rope, heads = (hf[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "num_attention_heads"))
    said = {"num_key_value_heads": heads, "head_dim": rope, "qk_head_dim": nope + rope}
    assert decoder_config(hf | said) == decoder_config(hf)
    for name, size in said.items():
        with pytest.raises(ValueError, match=rf"{name}: {size + 1}; .*it must be {size}, or left out"):
            decoder_config(hf | {name: size + 1})


def test_a_field_stands_in_one_list() -> None:
    with pytest.raises(AssertionError, match="one list"):
        ConfigFields(frozenset({"a"}), irrelevant={"a": "it is nothing"})


def test_fields_that_no_one_knows_are_named_once_at_load(
    stored: Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, hf = make(OF_FAMILY["llama"], tmp_path)[1], stored("llama")[1]
    more: dict[str, Any] = {
        "residual_multiplier": 0.2,
        "_note": 1,
        "rope_parameters": hf["rope_parameters"] | {"mrope": [1]},
    }
    (path / "config.json").write_text(json.dumps(hf | more))
    sizes = ("cache.memory_gib=0.05", "device.compile=false", "device.threads=1")
    with caplog.at_level(logging.WARNING):
        build(load("recipes/any/cpu.yaml", (f"model.path={path}", *sizes)))
    (said,) = (each.getMessage() for each in caplog.records if "residual_multiplier" in each.getMessage())
    assert said.endswith("not known, without effect: 'residual_multiplier', 'rope_parameters.mrope'")


@pytest.mark.parametrize(
    ("name", "field", "tensor", "level"),
    [
        ("minimax_m2", {"use_mtp": True}, "model.mtp_modules.0.norm.weight", logging.WARNING),
        ("glm4_moe", {"num_nextn_predict_layers": 1}, "model.layers.3.eh_proj.weight", logging.INFO),
    ],
)
def test_layers_for_further_tokens_that_are_not_read_are_said(
    name: str,
    field: dict[str, Any],
    tensor: str,
    level: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    _, path = make(replace(variant, shard_size="5GB"), tmp_path)
    hf = json.loads((path / "config.json").read_text()) | field
    number = str(hf["num_hidden_layers"])
    tensor = tensor.replace("layers.3", f"layers.{number}")
    (path / "config.json").write_text(json.dumps(hf))
    save_file(load_file(path / "model.safetensors") | {tensor: torch.ones(2)}, path / "model.safetensors")
    sizes = ("cache.memory_gib=0.05", "device.compile=false", "device.threads=1")
    with caplog.at_level(logging.INFO):
        build(load("recipes/any/cpu.yaml", (f"model.path={path}", *sizes)))
    (said,) = (each for each in caplog.records if "layers that predict further" in each.getMessage())
    assert said.levelno == level
    way = "guesses with them" if level == logging.INFO else f"and not of {name}"
    words = f"does not read: layers that predict further tokens, in 1 tensors such as {tensor} ("
    assert words in said.getMessage()
    assert way in said.getMessage()
