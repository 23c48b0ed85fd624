"""Choose the types in which Triton kernels multiply and store, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Triton's interpreter runs kernels on a CPU. It multiplies bfloat16 as if it were integers and truncates
# where a GPU rounds, so the callers let kernels multiply and store float32 there.
INTERPRETED: bool = triton.knobs.runtime.interpret


def stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a kernel stores its results, before they are converted to `dtype`."""
    return torch.float32 if INTERPRETED else dtype


def kernel_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the type in which a kernel multiplies matrices of `dtype`."""
    return getattr(tl, str(stored_dtype(dtype)).removeprefix("torch."))
