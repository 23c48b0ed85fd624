"""Wrong calls of what DeepSeek's models ask for, latent attention and its router; see wrong_calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.virtual_npu.right_calls import Arguments
from tests.virtual_npu.wrong import Wrong, cut, pages_but, put, spoil, strided, to

CACHE = [
    Wrong("mode", put(cache_mode="PA_NZ"), "cache_mode", "PA_NZ"),
    Wrong("mode", put(c_kv_scale=torch.ones(512)), "c_kv_scale", "float32 (512,)"),
    Wrong("dtype", to("cos", Tensor.float), "cos", "float32"),
    Wrong("dtype", to("index", Tensor.int), "index", "int32"),
    Wrong("axes", to("kv", lambda kv: kv[..., :-1]), "kv", "575"),
    Wrong("axes", to("gamma", lambda gamma: gamma[:-1]), "gamma", "(511,)"),
    Wrong("axes", cut("sin"), "sin", "rows"),
    Wrong("axes", to("ckv_cache", lambda cache: cache.transpose(1, 2)), "ckv_cache", "512)"),
    Wrong("axes", to("k_cache", lambda cache: cache[..., :-1]), "k_cache", "63)"),
    Wrong("axes", cut("index"), "index", "rows"),
    Wrong("contiguous", to("kv", strided), "kv", "strided"),
    Wrong("slots-in-range", to("index", lambda index: spoil(index, 1, -1)), "index", "one with place -1 of"),
    Wrong("slots-unique", to("index", lambda index: spoil(index, 1, index[0])), "index", "more than once"),
    Wrong(
        "null-page",
        to("index", lambda index: spoil(index, 1, 3)),
        "index",
        "page 0 in row 0",
        conditions={"held": pages_but()},
    ),
    Wrong("pages-held", put(), "index", "which no request holds", conditions={"held": lambda: [39]}),
]


def _wide(call: Arguments) -> Arguments:
    return {
        "input": torch.zeros(3, 128, 512).bfloat16(),
        "weight": torch.zeros(128, 512, 8).bfloat16(),
        "perm_x1": [1, 0, 2],
    }


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
]

GATING = [
    Wrong("scores", to("x", Tensor.double), "x", "float64"),
    Wrong("scores", to("bias", Tensor.double), "bias", "float64"),
    Wrong("scores", cut("bias"), "bias", "for"),
    Wrong("groups", put(group_count=29), "group_count", "29 of"),
    Wrong("groups", put(k_group=0), "k_group", "0 of"),
    Wrong("groups", put(group_select_mode=2), "group_select_mode", "2 of groups"),
    Wrong("groups", put(k=1000), "k", "1000 of"),
    Wrong("kinds", put(renorm=1), "renorm", "is 1"),
    Wrong("kinds", put(norm_type=2), "norm_type", "is 2"),
    Wrong("kinds", put(input_ids=torch.zeros(3)), "input_ids", "float32 (3,)"),
]
