"""Store a checkpoint as AWQ, GPTQ and compressed-tensors do, by their published layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint.files import INDEX, SINGLE

LINEAR = re.compile(r"(_proj|\.w[123])\.weight$")  # linears of a layer: routers are never packed
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output the first four bits hold, which the next four, ...


@dataclass(frozen=True)
class Form:
    """What config.json says, and how many inputs share a scale (0: all)."""

    said: dict[str, Any]
    bits: int = 4
    group: int = 16
    has_zeros: bool = True
    is_shuffled: bool = False
    left_out: str | None = None  # linears with this in their names are not packed


def compressed(bits: int, strategy: str, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": 16 if strategy == "group" else None,
        "dynamic": False,
        **more,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 16,
    "desc_act": False,
    "sym": False,
    "lm_head": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
FORMS = {
    "awq": Form(AWQ),
    "gptq": Form(GPTQ | {"checkpoint_format": "gptq"}),
    "gptq_v2": Form(GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq_by_activation": Form(GPTQ | {"desc_act": True, "sym": True}, is_shuffled=True),
    "gptq_8_bits": Form(GPTQ | {"bits": 8, "group_size": -1}, bits=8, group=0),
    "packed": Form(compressed(4, "group", True), has_zeros=False),
    "packed_zeros": Form(compressed(4, "group", False)),
    "packed_by_activation": Form(compressed(4, "group", False, actorder="group"), is_shuffled=True),
    "packed_8_bits": Form(compressed(8, "channel", True), bits=8, group=0, has_zeros=False),
}


def packed(values: Tensor, bits: int, order: Sequence[int] = range(8)) -> Tensor:
    """[a, b] -> int32 [a, words], value by value."""
    count = 32 // bits
    missing = -values.shape[1] % count
    apart = torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, count))
    words: Tensor = sum(apart[..., order[place]] << (bits * place) for place in range(count))
    return (words - 2**32 * (words >= 2**31)).int().contiguous()


def tensors_of(weight: Tensor, form: Form) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored of a weight [out, in], and what that stands for."""
    outputs, inputs = weight.shape
    size = form.group or inputs
    groups = torch.arange(inputs) // size
    if form.is_shuffled:
        groups = groups[torch.randperm(inputs)]
    count, most = -(-inputs // size), 2**form.bits - 1
    low, high = (torch.full((outputs, count), fill) for fill in (torch.inf, -torch.inf))
    for group in range(count):
        part = weight[:, groups == group]
        low[:, group], high[:, group] = part.amin(1), part.amax(1)
    if form.has_zeros:
        scale = (high - low).half().float() / most
        zero = (-low / scale).round().clamp(1, most)
    else:
        scale = torch.maximum(-low, high) / (most // 2)
        zero = torch.full_like(scale, most // 2 + 1)
    scale = scale.half().float()
    number = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, most).long()
    exact, zero = (number - zero[:, groups]) * scale[:, groups], zero.long()
    method, bits, half = form.said["quant_method"], form.bits, scale.half()
    if method == "awq":
        parts = {"qweight": packed(number.t(), 4, AWQ_ORDER), "qzeros": packed(zero.t(), 4, AWQ_ORDER)}
        return parts | {"scales": half.t().contiguous()}, exact
    if method == "gptq":
        less = zero - int(form.said.get("checkpoint_format", "gptq") == "gptq")
        parts = {"qweight": packed(number, bits).t().contiguous(), "qzeros": packed(less.t(), bits)}
        return parts | {"scales": half.t().contiguous(), "g_idx": groups.int()}, exact
    parts = {"weight_packed": packed(number, bits), "weight_scale": half}
    parts["weight_shape"] = torch.tensor([outputs, inputs])
    if form.has_zeros:
        parts["weight_zero_point"] = packed(zero.t(), bits).t().contiguous()
    if form.is_shuffled:
        parts["weight_g_idx"] = groups.int()
    return parts, exact


def store(path: Path, form: Form) -> dict[str, Tensor]:
    """Store a checkpoint's linears so, in two files that cut some of them apart; what they stand for."""
    tensors, exact = load_file(path / SINGLE), dict[str, Tensor]()
    files: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for number, (name, weight) in enumerate(sorted(tensors.items())):
        exact[name] = weight
        parts = {name: weight}
        if LINEAR.search(name) and (form.left_out is None or form.left_out not in name):
            made, exact[name] = tensors_of(weight, form)
            parts = {f"{name.removesuffix('.weight')}.{end}": each for end, each in made.items()}
        for place, (end, each) in enumerate(parts.items()):
            files[(number % 5 == 0 and place > 1) or number > len(tensors) // 2][end] = each
    where: dict[str, str] = {}
    for number, some in enumerate(files):
        save_file(some, path / f"model-{number}.safetensors")
        where |= dict.fromkeys(some, f"model-{number}.safetensors")
    (path / SINGLE).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": where}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": form.said}))
    return exact
