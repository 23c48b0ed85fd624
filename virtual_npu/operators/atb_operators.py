"""Which operators of ATB does the 310P's attention call?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from virtual_npu.contract import Operator, Rule
from virtual_npu.operators.atb import AtbAttentionCall, attend
from virtual_npu.operators.atb_rules import FIELD, FIRST, KEYS, MASK, PAGED, PAGES, READ_PAGES
from virtual_npu.products import A2, A3, P310, Product

WORKSPACE = 2**20
_CACHES = "Tensor query, Tensor key_cache, Tensor value_cache, "
_SPLITFUSE = (
    _CACHES + "Tensor block_table, Tensor context_lens, Tensor mask, Tensor seq_len, int num_kv_heads, "
    "int num_heads, float scale_value, "
)
_DECODE = (
    _CACHES + "int num_kv_heads, int num_heads, float scale_value, Tensor block_table, Tensor context_lens, "
    "Tensor(a!) out"
)
_FLASH = (
    "Tensor query, Tensor key, Tensor value, Tensor mask, Tensor seq_len, float scale_value, int num_heads, "
    "int num_kv_heads, "
)


def _workspace(asked: AtbAttentionCall) -> Tensor:
    return torch.empty(WORKSPACE, dtype=torch.uint8)


def _over_pages(schema: str, products: tuple[Product, ...], more: tuple[Rule, ...] = ()) -> Operator:
    return Operator(
        schema=schema,
        products=products,
        source=f"{PAGED}; {FIELD}/attention_v1.py",
        read=partial(AtbAttentionCall, paged=True),
        first=FIRST + PAGES,
        rules=READ_PAGES + more,
        reference=attend,
    )


def _over_keys(schema: str) -> Operator:
    return Operator(
        schema=schema,
        products=(P310,),
        source=f"CANN SelfAttentionOperation; {FIELD}/attention_v1.py",
        read=partial(AtbAttentionCall, paged=False),
        first=FIRST + KEYS,
        rules=MASK,
        reference=attend,
    )


OPERATORS = (
    _over_pages(f"atb::_npu_paged_attention({_DECODE}, *, Tensor? workspace=None) -> ()", (P310, A2, A3)),
    Operator(
        schema=f"atb::_npu_paged_attention_get_workspace({_DECODE}) -> Tensor",
        products=(P310, A2, A3),
        source=PAGED,
        read=partial(AtbAttentionCall, paged=True),
        first=FIRST + PAGES,
        rules=(),
        reference=_workspace,
    ),
    _over_pages(f"atb::_npu_paged_attention_splitfuse({_SPLITFUSE}Tensor(a!) out) -> ()", (P310,), MASK),
    _over_pages(
        f"atb::_npu_paged_attention_splitfuse_v2({_SPLITFUSE}*, int? mask_type=5, Tensor(a!) out) -> ()",
        (P310,),
        MASK,
    ),
    _over_keys(f"atb::_npu_flash_attention({_FLASH}Tensor(a!) out) -> ()"),
    _over_keys(f"atb::_npu_flash_attention_v3({_FLASH}*, int? mask_type=3, Tensor(a!) out) -> ()"),
)
