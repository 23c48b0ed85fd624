"""List the safetensors files of a checkpoint directory, open them, and check their tensors.

Checkpoints are Hugging Face directories of safetensors, one file or an index over shards. Where the tensors
go is the task of `weights`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from borders.file_bounds import check_regular, is_there

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_NAMES = 20  # names that one message lists


def checkpoint_files(path: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint directory; raises ValueError if some are absent."""
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
        names = sorted(Path(file).name for file in files)  # all in this folder, whatever the index says
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / INDEX} is no index of safetensors files; download it again") from error
    absent = [name for name in names if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{path} lacks {_first(absent)}, which {INDEX} lists; download what is missing")
    return [path / name for name in names]


def tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors of a checkpoint; raises ValueError if files are absent or damaged."""
    return {name for file in checkpoint_files(path) for name in names_in(open_checkpoint(file))}


def _first(names: list[str]) -> str:
    """List the first of many names, so that a message stays readable."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(name[:100] for name in names[:MOST_NAMES]) + more


def open_checkpoint(file: Path) -> Any:
    """Map a safetensors file; raises ValueError if it is damaged or something else."""
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); download it again") from error


def names_in(opened: Any) -> list[str]:
    """Return the tensor names of a file from `open_checkpoint`, which is no mapping."""
    return list(opened.keys())


def check_finite(file: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError for a tensor that `dtype` cannot hold; a single NaN would spoil every answer."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    least, most = (each.item() for each in tensor.aminmax())
    largest = torch.finfo(dtype).max if dtype.is_floating_point else math.inf
    if not (math.isfinite(least) and math.isfinite(most)):  # both are NaN if any number is
        raise ValueError(f"{file} is damaged: {name} holds NaN or infinity; download it again")
    if max(-least, most) > largest:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{file}: {name} holds {max(-least, most):.3g}, and {kind} reaches {largest:.3g}; set"
            " model.dtype: bfloat16 or float32"
        )
    if name.endswith(".weight_scale") and least < 0:
        raise ValueError(f"{file} is damaged: {name} holds {least:.3g}, and no scale is negative")
