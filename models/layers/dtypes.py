"""Map the type names of a configuration, which is free of torch, to torch's types."""

from __future__ import annotations

import torch

from kv_cache.groups import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
