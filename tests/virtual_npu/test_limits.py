"""A value at a limit is right, and one that is a step past it is refused.

Those whose wrong value stands in the tables of wrong calls are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.each_of import each_of
from tests.virtual_npu.batches import paged
from virtual_npu.contract import Conditions, ContractError
from virtual_npu.operators import operator
from virtual_npu.simulated_products import A2, P310

FIA = "npu_fused_infer_attention_score_v2"
BF16 = torch.bfloat16


def attention(**options: Any) -> dict[str, Any]:
    return paged(np.random.default_rng(0), BF16, **({"lens": [(2, 5)]} | options))[0]


def rows(dim: int = 64, size: int = 128, queries: int = 2) -> dict[str, Any]:
    """A batch of BSH over pages."""
    query, cache = torch.zeros(1, queries, dim, dtype=BF16), torch.zeros(2, size, dim, dtype=BF16)
    return {
        "query": query,
        "key": cache,
        "value": cache,
        "block_size": size,
        "actual_seq_kvlen": [queries],
        "block_table": torch.ones(1, 1, dtype=torch.int32),
        "num_query_heads": 1,
        "input_layout": "BSH",
    }


def turned(heads: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    angles = torch.zeros(2, 1, 128, dtype=dtype)
    query, key = torch.zeros(2, heads - 1, 128, dtype=dtype), torch.zeros(2, 1, 128, dtype=dtype)
    return {"query": query, "key": key, "cos": angles, "sin": angles, "layout": "TND"}


def multiplied(dim: int = 64, heads: int = 2) -> dict[str, Any]:
    angles = torch.zeros(3, 1, dim)
    return {"input": torch.zeros(3, heads, dim), "r1": angles, "r2": angles}


def normed(width: int) -> dict[str, Any]:
    return {"input": torch.ones(2, width).half(), "gamma": torch.ones(width).half()}


def product(inner: int, columns: int) -> dict[str, Any]:
    x1, x2 = torch.ones(1, inner, dtype=torch.int8), torch.ones(inner, columns, dtype=torch.int8)
    return {"x1": x1, "x2": x2, "scale": torch.ones(1), "output_dtype": torch.bfloat16}


def decoded(dim: int, size: int) -> dict[str, Any]:
    cache, query = torch.zeros(2, dim // 16, size, 16).half(), torch.zeros(1, 1, dim).half()
    return {
        "query": query,
        "key_cache": cache,
        "value_cache": cache,
        "num_kv_heads": 1,
        "num_heads": 1,
        "scale_value": 0.1,
        "block_table": torch.ones(1, 1, dtype=torch.int32),
        "out": query.clone(),
        "context_lens": torch.ones(1, dtype=torch.int32),
    }


Case = tuple[str, str, Callable[..., dict[str, Any]], dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    ("page-size", FIA, attention, {"page_size": 1024}, {"page_size": 1040}),
    ("page-size", FIA, rows, {"size": 512}, {"size": 640}),
    ("page-size", FIA, rows, {"size": 16, "queries": 1}, {"size": 8, "queries": 1}),
    ("head-dim", FIA, rows, {"dim": 512}, {"dim": 528}),
    ("head-dim", FIA, attention, {"dim": 128}, {"dim": 144}),
    ("heads", FIA, attention, {"heads": (64, 1)}, {"heads": (65, 1)}),
    ("heads", FIA, attention, {"heads": (256, 4)}, {"heads": (260, 5)}),
    ("buffer", "npu_apply_rotary_pos_emb", turned, {"heads": 76}, {"heads": 77}),
    ("sizes", "npu_rotary_mul", multiplied, {"dim": 894}, {"dim": 896}),
    ("angles", "npu_rotary_mul", multiplied, {"heads": 999}, {"heads": 1000}),
    ("sides", "npu_quant_matmul", product, {"inner": 65535, "columns": 1}, {"inner": 65536, "columns": 1}),
]
ON_310P: list[Case] = [
    ("row", "npu_rms_norm", normed, {"width": 16}, {"width": 15}),
    ("page-size", "_npu_paged_attention", decoded, {"dim": 128, "size": 128}, {"dim": 256, "size": 128}),
    ("heads", "_npu_paged_attention", decoded, {"dim": 256, "size": 64}, {"dim": 272, "size": 64}),
]


@each_of("case", CASES + ON_310P)
def test_a_limit_holds_where_it_is_said_to(case: Case) -> None:
    rule, name, make, right, wrong = case
    conditions = Conditions(product=P310 if case in ON_310P else A2)
    operator(name)(conditions, **make(**right))
    with pytest.raises(ContractError) as refused:
        operator(name)(conditions, **make(**wrong))
    assert refused.value.rule == rule
