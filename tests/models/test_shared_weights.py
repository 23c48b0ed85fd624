"""Each rank reads its part of a checkpoint and no more, and the parts make up the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attention.reference import Attention
from devices.shapes import AttentionShape
from models.checkpoint import weights
from models.checkpoint.files import SINGLE
from models.config import DecoderConfig
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.ops.reference import Ops
from models.parallel.group import Alone
from models.parallel.share import Share
from models.quantization import Quantization
from recipes.assembly.families import decoder_config, read
from tests.models.families import VARIANTS, make
from tests.models.test_quantization import held_bytes

LAYER = "model.layers.1."


class Rank(Alone):
    """One of several ranks, the others of which bring nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def part_of(config: DecoderConfig, rank: int, size: int) -> Decoder:
    part = Share(rank, size).part(config)
    sizes = (part.num_heads, part.num_kv_heads, part.head_dim)
    shape = AttentionShape(*sizes, 16, 1.0, TORCH_DTYPES[part.dtype], part.windows)
    return Decoder(config, Ops(), Attention(shape), Rank(rank, size))


def checkpoint(name: str, root: Path, **options: Any) -> Path:
    """A small random checkpoint in one file."""
    variant = next(each for each in VARIANTS if each.name == name)
    changed = replace(variant, shard_size="5GB", options=variant.options | options)
    return make(changed, root)[1]


def rows_of(decoders: list[Decoder], kind: int, which: int) -> Tensor:
    """Of all ranks' queries (0), keys (1) or values (2) in layer 1, the rows of weight (0) or bias (1)."""
    linears = [decoder.layers[1].attention.qkv for decoder in decoders]
    return torch.cat([linear.packed[kind].split(linear.widths)[which] for linear in linears])


@pytest.mark.parametrize(("name", "size"), [("llama_biased", 2), ("qwen2_yarn", 4), ("qwen3_layer_types", 2)])
def test_the_parts_make_up_the_checkpoint(name: str, size: int, tmp_path: Path) -> None:
    path = checkpoint(name, tmp_path, vocab_size=509)
    theirs = {key: tensor.float() for key, tensor in load_file(path / SINGLE).items()}
    config = decoder_config(read(path))
    decoders = [part_of(config, rank, size) for rank in range(size)]
    for decoder in decoders:
        weights.load(decoder, path)
    for kind, ending in enumerate(("weight", "bias")):
        if f"{LAYER}self_attn.q_proj.{ending}" not in theirs:
            continue
        for which, letter in enumerate("qkv"):
            whole = theirs[f"{LAYER}self_attn.{letter}_proj.{ending}"]
            if which and size > config.num_kv_heads:  # a head on several ranks
                heads = whole.unflatten(0, (config.num_kv_heads, -1))
                whole = heads.repeat_interleave(size // config.num_kv_heads, 0).flatten(0, 1)
            assert torch.equal(rows_of(decoders, kind, which).float(), whole), (ending, letter)
    for kind, ending in enumerate(("weight", "bias")):
        if f"{LAYER}mlp.up_proj.{ending}" in theirs:
            halves = [decoder.layers[1].mlp.gate_up.packed[kind].chunk(2) for decoder in decoders]
            for letter, parts in zip(("gate", "up"), zip(*halves)):
                assert torch.equal(torch.cat(parts).float(), theirs[f"{LAYER}mlp.{letter}_proj.{ending}"])
    for linear, of_rank in (("self_attn.o_proj", "attention.output"), ("mlp.down_proj", "mlp.down")):
        packed = [decoder.get_submodule(f"layers.1.{of_rank}").packed for decoder in decoders]
        joined = torch.cat([weight for weight, _ in packed], dim=1).float()
        assert torch.equal(joined, theirs[f"{LAYER}{linear}.weight"])
        if f"{LAYER}{linear}.bias" in theirs:
            biases = [bias for _, bias in packed]
            assert torch.equal(biases[0], theirs[f"{LAYER}{linear}.bias"])
            assert not torch.stack(biases[1:]).any(), "the bias is added by one rank"
    for name, tensors in (
        (weights.EMBEDDING, [decoder.embedding for decoder in decoders]),
        (weights.HEAD, [decoder.head.packed[0] for decoder in decoders]),
    ):
        rows = torch.cat([tensor.data for tensor in tensors]).float()
        assert torch.equal(rows[:509], theirs.get(name, theirs[weights.EMBEDDING]))
        assert not rows[509:].any(), "rows beyond the vocabulary are zero"
    for decoder in decoders:
        assert torch.equal(decoder.norm.float(), theirs["model.norm.weight"])
        assert torch.equal(
            decoder.layers[1].mlp_norm.float(), theirs[f"{LAYER}post_attention_layernorm.weight"]
        )


def test_every_rank_accounts_for_the_whole_checkpoint(tmp_path: Path) -> None:
    path = checkpoint("llama_biased", tmp_path)
    tensors = load_file(path / SINGLE)
    name = f"{LAYER}mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :40].contiguous()  # its width is that of the part
    del tensors[f"{LAYER}self_attn.o_proj.bias"]
    save_file(tensors, path / SINGLE)
    for rank in range(2):
        with pytest.raises(ValueError, match="are not those of") as caught:
            weights.load(part_of(decoder_config(read(path)), rank, 2), path)
        assert f"misshapen: {name} is [48, 40], the model needs [48, 80]" in str(caught.value)
        assert f"missing: {LAYER}self_attn.o_proj.bias [48]" in str(caught.value)


def test_a_tied_head_is_compared_where_a_rank_holds_it(tmp_path: Path) -> None:
    path = checkpoint("qwen3", tmp_path, vocab_size=509)
    tensors = load_file(path / SINGLE)
    head = tensors[weights.EMBEDDING].clone()
    save_file(tensors | {weights.HEAD: head}, path / SINGLE)
    config = decoder_config(read(path))
    for rank in range(2):
        weights.load(part_of(config, rank, 2), path)
    embedding = tensors.pop(weights.EMBEDDING)
    save_file(tensors | {weights.HEAD: head}, path / SINGLE)  # the shared tensor by its other name alone
    parts = [part_of(config, rank, 2) for rank in range(2)]
    for part in parts:
        weights.load(part, path)
    assert torch.equal(torch.cat([part.embedding for part in parts])[:509].to(embedding), embedding)
    tensors[weights.EMBEDDING] = embedding
    head[508] += 1
    save_file(tensors | {weights.HEAD: head}, path / SINGLE)
    weights.load(part_of(config, 0, 2), path)
    with pytest.raises(ValueError, match="set tie_word_embeddings to false"):
        weights.load(part_of(config, 1, 2), path)


@pytest.mark.parametrize("name", ["llama_biased", "qwen3"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_a_part_has_the_bytes_that_its_configuration_says(name: str, is_int8: bool, tmp_path: Path) -> None:
    config = decoder_config(read(checkpoint(name, tmp_path, vocab_size=509)))
    if is_int8:
        config = replace(config, quantization=Quantization(is_stored=False))
    for rank in range(4):
        decoder = part_of(config, rank, 4)
        weights.random(decoder, 0)
        assert decoder.part.weight_bytes == held_bytes(decoder)
        assert decoder.part.kv_bytes_per_token() == config.kv_bytes_per_token(4)
