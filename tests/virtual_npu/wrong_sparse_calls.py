"""Wrong calls of what sparse attention asks for; see wrong_calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.virtual_npu.wrong import HELD, NOBODYS, Change, Wrong, cut, put, spoil, strided, to
from virtual_npu.simulated_products import A5


def _keys_of(change: Change, said: str) -> Wrong:
    return Wrong("lengths", change, "key_lens", said)


def _pages_of(size: int) -> Change:
    """Cut each page down."""
    names = ("key", "value", "key_rope", "key_dequant_scale")
    return lambda call: {name: call[name][:, :size].contiguous() for name in names if name in call}


# Calls of all four operators
SHARED = [
    Wrong("mode", put(layout_query="BSND"), "layout_query", "BSND"),
    Wrong("mode", put(layout_keys="TND"), "layout_keys", "TND"),
    Wrong("given", put(block_table=None), "block_table", "None"),
    Wrong("given", put(key_lens=None), "key_lens", "None"),
    Wrong("dtype", to("block_table", Tensor.long), "block_table", "int64"),
    Wrong("dtype", to("query", Tensor.double), "query", "float64"),
    Wrong("axes", to("query", lambda query: query[..., :-1]), "query", "for ("),
    Wrong("axes", to("key", lambda key: key[:, :, 0]), "key", "("),
    Wrong("page-size", _pages_of(15), "key", "pages of 15"),
    Wrong("contiguous", to("query", strided), "query", "strided"),
    Wrong("contiguous", to("block_table", strided), "block_table", "strided"),
    Wrong(
        "lengths",
        to("actual_seq_lengths_query", lambda ends: ends - 1),
        "actual_seq_lengths_query",
        "query tokens",
    ),
    _keys_of(to("key_lens", lambda lens: spoil(lens, 0, 0)), "0 for"),
    _keys_of(to("key_lens", lambda lens: spoil(lens, 0, 10_000)), "places"),
    Wrong("page-ids", to("block_table", lambda table: spoil(table, (0, 0), 999)), "block_table", "page 999"),
    Wrong(
        "null-page",
        to("block_table", lambda table: spoil(table, (0, 0), 0)),
        "block_table",
        "page 0 in row 0",
        conditions=NOBODYS,
    ),
    Wrong("pages-held", put(), "block_table", "no request holds", conditions=HELD),
]


def _heads(count: int) -> Change:
    """Put so many heads in place of a call's."""
    names = ("query", "query_rope", "weights", "query_dequant_scale")

    def widen(tensor: Tensor) -> Tensor:
        return tensor[:, :1].expand(-1, count, *tensor.shape[2:]).contiguous()

    return lambda call: {name: widen(call[name]) for name in names if name in call}


ON_A5 = {"product": A5}
INDEXER = [
    *SHARED,
    Wrong("mode", put(return_value=True), "return_value", "True"),
    Wrong("dtype", to("weights", Tensor.double), "weights", "float64"),
    Wrong("dtype", to("key", Tensor.float), "key", "float32"),
    Wrong("axes", cut("weights"), "weights", "for ("),
    Wrong("heads", _heads(65), "query", "65 heads"),
    Wrong("heads", _heads(4), "query", "4 heads", conditions=ON_A5),
    Wrong("count", put(sparse_count=0), "sparse_count", "is 0"),
    Wrong("count", put(sparse_count=3000), "sparse_count", "is 3000"),
]
INT8_INDEXER = [
    *SHARED,
    Wrong("mode", put(key_quant_mode=1), "key_quant_mode", "is 1"),
    Wrong("dtype", to("weights", Tensor.float), "weights", "float32"),
    Wrong("dtype", to("key_dequant_scale", Tensor.float), "key_dequant_scale", "float32"),
    Wrong("axes", cut("key_dequant_scale"), "key_dequant_scale", "for ("),
    Wrong("heads", _heads(65), "query", "65 heads"),
    Wrong("count", put(sparse_count=3072), "sparse_count", "is 3072"),
    Wrong(
        "range",
        lambda call: {
            "weights": spoil(call["weights"], (0, 0), 60_000.0),
            "query_dequant_scale": spoil(call["query_dequant_scale"], (0, 0), 2.0),
        },
        "weights",
        "120000 by",
    ),
]
CHOSEN = [
    *SHARED,
    Wrong("mode", put(attention_mode=0), "attention_mode", "is 0"),
    Wrong("mode", put(sparse_block_size=2), "sparse_block_size", "is 2"),
    Wrong("dtype", to("sparse_indices", Tensor.long), "sparse_indices", "int64"),
    Wrong("axes", cut("sparse_indices"), "sparse_indices", "for ("),
    Wrong("axes", cut("value"), "value", "for ("),
    Wrong("heads", _heads(3), "query", "3 heads"),
    Wrong("heads", _heads(129), "query", "129 heads"),
    Wrong(
        "indices",
        to("sparse_indices", lambda each: spoil(each, (0, 0, 0), -1)),
        "sparse_indices",
        "first in row 0",
    ),
    Wrong(
        "indices",
        to("sparse_indices", lambda each: spoil(each, (1, 0, 0), 5_000)),
        "sparse_indices",
        "5000 in row 1",
    ),
]
ATTENTION = [
    *CHOSEN,
    Wrong("mode", put(sinks=torch.ones(4)), "sinks", "float32 (4,)"),
    Wrong("dtype", to("key_rope", Tensor.float), "key_rope", "float32"),
    Wrong("axes", to("key_rope", lambda rope: rope[..., :-1]), "key_rope", "for ("),
    Wrong("given", put(query_rope=None), "query_rope", "None"),
]
INT8_ATTENTION = [
    *CHOSEN,
    Wrong("mode", put(tile_size=64), "tile_size", "is 64"),
    Wrong("mode", put(key_dequant_scale=torch.ones(4)), "key_dequant_scale", "float32 (4,)"),
    Wrong("dtype", to("query", Tensor.half), "query", "float16"),
    Wrong("axes", to("key", lambda rows: rows[..., :-1]), "key", "for ("),
]
