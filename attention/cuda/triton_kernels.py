"""Define the Triton kernels that read the paged cache for a whole mixed batch in one launch.

A program computes one tile of queries (query_tiles.py) for one kv head. The query heads that share the kv
head are rows of one matrix, row = query * G + head, so that keys and values are read once for all of them.
The softmax runs over the positions in order (Dao, "FlashAttention-2", 2023); if several programs share a
tile's positions, a second kernel combines their partial results, the parts ("Flash-Decoding", Dao et al.,
2023).

Legend: T tokens of the step, H/K query/kv heads, G = H/K, D head dim, P pages, B tokens a page, Q rows of
  a tile, N positions read at a time, X rows of parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_tokens"])
def write_places(
    key, value, keys, values, places, key_row, key_head, value_row, value_head, num_tokens,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the keys and values [K, D] of some tokens to their places in the cache [P * B, K, D]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(places + token, mask=token < num_tokens, other=0)
    token = token.to(tl.int64)[:, None]
    at = tl.arange(0, WIDTH)[None, :]  # a power of two of at least K * D
    head, dim = at // HEAD_DIM, at % HEAD_DIM
    mask = (token < num_tokens) & (at < NUM_KV * HEAD_DIM)
    target = place.to(tl.int64)[:, None] * (NUM_KV * HEAD_DIM) + at
    source = key + token * key_row + head * key_head + dim
    tl.store(keys + target, tl.load(source, mask=mask), mask=mask)
    source = value + token * value_row + head * value_head + dim
    tl.store(values + target, tl.load(source, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["table_row"])
def attend_tiles(
    query, keys, values, output, sinks, tiles, page_table, part_sums, part_peaks, part_totals,
    query_row, query_head, table_row, scale,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, CHUNK: tl.constexpr, OPERAND: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from one tile of queries and one kv head; write `output` [T, H, D], or parts [X, H, D].

    `scale` converts scores to powers of two, or to fractions of CAP, which bounds scores unless it is 0.
    `sinks` [H] count in the sums of weights. WINDOW 0 means all positions. CHUNK 0 reads the positions in one
    run; otherwise each CHUNK of them is summed separately, and the results are combined in order. RUN divides
    PAGE and STEP. OPERAND is the type in which matrices are multiplied.
    """
    program = tl.program_id(0)
    head = program % NUM_KV
    entry = tiles + (program // NUM_KV) * 8
    num_queries = tl.load(entry + 1)
    if num_queries == 0:  # padding
        return
    first_row, first_position = tl.load(entry).to(tl.int64), tl.load(entry + 2)
    low, high = tl.load(entry + 3), tl.load(entry + 4)
    table = page_table + tl.load(entry + 5).to(tl.int64) * table_row
    part = tl.load(entry + 6).to(tl.int64)

    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    index, of_head = row // GROUP, head * GROUP + row % GROUP
    mask = (index < num_queries)[:, None] & (dim < HEAD_DIM)[None, :]
    at = (first_row + index)[:, None] * query_row + of_head[:, None] * query_head + dim[None, :]
    rows = tl.load(query + at, mask=mask, other=0.0).to(OPERAND)
    last = first_position + tl.minimum(index, num_queries - 1)  # a padding row must see something too

    if CHUNK == 0:
        peak, total, sums = _read(
            rows, last, low, high, table, head, keys, values, scale,
            NUM_KV, HEAD_DIM, PADDED_DIM, PAGE, RUN, ROWS, STEP, WINDOW, CAP, OPERAND,
        )  # fmt: skip
    else:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
        for chunk in range(low // CHUNK * CHUNK, high, CHUNK):
            chunk_peak, chunk_total, chunk_sums = _read(
                rows, last, tl.maximum(low, chunk), tl.minimum(high, chunk + CHUNK), table, head, keys,
                values, scale, NUM_KV, HEAD_DIM, PADDED_DIM, PAGE, RUN, ROWS, STEP, WINDOW, CAP, OPERAND,
            )  # fmt: skip
            peak, old, new = _weights(peak, chunk_peak)
            total = total * old + chunk_total * new
            sums = sums * old[:, None] + chunk_sums * new[:, None]

    if part < 0:
        if HAS_SINKS:
            total += _sunk(sinks + of_head, peak)
        at_head = (first_row + index) * (NUM_KV * GROUP) + of_head
        tl.store(output + at_head[:, None] * HEAD_DIM + dim[None, :], sums / total[:, None], mask=mask)
    else:
        at_head = (part + index) * (NUM_KV * GROUP) + of_head
        tl.store(part_sums + at_head[:, None] * HEAD_DIM + dim[None, :], sums, mask=mask)
        tl.store(part_peaks + at_head, peak, mask=index < num_queries)
        tl.store(part_totals + at_head, total, mask=index < num_queries)


@triton.jit
def _read(
    rows, last, low, high, table, head, keys, values, scale,
    NUM_KV: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Attend from rows [Q, D] over positions low to high - 1, each row up to its `last` [Q].

    Returns the largest score [Q], the sum of 2^(score - largest) [Q] and the sum of values weighted by it [Q,
    D]. Steps begin at multiples of N, and a step in which a row sees nothing leaves its numbers unchanged:
    the result of a row does not depend on the other rows of its tile.
    """
    dim, offset = tl.arange(0, PADDED_DIM), tl.arange(0, STEP)
    is_dim = dim < HEAD_DIM
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for start in range(low // STEP * STEP, high, STEP):
        position = start + offset
        exists = (position >= low) & (position < high)
        # First positions of the runs, each of which lies in one page
        run = start + tl.arange(0, STEP // RUN) * RUN
        page = tl.load(table + run // PAGE, mask=run < high, other=0).to(tl.int64)
        page = tl.reshape(tl.broadcast_to(page[:, None], [STEP // RUN, RUN]), [STEP])
        at = ((page * PAGE + position % PAGE) * NUM_KV + head) * HEAD_DIM
        key = tl.load(keys + at[None, :] + dim[:, None], mask=exists[None, :] & is_dim[:, None], other=0.0)
        value = tl.load(
            values + at[:, None] + dim[None, :], mask=exists[:, None] & is_dim[None, :], other=0.0
        )
        seen = (position[None, :] <= last[:, None]) & exists[None, :]
        if WINDOW > 0:
            seen = seen & (position[None, :] > last[:, None] - WINDOW)
        scores = tl.dot(rows, key.to(OPERAND), input_precision="ieee") * scale
        if CAP > 0:
            # This is CAP times the tanh of the score
            scores = (1 - 2 / (tl.exp(2 * scores) + 1)) * (CAP * LOG2_E)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # -inf means that nothing has been seen yet
        old, weights = tl.exp2(peak - base), tl.exp2(scores - base[:, None])
        total = total * old + tl.sum(weights, 1)
        peak, sums = new_peak, sums * old[:, None]
        sums = tl.dot(weights.to(OPERAND), value.to(OPERAND), sums, input_precision="ieee")
    return peak, total, sums


@triton.jit
def _sunk(sinks, peak):
    """Return the weights of sinks, relative to the largest scores of their rows."""
    return tl.exp2(tl.load(sinks).to(tl.float32) * LOG2_E - peak)


@triton.jit
def _weights(peak, other):
    """Return the larger of two peaks, and the factors that bring sums relative to either peak to it.

    A side that has seen nothing (-inf) has the factor 0 and leaves the bits of the other unchanged.
    """
    both = tl.maximum(peak, other)
    base = tl.where(both == float("-inf"), 0.0, both)
    return both, tl.exp2(peak - base), tl.exp2(other - base)


@triton.jit
def join_parts(
    output, sinks, joins, part_sums, part_peaks, part_totals,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of one query and head, in order, into `output` [T, H, D]."""
    program = tl.program_id(0)
    head = program % NUM_HEADS
    entry = joins + (program // NUM_HEADS) * 4
    num_parts = tl.load(entry + 3)
    if num_parts == 0:  # padding
        return
    row, part, stride = tl.load(entry).to(tl.int64), tl.load(entry + 1).to(tl.int64), tl.load(entry + 2)
    dim = tl.arange(0, PADDED_DIM)
    mask = dim < HEAD_DIM
    peak = tl.full([], float("-inf"), tl.float32)
    total, sums = tl.full([], 0.0, tl.float32), tl.zeros([PADDED_DIM], tl.float32)
    for number in range(num_parts):
        at = (part + number * stride) * NUM_HEADS + head
        part_sum = tl.load(part_sums + at * HEAD_DIM + dim, mask=mask, other=0.0)
        peak, old, new = _weights(peak, tl.load(part_peaks + at))
        total = total * old + tl.load(part_totals + at) * new
        sums = sums * old + part_sum * new
    if HAS_SINKS:
        total += _sunk(sinks + head, peak)
    tl.store(output + (row * NUM_HEADS + head) * HEAD_DIM + dim, sums / total, mask=mask)
