"""Wrong calls of what DeepSeek's models ask for, latent attention and its router; see wrong_calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.virtual_npu.calls import Arguments
from tests.virtual_npu.wrong import HELD, NOBODYS, Change, Wrong, cut, put, spoil, strided, to


def _in_last_pages(index: str, cache: str) -> Change:
    """Write to the last pages, and not to the null page."""
    return lambda call: {
        index: call[cache].shape[:2].numel() - 1 - torch.arange(len(call[index])).view_as(call[index])
    }


def _as_sequences(*sizes: int) -> Change:
    """Put sequences in place of a call's, with two pages for all of them."""
    rows, length = sizes if len(sizes) == 2 else (1, sizes[0])
    lead = rows, 1, length

    def changed(call: Arguments) -> Arguments:
        made = {"kv": 576, "cos": 64, "sin": 64}
        dtype = call["kv"].dtype
        rows_of = {name: torch.zeros(*lead, width, dtype=dtype) for name, width in made.items()}
        caches = {"k_cache": 64, "ckv_cache": 512}
        pages = {name: torch.zeros(2, 128, 1, width, dtype=dtype) for name, width in caches.items()}
        return rows_of | pages | {"index": torch.arange(rows * length)}

    return changed


CACHE = [
    Wrong("mode", put(cache_mode="PA_NZ"), "cache_mode", "PA_NZ"),
    Wrong("mode", put(c_kv_scale=torch.ones(512)), "c_kv_scale", "float32 (512,)"),
    Wrong("dtype", to("cos", Tensor.float), "cos", "float32"),
    Wrong("dtype", to("index", Tensor.int), "index", "int32"),
    Wrong("axes", to("kv", lambda kv: kv[..., :-1]), "kv", "575"),
    Wrong("axes", to("gamma", lambda gamma: gamma[:-1]), "gamma", "(511,)"),
    Wrong("enough-pages", _as_sequences(300), "k_cache", "of 2 pages of 128 for 1 times 300 tokens"),
    Wrong("enough-pages", _as_sequences(3, 1), "k_cache", "of 2 pages of 128 for 3 times 1 tokens"),
    Wrong("contiguous", to("kv", strided), "kv", "strided"),
    Wrong("slots-in-range", to("index", lambda index: spoil(index, 1, -1)), "index", "one with place -1 of"),
    Wrong("slots-unique", to("index", lambda index: spoil(index, 1, index[0])), "index", "more than once"),
    Wrong(
        "null-page",
        to("index", lambda index: spoil(index, 1, 3)),
        "index",
        "page 0 in row 0",
        conditions=NOBODYS,
    ),
    Wrong(
        "pages-held", _in_last_pages("index", "k_cache"), "index", "which no request holds", conditions=HELD
    ),
]


def _wide(call: Arguments) -> Arguments:
    return {
        "input": torch.zeros(3, 128, 512).bfloat16(),
        "weight": torch.zeros(128, 512, 8).bfloat16(),
        "perm_x1": [1, 0, 2],
    }


def _by_eights(inner: int, width: int) -> Change:
    x, weight = torch.zeros(3, 2, inner), torch.zeros(2, inner, width)
    return put(input=x, weight=weight, perm_x1=[1, 0, 2])


PRODUCT = [
    Wrong("sides", to("weight", lambda weight: weight.mT.contiguous()), "weight", "for"),
    Wrong("sides", put(perm_x1=[0, 2, 1]), "perm_x1", "[0, 2, 1]"),
    Wrong("sides", to("input", lambda x: x[0]), "weight", "for"),
    Wrong("orders", put(perm_y=None), "perm_y", "None"),
    Wrong("orders", put(perm_x2=[0, 2, 1]), "perm_x2", "[0, 2, 1]"),
    Wrong("plain", put(bias=torch.zeros(3)), "bias", "float32 (3,)"),
    Wrong("plain", put(batch_split_factor=2), "batch_split_factor", "is 2"),
    Wrong("dtype", to("weight", Tensor.double), "weight", "float64"),
    Wrong("sizes", _wide, "input", "rows of 65536"),
    Wrong("by-sixteens", _by_eights(32, 40), "weight", "32, 40)"),
    Wrong("by-sixteens", _by_eights(40, 32), "weight", "40, 32)"),
]

PROLOG = [
    Wrong("mode", put(cache_mode="PA_NZ"), "cache_mode", "PA_NZ"),
    Wrong("mode", put(qc_qr_scale=2.0), "qc_qr_scale", "is 2.0"),
    Wrong("quantised", put(weight_quant_mode=1), "weight_quant_mode", "is 1"),
    Wrong("quantised", put(weight_quant_mode=0), "dequant_scale_x", "in mode 0"),
    Wrong("dtype", to("token_x", Tensor.bfloat16), "token_x", "bfloat16"),
    Wrong("dtype", to("weight_uq_qr", Tensor.bfloat16), "weight_uq_qr", "bfloat16"),
    Wrong("sizes", to("weight_dq", lambda weight: weight[:1000]), "weight_dq", "(1000, "),
    Wrong("sizes", to("weight_uk", lambda weight: weight[..., :256]), "weight_uk", "256)"),
    Wrong("axes", cut("weight_uq_qr"), "weight_uq_qr", "for ("),
    Wrong("axes", cut("rmsnorm_gamma_ckv"), "rmsnorm_gamma_ckv", "(511,)"),
    Wrong(
        "page-size",
        lambda call: {name: call[name][:, :15].contiguous() for name in ("kv_cache", "kr_cache")},
        "kv_cache",
        "pages of 15",
    ),
    Wrong("contiguous", to("token_x", strided), "token_x", "strided"),
    Wrong("slots-in-range", to("cache_index", lambda index: spoil(index, 1, -1)), "cache_index", "place -1"),
    Wrong("slots-unique", to("cache_index", lambda index: spoil(index, 1, index[0])), "cache_index", "once"),
    Wrong(
        "null-page",
        to("cache_index", lambda index: spoil(index, 1, 3)),
        "cache_index",
        "page 0 in row 0",
        conditions=NOBODYS,
    ),
    Wrong(
        "pages-held",
        _in_last_pages("cache_index", "kv_cache"),
        "cache_index",
        "no request holds",
        conditions=HELD,
    ),
]


def gating_of(groups: int, size: int) -> Change:
    """Put groups of so many experts in place of a call's."""
    x, bias = torch.randn(4, groups * size), torch.randn(groups * size)
    return put(x=x, bias=bias, group_count=groups, k_group=1, k=1, group_select_mode=0)


GATING = [
    Wrong("scores", to("x", Tensor.double), "x", "float64"),
    Wrong("scores", to("bias", Tensor.double), "bias", "float64"),
    Wrong("groups", put(group_count=29), "group_count", "29 of"),
    Wrong("groups", put(k_group=0), "k_group", "0 of"),
    Wrong("groups", put(group_select_mode=2), "group_select_mode", "2 of groups"),
    Wrong("groups", put(k=1000), "k", "1000 of"),
    Wrong("group-sizes", gating_of(8, 2), "group_count", "8 of 2 experts each"),
    Wrong("group-sizes", gating_of(128, 4), "group_count", "128 of 4 experts each"),
    Wrong("group-sizes", gating_of(1, 2), "group_count", "1 of 2 experts each"),
    Wrong("kinds", put(renorm=1), "renorm", "is 1"),
    Wrong("kinds", put(norm_type=2), "norm_type", "is 2"),
    Wrong("kinds", put(input_ids=torch.zeros(3)), "input_ids", "float32 (3,)"),
]
