"""Define the operators of sparse attention (DSA): two indexers, and two that attend to what they chose.

An indexer scores the keys of each query token's request and returns the positions of the highest scores, in
an order of its own, and then -1. Attention by latents reads these positions alone. Either has a form whose
pages are in int8. All lengths are tensors on the device, so that a captured call needs no update.

Legend: T query tokens, S requests, I index heads, H heads, P pages, B tokens a page, C positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.latent import HALVES, LATENT, ROPE
from virtual_npu.operators.paging import holding_rules, page_id_rule
from virtual_npu.simulated_products import A2, A3, A5

INDEXER = "op-plugin torch_npu.npu_lightning_indexer"
INT8_INDEXER = "op-plugin torch_npu.npu_quant_lightning_indexer"
ATTENTION = "op-plugin torch_npu.npu_sparse_flash_attention"
INT8_ATTENTION = "op-plugin torch_npu.npu_kv_quant_sparse_flash_attention"
INDEX_WIDTH, MOST_INDEX_HEADS = 128, 64
COUNTS = range(1, 2048 + 1)
LARGE_COUNTS = range(3072, 8192 + 1, 1024)  # counts of the indexer that reads no int8
MOST_HEADS = 128
PAGE_STEP, MOST_PAGE = 16, 1024
UNBOUNDED = 2**63 - 1
TILE = 128  # channels of an int8 latent that share a scale
SCALES_BYTES = LATENT // TILE * torch.float32.itemsize
ROW_BYTES = LATENT + ROPE * torch.bfloat16.itemsize + SCALES_BYTES
GATHERED = 2**22  # numbers of gathered latents that the reference holds at a time
Wanted = Mapping[str, object]


def _spans(call: Call) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield the first row of each request, the one after its last, its number of keys, and its pages."""
    size, start = call["key"].shape[1], 0
    lens = zip(call["actual_seq_lengths_query"].tolist(), call["key_lens"].tolist())
    for number, (stop, keys) in enumerate(lens):
        yield start, stop, keys, call["block_table"][number, : -(-keys // size)].long()
        start = stop


def _chosen(call: Call, keys: Tensor, scale: Tensor | None, weights: Tensor) -> Tensor:
    """Return the positions [T, 1, C] of the highest scores, highest first, and of equal ones the lowest."""
    query, count = call["query"].float(), call["sparse_count"]
    positions = torch.full((len(query), 1, count), -1, dtype=torch.int32)
    for start, stop, num_keys, pages in _spans(call):
        read = keys[pages].flatten(0, 1)[:num_keys, 0].float()
        products = torch.einsum("tid,nd->tin", query[start:stop], read).relu()
        if scale is not None:
            products = products * scale[pages].flatten()[:num_keys].float()
        scores = torch.einsum("tin,ti->tn", products, weights[start:stop])
        own = torch.arange(num_keys - (stop - start), num_keys)[:, None]
        hidden = torch.arange(num_keys) > own
        scores = scores.masked_fill(hidden, -torch.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        best = best.masked_fill(hidden.gather(1, best), -1)
        positions[start:stop, 0, : best.shape[1]] = best.int()
    return positions


def _index(call: Call) -> tuple[Tensor, Tensor]:
    found = _chosen(call, call["key"], None, call["weights"].float())
    return found, torch.empty(0, dtype=call["query"].dtype)


def _int8_index(call: Call) -> Tensor:
    weights = call["weights"].float() * call["query_dequant_scale"].float()
    return _chosen(call, call["key"], call["key_dequant_scale"], weights)


def _attended(
    call: Call, query: Tensor, read: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """Attend from queries [T, H, L + R]; `read` gives the float32 rows [n, L + R] of places of pages."""
    output = torch.empty(*query.shape[:2], LATENT, dtype=dtype)
    size, indices = call["key"].shape[1], call["sparse_indices"][:, 0]
    step = max(1, GATHERED // (indices.shape[1] * (LATENT + ROPE)))
    for start, stop, _, pages in _spans(call):
        for first in range(start, stop, step):
            rows = slice(first, min(first + step, stop))
            at = indices[rows].clamp_min(0).long()
            numbers = read(pages[at // size], at % size)
            scores = torch.einsum("thd,tcd->thc", query[rows].float(), numbers) * call["scale_value"]
            weights = scores.masked_fill(indices[rows, None] < 0, -torch.inf).softmax(-1)
            output[rows] = torch.einsum("thc,tcl->thl", weights, numbers[..., :LATENT]).to(dtype)
    return output


def _attend(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    def read(pages: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([call[name][pages, offsets, 0] for name in ("key", "key_rope")], -1).float()

    query = torch.cat((call["query"], call["query_rope"]), -1)
    return _attended(call, query, read, query.dtype), torch.empty(0), torch.empty(0)


def _int8_attend(call: Call) -> Tensor:
    def read(pages: Tensor, offsets: Tensor) -> Tensor:
        return unpacked(call["key"][pages, offsets, 0])

    return _attended(call, call["query"], read, call["query"].dtype)


def packed(latents: Tensor, rope_keys: Tensor) -> Tensor:
    """Pack latents [n, 512] in int8, bfloat16 rope keys [n, 64] and scales to rows of 656 bytes."""
    tiles = latents.float().unflatten(-1, (-1, TILE))
    scale = tiles.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    numbers = (tiles / scale).round().to(torch.int8).flatten(-2)
    return torch.cat((numbers, rope_keys.bfloat16().view(torch.int8), scale[..., 0].view(torch.int8)), -1)


def unpacked(rows: Tensor) -> Tensor:
    """Return the float32 latents and rope keys [..., 576] of rows of 656 bytes."""
    numbers, rope, scale = rows.split((LATENT, ROW_BYTES - LATENT - SCALES_BYTES, SCALES_BYTES), -1)
    by_tile = numbers.float().unflatten(-1, (-1, TILE)) * scale.contiguous().view(torch.float32)[..., None]
    return torch.cat((by_tile.flatten(-2), rope.contiguous().view(torch.bfloat16).float()), -1)


def _are(source: str, **wanted: object) -> Rule:
    """Return the rule that arguments have these values; all other layouts and modes are not checked here."""
    said = {name: repr(value) for name, value in wanted.items() if value is not None}
    demands = ", ".join(f"{name} is {value}" for name, value in said.items())
    out = ", ".join(name for name, value in wanted.items() if value is None)

    def check(call: Call) -> Iterator[Breach]:
        for name, value in wanted.items():
            found = call[name]
            if isinstance(found, Tensor) or found != value:
                yield name, shape(found) if isinstance(found, Tensor) else found

    rest = f"; {out}, and bounds of pre_tokens and next_tokens, are left out" if out else ""
    return Rule("mode", demands + rest, source, "pass packed queries and a paged cache", check)


def _types(source: str, demands: str, kinds: Mapping[str, tuple[torch.dtype, ...]], same: str) -> Rule:
    """Return the rule on types; the arguments of `same` have the query's own type."""

    def check(call: Call) -> Iterator[Breach]:
        for name, dtypes in kinds.items():
            is_of_model = torch.bfloat16 in dtypes and torch.float32 not in dtypes
            has = is_dtype(call[name], dtypes, call.conditions) if is_of_model else call[name].dtype in dtypes
            if not has:
                yield name, shape(call[name])
        for name in same.split():
            if call[name].dtype != call["query"].dtype:
                yield name, f"{shape(call[name])} for {shape(call['query'])}"
        for name in ("actual_seq_lengths_query", "key_lens", "block_table"):
            if call[name].dtype != torch.int32:
                yield name, shape(call[name])

    demands += "; lengths and the page table are int32"
    return Rule("dtype", demands, source, "cast weights once, and pass lengths in int32", check)


def _axes(source: str, demands: str, of: Callable[[Call], Mapping[str, tuple[int, ...]]]) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        for name, axes in (("query", 3), ("key", 4), ("actual_seq_lengths_query", 1), ("block_table", 2)):
            if call[name].dim() != axes:
                yield name, shape(call[name])
                return
        num_spans = len(call["actual_seq_lengths_query"])
        lens = {"key_lens": (num_spans,), "block_table": (num_spans, call["block_table"].shape[1])}
        for name, sizes in (lens | dict(of(call))).items():
            if tuple(call[name].shape) != sizes:
                yield name, f"{shape(call[name])} for {sizes}"

    demands += "; there are the lengths of S requests, and as many rows of pages"
    return Rule("axes", demands, source, "view tensors so", check)


def _given(source: str, *names: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        yield from ((name, None) for name in names if call[name] is None)

    return Rule("given", f"{', '.join(names)} are given", source, "pass all of them", check)


def _page_size(source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        size = call["key"].shape[1]
        if size % PAGE_STEP or not PAGE_STEP <= size <= MOST_PAGE:
            yield "key", f"{shape(call['key'])}, pages of {size}"

    demands = f"pages are a multiple of {PAGE_STEP} up to {MOST_PAGE} tokens"
    return Rule("page-size", demands, source, "set cache.page_size to 128", check)


def _contiguous(source: str, *names: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        for name in (*names, "actual_seq_lengths_query", "key_lens", "block_table"):
            if not call[name].is_contiguous():
                yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"

    return Rule("contiguous", "tensors are contiguous", source, "call contiguous() first", check)


def _index_heads(source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        heads = call["query"].shape[1]
        on_a5 = call.conditions.product is A5
        if not 1 <= heads <= MOST_INDEX_HEADS or (on_a5 and heads not in (8, 16, 24, 32, 64)):
            yield "query", f"one of {heads} heads"

    demands = f"there are at most {MOST_INDEX_HEADS} index heads; a 950 takes 8, 16, 24, 32 or 64"
    return Rule("heads", demands, source, "choose by plain products", check)


def _heads(source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        heads = call["query"].shape[1]
        is_power = heads > 0 and not heads & (heads - 1)
        if not 1 <= heads <= MOST_HEADS or not (is_power or call.conditions.product is A5):
            yield "query", f"one of {heads} heads"

    demands = f"there are up to {MOST_HEADS} heads, a power of two but on a 950"
    return Rule("heads", demands, source, "choose another number of tensor ranks", check)


def _count(source: str, *counts: range) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        if not any(call["sparse_count"] in each for each in counts):
            yield "sparse_count", call["sparse_count"]

    words = [f"from {each[0]} to {each[-1]}{f' by {each.step}' * (each.step > 1)}" for each in counts]
    return Rule("count", f"sparse_count is {' or '.join(words)}", source, "choose by plain products", check)


def _lengths(source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        ends, size = call["actual_seq_lengths_query"].tolist(), call["key"].shape[1]
        if ends[-1] != len(call["query"]) or any(b < a for a, b in zip([0, *ends], ends)):
            yield "actual_seq_lengths_query", f"{ends} for {len(call['query'])} query tokens"
            return
        room = call["block_table"].shape[1] * size
        for number, (start, stop, keys) in enumerate(zip([0, *ends], ends, call["key_lens"].tolist())):
            if keys < stop - start or keys > room:
                yield "key_lens", f"{keys} for {stop - start} queries of request {number}, of {room} places"

    return Rule(
        "lengths",
        "query lengths are sums from the first on, up to T; each request has as many keys as queries or more,"
        " and pages for all of them",
        source,
        "count a span's own tokens among its keys, and give a padding row one key of page 0",
        check,
    )


def _indices(source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        indices = call["sparse_indices"][:, 0]
        is_valid = indices >= 0
        late = (is_valid[:, 1:] & ~is_valid[:, :-1]).any(-1) | ~is_valid[:, 0]
        if bool(late.any()):
            row = int(late.nonzero()[0])
            yield "sparse_indices", f"one with {indices[row].tolist()[:8]} first in row {row}"
        for start, stop, keys, _ in _spans(call):
            own = torch.arange(keys - (stop - start), keys)[:, None]
            wrong = (indices[start:stop] > own).any(-1)
            if bool(wrong.any()):
                row = start + int(wrong.nonzero()[0])
                yield "sparse_indices", f"one with {int(indices[row].max())} in row {row}, past its own token"

    return Rule(
        "indices",
        "a row has one position or more, all up to its own token, and after the last of them -1 alone",
        source,
        "pass what the indexer returned for these rows and lengths",
        check,
    )


def _range(call: Call) -> Iterator[Breach]:
    both = call["weights"].float() * call["query_dequant_scale"].float()
    if bool((both.abs() > torch.finfo(torch.float16).max).any()):
        yield "weights", f"one that is {float(both.abs().max()):g} by its query's scale"


def _paged(source: str) -> tuple[Rule, ...]:
    """Return the rules that read lengths and pages, which every replay of a captured call checks too."""

    def pages(call: Call) -> list[Tensor]:
        return [each for *_, each in _spans(call)]

    return (
        _lengths(source),
        page_id_rule("block_table", pages, lambda call: len(call["key"])),
        *holding_rules("block_table", pages),
    )


def _index_axes(call: Call) -> Mapping[str, tuple[int, ...]]:
    tokens, heads = call["query"].shape[:2]
    pages = tuple(call["key"].shape[:2])
    axes: dict[str, tuple[int, ...]] = {
        "query": (tokens, heads, INDEX_WIDTH),
        "key": (*pages, 1, INDEX_WIDTH),
        "weights": (tokens, heads),
    }
    if call["query_dequant_scale"] is not None:
        axes |= {"query_dequant_scale": (tokens, heads), "key_dequant_scale": (*pages, 1)}
    return axes


def _attention_axes(call: Call) -> Mapping[str, tuple[int, ...]]:
    tokens, heads = call["query"].shape[:2]
    pages, count = tuple(call["key"].shape[:2]), call["sparse_indices"].shape[-1]
    if call["query_rope"] is None:
        width, row = LATENT + ROPE, ROW_BYTES
        axes: dict[str, tuple[int, ...]] = {}
    else:
        width = row = LATENT
        axes = {"query_rope": (tokens, heads, ROPE), "key_rope": (*pages, 1, ROPE)}
    return axes | {
        "query": (tokens, heads, width),
        "key": (*pages, 1, row),
        "value": (*pages, 1, row),
        "sparse_indices": (tokens, 1, count),
    }


PACKED: Wanted = {"layout_query": "TND", "layout_keys": "PA_BSND", "sparse_mode": 3}
BOUNDS: Wanted = {"pre_tokens": UNBOUNDED, "next_tokens": UNBOUNDED}
LENGTHS = ("actual_seq_lengths_query", "key_lens", "block_table")
OF_INDEXER = {"key_lens": "actual_seq_lengths_key", "layout_keys": "layout_key"}
OF_ATTENTION = {"key_lens": "actual_seq_lengths_kv", "layout_keys": "layout_kv"}

OPERATORS = (
    Operator(
        schema="npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor?"
        " actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str"
        ' layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int'
        " pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) ->"
        " (Tensor, Tensor)",
        products=(A2, A3, A5),
        source=INDEXER,
        names=OF_INDEXER,
        first=(
            _are(INDEXER, **PACKED, **BOUNDS, return_value=False),
            _given(INDEXER, *LENGTHS),
            _types(
                INDEXER,
                "queries and keys are float16 or bfloat16, weights as they are or float32",
                {"query": HALVES, "weights": (*HALVES, torch.float32)},
                "key",
            ),
            _axes(
                INDEXER,
                f"queries are [T, I, {INDEX_WIDTH}], keys [P, B, 1, {INDEX_WIDTH}] and weights [T, I]",
                _index_axes,
            ),
            _index_heads(INDEXER),
            _count(INDEXER, COUNTS, LARGE_COUNTS),
            _page_size(INDEXER),
            _contiguous(INDEXER, "query", "key", "weights"),
        ),
        rules=_paged(INDEXER),
        reference=_index,
    ),
    Operator(
        schema="npu::npu_quant_lightning_indexer(Tensor query, Tensor key, Tensor weights, Tensor"
        " query_dequant_scale, Tensor key_dequant_scale, int query_quant_mode, int key_quant_mode, *, Tensor?"
        " actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str"
        ' layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int'
        " pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int? query_dtype=None, int?"
        " key_dtype=None) -> Tensor",
        products=(A2, A3),
        source=INT8_INDEXER,
        names=OF_INDEXER,
        first=(
            _are(
                INT8_INDEXER,
                **PACKED,
                **BOUNDS,
                query_quant_mode=0,
                key_quant_mode=0,
                query_dtype=None,
                key_dtype=None,
            ),
            _given(INT8_INDEXER, *LENGTHS),
            _types(
                INT8_INDEXER,
                "queries and keys are int8, weights and scales float16",
                {
                    "query": (torch.int8,),
                    "weights": (torch.float16,),
                    "query_dequant_scale": (torch.float16,),
                    "key_dequant_scale": (torch.float16,),
                },
                "key",
            ),
            _axes(
                INT8_INDEXER,
                f"queries are [T, I, {INDEX_WIDTH}], keys [P, B, 1, {INDEX_WIDTH}], weights and scales of"
                " queries [T, I], scales of keys [P, B, 1]",
                _index_axes,
            ),
            _index_heads(INT8_INDEXER),
            _count(INT8_INDEXER, COUNTS),
            _page_size(INT8_INDEXER),
            _contiguous(INT8_INDEXER, "query", "key", "weights", "query_dequant_scale", "key_dequant_scale"),
        ),
        rules=(
            *_paged(INT8_INDEXER),
            Rule(
                "range",
                "the product of a weight and its query's scale is a float16",
                INT8_INDEXER,
                "multiply the weights by a constant, which changes no order",
                _range,
            ),
        ),
        reference=_int8_index,
    ),
    Operator(
        schema="npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor"
        " sparse_indices, float scale_value, *, Tensor? block_table=None, Tensor?"
        " actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor?"
        ' key_rope=None, int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int'
        " sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int"
        " attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=ATTENTION,
        names=OF_ATTENTION,
        first=(
            _are(
                ATTENTION,
                **PACKED,
                **BOUNDS,
                attention_mode=2,
                sparse_block_size=1,
                return_softmax_lse=False,
                sinks=None,
            ),
            _given(ATTENTION, *LENGTHS, "value", "query_rope", "key_rope"),
            _types(
                ATTENTION,
                "queries, latents and rope keys are all float16 or all bfloat16, indices int32",
                {"query": HALVES, "sparse_indices": (torch.int32,)},
                "key value query_rope key_rope",
            ),
            _axes(
                ATTENTION,
                f"queries are [T, H, {LATENT}] and [T, H, {ROPE}], pages [P, B, 1, {LATENT}], for keys and"
                f" values alike, and [P, B, 1, {ROPE}], indices [T, 1, C]",
                _attention_axes,
            ),
            _heads(ATTENTION),
            _page_size(ATTENTION),
            _contiguous(ATTENTION, "query", "key", "value", "sparse_indices", "query_rope", "key_rope"),
        ),
        rules=(*_paged(ATTENTION), _indices(ATTENTION)),
        reference=_attend,
    ),
    Operator(
        schema="npu::npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor"
        " sparse_indices, float scale_value, int key_quant_mode, int value_quant_mode, *, Tensor?"
        " key_dequant_scale=None, Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor?"
        " actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str"
        ' layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807,'
        " int next_tokens=9223372036854775807, int attention_mode=0, int quant_scale_repo_mode=1, int"
        " tile_size=128, int rope_head_dim=64, int? key_dtype=None, int? value_dtype=None) -> Tensor",
        products=(A2, A3),
        source=INT8_ATTENTION,
        names=OF_ATTENTION,
        first=(
            _are(
                INT8_ATTENTION,
                **PACKED,
                **BOUNDS,
                key_quant_mode=2,
                value_quant_mode=2,
                attention_mode=2,
                sparse_block_size=1,
                quant_scale_repo_mode=1,
                tile_size=TILE,
                rope_head_dim=ROPE,
                key_dequant_scale=None,
                value_dequant_scale=None,
                key_dtype=None,
                value_dtype=None,
            ),
            _given(INT8_ATTENTION, *LENGTHS),
            _types(
                INT8_ATTENTION,
                "queries are bfloat16, as the rope keys within rows (float16 is not checked here), rows int8,"
                " indices int32",
                {
                    "query": (torch.bfloat16,),
                    "key": (torch.int8,),
                    "value": (torch.int8,),
                    "sparse_indices": (torch.int32,),
                },
                "",
            ),
            _axes(
                INT8_ATTENTION,
                f"queries are [T, H, {LATENT + ROPE}], pages [P, B, 1, {ROW_BYTES}], for keys and values"
                " alike, indices [T, 1, C]",
                _attention_axes,
            ),
            _heads(INT8_ATTENTION),
            _page_size(INT8_ATTENTION),
            _contiguous(INT8_ATTENTION, "query", "key", "value", "sparse_indices"),
        ),
        rules=(*_paged(INT8_ATTENTION), _indices(INT8_ATTENTION)),
        reference=_int8_attend,
    ),
)
