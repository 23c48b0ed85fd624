"""Write checkpoints as msModelSlim stores them, and compute the answers that its arithmetic gives.

Types, tensors and formulas are those of its exporter and of vllm-ascend, which reads them, written here by
themselves: nothing of the product is used. transformers' model computes everything but the linears.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.lazy import transformers
from tests.models.families import VARIANTS, expected_logprobs, make, wide
from tests.models.sparse_variants import SPARSE_VARIANTS

LINEAR = "_proj.weight", "_with_mqa.weight", "wq_b.weight", "mtp.fc.weight", "lm_head.weight"
# Those that read hidden states, or compressed queries
NORMS = tuple(
    f"{each}.weight" for each in ("input_layernorm", "attention_layernorm", "q_a_layernorm", "model.norm")
)
DESCRIPTION = "quant_model_description.json"
BY_OUTPUTS = ("o_proj", "down_proj")  # what tensor ranks divide by inputs
Types = Callable[[str], str]  # the type of a linear, by its name


@dataclass
class Stored:
    """A linear as it is stored: its type, its tensors by the ends of their names, and its bias."""

    kind: str
    tensors: dict[str, Tensor]
    bias: Tensor | None
    ranks: int = 1  # that divide its inputs, and quantise their parts of a token by themselves

    @property
    def alone(self) -> Tensor:
        """The weight by itself, [out, in]."""
        found, static = self.tensors, self.kind == "W8A8"
        scale = _float_of(found["deq_scale"]) / found["input_scale"] if static else found["weight_scale"]
        alone: Tensor = found["weight"].double() * scale.double().reshape(-1, 1)
        return alone

    def __call__(self, x: Tensor) -> Tensor:
        made = self._dynamic if self.kind.endswith(("_DYNAMIC", "_MIX")) else self._by_kind
        y: Tensor = made(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return y.to(x.dtype)

    def _by_kind(self, x: Tensor) -> Tensor:
        found = self.tensors
        weight = found["weight"].double()
        if self.kind == "W8A8":
            scale, offset = found["input_scale"], found["input_offset"]
            rows = (x.float() * (1 / scale) + offset).round().clamp(-128, 127).double()
            return (rows @ weight.t() + found["quant_bias"]) * _float_of(found["deq_scale"]).double()
        assert self.kind == "W8A16", self.kind
        made = x.double() @ ((weight - found["weight_offset"]) * found["weight_scale"].double()).t()
        return made if self.bias is None else made + self.bias

    def _dynamic(self, x: Tensor) -> Tensor:
        weight = self.tensors["weight"]
        if self.kind == "W4A8_DYNAMIC":
            low, high = weight << 4 >> 4, weight >> 4
            weight = torch.stack((low, high), 1).flatten(0, 1)
        total = torch.zeros(len(x), len(weight), dtype=torch.double)
        for part, of_weight in zip(x.float().chunk(self.ranks, 1), weight.double().chunk(self.ranks, 1)):
            scale = part.abs().amax(1, keepdim=True) / 127
            rows = torch.where(scale > 0, part / scale, 0).round().double()
            total += rows @ of_weight.t() * scale
        made = total * self.tensors["weight_scale"].double()[:, 0]
        return made if self.bias is None else made + self.bias


def _float_of(scale: Tensor) -> Tensor:
    """A file for float16 has the bits of the float32 in the low half of an int64."""
    return scale.int().view(torch.float32) if scale.dtype == torch.int64 else scale


def stored_as(
    kind: str, weight: Tensor, bias: Tensor | None, *, seed: int, is_half: bool, role: str
) -> Stored:
    """Quantise a weight [out, in], with the input's scale and offset that this seed draws."""
    tensors: dict[str, Tensor] = {}
    if kind == "W4A8_DYNAMIC":
        scale = weight.abs().amax(1, keepdim=True) / 7.5
        numbers = (weight / scale).round().clamp(-8, 7).to(torch.int8)
        tensors["weight"] = (numbers[::2] & 15) | (numbers[1::2] << 4)
        parts = 16 if role in BY_OUTPUTS else 1
        sums = numbers.float().unflatten(1, (parts, -1)).sum(-1)
        tensors["scale_bias"] = 8 * sums * scale
    else:
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors["weight"] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    if kind != "W8A8":
        tensors |= {"weight_scale": scale, "weight_offset": torch.zeros_like(scale)}
    if kind in ("W8A8", "W8A8_MIX"):
        draw = torch.Generator().manual_seed(seed)
        input_scale = 0.02 + 0.02 * torch.rand(1, generator=draw)
        input_offset = torch.randint(-20, 21, (1,), generator=draw).float()
        deq = input_scale * scale[:, 0]
        # Sums of a row are whole, and so is what is subtracted
        sums = tensors["weight"].double().sum(1) * input_offset.double()
        added = 0 if bias is None else bias.double() / deq.double()
        tensors |= {"input_scale": input_scale, "input_offset": input_offset}
        tensors["quant_bias"] = (added - sums).round().int()
        tensors["deq_scale"] = deq.view(torch.int32).long() if is_half else deq
    if bias is not None:
        tensors["bias"] = bias.float()
    return Stored(kind, {end: each.contiguous() for end, each in tensors.items()}, bias)


def checkpoint(
    name: str,
    root: Path,
    types: Types,
    *,
    salt: int = 0,
    is_wide: bool = False,
    dtype: torch.dtype = torch.float32,
    form: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Path]:
    """transformers' model whose linears compute by msModelSlim's arithmetic, and the directory that it wrote.

    Another `salt` draws other weights and scales, and `form` is what `quantised` takes.
    """
    variant = next(each for each in [*VARIANTS, *SPARSE_VARIANTS] if each.name == name)
    variant = wide(variant) if is_wide else variant
    variant = replace(variant, name=variant.name + salt * "_")  # a seed follows from its length
    options = variant.options | {"max_position_embeddings": 512} | options
    model, path = make(replace(variant, options=options, shard_size="5GB", saved_as=dtype), root)
    return model, quantised(model, path, types, salt=salt, **(form or {}))


def quantised(
    model: Any,
    path: Path,
    types: Types,
    *,
    salt: int = 0,
    are_apart: bool = False,
    has_cache_scales: bool | Literal["one"] = False,
    ranks: int = 1,
    divided: int = 1,
    norm_biases: bool = False,
    more: dict[str, Any] | None = None,
    further: Any = None,
    further_name: str | None = None,
) -> Path:
    """Store a checkpoint so, and let transformers' model compute by it; `further` is a layer behind its own,
    or the one whose tensors' names begin with `further_name`.

    Linears that share an input share its scale, unless they `are_apart`; `ranks` divide the inputs of dense
    linears, and `divided` of them those of an expert. Scales of a cache (C8) are coarse, so that they matter,
    and one for all channels on request.
    """
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    described, made, linears = {}, {}, {}
    for key in sorted(tensors):
        stem, _, end = key.rpartition(".")
        kind = types(stem) if f"{stem}.weight".endswith(LINEAR) else "FLOAT"
        if kind == "FLOAT" or end != "weight":
            if kind == "FLOAT":
                made[key], described[key] = tensors[key], "FLOAT"
            continue
        role, bias = stem.rpartition(".")[2], tensors.get(f"{stem}.bias")
        seed = salt + sum(map(ord, stem[: -len(role)])) + 3 * (role in BY_OUTPUTS)
        seed += sum(map(ord, role)) * are_apart
        found = stored_as(
            kind,
            tensors[key].float(),
            bias,
            seed=seed,
            is_half=tensors[key].dtype == torch.float16,
            role=role,
        )
        if role in BY_OUTPUTS:
            found.ranks = divided if ".experts." in stem else ranks
        linears[stem] = found
        for part, each in found.tensors.items():
            made[f"{stem}.{part}"] = each
            described[f"{stem}.{part}"] = "FLOAT" if part == "bias" else kind
    if norm_biases:
        for key in [key for key in made if key.endswith(NORMS)]:
            draw = torch.Generator().manual_seed(len(made))
            bias = torch.randn(made[key].shape, generator=draw) / 4
            made[key.replace(".weight", ".bias")] = bias
            described[key.replace(".weight", ".bias")] = "FLOAT"
            _add_after(model.get_submodule(key.removesuffix(".weight")), bias)
    for layer in range(model.config.num_hidden_layers if has_cache_scales else 0):
        is_latent = hasattr(model.config, "kv_lora_rank")
        stems = ["fa_q.", "fa_k.", "fa_v."] if is_latent else ["k_proj.kv_cache_", "v_proj.kv_cache_"]
        own = model.model.layers[layer].self_attn
        scales = []
        for number, stem in enumerate(f"model.layers.{layer}.self_attn.{each}" for each in stems):
            draw = torch.Generator().manual_seed(salt + 2 * layer + number)
            width = 32 if is_latent else len(own.v_proj.weight)
            scales.append(0.1 + 0.2 * torch.rand(1 if has_cache_scales == "one" else width, generator=draw))
            made |= {f"{stem}scale": scales[-1], f"{stem}offset": torch.zeros_like(scales[-1])}
            described |= dict.fromkeys((f"{stem}scale", f"{stem}offset"), "C8")
        own.cache_scales = scales
    if has_cache_scales and not is_latent:
        model.config._attn_implementation = _quantised_cache()
    _write(path, made, {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0"} | described | (more or {}))
    _replace(model, linears)
    if further is not None:
        _replace(further, linears, further_name or f"model.layers.{model.config.num_hidden_layers}.")
        if "mtp.fc" in linears:
            model.further.join = linears["mtp.fc"]
    return path


def _quantised_cache() -> str:
    """The name of attention in transformers that reads keys and values as a C8 cache returns them."""

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *given: Any, **more: Any
    ) -> tuple[Tensor, Tensor | None]:
        kept = []
        for each, scale in zip((key, value), cast(Any, module).cache_scales):
            units = scale.expand(each.shape[1] * each.shape[3]).view(1, each.shape[1], 1, each.shape[3])
            kept.append((each / units).round().clamp(-128, 127) * units)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        found: tuple[Tensor, Tensor | None] = eager(module, query, *kept, *given, **more)
        return found

    masks = transformers.masking_utils
    transformers.AttentionInterface.register("c8", attend)
    transformers.AttentionMaskInterface.register("c8", masks.eager_mask)
    return "c8"


def _write(path: Path, made: dict[str, Tensor], described: dict[str, Any]) -> None:
    """In two files with an index, as the exporter names them."""
    names = sorted(made)
    where: dict[str, str] = {}
    for number, some in enumerate((names[::2], names[1::2]), 1):
        file = f"quant_model_weights-0000{number}-of-00002.safetensors"
        save_file({each: made[each].contiguous() for each in some}, path / file)
        where |= dict.fromkeys(some, file)
    (path / "quant_model_weights.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (path / DESCRIPTION).write_text(json.dumps(described))


def _add_after(norm: nn.Module, bias: Tensor) -> None:
    norm.register_forward_hook(lambda _, __, output: output + bias)


class Experts(nn.Module):
    """The experts of a layer, by their linears."""

    def __init__(self, prefix: str, linears: dict[str, Stored], plain: Any) -> None:
        super().__init__()
        self.num_experts = plain.num_experts
        self.gates, self.ups, self.downs = (
            [linears[f"{prefix}.{number}.{role}_proj"] for number in range(self.num_experts)]
            for role in ("gate", "up", "down")
        )

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for number in range(self.num_experts):
            share = torch.where(chosen == number, weights, 0).sum(-1, keepdim=True)
            inner = F.silu(self.gates[number](hidden)) * self.ups[number](hidden)
            total += share * self.downs[number](inner)
        return total


def _replace(model: Any, linears: dict[str, Stored], prefix: str = "") -> None:
    for own, module in list(model.named_modules()):
        name = prefix + own
        if name.endswith(".experts") and f"{name}.0.gate_proj" in linears:
            parent = model.get_submodule(own.rpartition(".")[0])
            parent.experts = Experts(name, linears, module)
        elif name.endswith("kv_b_proj") and name in linears:  # which is multiplied into queries and values
            module.weight.data = linears[name].alone.float()
        elif name in linears:
            module.forward = linears[name]


def oracle_logprobs(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """The log-probabilities [len(prompt), V] of each prompt alone."""
    return [expected_logprobs(model, prompt) for prompt in prompts]
