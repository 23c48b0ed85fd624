"""Which tensor of a checkpoint goes where?

Checkpoints are Hugging Face directories of safetensors, one file or an index over shards. Each tensor is
memory-mapped and copied directly to its place in the decoder's joined parameters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.decoder import Decoder, Linear
from models.file_bounds import check_regular, is_there

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = ("F64", "F32", "BF16", "F16")  # converted to the model's dtype
INT8 = ("I8",)
MOST_NAMES = 20  # that one message lists
MAPPED_BYTES = 2**27  # then a file is mapped again: pages read from a mapping count as the process's memory
# Buffers that older checkpoints contain although they follow from config.json
HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load(decoder: Decoder, path: str | Path) -> None:
    """Fill the decoder from the checkpoint directory `path`, and pack it.

    Raises one ValueError that names every tensor that is missing, surplus, misshapen or wrongly typed.
    """
    path = Path(path)
    places = places_by_name(decoder)
    found, faults = _account(checkpoint_files(path), places, decoder.config.tie_embeddings)
    if faults:
        raise ValueError(
            f"the weights in {path} are not those of its config.json:\n  "
            + "\n  ".join(faults)
            + "\nDownload the checkpoint again, or correct config.json."
        )
    for file, names in found.items():
        for name, tensor in _tensors(file, names):
            if name in places:
                check_finite(file, name, tensor, places[name].dtype)
                places[name].copy_(tensor)
    # A tied checkpoint may contain its head as well; if the two differ it is not tied
    for file in (file for file, names in found.items() if HEAD in names and HEAD not in places):
        head = open_checkpoint(file).get_tensor(HEAD).to(decoder.embedding)
        if not torch.equal(head, decoder.embedding):
            raise ValueError(
                f"{HEAD} in {path} differs from {EMBEDDING}, yet config.json ties them; "
                "set tie_word_embeddings to false"
            )
    decoder.pack()


def check_finite(file: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a tensor that `dtype` cannot hold; a single NaN would spoil every answer."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    least, most = (each.item() for each in tensor.aminmax())
    largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    if not (math.isfinite(least) and math.isfinite(most)):  # NaN is both the least and the most
        raise ValueError(f"{file} is damaged: {name} holds NaN or infinity; download it again")
    if max(-least, most) > largest:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{file}: {name} holds {max(-least, most):.3g}, and {kind} reaches {largest:.3g}; set"
            " model.dtype: bfloat16 or float32"
        )
    if name.endswith(".weight_scale") and least < 0:
        raise ValueError(f"{file} is damaged: {name} holds {least:.3g}, and no scale is negative")


def random(decoder: Decoder, seed: int) -> None:
    """Fill the decoder with seeded random weights of a scale that keeps logits near one, and pack it."""
    generator = torch.Generator(decoder.embedding.device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():  # a tied head appears once, as the embedding
        if name.endswith("norm"):
            parameter.data.fill_(1.0)
        else:
            bound = math.sqrt(3.0 / parameter.shape[-1])  # uniform is three times as fast as normal
            parameter.data.uniform_(-bound, bound, generator=generator)
    decoder.pack()


def places_by_name(decoder: Decoder) -> dict[str, Tensor]:
    """For each tensor name of a checkpoint, the view of the decoder's parameters that it is copied to."""
    config = decoder.config
    places: dict[str, Tensor | None] = {EMBEDDING: decoder.embedding, "model.norm.weight": decoder.norm}
    if not config.tie_embeddings:
        places |= _split("", ("lm_head",), decoder.head, [config.vocab_size])
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    for index, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{index}."
        attention, mlp = layer.attention, layer.mlp
        places[prefix + "input_layernorm.weight"] = layer.input_norm
        places[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        places[prefix + "self_attn.q_norm.weight"] = attention.query_norm
        places[prefix + "self_attn.k_norm.weight"] = attention.key_norm
        widths = [count * config.head_dim for count in heads]
        places |= _split(prefix + "self_attn.", ("q_proj", "k_proj", "v_proj"), attention.qkv, widths)
        places |= _split(prefix + "self_attn.", ("o_proj",), attention.output, [config.hidden_size])
        places |= _split(
            prefix + "mlp.", ("gate_proj", "up_proj"), mlp.gate_up, [config.intermediate_size] * 2
        )
        places |= _split(prefix + "mlp.", ("down_proj",), mlp.down, [config.hidden_size])
    return {name: place.data for name, place in places.items() if place is not None}


def _split(
    prefix: str, names: tuple[str, ...], linear: Linear, widths: list[int]
) -> dict[str, Tensor | None]:
    """The rows of a joined linear that belong to each of the checkpoint's linears."""
    places: dict[str, Tensor | None] = {}
    kinds = {"weight": linear.weight, "weight_scale": linear.weight_scale, "bias": linear.bias}
    for kind, joined in kinds.items():
        if joined is not None:
            views = joined.data.split(widths)
            places |= {f"{prefix}{name}.{kind}": view for name, view in zip(names, views)}
    return places


def checkpoint_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory; raises ValueError where some are absent."""
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if not is_there(path / INDEX):
        raise ValueError(
            f"{path} holds neither {SINGLE} nor {INDEX}; only safetensors are read: "
            "convert the checkpoint, or set model.weights: random"
        )
    check_regular(path / INDEX)
    try:
        files = set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        names = sorted(Path(file).name for file in files)  # all in this folder
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / INDEX} is no index of safetensors files; download it again") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} lacks {_first(absent)}, which {INDEX} lists; download what is missing")
    return [path / name for name in names]


def _first(names: list[str]) -> str:
    """Some of many names, so that a message stays one that can be read."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMES]) + more


def open_checkpoint(file: Path) -> Any:
    """A safetensors file, mapped; raises ValueError where it is damaged or something else."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); download it again") from error


def _tensors(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, mapped one after the other; each is valid until the next is asked for."""
    mapped, num_bytes = open_checkpoint(file), 0
    for name in names:
        tensor = mapped.get_tensor(name)
        num_bytes += tensor.nbytes
        yield name, tensor
        del tensor
        if num_bytes > MAPPED_BYTES:
            mapped, num_bytes = open_checkpoint(file), 0


def _account(
    files: list[Path], places: dict[str, Tensor], tied: bool
) -> tuple[dict[Path, list[str]], list[str]]:
    """The tensors to be read from each file, and everything that is wrong with them."""
    found: dict[Path, list[str]] = {}
    faults: list[str] = []
    absent = {name: list(place.shape) for name, place in places.items()}
    known = {HEAD: places[EMBEDDING], **places} if tied else places
    seen = set()
    for file in files:
        opened = open_checkpoint(file)
        names = [name for name in opened.keys() if not HARMLESS.fullmatch(name)]  # noqa: SIM118 - no mapping
        for name in names:
            if name in seen:
                faults.append(f"surplus: {name} is in two files")
            elif name not in known:
                faults.append(f"surplus: {name} has no place in this model")
            else:
                faults += _misfits(name, opened.get_slice(name), known[name])
            absent.pop(name, None)
        seen.update(names)
        found[file] = names
    faults += [f"missing: {name} {shape}" for name, shape in absent.items()]
    return found, faults


def _misfits(name: str, header: Any, place: Tensor) -> list[str]:
    faults = []
    shape, dtypes = list(place.shape), FLOATS if place.is_floating_point() else INT8
    if header.get_shape() != shape:
        faults.append(f"misshapen: {name} is {header.get_shape()}, the model needs {shape}")
    if header.get_dtype() not in dtypes:
        faults.append(f"wrongly typed: {name} is {header.get_dtype()}, not one of {', '.join(dtypes)}")
    return faults
