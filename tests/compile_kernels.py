"""Compile Triton kernels for the cases on standard input, and print what the compiler made of each.

A program of its own, because Triton compiles only where it does not interpret.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.cuda.attention import CHUNK, CudaAttention
from attention.cuda.triton_kernels import attend_tiles, join_parts, write_places
from devices.shapes import AttentionShape
from devices.triton_types import kernel_dtype
from models.ops.cuda.ops import SMALL_TILE, TILE
from models.ops.cuda.triton_kernels import multiply_rows, norm_rows, turn_heads, weigh_by_gate

TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
INTEGERS = {  # arguments; all others that are no constants point to numbers of the case's dtype
    "*i32": ("tiles", "page_table", "joins"),
    "*i64": ("places",),
    "*fp32": ("part_sums", "part_peaks", "part_totals"),
    "fp32": ("scale", "eps"),
    "i32": ("num_tokens", "num_heads", "num_rows", "table_row"),
}
STRIDES = re.compile(r"_(row|head|token)$")


def compiled(
    kernel: Any, capability: int, dtype: str, constants: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """Bytes of shared memory and of the stack, and whether matrices are multiplied by a matrix unit."""
    types = {name: found for found, names in INTEGERS.items() for name in names}
    names = kernel.arg_names
    signature, aligned = {}, []
    for name in names:
        stride = bool(STRIDES.search(name)) and name not in types
        signature[name] = types.get(name, "i32" if stride else TYPES[dtype])
        aligned += [name] if stride or signature[name][0] == "*" else []
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants
    }
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    assert stack, usage.stdout
    return {
        "shared": made.metadata.shared,
        "stack": int(stack[1]),
        "uses_matrix_unit": "mma" in made.asm["ptx"],
    }


def attention(capability: int, dtype: str, head_dim: int, few: bool, batch_invariant: bool) -> dict[str, Any]:
    """The attention kernel as CudaAttention launches it."""
    shape = AttentionShape(32, 8, head_dim, 16, 1.0, getattr(torch, dtype), (None,))
    ours = CudaAttention(shape, batch_invariant=batch_invariant)
    constants = {
        "NUM_KV": 8,
        "GROUP": ours.group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": ours.padded_dim,
        "PAGE": 16,
        "RUN": 16,
        "ROWS": ours._num_rows(1 if few else 100),
        "STEP": ours.step,
        "WINDOW": 0,
        "CAP": 0.0,
        "HAS_SINKS": few,
        "CHUNK": CHUNK if batch_invariant else 0,
        "OPERAND": kernel_dtype(shape.dtype),
    }
    fusion = {"enable_fp_fusion": not batch_invariant}
    return compiled(
        attend_tiles, capability, dtype, constants, num_warps=ours.num_warps, num_stages=3, **fusion
    )


def small(capability: int, dtype: str, name: str) -> dict[str, Any]:
    """Another kernel, at the sizes of Qwen3-8B."""
    rows, columns, depth = SMALL_TILE if dtype == "float32" else TILE
    heads = {"NUM_HEADS": 32, "HEAD_DIM": 128}
    product = {"INNER": 4096, "OUTER": 12_288, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
    product |= {"OPERAND": kernel_dtype(getattr(torch, dtype)), "HAS_BIAS": True}
    cases: dict[str, tuple[Any, dict[str, Any], int]] = {
        "write": (write_places, {"NUM_KV": 8, "HEAD_DIM": 128, "TOKENS": 4, "WIDTH": 1024}, 4),
        "join": (join_parts, {**heads, "PADDED_DIM": 128, "HAS_SINKS": True}, 4),
        "norm": (norm_rows, {"SIZE": 4096, "PADDED": 4096, "ADD": True}, 8),
        "turn": (turn_heads, {**heads, "NUM_KV": 8, "PADDED_HALF": 64, "HEADS": 8}, 4),
        "weigh": (weigh_by_gate, {"SIZE": 12_288, "COLUMNS": 1024}, 4),
        "multiply": (multiply_rows, product, 4),
    }
    kernel, constants, num_warps = cases[name]
    return compiled(kernel, capability, dtype, constants, num_warps=num_warps, num_stages=4)


if __name__ == "__main__":
    found = {}
    for case in json.load(sys.stdin):
        found[json.dumps(case)] = small(*case) if len(case) == 3 else attention(*case)
    print(json.dumps(found))
