"""Wrong calls of all operators but fused attention, by name; each starts from a right one of its operator."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.virtual_npu import (
    delta_rule_calls,
    dispatch_calls,
    summed_calls,
    wrong_int8_calls,
    wrong_latent_calls,
    wrong_sparse_calls,
)
from tests.virtual_npu.calls import Arguments
from tests.virtual_npu.wrong import HELD, NOBODYS, Change, Wrong, cut, put, spoil, strided, to
from virtual_npu.simulated_products import A2, A5, P310

ON_310P, ON_910B = {"product": P310}, {"product": A2}
Sent = torch.nn.Parameter  # stands for a tensor in the device's memory


def _small_pages(call: Arguments) -> Arguments:
    caches = {name: each for name, each in call.items() if name.endswith("_cache")}
    return {name: torch.zeros(*each.shape[:2], 32, 16, dtype=each.dtype) for name, each in caches.items()}


def _many(call: Arguments) -> Arguments:
    query, ones = call["query"][:1].expand(2001, -1, -1).contiguous(), torch.ones(2001, dtype=torch.int32)
    changed = {
        "query": query,
        "out": query.clone(),
        "context_lens": ones,
        "block_table": call["block_table"][:1].expand(2001, -1).contiguous(),
    }
    if "seq_len" not in call:
        return changed
    return changed | {"seq_len": ones}


ATB = [
    Wrong("dtype", to("query", Tensor.bfloat16), "query", "bfloat16", conditions=ON_310P),
    Wrong("heads", put(num_heads=3), "query", "for 3 heads"),
    Wrong("contiguous", to("query", strided), "query", "strided"),
    Wrong("out", cut("out"), "out", "for query"),
    Wrong("scale", put(scale_value=-1.0), "scale_value", "is -1.0"),
    Wrong("lens", to("seq_len", Tensor.long), "seq_len", "int64"),
    Wrong("lens", to("seq_len", lambda lens: lens + 1), "seq_len", "adds up to"),
    Wrong("lens", to("context_lens", Tensor.long), "context_lens", "int64"),
    Wrong("placed", put(), "seq_len", "on the device", conditions={**ON_310P, "on_device": lambda _: True}),
    Wrong(
        "placed", put(), "context_lens", "on the host", conditions={**ON_310P, "on_device": lambda _: False}
    ),
    Wrong(
        "cache", to("key_cache", lambda cache: cache.transpose(1, 2).contiguous()), "key_cache", "heads of"
    ),
    Wrong("context-lens", cut("context_lens"), "context_lens", "sequences"),
    Wrong("table", to("block_table", Tensor.long), "block_table", "int64"),
    Wrong("page-size", _small_pages, "key_cache", "pages of 32", conditions=ON_310P),
    Wrong("batch", _many, "query", "of 2001 sequences", conditions=ON_310P),
    Wrong("table-width", to("context_lens", lambda lens: lens + 500), "context_lens", "with rows of 3 pages"),
    Wrong(
        "page-ids", to("block_table", lambda table: spoil(table, 0, 77)), "block_table", "page 77 in row 0"
    ),
    Wrong(
        "null-page",
        to("block_table", lambda table: spoil(table, 0, 0)),
        "block_table",
        "page 0 in row 0",
        conditions=NOBODYS,
    ),
    Wrong("pages-held", put(), "block_table", "which no request holds", conditions=HELD),
    Wrong("written", to("key_cache", lambda cache: cache * torch.nan), "key_cache", "NaN at place 0"),
    Wrong("mask-shape", to("mask", Tensor.float), "mask", "float32"),
    Wrong("mask-shape", put(mask_type=2), "mask_type", "is 2"),
    Wrong("mask-content", to("mask", torch.ones_like), "mask", "not 0 up to each query"),
]
FROZEN_KEYS = Wrong(
    "task-group",
    put(),
    "context_lens",
    "frozen by the capture",
    captured=True,
    conditions={"product": A2, "on_device": lambda _: False, "capture": lambda: "stream"},
)
FROZEN_QUERIES = Wrong(
    "task-group",
    lambda call: {"context_lens": Sent(call["context_lens"], False)} if "context_lens" in call else {},
    "seq_len",
    "frozen by the capture",
    captured=True,
    conditions={**ON_310P, "on_device": lambda lens: isinstance(lens, Sent), "capture": lambda: "stream"},
)
DECODES, SPANS = [*ATB, FROZEN_KEYS], [*ATB, FROZEN_QUERIES]
WRITES = [
    Wrong("mode", put(cache_mode="ND"), "cache_mode", "is ND"),
    Wrong("mode", put(seq_lens=torch.ones(1)), "seq_lens", "float32 (1,)"),
    Wrong("dtype", to("key", Tensor.double), "key", "float64"),
    Wrong("slots", to("slot_mapping", Tensor.short), "slot_mapping", "int16"),
    Wrong("slots", cut("slot_mapping"), "slot_mapping", "rows of key"),
    Wrong("slots", cut("value"), "value", "beside key"),
    Wrong("contiguous", to("key_cache", strided), "key_cache", "strided"),
    Wrong("cache-axes", to("key_cache", lambda cache: torch.cat([cache, cache], 3)), "key_cache", "for key"),
    Wrong("caches-alike", to("value_cache", lambda cache: cache[1:]), "value_cache", "beside"),
    Wrong("page-size", _small_pages, "key_cache", "pages of 32", conditions=ON_310P),
    Wrong(
        "slots-in-range", to("slot_mapping", lambda at: spoil(at, 0, -1)), "slot_mapping", "place -1 of 320"
    ),
    Wrong("slots-in-range", to("slot_mapping", lambda at: spoil(at, 1, 320)), "slot_mapping", "place 320 of"),
    Wrong("slots-unique", to("slot_mapping", lambda at: spoil(at, 1, int(at[0]))), "slot_mapping", "once"),
    Wrong(
        "null-page",
        to("slot_mapping", lambda at: spoil(at, 0, 5)),
        "slot_mapping",
        "page 0 in row 0",
        conditions=NOBODYS,
    ),
    Wrong("pages-held", put(), "slot_mapping", "which no request holds", conditions=HELD),
]
NORM = [
    Wrong("dtype", to("x1", Tensor.double), "x1", "float64"),
    Wrong("gamma-dtype", to("gamma", Tensor.double), "gamma", "float64"),
    Wrong(
        "gamma-dtype",
        lambda call: {"x1": call["x1"].half(), "gamma": call["gamma"].float()},
        "gamma",
        "float32",
        conditions={"product": A5},
    ),
    Wrong("gamma-shape", to("gamma", lambda gamma: gamma[1:]), "gamma", "for"),
    Wrong(
        "row",
        lambda call: {name: call[name][..., :4] for name in ("x1", "x2", "gamma") if name in call},
        "x1",
        "4)",
        conditions=ON_310P,
    ),
    Wrong("epsilon", put(epsilon=0.0), "epsilon", "is 0.0"),
    Wrong("alike", cut("x2"), "x2", "beside"),
    Wrong("filled", lambda call: {name: call[name][:0] for name in ("x1", "x2")}, "x1", "(0,"),
]
CAST = [
    *(each for each in NORM if each.rule not in ("dtype", "row", "filled")),
    Wrong("halves", to("x1", Tensor.float), "x1", "float32"),
    Wrong("contiguous", to("x2", strided), "x2", "strided"),
]
TURNED = ("query", "key", "cos", "sin")
ROTARY = [
    Wrong("layout", put(layout="BSH"), "layout", "is BSH"),
    Wrong("mode", put(rotary_mode="whole"), "rotary_mode", "is whole"),
    Wrong("dtype", to("cos", Tensor.double), "cos", "float64"),
    Wrong("axes", cut("cos"), "cos", "beside query"),
    Wrong("axes", lambda call: {"sin": call["key"]}, "sin", "2, "),
    Wrong("head-dim", lambda call: {name: call[name][..., :32] for name in TURNED}, "query", "32)"),
    Wrong("buffer", to("query", lambda query: query[:, :1].repeat(1, 700, 1)), "query", "of 702 heads"),
    Wrong("contiguous", to("key", strided), "key", "strided"),
]
MULTIPLY = [
    Wrong("mode", put(rotary_mode="quarter"), "rotary_mode", "is quarter"),
    Wrong("dtype", to("r1", Tensor.double), "r1", "float64"),
    Wrong(
        "dtype",
        lambda call: {name: call[name].bfloat16() for name in ("input", "r1", "r2")},
        "input",
        "bfloat16",
        conditions=ON_310P,
    ),
    Wrong(
        "sizes", lambda call: {name: call[name][..., :31] for name in ("input", "r1", "r2")}, "input", "31)"
    ),
    Wrong("angles", cut("r2"), "r2", "beside r1"),
    Wrong(
        "angles", lambda call: {name: call[name][..., :2, :, :] for name in ("r1", "r2")}, "r1", "for input"
    ),
    Wrong(
        "unscaled",
        to("r2", lambda sin: torch.full_like(sin, 1.25)),
        "r2",
        "of up to 1.25",
        conditions=ON_910B,
    ),
]
SWIGLU = [
    Wrong("dtype", to("input", Tensor.double), "input", "float64"),
    Wrong("dtype", to("input", Tensor.bfloat16), "input", "bfloat16", conditions=ON_310P),
    Wrong("axis", put(dim=3), "dim", "3 of"),
    Wrong("even", to("input", lambda x: x[..., 1:].contiguous()), "input", "input is"),
    Wrong(
        "aligned", put(input=torch.ones(3, 62).half()), "input", "in halves of 62 bytes", conditions=ON_310P
    ),
    Wrong("contiguous", to("input", strided), "input", "strided"),
]
CLIPPED = [
    Wrong("dtype", to("x", Tensor.double), "x", "float64"),
    Wrong("axis", put(dim=3), "dim", "3 of"),
    Wrong("even", to("x", lambda x: x[..., 1:].contiguous()), "x", "x is"),
    Wrong("contiguous", to("x", strided), "x", "strided"),
    Wrong("limit", put(limit=0.0), "limit", "0"),
    Wrong("modelled", put(group_index=torch.ones(1).long()), "group_index", "int64"),
]
MATMUL = [
    Wrong("int8", to("x1", Tensor.short), "x1", "int16"),
    Wrong("sides", cut("x2"), "x2", "for"),
    Wrong("contiguous", to("x1", strided), "x1", "strided"),
    Wrong(
        "turned",
        to("x2", Tensor.contiguous),
        "x2",
        "that is no transposed view",
        conditions={"product": P310},
    ),
    Wrong("scales", put(pertoken_scale=torch.ones(1000)), "pertoken_scale", "(1000,)"),
    Wrong("scales", put(scale=torch.ones(1, 1)), "scale", "(1, 1)"),
    Wrong("combination", put(output_dtype=torch.float32), "output_dtype", "torch.float32 with"),
    Wrong(
        "combination", put(output_dtype=5, scale=torch.ones(1).bfloat16()), "output_dtype", "scale bfloat16"
    ),
    Wrong("modelled", put(group_sizes=[1, 1, 32]), "group_sizes", "[1, 1, 32]"),
]
INT4_PACK = [
    Wrong("int32", to("weight", Tensor.long), "weight", "int64"),
    Wrong("int32", to("weight", lambda weight: weight[:, 1:]), "weight", "int32"),
    Wrong("contiguous", to("weight", strided), "weight", "strided"),
    Wrong("four-bits", to("weight", lambda weight: weight + 8), "weight", "to 1"),
    Wrong("reserved", put(inner_k_tiles=2), "inner_k_tiles", "is 2"),
]
INT4_MATMUL = [
    Wrong("matched", to("x", Tensor.double), "x", "float64"),
    Wrong("matched", to("weight", Tensor.short), "weight", "int16"),
    Wrong("sides", cut("weight"), "weight", "for"),
    Wrong("order", to("x", strided), "x", "strided"),
    Wrong("order", to("weight", strided), "weight", "strided"),
    Wrong("groups", put(antiquant_group_size=16), "antiquant_group_size", "16 of"),
    Wrong("groups", put(antiquant_group_size=160), "antiquant_group_size", "160 of"),
    Wrong("scales", to("antiquant_scale", Tensor.float), "antiquant_scale", "float32"),
    Wrong("scales", cut("antiquant_scale"), "antiquant_scale", "columns"),
    Wrong("bias", to("bias", Tensor.double), "bias", "float64"),
    Wrong("bias", put(bias=torch.ones(3)), "bias", "(3,)"),
    Wrong("modelled", put(quant_scale=torch.ones(1)), "quant_scale", "given"),
    Wrong("modelled", put(inner_precise=1), "inner_precise", "is 1"),
]
STATIC_QUANT = [
    Wrong("matched", to("input", Tensor.double), "input", "float64"),
    Wrong("matched", to("scales", Tensor.double), "scales", "float64"),
    Wrong("columns", put(scales=torch.ones(99).half(), input=torch.ones(2, 3).half()), "scales", "(99,)"),
    Wrong("columns", put(zero_points=torch.ones(99)), "zero_points", "beside"),
    Wrong(
        "divisors",
        put(div_mode=True, scales=torch.ones(1).half(), input=torch.ones(2, 3).half()),
        "scales",
        "with div_mode True",
    ),
    Wrong("last-axis", put(dtype=torch.quint8), "dtype", "quint8"),
    Wrong("last-axis", put(axis=1), "axis", "is 1"),
]
QUANT = [
    Wrong("dtype", to("input", Tensor.float), "input", "float32"),
    Wrong("smooth", put(smooth_scales=torch.ones(99)), "smooth_scales", "(99,)"),
    Wrong("by-token", put(quant_mode="pertensor"), "quant_mode", "pertensor"),
    Wrong("by-token", put(dst_type=16), "dst_type", "is 16"),
]


def of_experts(**values: object) -> Change:
    """A call over three experts, with other values."""
    right = {
        "x": [torch.ones(6, 4).half()],
        "weight": [torch.ones(3, 4, 8).half()],
        "bias": None,
        "split_item": 2,
        "group_type": 0,
        "group_list": torch.tensor([1, 0, 5]),
        "group_list_type": 1,
    }
    return put(**right | values)


def in_4_bits(**values: object) -> Change:
    """The same with a weight of 4 bits, by two groups of rows."""
    scales = torch.ones(3, 2, 8).half()
    right = {"weight": [torch.ones(3, 4, 1).int()], "antiquant_scale": [scales], "antiquant_offset": [scales]}
    return of_experts(**right | values)


def in_int8(**values: object) -> Change:
    """The same in int8, whose result is bfloat16."""
    right = {
        "x": [torch.ones(6, 4).to(torch.int8)],
        "weight": [torch.ones(3, 4, 8).to(torch.int8)],
        "scale": [torch.ones(3, 8).bfloat16()],
        "per_token_scale": [torch.ones(6)],
        "output_dtype": torch.bfloat16,
    }
    return of_experts(**right | values)


def in_4_and_8_bits(**values: object) -> Change:
    """The same with a weight in 4 bits."""
    right = {"weight": [torch.ones(3, 4, 1).int()], "scale": [torch.ones(3, 1, 8).long()]}
    return in_int8(**right | {"bias": [torch.ones(3, 8)]} | values)


GROUPED = [
    Wrong("groups", to("x", lambda x: x[1:]), "weight", "a list of"),
    Wrong("matched", to("x", lambda x: [each.double() for each in x]), "x", "float64"),
    Wrong("matched", lambda call: {"bias": [each[0].short() for each in call["weight"]]}, "bias", "int16"),
    Wrong("sides", to("weight", lambda weights: [each[1:] for each in weights]), "weight", "for"),
    Wrong("order", to("x", lambda x: [strided(each) for each in x]), "x", "strided"),
    Wrong("alone", put(group_type=2), "group_type", "is 2"),
    Wrong("sides", of_experts(weight=[torch.ones(3, 5, 8).half()]), "weight", "for"),
    Wrong("experts", of_experts(split_item=0), "split_item", "is 0"),
    Wrong(
        "experts",
        of_experts(x=[torch.ones(6, 4).half()] * 2, weight=[torch.ones(3, 4, 8).half()] * 2),
        "x",
        "2",
    ),
    Wrong("divided", of_experts(group_list=None), "group_list", "None"),
    Wrong("divided", of_experts(group_list=torch.tensor([1, 5])), "group_list", "for 3 experts"),
    Wrong("divided", of_experts(group_list=torch.tensor([1, 0, 5]).int()), "group_list", "int32"),
    Wrong("divided", of_experts(group_list_type=2), "group_list_type", "is 2"),
    Wrong(
        "divided",
        of_experts(weight=[torch.ones(1, 4, 8).half()], group_list=torch.tensor([6])),
        "group_list_type",
        "1 of 1",
    ),
    Wrong("scaled", of_experts(output_dtype=torch.float16), "output_dtype", "given for"),
    Wrong("scaled", in_int8(output_dtype=None), "output_dtype", "None with"),
    Wrong("scaled", in_int8(output_dtype=torch.int32), "scale", "stays in int32"),
    Wrong("scaled", in_int8(scale=[torch.ones(3, 8)]), "scale", "float32"),
    Wrong("scaled", in_int8(per_token_scale=[torch.ones(5)]), "per_token_scale", "for"),
    Wrong("experts", in_int8(weight=[torch.ones(3, 4, 1).int()]), "bias", "None for int32"),
    Wrong("scaled", in_4_and_8_bits(scale=[torch.ones(3, 8)]), "scale", "float32"),
    Wrong("scaled", in_4_and_8_bits(scale=[torch.ones(3, 2, 8).long()]), "scale", "(3, 2, 8)"),
    Wrong("scaled", in_4_and_8_bits(bias=[torch.ones(3, 8).half()]), "bias", "float16"),
    Wrong("sides", in_4_and_8_bits(bias=[torch.ones(3, 9)]), "bias", "(3, 9)"),
    Wrong("sides", of_experts(bias=[torch.ones(8).half()]), "bias", "for"),
    Wrong("experts", in_int8(bias=[torch.ones(3, 8).int()]), "bias", "given for"),
    Wrong("antiquant", of_experts(antiquant_scale=[torch.ones(3, 8).half()]), "antiquant_scale", "given for"),
    Wrong("antiquant", in_4_bits(antiquant_offset=None), "antiquant_offset", "not both"),
    Wrong(
        "antiquant", in_4_bits(antiquant_scale=[torch.ones(3, 3, 8).half()]), "antiquant_scale", "(3, 3, 8)"
    ),
    Wrong("antiquant", in_4_bits(antiquant_scale=[torch.ones(3, 2, 8)]), "antiquant_scale", "float32"),
    Wrong("antiquant", in_4_bits(antiquant_offset=[torch.ones(3, 8).half()]), "antiquant_offset", "beside"),
    Wrong("antiquant", in_4_bits(weight=[torch.ones(3, 2, 4).int().mT]), "weight", "strided"),
    Wrong("whole", of_experts(group_list=torch.tensor([1, 0, 6])), "group_list", "7 of 6 rows"),
    Wrong("whole", of_experts(group_list_type=0), "group_list", "of 6 rows"),
    Wrong("alone", put(split_item=2), "split_item", "is 2"),
    Wrong("alone", put(group_list=torch.tensor([1, 2])), "group_list", "int64"),
    Wrong("modelled", put(output_dtype=15), "output_dtype", "given"),
]
FORMAT = [
    Wrong("format", put(acl_format=3), "acl_format", "is 3"),
    Wrong("tiles", lambda call: {"input": call["input"].float(), "acl_format": 29}, "input", "float32"),
    Wrong("contiguous", to("input", strided), "input", "strided"),
]
SAMPLING = [
    Wrong("logits", to("logits", lambda logits: logits[None]), "logits", "(1, "),
    Wrong("given", put(p=None, k=None), "p", "None, and k too"),
    Wrong("columns", to("k", Tensor.long), "k", "int64"),
    Wrong("k-range", to("k", lambda k: spoil(k, 0, 0)), "k", "from 0 to"),
    Wrong("k-range", to("k", lambda k: spoil(k, 0, 1025)), "k", "to 1025"),
    Wrong("p-range", to("p", lambda p: p + 1), "p", "from"),
]
GATING = [
    Wrong("scores", to("x", Tensor.double), "x", "float64"),
    Wrong("chosen", put(k=0), "k", "is 0 of"),
    Wrong("chosen", lambda call: {"k": call["x"].shape[1] + 1}, "k", "of"),
    Wrong("chosen", put(finished=torch.zeros(1).bool()), "finished", "bool"),
]
GATING_AS_ONE = [
    *GATING,
    Wrong("renormed", put(renorm=2), "renorm", "is 2"),
    Wrong("renormed", put(output_softmax=True), "output_softmax", "is True"),
]
ROUTING = [
    Wrong("rows", to("x", strided), "x", "("),
    Wrong("rows", to("expert_idx", Tensor.long), "expert_idx", "int64"),
    Wrong("rows", cut("expert_idx"), "expert_idx", "for"),
    Wrong("all_experts", put(active_expert_range=[0, 2]), "active_expert_range", "[0, 2]"),
    Wrong("all_experts", put(active_num=1000), "active_num", "is 1000"),
    Wrong("counted", put(expert_tokens_num_type=0), "expert_tokens_num_type", "is 0"),
    Wrong("counted", put(quant_mode=0), "quant_mode", "is 0"),
    Wrong("counted", put(quant_mode=1), "quant_mode", "is 1 on the 950", conditions={"product": A5}),
    Wrong("known", to("expert_idx", lambda each: each + 99), "expert_idx", "of"),
]
COMBINING = [
    Wrong("sorted", to("permuted_tokens", Tensor.double), "permuted_tokens", "float64"),
    Wrong("sorted", to("sorted_indices", Tensor.long), "sorted_indices", "int64"),
    Wrong("sorted", put(probs=None), "probs", "None"),
    Wrong("sorted", to("probs", Tensor.double), "probs", "float64"),
    Wrong("unpadded", put(padded_mode=True), "padded_mode", "True"),
    Wrong("placed", to("sorted_indices", torch.zeros_like), "sorted_indices", "no order"),
]
PREFETCH = [
    Wrong("dependency", put(dependency=None), "dependency", "None, while captured", captured=True),
    Wrong("size", put(max_size=0), "max_size", "is 0"),
    Wrong("offset", put(offset=-1), "offset", "is -1 of"),
    Wrong("offset", lambda call: {**call, "offset": call["input"].nbytes}, "offset", "bytes"),
]


def _written_twice(call: Arguments) -> Arguments:
    """Two tokens in one place."""
    kept = call["index"][call["index"] >= 0]
    return {"index": spoil(call["index"], call["index"] >= 0, kept[0])}


JOINED = [
    Wrong("mode", put(cache_mode="Norm"), "cache_mode", "Norm"),
    Wrong("mode", put(k_scale=torch.ones(2, 128)), "k_scale", "float32 (2, 128)"),
    Wrong("dtype", to("cos", Tensor.float), "cos", "float32"),
    Wrong("dtype", to("index", Tensor.int), "index", "int32"),
    Wrong("sizes", to("head_nums", lambda heads: [heads[0] + 1, heads[1] - 1, heads[2]]), "head_nums", "["),
    Wrong("sizes", to("qkv_size", lambda size: [*size[:3], 64]), "qkv_size", "64] for heads"),
    Wrong("axes", to("k_gamma", lambda gamma: gamma[:-1]), "k_gamma", "(127,)"),
    Wrong("axes", cut("sin"), "sin", "rows of"),
    Wrong("blocks", to("k_cache", lambda cache: cache[..., :-1]), "k_cache", "15)"),
    Wrong("blocks", cut("v_cache"), "v_cache", "columns"),
    Wrong(
        "blocks",
        lambda call: {name: call[name][:, :, :16].contiguous() for name in ("k_cache", "v_cache")},
        "k_cache",
        "blocks of 16 for 1 times",
    ),
    Wrong(
        "blocks",
        lambda call: {name: call[name][:0] for name in ("k_cache", "v_cache")},
        "k_cache",
        "0 blocks of",
    ),
    Wrong("contiguous", to("qkv", strided), "qkv", "strided"),
    Wrong("places", to("index", lambda index: spoil(index, 0, 999)), "index", "one with place 999 of"),
    Wrong("places", to("index", lambda index: spoil(index, 0, -2)), "index", "one with place -2 of"),
    Wrong("places", _written_twice, "index", "more than once"),
]

FAMILIES = {
    "_npu_paged_attention": DECODES,
    "_npu_paged_attention_splitfuse_v2": SPANS,
    **dict.fromkeys(("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"), WRITES),
    "npu_kv_rmsnorm_rope_cache": wrong_latent_calls.CACHE,
    "npu_transpose_batchmatmul": wrong_latent_calls.PRODUCT,
    "npu_mla_prolog_v3": wrong_latent_calls.PROLOG,
    "npu_lightning_indexer": wrong_sparse_calls.INDEXER,
    "npu_quant_lightning_indexer": wrong_sparse_calls.INT8_INDEXER,
    "npu_sparse_flash_attention": wrong_sparse_calls.ATTENTION,
    "npu_kv_quant_sparse_flash_attention": wrong_sparse_calls.INT8_ATTENTION,
    **dict.fromkeys(("npu_rms_norm", "npu_add_rms_norm"), NORM),
    "npu_add_rms_norm_cast": CAST,
    "npu_qkv_rms_norm_rope_cache": JOINED,
    "npu_apply_rotary_pos_emb": ROTARY,
    "npu_rotary_mul": MULTIPLY,
    "npu_swiglu": SWIGLU,
    "npu_clipped_swiglu": CLIPPED,
    "npu_quant_matmul": MATMUL,
    "npu_dynamic_quant": QUANT,
    "npu_quantize": STATIC_QUANT,
    "npu_convert_weight_to_int4pack": INT4_PACK,
    "npu_weight_quant_batchmatmul": INT4_MATMUL,
    "npu_grouped_matmul": GROUPED,
    "npu_mm_all_reduce_base": summed_calls.WRONG,
    "npu_moe_distribute_dispatch_v2": dispatch_calls.DISPATCH,
    "npu_moe_distribute_combine_v2": dispatch_calls.COMBINE,
    "npu_add_rms_norm_dynamic_quant": wrong_int8_calls.NORM,
    "npu_dequant_swiglu_quant": wrong_int8_calls.SWIGLU,
    "npu_grouped_matmul_swiglu_quant_v2": wrong_int8_calls.GATED,
    "npu_moe_gating_top_k_softmax": GATING,
    "npu_moe_gating_top_k_softmax_v2": GATING_AS_ONE,
    "npu_moe_gating_top_k": wrong_latent_calls.GATING,
    "npu_moe_init_routing_v2": ROUTING,
    "npu_moe_token_unpermute": COMBINING,
    "_npu_moe_token_unpermute": COMBINING,
    "npu_format_cast": FORMAT,
    "npu_recurrent_gated_delta_rule": delta_rule_calls.RECURRENT,
    "npu_chunk_gated_delta_rule": delta_rule_calls.CHUNK,
    "npu_top_k_top_p": SAMPLING,
    "npu_prefetch": PREFETCH,
}
# What a base has to be so that its family's changes change something
WANTED = {
    "npu_apply_rotary_pos_emb": lambda call: call["layout"] == "TND",
    "npu_quant_matmul": lambda call: "offset" not in call,
    "npu_weight_quant_batchmatmul": lambda call: (
        call["weight"].dtype == torch.int32
        and None not in (call["antiquant_offset"], call.get("bias"))
        and call["antiquant_group_size"]
    ),
    "npu_convert_weight_to_int4pack": lambda call: len(call["weight"]) > 1,
    "npu_mm_all_reduce_base": lambda call: call["x1"].dtype == torch.float16,
    "npu_moe_distribute_dispatch_v2": lambda call: call["x"].dtype == torch.float16,
    "npu_moe_distribute_combine_v2": lambda call: call["ep_send_counts"].any(),
    "npu_grouped_matmul": lambda call: call["group_type"] == -1,
    "npu_transpose_batchmatmul": lambda call: len(set(call["weight"].shape)) == 3,
    "npu_dequant_swiglu_quant": lambda call: "group_index" not in call,
    "npu_mla_prolog_v3": lambda call: call["weight_quant_mode"] == 2,
    "npu_qkv_rms_norm_rope_cache": lambda call: (
        call["qkv_size"][0] == 1 < call["head_nums"][1] and (call["index"] >= 0).sum() > 1
    ),
    "npu_recurrent_gated_delta_rule": lambda call: (
        call["num_accepted_tokens"] is not None and len(call["value"]) > 1
    ),
    "npu_chunk_gated_delta_rule": lambda call: call["g"] is not None,
    "npu_moe_gating_top_k": lambda call: call["group_count"] > 2 and call["bias"] is not None,
    "npu_moe_init_routing_v2": lambda call: call["expert_num"] > 2,
    "npu_top_k_top_p": lambda call: {"p", "k"} <= set(call) and call["logits"].shape[1] > 1024,
}
PRODUCT = {"npu_apply_rotary_pos_emb": A2}
