"""List the Ascend products and what each supports.

Every fact has its source beside it: a document of Ascend/op-plugin, named by its operator, a document of
CANN, or a file of vllm-project/vllm-ascend, which runs on the product and does no more than it supports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # each product exists once
class Product:
    """One Ascend product and what its operators support; `sources` has an entry for every stated fact."""

    name: str
    chips: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # dtypes of activations in the fused operators
    fused_attention: bool  # npu_fused_infer_attention_score exists
    mixed_spans: bool  # one attention call may hold single tokens and longer spans
    paged_attention: bool  # the ATB operator for decodes is in use
    split_heads: bool  # the cache is [pages, heads * dim / 16, page, 16], each page in columns of 16
    page_sizes: tuple[int, ...]  # tokens in a page; () admits whatever the operator supports
    captured_sizes: int | None  # most sizes for which graphs may be captured; None: no limit
    unified_buffer_bytes: int
    compiles_online: bool  # operators of torch are compiled online, unless the compile mode is set
    sources: Mapping[str, str]


_FIA = "op-plugin npu_fused_infer_attention_score: products"
_MIXED = "vllm-ascend attention/attention_v1.py: one call for a chunked prefill's decodes and prompts"
_PAGED = "vllm-ascend attention/attention_v1.py: _npu_paged_attention for pure decodes"
_ND = "vllm-ascend attention/attention_v1.py: get_kv_cache_shape"
_BUFFER = "Ascend C guide: 192 KiB of unified buffer a vector core; 256 KiB on the 310P"
_DTYPES = "op-plugin npu_fused_infer_attention_score: query is float16 or bfloat16"


def _sources(**said: str) -> Mapping[str, str]:
    common = {
        "dtypes": _DTYPES,
        "fused_attention": _FIA,
        "mixed_spans": _MIXED,
        "paged_attention": _PAGED,
        "split_heads": _ND,
        "page_sizes": "op-plugin npu_fused_infer_attention_score_v2: page attention, by layout",
        "captured_sizes": "vllm-ascend compilation/acl_graph.py: bounded by streams alone",
        "unified_buffer_bytes": _BUFFER,
        "compiles_online": "CANN: ACL_OP_JIT_COMPILE is on before the 910B, off from it on",
    }
    return MappingProxyType(common | said)


P310 = Product(
    name="310P",
    chips=("Ascend310P3",),
    dtypes=(torch.float16,),
    fused_attention=False,
    mixed_spans=True,
    paged_attention=True,
    split_heads=True,
    page_sizes=(128, 64),
    captured_sizes=None,
    unified_buffer_bytes=256 * 1024,
    compiles_online=True,
    sources=_sources(
        dtypes="CANN PagedAttentionOperation: float16 alone on Atlas inference products",
        mixed_spans="vllm-ascend _310p/attention/attention_v1.py: splitfuse takes both",
        split_heads="vllm-ascend _310p/attention/attention_v1.py: get_kv_cache_shape",
        page_sizes="vllm-ascend _310p/attention/attention_v1.py: get_supported_kernel_block_sizes",
    ),
)
A1 = Product(
    name="910",
    chips=("Ascend910A", "Ascend910ProA", "Ascend910ProB", "Ascend910PremiumA"),
    dtypes=(torch.float16,),
    fused_attention=False,
    mixed_spans=False,
    paged_attention=False,
    split_heads=False,
    page_sizes=(),
    captured_sizes=None,
    unified_buffer_bytes=256 * 1024,
    compiles_online=True,
    sources=_sources(
        dtypes="CANN: bfloat16 begins with the 910B",
        mixed_spans="op-plugin: no attention operator lists the first Atlas training products",
        paged_attention="op-plugin: no attention operator lists the first Atlas training products",
    ),
)
A2 = Product(
    name="910B",
    chips=("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4"),
    dtypes=(torch.float16, torch.bfloat16),
    fused_attention=True,
    mixed_spans=True,
    paged_attention=True,
    split_heads=False,
    page_sizes=(),
    captured_sizes=None,
    unified_buffer_bytes=192 * 1024,
    compiles_online=False,
    sources=_sources(),
)
A3 = Product(
    name="910C",
    chips=("Ascend910_9391", "Ascend910_9392", "Ascend910_9381", "Ascend910_9382"),
    dtypes=(torch.float16, torch.bfloat16),
    fused_attention=True,
    mixed_spans=True,
    paged_attention=True,
    split_heads=False,
    page_sizes=(),
    captured_sizes=None,
    unified_buffer_bytes=192 * 1024,
    compiles_online=False,
    sources=_sources(),
)
A5 = Product(
    name="950",
    chips=("Ascend950",),
    dtypes=(torch.float16, torch.bfloat16),
    fused_attention=True,
    mixed_spans=False,
    paged_attention=False,
    split_heads=False,
    page_sizes=(),
    captured_sizes=4,
    unified_buffer_bytes=192 * 1024,
    compiles_online=False,
    sources=_sources(
        fused_attention="vllm-ascend attention/attention_v1.py: the 950 makes the same call",
        mixed_spans="vllm-ascend attention/attention_v1.py: a chunked prefill is two calls on the 950",
        paged_attention="vllm-ascend attention/attention_v1.py: not used on the 950",
        captured_sizes="vllm-ascend #10567, #15991: cut to 4 on the 950, whose driver lacks the streams",
    ),
)

PRODUCTS: Mapping[str, Product] = MappingProxyType({each.name: each for each in (P310, A1, A2, A3, A5)})


def product(name: str) -> Product:
    """Return the product of that name. Raises ValueError for an unknown name."""
    if name not in PRODUCTS:
        raise ValueError(f"product {name!r} is not known; the products are {', '.join(PRODUCTS)}: choose one")
    return PRODUCTS[name]
