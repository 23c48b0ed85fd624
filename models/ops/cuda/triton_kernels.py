"""Define the Triton kernels of the decoder's operators.

Each computes in float32 and rounds once, at the end. Every row belongs to one program, so the result of a row
does not depend on the other rows.

Legend: T tokens of the step, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_heads"])
def norm_rows(
    x, residual, weight, normed, total, x_token, x_head, num_heads, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute the RMS norm of one row of `x`, or of x + residual, which is then stored in `total`.

    Rows of `x` are `num_heads` to a token; all other tensors have them one after the other.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    mask = at < SIZE
    source = x + row // num_heads * x_token + row % num_heads * x_head
    wide = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * SIZE + at, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + at, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    scale = 1 / tl.sqrt_rn(tl.sum(wide * wide, 0) / SIZE + eps)
    wide = wide * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + at, wide, mask=mask)


@triton.jit
def turn_heads(
    query, key, cos, sin, turned_query, turned_key, query_token, query_head, key_token, key_head,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate some of the query heads, or of the key heads, of one token."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = tl.arange(0, PADDED_HALF)
    mask = half < HEAD_DIM // 2
    cosine = tl.load(cos + token * HEAD_DIM + half, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * HEAD_DIM + half, mask=mask, other=0.0).to(tl.float32)
    query_groups = (NUM_HEADS + HEADS - 1) // HEADS
    if group < query_groups:
        _turn(
            query + token * query_token, turned_query + token * (NUM_HEADS * HEAD_DIM), cosine, sine,
            group * HEADS, query_head, NUM_HEADS, HEAD_DIM, PADDED_HALF, HEADS,
        )  # fmt: skip
    else:
        _turn(
            key + token * key_token, turned_key + token * (NUM_KV * HEAD_DIM), cosine, sine,
            (group - query_groups) * HEADS, key_head, NUM_KV, HEAD_DIM, PADDED_HALF, HEADS,
        )  # fmt: skip


@triton.jit
def _turn(
    x, turned, cosine, sine, first, x_head,
    COUNT: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head, half = (first + tl.arange(0, HEADS))[:, None], tl.arange(0, PADDED_HALF)[None, :]
    mask = (head < COUNT) & (half < HEAD_DIM // 2)
    source, target = x + head * x_head + half, turned + head * HEAD_DIM + half
    low = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, low * cosine[None, :] - high * sine[None, :], mask=mask)
    tl.store(target + HEAD_DIM // 2, high * cosine[None, :] + low * sine[None, :], mask=mask)


@triton.jit
def weigh_by_gate(gate_up, product, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute silu(gate) * up for some columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = at < SIZE
    gate = tl.load(gate_up + token * (2 * SIZE) + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * SIZE) + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + token * SIZE + at, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    x, weight, bias, y, num_rows, x_row,
    INNER: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    OPERAND: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Multiply one tile of x [T, inner] by weight [outer, inner], transposed, in a fixed order of sums."""
    num_columns = (OUTER + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    row = program // num_columns * ROWS + tl.arange(0, ROWS)
    column = program % num_columns * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < num_rows)[:, None], (column < OUTER)[None, :]
    rows, columns = row.to(tl.int64)[:, None], column.to(tl.int64)[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INNER, DEPTH):
        at = start + tl.arange(0, DEPTH)
        left = tl.load(x + rows * x_row + at[None, :], mask=is_row & (at < INNER)[None, :], other=0.0)
        right = tl.load(
            weight + columns * INNER + at[:, None], mask=is_column & (at < INNER)[:, None], other=0.0
        )
        sums = tl.dot(left.to(OPERAND), right.to(OPERAND), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y + rows * OUTER + columns, sums, mask=is_row & is_column)
