"""Run Triton's kernels on a GPU if there is one, and otherwise in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_patch = interpreter._patch_lang_tensor


def _patch_scalars(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes a scalar, an array of one, by `int`, which numpy has refused since 2.4."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_scalars


def multiply_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by BLAS, whose sums depend on where a row lies; a matrix unit's do not."""

    def dot(self: object, a: Any, b: Any, sums: Any, *_: object) -> interpreter.TensorHandle:
        product = np.einsum("mk,kn->mn", a.data, b.data)
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
