"""Wrong calls of fused attention by name, in the names of its second version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.virtual_npu.batches import MASK, int8_pages, paged
from tests.virtual_npu.calls import Arguments
from tests.virtual_npu.right_calls import in_layout
from tests.virtual_npu.wrong import HELD, NOBODYS, Wrong, put, spoil, strided, to
from virtual_npu.simulated_products import A5

INT8_PAGES = "pages of int8"
LENS = [(1, 20), (5, 5), (30, 40)]


def packed_base(**options: Any) -> Arguments:
    arguments, _ = paged(np.random.default_rng(5), torch.bfloat16, **{"lens": LENS, **options})
    return arguments


def keys_base() -> Arguments:
    arguments, dense = paged(np.random.default_rng(5), torch.bfloat16, lens=LENS)
    return arguments | {
        "key": torch.cat(dense.keys),
        "value": torch.cat(dense.values),
        "block_table": None,
        "block_size": 0,
        "actual_seq_kvlen": [20, 25, 65],
    }


def rows_base(layout: str = "BSND", queries: int = 6, mode: int = 0) -> Arguments:
    query, key = torch.randn(2, queries, 4, 64), torch.randn(2, 9, 2, 64)
    return {
        "query": in_layout(query.bfloat16(), layout),
        "key": in_layout(key.bfloat16(), layout),
        "value": in_layout(key.bfloat16(), layout),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "softmax_scale": 0.125,
        "input_layout": layout,
        "sparse_mode": mode,
    }


def long_rows() -> Arguments:
    base = rows_base() | {"atten_mask": torch.zeros(1, 6, 600, dtype=torch.bool)}
    return base | {name: torch.randn(2, 600, 2, 64).bfloat16() for name in ("key", "value")}


def int8_base() -> Arguments:
    """Single queries, in the first version alone, over pages of int8."""
    return int8_pages(np.random.default_rng(5), lens=[(1, 20), (1, 5), (1, 40)])[0]


def latent_base() -> Arguments:
    """Short spans in the space of latents."""
    latents = torch.randn(5, 16, 512).bfloat16()
    return {
        "query": torch.randn(6, 4, 512).bfloat16(),
        "key": latents,
        "value": latents,
        "query_rope": torch.randn(6, 4, 64).bfloat16(),
        "key_rope": torch.randn(5, 16, 64).bfloat16(),
        "atten_mask": MASK,
        "actual_seq_qlen": [1, 6],
        "actual_seq_kvlen": [20, 30],
        "block_table": torch.tensor([[1, 2], [4, 3]], dtype=torch.int32),
        "num_query_heads": 4,
        "num_key_value_heads": 1,
        "softmax_scale": 0.07,
        "input_layout": "TND",
        "sparse_mode": 3,
        "block_size": 16,
    }


def _long_latent(call: Arguments) -> Arguments:
    return {
        "query": torch.randn(18, 4, 512).bfloat16(),
        "query_rope": torch.randn(18, 4, 64).bfloat16(),
        "actual_seq_qlen": [1, 18],
    }


def expanded_base() -> Arguments:
    """Long spans, with keys and values of each head."""
    names = {"query": (9, 4, 128), "key": (12, 4, 128), "value": (12, 4, 128)}
    ropes = {"query_rope": (9, 4, 64), "key_rope": (12, 4, 64)}
    made = {name: torch.randn(*sizes).bfloat16() for name, sizes in (names | ropes).items()}
    return (
        latent_base()
        | made
        | {
            "actual_seq_qlen": [4, 9],
            "actual_seq_kvlen": [7, 12],
            "block_table": None,
            "block_size": 0,
            "num_key_value_heads": 4,
        }
    )


ATTENTION_BASES: dict[str, Callable[[], Arguments]] = {
    "base": packed_base,
    "decodes": lambda: packed_base(lens=[(1, 20), (1, 5)]),
    "seventeen": lambda: packed_base(lens=[(1, 20), (17, 30), (16, 16)]),
    "own heads": lambda: packed_base(heads=(2, 2)),
    "window": lambda: packed_base(window=9),
    "sink": lambda: packed_base(sink=True),
    "keys": keys_base,
    "rows": rows_base,
    "single rows": lambda: rows_base(queries=1),
    "turned single rows": lambda: rows_base("BNSD_BSND", queries=1),
    "long rows": long_rows,
    INT8_PAGES: int8_base,
    "latent": latent_base,
    "expanded": expanded_base,
}


def _in_int8(call: Arguments) -> Arguments:
    return {name: call[name].nan_to_num().char() for name in ("key", "value")}


def _two_queries(call: Arguments) -> Arguments:
    return {"query": torch.cat((call["query"], call["query"]), 2)}


def _mixed_spans(_: Arguments) -> Arguments:
    return packed_base(page_size=128)


def _small_pages(call: Arguments) -> Arguments:
    halves = {name: call[name].view(-1, 16, call[name].shape[-1]) for name in ("key", "value")}
    return halves | {"block_size": 16}


def _wide_pages(call: Arguments) -> Arguments:
    cache = torch.zeros(2, 16, 2 * 32768, dtype=torch.bfloat16)
    return {"key": cache, "value": cache}


def _enormous(call: Arguments) -> Arguments:
    cache = torch.empty(2**17, 2**10, 128, dtype=torch.bfloat16, device="meta")
    return {"key": cache, "value": cache}


def _endless(call: Arguments) -> Arguments:
    cache = torch.zeros(3, 1024, 128, dtype=torch.bfloat16)
    table = torch.ones(1, 257, dtype=torch.int32)
    return {
        "key": cache,
        "value": cache,
        "block_table": table,
        "block_size": 1024,
        "query": call["query"][:1],
        "actual_seq_qlen": [1],
        "actual_seq_kvlen": [262145],
    }


def _blind_mask(call: Arguments) -> Arguments:
    mask = torch.zeros(1, 6, 9, dtype=torch.bool)
    mask[0, 3] = True
    return {"atten_mask": mask, "sparse_mode": 1}


ATTENTION = [
    Wrong("layout", put(input_layout="SBND"), "input_layout", "SBND"),
    Wrong("int8", _in_int8, "key", "for 4:2 heads in TND"),
    Wrong("int8", _in_int8, "key", "in BSND", "rows"),
    Wrong("int8", put(), "key", "on the 950", INT8_PAGES, conditions={"product": A5}),
    Wrong("int8", put(value_antiquant_scale=None), "value", "without value_antiquant_scale", INT8_PAGES),
    Wrong("int8", _two_queries, "key", "and 2 query tokens a sequence", INT8_PAGES),
    Wrong("int8", _small_pages, "key", "with a block_size of 16", INT8_PAGES),
    Wrong("channels", to("key_antiquant_scale", Tensor.float), "key_antiquant_scale", "float32", INT8_PAGES),
    Wrong(
        "channels", to("value_antiquant_scale", torch.squeeze), "value_antiquant_scale", "(2, 64)", INT8_PAGES
    ),
    Wrong(
        "channels",
        lambda call: packed_base() | {"key_antiquant_scale": torch.ones(1, 128).bfloat16()},
        "key_antiquant_scale",
        "beside key bfloat16",
        INT8_PAGES,
    ),
    Wrong("dtype", to("key", Tensor.char), "key", "int8 "),
    Wrong("modelled", put(pse_shift=torch.zeros(1, 4, 36, 40)), "pse_shift", "float32 (1, 4, 36, 40)"),
    Wrong("dtype", to("query", Tensor.float), "query", "float32"),
    Wrong("axes", to("query", lambda query: query[None]), "query", "(1, 36, 4, 64)"),
    Wrong("axes", to("key", lambda key: key.flatten(1)), "key", "(65, 128)", "keys"),
    Wrong("heads", put(num_key_value_heads=3), "num_query_heads", "4 over num_key_value_heads 3"),
    Wrong("heads", put(num_query_heads=130, num_key_value_heads=2), "num_query_heads", "130 over"),
    Wrong("heads-fit", put(num_query_heads=8), "query", "for 8 heads"),
    Wrong("batch", to("query", lambda query: query[:0]), "query", "(0, 6, 4, 64)", "rows"),
    Wrong("cache-axes", to("key", lambda key: key.view(-1, 16, 2, 64)), "key", "for 2 kv heads"),
    Wrong("cache-axes", to("key", lambda key: key[0]), "key", "(16, 128)"),
    Wrong(
        "cache-by-heads",
        lambda call: {name: call[name].view(-1, 2, 16, 64) for name in ("key", "value")},
        "key",
        "as many kv heads as query heads",
        "own heads",
    ),
    Wrong("row-width", _wide_pages, "key", "65536"),
    Wrong("rope", put(key_rope=None), "key_rope", "None beside the other", "latent"),
    Wrong("rope", to("query_rope", Tensor.float), "query_rope", "float32 (6, 4, 64)", "latent"),
    Wrong("rope", to("key_rope", lambda rope: rope[..., :32]), "key_rope", "(5, 16, 32)", "latent"),
    Wrong(
        "rope",
        put(query_rope=torch.zeros(2, 6, 4, 64).bfloat16(), key_rope=torch.zeros(2, 9, 2, 64).bfloat16()),
        "input_layout",
        "BSND with query_rope",
        "rows",
    ),
    Wrong(
        "latent",
        lambda call: {
            "num_query_heads": 3,
            **{name: call[name][:, :3].contiguous() for name in ("query", "query_rope")},
        },
        "num_query_heads",
        "3 over num_key_value_heads 1",
        "latent",
    ),
    Wrong("latent", to("value", torch.zeros_like), "value", "that is not the key", "latent"),
    Wrong(
        "latent",
        lambda call: {
            "num_key_value_heads": 2,
            **{name: call[name][:, :2].contiguous() for name in ("key", "value", "key_rope")},
        },
        "query_rope",
        "heads of 128, 4 over 2",
        "expanded",
    ),
    Wrong("latent-queries", _long_latent, "actual_seq_qlen", "17 query tokens a sequence", "latent"),
    Wrong("elements", _enormous, "key", "(131072, 1024, 128)"),
    Wrong("kv-alike", to("value", lambda value: value[1:]), "value", "beside key"),
    Wrong("head-dim", lambda _: packed_base(dim=256), "query", "head sizes query 256"),
    Wrong("head-dim", lambda _: packed_base(dim=80), "query", "head sizes query 80"),
    Wrong("contiguous", to("query", strided), "query", "strided"),
    Wrong("contiguous", to("block_table", strided), "block_table", "strided"),
    Wrong("page-size", put(block_size=17), "block_size", "is 17"),
    Wrong("page-size", lambda _: packed_base(page_size=8), "block_size", "is 8;"),
    Wrong("page-size", lambda _: packed_base(page_size=24), "block_size", "is 24;"),
    Wrong("page-size", put(), "block_size", "is 16", conditions={"product": A5}),
    Wrong("inner-precise", put(inner_precise=4), "inner_precise", "is 4"),
    Wrong("inner-precise", put(inner_precise=1), "inner_precise", "is 1", "own heads"),
    Wrong("inner-precise", put(inner_precise=2), "inner_precise", "is 2", "decodes"),
    Wrong("inner-precise", put(inner_precise=3), "inner_precise", "is 3", "single rows"),
    Wrong("scale", put(softmax_scale=0.0), "softmax_scale", "is 0.0"),
    Wrong("output-order", put(), "input_layout", "BNSD_BSND with 1 query tokens", "turned single rows"),
    Wrong("sparse-mode", put(sparse_mode=7), "sparse_mode", "is 7"),
    Wrong("sparse-mode", put(sparse_mode=2), "sparse_mode", "2 with input_layout TND"),
    Wrong("band", put(pre_tokens=-1), "pre_tokens", "is -1", "window"),
    Wrong(
        "band",
        put(next_tokens=0, atten_mask=torch.zeros(1, 6, 9).bool()),
        "next_tokens",
        "0 with a mask of one's own",
        "rows",
    ),
    Wrong("sink", to("learnable_sink", Tensor.half), "learnable_sink", "float16 (4,)", "sink"),
    Wrong("lengths", put(actual_seq_qlen=None), "actual_seq_qlen", "None"),
    Wrong("lengths", put(actual_seq_kvlen=None), "actual_seq_kvlen", "None"),
    Wrong("query-lens", put(actual_seq_qlen=[1, 40, 36]), "actual_seq_qlen", "[1, 40, 36]"),
    Wrong("query-lens", put(actual_seq_qlen=[1] * 4096 + [36]), "actual_seq_qlen", "a list of 4097"),
    Wrong("query-lens", put(actual_seq_qlen=[6, 7]), "actual_seq_qlen", "[6, 7], in rows of 6", "rows"),
    Wrong("query-sum", put(actual_seq_qlen=[1, 5, 30]), "actual_seq_qlen", "[1, 5, 30] over 36 rows"),
    Wrong("key-lens", put(actual_seq_kvlen=[20, 5]), "actual_seq_kvlen", "a list of 2 beside 3"),
    Wrong("key-lens", put(actual_seq_kvlen=[-1, 5, 40]), "actual_seq_kvlen", "[-1, 5, 40]"),
    Wrong("key-sum", put(actual_seq_kvlen=[20, 5, 40]), "actual_seq_kvlen", "[20, 5, 40] over 65", "keys"),
    Wrong("table", to("block_table", Tensor.long), "block_table", "int64"),
    Wrong("table", to("block_table", lambda table: table[:2]), "block_table", "for 3 sequences"),
    Wrong("table-width", put(actual_seq_kvlen=[20, 25, 65]), "actual_seq_kvlen", "65 with rows of"),
    Wrong("most-keys", _endless, "actual_seq_kvlen", "262145"),
    Wrong("mixed-spans", _mixed_spans, "actual_seq_qlen", "[1, 5, 30]", conditions={"product": A5}),
    Wrong("mask-given", put(atten_mask=None), "atten_mask", "None with sparse_mode 3"),
    Wrong("mask-shape", put(atten_mask=MASK[:100, :100].contiguous()), "atten_mask", "(100, 100)"),
    Wrong("mask-shape", put(atten_mask=MASK.bfloat16()), "atten_mask", "bfloat16"),
    Wrong("mask-shape", put(atten_mask=torch.zeros(6, 5).bool()), "atten_mask", "(6, 5)", "rows"),
    Wrong(
        "mask-content", put(atten_mask=torch.ones_like(MASK).tril()), "atten_mask", "lower left corner is 1"
    ),
    Wrong("mask-content", put(atten_mask=torch.zeros_like(MASK)), "atten_mask", "upper right 0"),
    Wrong("mask-content", put(atten_mask=MASK.triu(2)), "atten_mask", "not 1 above the diagonal"),
    Wrong("blind-rows", put(actual_seq_kvlen=[20, 5, 29]), "actual_seq_kvlen", "29 for the 30 query tokens"),
    Wrong("blind-rows", _blind_mask, "atten_mask", "hides all keys", "rows"),
    Wrong(
        "page-ids",
        to("block_table", lambda table: spoil(table, (2, 1), 99)),
        "block_table",
        "page 99 in row 2",
    ),
    Wrong(
        "page-ids",
        lambda call: {"block_table": spoil(call["block_table"], (2, 1), call["key"].shape[0])},
        "block_table",
        "in row 2, of",
    ),
    Wrong(
        "page-ids",
        to("block_table", lambda table: spoil(table, (0, 0), -1)),
        "block_table",
        "page -1 in row 0",
    ),
    Wrong(
        "null-page",
        to("block_table", lambda table: spoil(table, (1, 0), 0)),
        "block_table",
        "page 0 in row 1",
        conditions=NOBODYS,
    ),
    Wrong("pages-held", put(), "block_table", "which no request holds", conditions=HELD),
    Wrong("written", to("value", lambda value: torch.full_like(value, torch.nan)), "value", "NaN at place 0"),
    Wrong("silent-average", put(sparse_mode=0, atten_mask=None), "sparse_mode", "0 without a mask in TND"),
    Wrong("silent-mask", put(), "atten_mask", "of sparse_mode 0 over 600 keys", "long rows"),
    Wrong("capture-form", put(), "out", "not given", captured=True, conditions={"capture": lambda: "group"}),
    Wrong(
        "task-group",
        put(),
        "actual_seq_kvlen",
        "frozen",
        captured=True,
        conditions={"capture": lambda: "stream"},
    ),
    Wrong(
        "workspace",
        put(workspace=None),
        "workspace",
        "None, while",
        captured=True,
        conditions={"capture": lambda: "group"},
    ),
    Wrong(
        "captured-queries",
        put(),
        "actual_seq_qlen",
        "of 17 query tokens",
        "seventeen",
        captured=True,
        conditions={"capture": lambda: "group"},
    ),
    Wrong("workspace-size", put(workspace=torch.empty(9)), "workspace", "float32 (9,), of"),
    Wrong("outputs", put(out=[torch.empty(36, 4, 64), torch.empty(1)]), "out", "for bfloat16 (36, 4, 64)"),
    Wrong("outputs", put(out=[]), "out", "a list of 0"),
]
