"""Random right calls of every operator, by the names of its schema.

`RIGHT` maps an operator's name to a function of a generator that makes the arguments of one call, and the
conditions under which it is right. Most are drawn as a verification of a device draws what an engine calls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.virtual_npu import delta_rule_calls, dispatch_calls, summed_calls
from tests.virtual_npu.batches import MASK, first_version, int8_pages, paged
from tests.virtual_npu.calls import HALVES, Arguments, pick
from virtual_npu.contract import Conditions
from virtual_npu.sample_calls import makers, sample_call
from virtual_npu.simulated_products import A2, A3, A5, P310, PRODUCTS
from virtual_npu.verify import sent

Draw = Callable[[np.random.Generator], tuple[Arguments, Conditions]]


def sampled(name: str) -> Draw:
    """Calls that a verification of a device draws of an operator, for every product that has it."""
    products = [each for each in PRODUCTS.values() if name in makers(each)]

    def draw(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
        chosen = pick(rng, *products)
        made = sample_call(name, int(rng.integers(1000)), chosen)
        return sent(made, "cpu"), Conditions(product=chosen)

    return draw


def fused_attention(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """TND over pages mostly, else over keys as they are, else another layout."""
    kind, dtype, product = (
        pick(rng, "pages", "pages", "keys", "rows"),
        pick(rng, *HALVES),
        pick(rng, A2, A3, A5),
    )
    heads = pick(rng, (2, 2), (4, 2), (8, 1))
    if kind == "rows":
        return rows(rng, dtype, heads), Conditions(product=product)
    lens = None
    if product is A5:  # single tokens and longer spans are two calls
        many = bool(rng.integers(2))
        lens = [
            (n, n + int(rng.integers(50))) for n in (rng.integers(2, 40, 3).tolist() if many else [1, 1, 1])
        ]
    arguments, dense = paged(
        rng,
        dtype,
        lens=lens,
        heads=heads,
        dim=pick(rng, 64, 128),
        page_size=128 if product is A5 else pick(rng, 16, 48, 128),
        by_heads=heads[0] != heads[1] and bool(rng.integers(2)),
        window=pick(rng, None, None, 1, 9),
        sink=dtype == torch.bfloat16 and bool(rng.integers(2)),
    )
    if heads[0] != heads[1] or dtype == torch.float16:
        arguments["inner_precise"] = int(rng.integers(2))
    arguments["return_softmax_lse"] = bool(rng.integers(2))
    arguments["atten_mask"] = pick(rng, MASK, MASK.bool(), MASK.view(torch.uint8))
    if kind == "keys":
        ends = np.cumsum([len(each) for each in dense.keys]).tolist()
        arguments |= {
            "key": torch.cat(dense.keys),
            "value": torch.cat(dense.values),
            "block_table": None,
            "block_size": 0,
            "actual_seq_kvlen": ends,
        }
    return arguments, Conditions(product=product)


def rows(rng: np.random.Generator, dtype: torch.dtype, heads: tuple[int, int]) -> Arguments:
    """A batch with an axis for sequences, in some layout and mode."""
    layout = pick(rng, "BSND", "BNSD", "BNSD_BSND")
    batch, many = int(rng.integers(1, 4)), "_" in layout
    queries = int(rng.integers(2, 9)) if many else pick(rng, 1, 7)
    keys, dim, mode = queries + int(rng.integers(9)), pick(rng, 16, 80), int(rng.integers(5))
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    mask[..., keys // 2 + 1 :] = True
    arguments: Arguments = {
        "query": in_layout(torch.randn(batch, queries, heads[0], dim).to(dtype), layout),
        "key": in_layout(torch.randn(batch, keys, heads[1], dim).to(dtype), layout),
        "value": in_layout(torch.randn(batch, keys, heads[1], dim).to(dtype), layout),
        "atten_mask": mask if mode < 2 else MASK,
        "num_query_heads": heads[0],
        "num_key_value_heads": pick(rng, heads[1], 0) if heads[0] == heads[1] else heads[1],
        "softmax_scale": 0.3,
        "input_layout": layout,
        "sparse_mode": mode,
        "return_softmax_lse": bool(rng.integers(2)),
    }
    if mode == 4:
        arguments |= {"pre_tokens": 3, "next_tokens": 1}
    return arguments


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """[B, S, N, D] in the order of a layout's input."""
    return tensor.transpose(1, 2).contiguous() if layout.startswith("BNSD") else tensor


def first_fused_attention(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    if not rng.integers(4):
        lens = [(1, int(each)) for each in rng.integers(1, 90, int(rng.integers(1, 6)))]
        arguments, _ = int8_pages(rng, pick(rng, *HALVES), lens=lens, page_size=pick(rng, 32, 128))
        return first_version(arguments), Conditions(product=pick(rng, A2, A3))
    arguments, conditions = fused_attention(rng)
    arguments.pop("learnable_sink", None)
    return first_version(arguments), conditions


def given_outputs(
    right: Callable[[np.random.Generator], tuple[Arguments, Conditions]],
) -> Callable[[np.random.Generator], tuple[Arguments, Conditions]]:
    """The same calls with outputs and workspace."""

    def call(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
        arguments, conditions = right(rng)
        return arguments | outputs(arguments), conditions

    return call


def outputs(arguments: Arguments) -> Arguments:
    """Outputs and workspace for a call."""
    query, layout = arguments["query"], arguments["input_layout"]
    if layout == "TND":
        out, lse = query.shape, (*query.shape[:2], 1)
    else:
        full = query.transpose(1, 2).shape if layout.startswith("BNSD") else query.shape
        batch, tokens, heads, dim = full
        out = full if layout.endswith("BSND") else (batch, heads, tokens, dim)
        lse = (batch, heads, tokens, 1)
    return {
        "workspace": torch.empty(2**26, dtype=torch.uint8),
        "out": [torch.empty(out, dtype=query.dtype), torch.empty(lse)],
    }


def split_cache(rng: np.random.Generator, pages: int, size: int, heads: int, dim: int) -> list[Tensor]:
    return [torch.randn(pages, heads * dim // 16, size, 16).half() for _ in range(2)]


def atb_over_pages(decodes: bool) -> Callable[[np.random.Generator], tuple[Arguments, Conditions]]:
    """Calls of ATB's attention over pages: of single tokens, or of spans with a mask."""

    def call(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
        product = P310 if not decodes else pick(rng, P310, A2, A3)
        heads, kv_heads, dim, size = pick(rng, 2, 4), pick(rng, 1, 2), 64, pick(rng, 64, 128)
        batch = int(rng.integers(1, 4))
        queries = [1] * batch if decodes else rng.integers(1, 30, batch).tolist()
        keys = [each + int(rng.integers(100)) for each in queries]
        pages, dtype = 1 + 3 * batch, torch.float16
        caches = split_cache(rng, pages, size, kv_heads, dim)
        if product is not P310:
            dtype = pick(rng, *HALVES)
            caches = [torch.randn(pages, size, kv_heads, dim).to(dtype) for _ in range(2)]
        query = torch.randn(sum(queries), heads, dim).to(dtype)
        arguments = {
            "query": query,
            "key_cache": caches[0],
            "value_cache": caches[1],
            "num_kv_heads": kv_heads,
            "num_heads": heads,
            "scale_value": 0.125,
            "block_table": torch.from_numpy(1 + rng.permutation(3 * batch)).int().view(batch, 3),
            "context_lens": torch.tensor(keys, dtype=torch.int32),
            "out": torch.empty_like(query),
        }
        if not decodes:
            arguments |= {"seq_len": torch.tensor(queries, dtype=torch.int32), "mask": compressed()}
        return arguments, Conditions(product=product)

    return call


def compressed() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.float16).triu(1) * -10000


def write(name: str) -> Callable[[np.random.Generator], tuple[Arguments, Conditions]]:
    """Calls that write the cache."""

    def call(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
        scatter = name.endswith("scatter_pa_kv_cache")
        product = pick(rng, A2, A3, A5) if scatter else pick(rng, P310, A2, A3)
        mode = pick(rng, "Norm", None, "PA_NZ") if scatter else None
        split = mode == "PA_NZ" or product is P310
        dtype = torch.float16 if product is P310 else pick(rng, *HALVES)
        tokens, heads, dim, size, pages = int(rng.integers(1, 40)), pick(rng, 1, 2), pick(rng, 32, 64), 64, 5
        cache = (pages, heads * dim // 16, size, 16) if split else (pages, size, heads, dim)
        names = ("key", "value")
        slots = size + rng.permutation((pages - 1) * size)[:tokens]
        wide = scatter and bool(rng.integers(2))
        arguments = {each: torch.randn(tokens, heads, dim).to(dtype) for each in names}
        arguments |= {f"{each}_cache": torch.zeros(cache, dtype=dtype) for each in names}
        arguments["slot_mapping" if scatter else "slot_indices"] = torch.from_numpy(slots).to(
            torch.int64 if wide else torch.int32
        )
        held = pick(rng, None, lambda: range(1, pages))
        return arguments | ({"cache_mode": mode} if scatter else {}), Conditions(product=product, held=held)

    return call


def joined_heads(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    dtype, blocks, size = pick(rng, *HALVES), int(rng.integers(3, 6)), pick(rng, 32, 64)
    tokens = int(rng.integers(1, 20))
    heads, kv_heads = rng.integers(1, 4, 2).tolist()
    is_one = tokens > blocks or bool(rng.integers(2))
    angles = 6 * torch.rand(tokens, 64)
    both = torch.cat([angles, angles], -1)
    index = torch.from_numpy(rng.permutation(blocks * size)[:tokens])
    index[torch.from_numpy(rng.integers(2, size=tokens) > 0)] = -1

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes).to(dtype)

    made: Arguments = {
        "qkv": random(tokens, (heads + 2 * kv_heads) * 128),
        "q_gamma": random(128),
        "k_gamma": random(128),
        "cos": both.cos().to(dtype),
        "sin": both.sin().to(dtype),
        "index": index,
        "q_out": random(tokens, heads * 128),
        "k_cache": random(blocks, kv_heads * 8, size, 16),
        "v_cache": random(blocks, kv_heads * 8, size, 16),
        "qkv_size": [1 if is_one else tokens, tokens if is_one else 1, heads + 2 * kv_heads, 128],
        "head_nums": [heads, kv_heads, kv_heads],
        "epsilon": 1e-5,
        "is_output_qkv": bool(rng.integers(2)),
    }
    return made, Conditions(product=pick(rng, A2, A3))


def rotary_mul(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    product = pick(rng, P310, A2, A3, A5)
    dtype = pick(rng, torch.float32, torch.float16) if product is P310 else pick(rng, torch.float32, *HALVES)
    batch, tokens = rng.integers(1, (5, 2000)).tolist()
    dim = 128 if product is P310 else pick(rng, 32, 80, 128, 256)
    lead = (batch, tokens) if product is P310 or rng.integers(2) else (tokens,)
    x, angles = torch.randn(*lead, 3, dim).to(dtype), (2 * torch.rand(*lead, 1, dim) - 1).to(dtype)
    return {"input": x, "r1": angles, "r2": angles.clone()}, Conditions(product=product)


def top_k_top_p(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    rows, vocabulary = int(rng.integers(1, 6)), int(rng.integers(1, 1500))
    logits = torch.randn(rows, vocabulary).to(pick(rng, torch.float32, *HALVES))
    k = torch.from_numpy(rng.integers(1, min(1024, vocabulary) + 1, rows)).int()
    given = pick(rng, ("p",), ("k",), ("p", "k"))
    columns = {"p": torch.rand(rows).to(logits.dtype), "k": k}
    return {"logits": logits} | {name: columns[name] for name in given}, Conditions(product=pick(rng, A2, A3))


FIA, ATB = "npu_fused_infer_attention_score", "_npu_paged_attention"


def int4_pack(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    rows, words = rng.integers(1, 20, 2).tolist()
    weight = torch.randint(-8, 8, (rows, 8 * words), dtype=torch.int32)
    return {"weight": weight}, Conditions(product=pick(rng, A2, A3))


def int4_product(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    rows, inner, words = int(rng.integers(1, 20)), int(rng.integers(33, 140)), int(rng.integers(1, 9))
    columns, dtype, size = 8 * words, pick(rng, *HALVES), pick(rng, 0, 32, 96 if inner > 96 else 32)
    shape = (-(-inner // size), columns) if size else pick(rng, (columns,), (1, columns), (1,), (1, 1))
    arguments: Arguments = {
        "x": torch.randn(rows, inner).to(dtype),
        "weight": torch.randint(-(2**31), 2**31, (inner, words)).int(),
        "antiquant_scale": torch.rand(shape).to(dtype),
        "antiquant_offset": pick(rng, None, torch.randint(-7, 9, shape).to(dtype)),
        "antiquant_group_size": int(size),
    }
    if bool(rng.integers(2)):
        arguments["weight"] = torch.randint(-128, 128, (inner, columns)).to(torch.int8)
    if bool(rng.integers(2)):
        bias = torch.randn(columns) if dtype == torch.bfloat16 else torch.randn(columns).half()
        arguments["bias"] = pick(rng, bias, bias[None])
    return arguments, Conditions(product=pick(rng, A2, A3))


DRAWN: dict[str, Draw] = {
    FIA: first_fused_attention,
    f"{FIA}.out": given_outputs(first_fused_attention),
    f"_{FIA}_get_max_workspace": first_fused_attention,
    f"{FIA}_v2": fused_attention,
    f"{FIA}_v2.out": given_outputs(fused_attention),
    f"_{FIA}_v2_get_max_workspace": fused_attention,
    ATB: atb_over_pages(decodes=True),
    f"{ATB}_splitfuse_v2": atb_over_pages(decodes=False),
    "npu_scatter_pa_kv_cache": write("npu_scatter_pa_kv_cache"),
    "_npu_reshape_and_cache": write("_npu_reshape_and_cache"),
    "npu_qkv_rms_norm_rope_cache": joined_heads,
    "npu_rotary_mul": rotary_mul,
    "_npu_moe_token_unpermute": sampled("npu_moe_token_unpermute"),
    "npu_convert_weight_to_int4pack": int4_pack,
    "npu_weight_quant_batchmatmul": int4_product,
    "npu_mm_all_reduce_base": summed_calls.product,
    "npu_moe_distribute_dispatch_v2": dispatch_calls.dispatch,
    "npu_moe_distribute_combine_v2": dispatch_calls.combine,
    "npu_recurrent_gated_delta_rule": delta_rule_calls.recurrent,
    "npu_top_k_top_p": top_k_top_p,
}
RIGHT = DRAWN | {
    name: sampled(name)
    for name in (
        "npu_kv_rmsnorm_rope_cache",
        "npu_transpose_batchmatmul",
        "npu_mla_prolog_v3",
        "npu_rms_norm",
        "npu_add_rms_norm",
        "npu_add_rms_norm_cast",
        "npu_apply_rotary_pos_emb",
        "npu_swiglu",
        "npu_clipped_swiglu",
        "npu_quant_matmul",
        "npu_dynamic_quant",
        "npu_quantize",
        "npu_format_cast",
        "npu_grouped_matmul",
        "npu_moe_gating_top_k",
        "npu_moe_gating_top_k_softmax",
        "npu_moe_gating_top_k_softmax_v2",
        "npu_moe_init_routing_v2",
        "npu_moe_token_unpermute",
        "npu_add_rms_norm_dynamic_quant",
        "npu_dequant_swiglu_quant",
        "npu_grouped_matmul_swiglu_quant_v2",
        "npu_chunk_gated_delta_rule",
        "npu_lightning_indexer",
        "npu_quant_lightning_indexer",
        "npu_sparse_flash_attention",
        "npu_kv_quant_sparse_flash_attention",
        "npu_prefetch",
    )
}
