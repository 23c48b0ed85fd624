"""Every tensor of a checkpoint is accounted for and ends where it belongs."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.reference import Attention
from devices.shapes import AttentionShape
from kv_cache.groups import DType
from models.checkpoint import weights
from models.checkpoint.files import INDEX, SINGLE, checkpoint_files
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.ops.reference import Ops
from recipes.assembly.engine import build
from recipes.assembly.families import decoder_config, read
from recipes.schema.reader import load
from tests.lazy import transformers
from tests.models.families import VARIANTS, make

VARIANT = {variant.name: variant for variant in VARIANTS}
LAYER = "model.layers.1."


def bare(config: DecoderConfig) -> Decoder:
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
    return Decoder(
        config, Ops(), Attention(AttentionShape(*sizes, 16, 1.0, TORCH_DTYPES[config.dtype], config.windows))
    )


def loaded(path: Path, dtype: DType | None = None) -> Decoder:
    config = decoder_config(read(path))
    decoder = bare(config if dtype is None else replace(config, dtype=dtype))
    weights.load(decoder, path)
    return decoder


def biased(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint in one file with biases everywhere, and its tensors."""
    _, path = make(replace(VARIANT["llama_biased"], shard_size="5GB"), tmp_path)
    return path, load_file(path / SINGLE)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3_layer_types"])
def test_shards_are_fused_in_place(name: str, tmp_path: Path) -> None:
    model, path = make(VARIANT[name], tmp_path)
    assert (path / INDEX).is_file(), "the checkpoint is to be sharded"
    theirs = model.state_dict()
    ours = loaded(path)
    attention, mlp = ours.layers[1].attention, ours.layers[1].mlp
    for kind, ending in enumerate(("weight", "bias")):
        if f"{LAYER}mlp.up_proj.{ending}" not in theirs:
            continue
        qkv = [theirs[f"{LAYER}self_attn.{part}_proj.{ending}"] for part in "qkv"]
        gate_up = [theirs[f"{LAYER}mlp.{part}_proj.{ending}"] for part in ("gate", "up")]
        assert torch.equal(attention.qkv.packed[kind], torch.cat(qkv))
        assert torch.equal(mlp.gate_up.packed[kind], torch.cat(gate_up))
        assert torch.equal(attention.output.packed[kind], theirs[f"{LAYER}self_attn.o_proj.{ending}"])
        assert torch.equal(mlp.down.packed[kind], theirs[f"{LAYER}mlp.down_proj.{ending}"])
    assert torch.equal(ours.head.packed[0], theirs[weights.HEAD])
    assert attention.qkv.weight is None, "the unpacked weight is to be let go"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_floats_are_converted_to_the_models_dtype(dtype: DType, tmp_path: Path) -> None:
    path, tensors = biased(tmp_path)
    tensors[weights.EMBEDDING] = tensors[weights.EMBEDDING].double()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    save_file(tensors, path / SINGLE)
    ours = loaded(path, dtype)
    assert torch.equal(ours.embedding.data, tensors[weights.EMBEDDING].to(TORCH_DTYPES[dtype]))
    assert torch.equal(ours.norm.data, tensors["model.norm.weight"].to(TORCH_DTYPES[dtype]))
    assert torch.equal(
        ours.layers[0].mlp.down.packed[0],
        tensors["model.layers.0.mlp.down_proj.weight"].to(TORCH_DTYPES[dtype]),
    )


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    path, tensors = biased(tmp_path)
    del tensors[LAYER + "self_attn.k_proj.bias"]
    tensors["score.weight"] = torch.zeros(3)
    tensors[LAYER + "mlp.up_proj.weight"] = torch.zeros(80, 47)
    tensors[LAYER + "input_layernorm.weight"] = torch.zeros(48, dtype=torch.int8)
    save_file(tensors, path / SINGLE)
    with pytest.raises(ValueError, match="are not those of") as caught:
        loaded(path)
    said = str(caught.value)
    faults, fix = said.partition("its config.json: ")[2].split("; ")[:-1], said.rpartition("; ")[2]
    assert fix == "download the checkpoint again, or correct config.json"
    assert sorted(faults) == [
        f"misshapen: {LAYER}mlp.up_proj.weight is [80, 47], the model needs [80, 48]",
        f"missing: {LAYER}self_attn.k_proj.bias [24]",
        "surplus: score.weight has no place in this model",
        f"wrongly typed: {LAYER}input_layernorm.weight is I8, not one of F64, F32, BF16, F16",
    ]


def test_of_many_faults_some_of_each_kind_are_named_in_one_line(tmp_path: Path) -> None:
    path, tensors = biased(tmp_path)
    del tensors[LAYER + "self_attn.k_proj.bias"]
    tensors |= {f"score{index}.weight": torch.zeros(3) for index in range(weights.MOST_FAULTS + 7)}
    save_file(tensors, path / SINGLE)
    with pytest.raises(ValueError, match=r"missing: .*k_proj.bias .*; and 7 more; download") as caught:
        loaded(path)
    assert str(caught.value).count("surplus: ") == weights.MOST_FAULTS
    assert "\n" not in str(caught.value)


def test_saved_frequencies_are_passed_over(tmp_path: Path) -> None:
    path, tensors = biased(tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(6)
    tensors["model.rotary_emb.inv_freq"] = torch.zeros(6)
    save_file(tensors, path / SINGLE)
    loaded(path)


def test_ernies_prediction_layers_are_passed_over(tmp_path: Path) -> None:
    """As the 21B model has them beside its own layers, and transformers passes over them."""
    _, path = make(VARIANT["ernie4_5_moe"], tmp_path)
    tensors = load_file(path / SINGLE)
    names = ("mtp_block.0.mlp.up_proj", "mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0")
    save_file(tensors | {f"model.{name}.weight": torch.ones(2) for name in names}, path / SINGLE)
    loaded(path)


def test_a_tied_head_may_be_there_or_not_but_not_differ(tmp_path: Path) -> None:
    _, path = make(VARIANT["qwen3"], tmp_path)
    tensors = load_file(path / SINGLE)
    assert weights.HEAD not in tensors
    ours = loaded(path)
    assert ours.head.packed[0].data_ptr() == ours.embedding.data_ptr()
    save_file(tensors | {weights.HEAD: tensors[weights.EMBEDDING].clone()}, path / SINGLE)
    loaded(path)
    save_file(tensors | {weights.HEAD: tensors[weights.EMBEDDING] + 1}, path / SINGLE)
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        loaded(path)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_tied_tensor_may_be_stored_as_the_head_alone(name: str, tmp_path: Path) -> None:
    """As transformers reads it, which ties the embedding to the head then."""
    _, path = make(replace(VARIANT[name], shard_size="5GB"), tmp_path)
    tensors = load_file(path / SINGLE)
    whole = loaded(path).embedding.data.clone()
    tensors[weights.HEAD] = tensors.pop(weights.EMBEDDING)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert torch.equal(loaded(path, "float32").embedding.data, theirs.get_input_embeddings().weight)
    assert torch.equal(loaded(path).embedding.data, whole)
    del tensors[weights.HEAD]
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"missing: {weights.EMBEDDING}"):
        loaded(path)


@pytest.mark.parametrize("shard_size", ["5GB", "30KB"])
def test_a_model_that_was_saved_without_its_head_is_the_same(shard_size: str, tmp_path: Path) -> None:
    """As models for embeddings are saved: their tensors are those of the decoder alone."""
    model, path = make(VARIANT["qwen3"], tmp_path)
    whole = loaded(path, "float32").state_dict()
    body = model.to(torch.float32).model
    shutil.rmtree(path)
    body.save_pretrained(path, max_shard_size=shard_size)
    assert (path / INDEX).is_file() == (shard_size == "30KB")
    stored = {name for file in checkpoint_files(path) for name in load_file(file)}
    assert {weights.EMBEDDING.removeprefix("model."), "layers.0.input_layernorm.weight"} < stored
    ours = loaded(path, "float32").state_dict()
    assert ours.keys() == whole.keys()
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_what_weights_tell_in_place_of_config_json(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A decoder without a head is tied, and is of the type of its tensors where config.json has none."""
    model, path = make(replace(VARIANT["llama_biased"], saved_as=torch.bfloat16), tmp_path)
    shutil.rmtree(path)
    model.to(torch.bfloat16).model.save_pretrained(path)
    tensors = load_file(path / SINGLE)
    assert "lm_head.weight" not in tensors
    frequencies = {f"{name}rotary_emb.inv_freq": torch.zeros(6) for name in ("", "layers.0.self_attn.")}
    save_file(tensors | frequencies, path / SINGLE, metadata={"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    assert not said.get("tie_word_embeddings")
    assert said.pop("dtype") == "bfloat16"
    (path / "config.json").write_text(json.dumps(said))
    asked = [f"model.path={path}", "device.compile=false", "device.threads=1", "cache.memory_gib=0.05"]
    with caplog.at_level(logging.INFO):
        built = build(load("recipes/any/cpu.yaml", [*asked, "model.dtype=auto"]))
    assert (built.config.tie_embeddings, built.config.dtype) == (True, "bfloat16")
    decoder = built.runner.decoder
    assert torch.equal(decoder.embedding, tensors["embed_tokens.weight"])
    assert torch.equal(decoder.norm, tensors["norm.weight"])
    assert [line for line in caplog.messages if line.startswith("weights: ")] == [
        f"weights: {path} has no dtype in config.json: it is the first tensor's, bfloat16",
        f"weights: {path} was saved without a head, which is tied to the embedding",
    ]


@pytest.mark.parametrize("name", ["llama_biased", "qwen3"])
def test_a_prefix_is_taken_away_or_refused_by_its_name_as_transformers_reads_it(
    name: str, tmp_path: Path
) -> None:
    _, path = make(replace(VARIANT[name], shard_size="5GB"), tmp_path)
    tensors, whole = load_file(path / SINGLE), loaded(path, "float32").state_dict()
    for prefix, words in (
        ("model.", None),
        ("module.", "begin with module. of DataParallel or DeepSpeed, which .* model.module.save_pretrained"),
        ("_orig_mod.", "begin with _orig_mod. of torch.compile"),
        ("model._orig_mod.", r"begin with model\._orig_mod. of torch.compile"),
        ("base_model.model.", "begin with base_model. of PEFT, which .*merge_and_unload"),
        ("transformer.", "begin with transformer. of a model that holds this one"),
        ("policy.llm.", r"begin with policy\.llm\. of a model that holds this one"),
    ):
        save_file({prefix + each: at for each, at in tensors.items()}, path / SINGLE, {"format": "pt"})
        theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
        if words is None:
            assert not told["missing_keys"]
            assert torch.equal(theirs.model.norm.weight, tensors["model.norm.weight"].float())
            ours = loaded(path, "float32").state_dict()
            assert all(torch.equal(ours[each], whole[each]) for each in whole)
            continue
        assert "model.norm.weight" in told["missing_keys"], prefix
        with pytest.raises(ValueError, match=words) as caught:
            loaded(path)
        assert "\n" not in str(caught.value)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    path, tensors = biased(tmp_path)
    del tensors[weights.HEAD]
    save_file(tensors, path / SINGLE)
    with pytest.raises(ValueError, match=r"missing: lm_head.weight \[160, 48\]"):
        loaded(path)


def test_a_tensor_in_two_shards_is_surplus(tmp_path: Path) -> None:
    _, path = make(VARIANT["llama_biased"], tmp_path)
    save_file({"model.norm.weight": torch.ones(48)}, path / "more.safetensors")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["more"] = "more.safetensors"
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"surplus: model.norm.weight is in two files"):
        loaded(path)


def test_files_that_are_absent_or_broken_are_named(tmp_path: Path) -> None:
    _, path = make(VARIANT["llama_biased"], tmp_path)
    shard = min(path.glob("model-*.safetensors"))
    shard.write_bytes(b"not safetensors")
    with pytest.raises(ValueError, match=f"{shard.name} cannot be read as safetensors"):
        loaded(path)
    shard.unlink()
    with pytest.raises(ValueError, match=f"lacks {shard.name}, which"):
        loaded(path)
    (path / INDEX).write_text("{}")
    with pytest.raises(ValueError, match="is no index of safetensors"):
        loaded(path)
    (path / INDEX).unlink()
    with pytest.raises(ValueError, match=f"lacks {INDEX} and shards 1 of 6; download what is missing"):
        loaded(path)
    for each in path.glob("model-*.safetensors"):
        each.unlink()
    with pytest.raises(ValueError, match="only safetensors are read: convert"):
        loaded(path)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3"])
def test_random_weights_follow_their_seed(name: str, tmp_path: Path) -> None:
    config = decoder_config(read(make(VARIANT[name], tmp_path)[1]))
    first, again, other = bare(config), bare(config), bare(config)
    for decoder, seed in ((first, 5), (again, 5), (other, 6)):
        weights.random(decoder, seed)
    one, same, another = (each.layers[2].attention.qkv.packed[0] for each in (first, again, other))
    assert torch.equal(one, same)
    assert not torch.equal(one, another)
    assert not torch.equal(one, first.layers[1].attention.qkv.packed[0])
    hidden = torch.randn(200, config.hidden_size).to(TORCH_DTYPES[config.dtype])
    assert 0.5 < first.logits(hidden).float().std() < 2


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), "float32", "is damaged: model.norm.weight holds NaN or infinity"),
        (float("inf"), "bfloat16", "is damaged: model.norm.weight holds NaN or infinity"),
        (-float("inf"), "float16", "is damaged: model.norm.weight holds NaN or infinity"),
        (-1e5, "float16", "model.norm.weight holds 1e+05, and float16 reaches 6.55e+04; set model.dtype"),
    ],
)
def test_a_value_that_would_spoil_every_answer_is_refused(
    value: float, dtype: DType, words: str, tmp_path: Path
) -> None:
    path, tensors = biased(tmp_path)
    tensors["model.norm.weight"][-1] = value
    save_file(tensors, path / SINGLE)
    with pytest.raises(ValueError, match=re.escape(words)):
        loaded(path, dtype)
