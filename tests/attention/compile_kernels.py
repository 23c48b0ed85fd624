"""Compile the attention kernel for cases read from standard input; print what became of each."""

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

from attention.cuda import CHUNK, CudaAttention, _operand
from attention.reference import AttentionShape
from attention.triton_kernels import attend_tiles

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def compile_case(
    capability: int, dtype: str, head_dim: int, few: bool, batch_invariant: bool
) -> dict[str, Any]:
    """Shared memory and stack in bytes, and whether matrices are multiplied by a matrix unit."""
    shape = AttentionShape(32, 8, head_dim, 16, 1.0, getattr(torch, dtype), (None,))
    attention = CudaAttention(shape, batch_invariant=batch_invariant)
    constants = {
        "NUM_KV": 8,
        "GROUP": attention.group,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": attention.padded_dim,
        "PAGE": 16,
        "ROWS": attention._num_rows(1 if few else 100),
        "STEP": attention.step,
        "WINDOW": 0,
        "CHUNK": CHUNK if batch_invariant else 0,
        "OPERAND": _operand(shape.dtype),
    }
    types = dict.fromkeys(("query", "keys", "values", "output"), POINTERS[dtype])
    types |= dict.fromkeys(("tiles", "page_table"), "*i32")
    types |= dict.fromkeys(("part_sums", "part_peaks", "part_totals"), "*fp32")
    aligned = [*types, "query_row", "query_head"]
    types |= {"query_row": "i32", "query_head": "i32", "table_row": "i32", "scale": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    names = attend_tiles.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {
        "num_warps": attention.num_warps,
        "num_stages": 3,
        "enable_fp_fusion": not batch_invariant,
    }
    source = ASTSource(attend_tiles, types, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    stack = re.search(r"STACK:(\d+)", usage.stdout)
    assert stack, usage.stdout
    return {
        "shared": kernel.metadata.shared,
        "stack": int(stack[1]),
        "uses_matrix_unit": "mma" in kernel.asm["ptx"],
    }


if __name__ == "__main__":
    print(json.dumps({json.dumps(case): compile_case(*case) for case in json.load(sys.stdin)}))
