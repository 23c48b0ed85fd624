"""Draw the calls that an engine makes, for comparison with a device.

A sample has the operator, its arguments on the CPU, and how close its results must be to the contract's. It
is drawn from a seed.

Legend: T tokens, S sequences, H query heads, K kv heads, D head dim, P pages, B tokens a page,
C = K * D / 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from virtual_npu.operators import operator as contract_of
from virtual_npu.operators.sparse import packed
from virtual_npu.simulated_products import A2, A5, Product

T = TypeVar("T")


class RandomInputs:
    """Random numbers and tensors of one call; successive seeds take the product's dtypes in turn."""

    def __init__(self, seed: int, product: Product) -> None:
        self.generator, self.product = torch.Generator().manual_seed(seed), product
        self.dtype = product.dtypes[::-1][seed % len(product.dtypes)]

    def number(self, least: int, most: int) -> int:
        """Draw an integer from least to most, both included."""
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def one(self, *values: T) -> T:
        """Choose one of the values."""
        return values[self.number(0, len(values) - 1)]

    def tensor(self, *shape: int) -> Tensor:
        """Draw normally distributed numbers in the call's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def int8(self, *shape: int) -> Tensor:
        """Draw int8 numbers, never -128."""
        return torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)

    def int4(self, *shape: int) -> Tensor:
        """Draw numbers of 4 bits, each in an int32."""
        return torch.randint(-8, 8, shape, generator=self.generator, dtype=torch.int32)

    def scale(self, *shape: int) -> Tensor:
        """Draw positive float32 numbers."""
        return 0.001 + 0.01 * torch.rand(*shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        """Return the numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator)

    def page_table(self, counts: list[int]) -> Tensor:
        """Draw `counts` pages for each sequence, shuffled, without page 0. int32 [S, pages]"""
        pages = (1 + self.order(sum(counts))).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        return table


def _int4_product(draw: RandomInputs) -> dict[str, Any]:
    """Draw scales by group or by column; the weight is drawn as numbers, which the device packs."""
    tokens, inputs, outputs = draw.number(1, 200), draw.one(64, 512, 4000), draw.one(32, 256)
    size = draw.one(0, 32, 128) if inputs > 128 else 0
    scale = draw.scale(-(-inputs // size) if size else 1, outputs).to(draw.dtype)
    bias = draw.one(None, draw.tensor(outputs))
    return {
        "x": draw.tensor(tokens, inputs),
        "weight": draw.int4(inputs, outputs),
        "antiquant_scale": scale,
        "antiquant_offset": draw.one(None, draw.int4(*scale.shape).to(draw.dtype)),
        "bias": bias if bias is None or draw.dtype == torch.float16 else bias.float(),
        "antiquant_group_size": size,
    }


LATENT, ROPE, HEAD = 512, 64, 128


def _latent_attention(draw: RandomInputs) -> dict[str, Any]:
    """Draw short spans on latents over shuffled pages, or long spans with separate keys for each head."""
    return draw.one(_absorbed, _expanded)(draw)


def _absorbed(draw: RandomInputs) -> dict[str, Any]:
    heads, page_size = draw.one(1, 4, 16, 128), draw.one(16, 128)
    most = draw.one(1, 16)
    lens = [(draw.number(1, most), draw.number(0, 700)) for _ in range(draw.number(1, 6))]
    kv_lens = [count + before for count, before in lens]
    counts = [-(-length // page_size) for length in kv_lens]
    ends = torch.tensor([count for count, _ in lens]).cumsum(0).tolist()
    latents = draw.tensor(1 + sum(counts), page_size, LATENT)
    return _shared(draw, ends, kv_lens, heads, most == 1) | {
        "query": draw.tensor(ends[-1], heads, LATENT),
        "key": latents,
        "value": latents,
        "query_rope": draw.tensor(ends[-1], heads, ROPE),
        "key_rope": draw.tensor(1 + sum(counts), page_size, ROPE),
        "block_table": draw.page_table(counts),
        "num_key_value_heads": 1,
        "block_size": page_size,
        # Scores of 512 random numbers would be too large without the factor.
        "scale": (HEAD + ROPE) ** -0.5 / 4,
    }


def _expanded(draw: RandomInputs) -> dict[str, Any]:
    heads, lens = draw.one(1, 4, 16), [draw.number(17, 200) for _ in range(draw.number(1, 4))]
    kv_lens = [count + draw.one(0, draw.number(1, 300)) for count in lens]
    ends, kv_ends = (torch.tensor(each).cumsum(0).tolist() for each in (lens, kv_lens))
    return _shared(draw, ends, kv_ends, heads, False) | {
        "query": draw.tensor(ends[-1], heads, HEAD),
        "key": draw.tensor(kv_ends[-1], heads, HEAD),
        "value": draw.tensor(kv_ends[-1], heads, HEAD),
        "query_rope": draw.tensor(ends[-1], heads, ROPE),
        "key_rope": draw.tensor(kv_ends[-1], heads, ROPE),
        "num_key_value_heads": heads,
        "scale": (HEAD + ROPE) ** -0.5,
    }


def _shared(
    draw: RandomInputs, ends: list[int], kv_lens: list[int], heads: int, is_decodes: bool
) -> dict[str, Any]:
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
    seen = {"sparse_mode": 0} if is_decodes else {"sparse_mode": 3, "atten_mask": mask}
    return seen | {
        "actual_seq_lengths": ends,
        "actual_seq_lengths_kv": kv_lens,
        "num_heads": heads,
        "input_layout": "TND",
    }


def _latent_write(draw: RandomInputs) -> dict[str, Any]:
    """Draw latents to be normed and rope keys to be rotated, for cache places in any order."""
    tokens, page_size = draw.one(draw.number(1, 20), draw.number(20, 300)), draw.one(16, 128)
    num_pages = 20 + tokens // page_size
    angles = 10 * torch.rand(tokens, ROPE // 2, generator=draw.generator)
    lead = (tokens, 1, 1) if tokens <= num_pages else (1, 1, tokens)  # each row a sequence, or all of one
    both = torch.cat([angles, angles], -1).view(*lead, ROPE)
    return {
        "kv": draw.tensor(*lead, LATENT + ROPE),
        "gamma": draw.tensor(LATENT),
        "cos": both.cos().to(draw.dtype),
        "sin": both.sin().to(draw.dtype),
        "index": draw.order(num_pages * page_size)[:tokens],
        "k_cache": draw.tensor(num_pages, page_size, 1, ROPE),
        "ckv_cache": draw.tensor(num_pages, page_size, 1, LATENT),
        "epsilon": 1e-6,
        "cache_mode": "PA",
    }


def _latent_product(draw: RandomInputs) -> dict[str, Any]:
    """Draw a product that maps queries into the latent space, or results out of it."""
    heads, (inputs, outputs) = draw.one(1, 4, 16, 64), draw.one((HEAD, LATENT), (LATENT, HEAD))
    return {
        "input": draw.tensor(draw.number(1, 200), heads, inputs),
        "weight": (draw.tensor(heads, inputs, outputs).float() / 16).to(draw.dtype),
        "perm_x1": [1, 0, 2],
        "perm_y": [1, 0, 2],
    }


def _latent_prolog(draw: RandomInputs) -> dict[str, Any]:
    """Draw the fused prolog of one device's heads, in bfloat16 only, with bfloat16 or int8 weights."""
    draw.dtype = torch.bfloat16
    tokens, heads, page_size = draw.number(1, 40), draw.one(1, 4, 8), draw.one(16, 128)
    hidden, compressed, in_int8 = draw.one(1024, 2048), 1536, draw.one(False, True)
    num_pages = 2 + tokens // page_size
    angles = 10 * torch.rand(tokens, ROPE // 2, generator=draw.generator)
    both = torch.cat([angles, angles], -1)
    made: dict[str, Any] = {
        "token_x": draw.int8(tokens, hidden) if in_int8 else draw.tensor(tokens, hidden),
        "weight_uk": draw.tensor(heads, HEAD, LATENT) / HEAD**0.5,
        "rmsnorm_gamma_cq": draw.tensor(compressed),
        "rmsnorm_gamma_ckv": draw.tensor(LATENT),
        "rope_sin": both.sin().bfloat16(),
        "rope_cos": both.cos().bfloat16(),
        "kv_cache": draw.tensor(num_pages, page_size, 1, LATENT),
        "kr_cache": draw.tensor(num_pages, page_size, 1, ROPE),
        "cache_index": draw.order(num_pages * page_size)[:tokens],
        "rmsnorm_epsilon_cq": 1e-6,
        "rmsnorm_epsilon_ckv": 1e-6,
        "weight_quant_mode": 2 if in_int8 else 0,
        "query_norm_flag": draw.one(False, True),
    }
    sides = {
        "dq": (hidden, compressed),
        "uq_qr": (compressed, heads * (HEAD + ROPE)),
        "dkv_kr": (hidden, LATENT + ROPE),
    }
    for name, (inputs, outputs) in sides.items():
        made[f"weight_{name}"] = draw.int8(inputs, outputs)
        if in_int8:
            made[f"dequant_scale_w_{name}"] = draw.scale(1, outputs) / inputs**0.5
        else:
            made[f"weight_{name}"] = draw.tensor(inputs, outputs) / inputs**0.5
    return made | ({"dequant_scale_x": draw.scale(tokens, 1)} if in_int8 else {})


INDEX_WIDTH, MOST_APART = 128, 256  # whole numbers up to 256 are exact in bfloat16


def _paged_spans(draw: RandomInputs, keys: str) -> tuple[list[int], Tensor, dict[str, Any]]:
    """Draw spans over shuffled pages.

    Returns the keys that each query token sees, a number for each place of the pages [P, B], which differ
    within a request, and the arguments that all operators of sparse attention take.
    """
    page_size, lens = draw.one(16, 128), [draw.number(1, MOST_APART) for _ in range(draw.number(1, 3))]
    counts = [draw.one(1, draw.number(1, min(each, 20))) for each in lens]
    table = draw.page_table([-(-each // page_size) for each in lens])
    places = torch.zeros(int(table.max()) + 1, page_size)
    for row in table:
        pages = row[row > 0].long()
        places[pages] = (1 + draw.order(MOST_APART).float())[: len(pages) * page_size].view(-1, page_size)
    seen = [length - count + at + 1 for length, count in zip(lens, counts) for at in range(count)]
    made = {
        "actual_seq_lengths_query": torch.tensor(counts).cumsum(0).int(),
        f"actual_seq_lengths_{keys}": torch.tensor(lens, dtype=torch.int32),
        "block_table": table,
        "layout_query": "TND",
        f"layout_{keys}": "PA_BSND",
        "sparse_mode": 3,
    }
    return seen, places, made


def _indexer(draw: RandomInputs) -> dict[str, Any]:
    """Draw keys along one direction, so far apart that rounding changes no order of their scores."""
    seen, places, made = _paged_spans(draw, "key")
    heads, direction = draw.one(16, 32, 64), draw.tensor(INDEX_WIDTH).sign()
    weights = 0.5 + torch.rand(len(seen), heads, generator=draw.generator)
    return made | {
        "query": direction.expand(len(seen), heads, -1).contiguous(),
        "key": (places[..., None, None] * direction.float()).to(draw.dtype),
        "weights": weights.to(draw.dtype),
        "sparse_count": draw.one(16, 2048),
    }


def _int8_indexer(draw: RandomInputs) -> dict[str, Any]:
    """Draw keys that differ in their scales alone."""
    seen, places, made = _paged_spans(draw, "key")
    heads, direction = draw.one(16, 32, 64), draw.int8(INDEX_WIDTH)
    weights, scales = (0.5 + torch.rand(len(seen), heads, generator=draw.generator) for _ in range(2))
    return made | {
        "query": direction.expand(len(seen), heads, -1).contiguous(),
        "key": direction.expand(*places.shape, 1, -1).contiguous(),
        "weights": weights.half(),
        "query_dequant_scale": scales.half(),
        "key_dequant_scale": (places / MOST_APART)[..., None].half(),
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "sparse_count": draw.one(16, 2048),
    }


def _sparse_attention(draw: RandomInputs) -> dict[str, Any]:
    """Draw positions in any order, up to each query token's own, fewer than all of them or not."""
    seen, places, made = _paged_spans(draw, "kv")
    heads, count = draw.one(1, 4, 16), draw.one(16, 300)
    indices = torch.full((len(seen), 1, count), -1, dtype=torch.int32)
    for row, keys in zip(indices[:, 0], seen):
        row[: min(keys, count)] = draw.order(keys)[:count].int()
    latents = draw.tensor(*places.shape, 1, LATENT)
    return made | {
        "query": draw.tensor(len(seen), heads, LATENT),
        "query_rope": draw.tensor(len(seen), heads, ROPE),
        "key": latents,
        "value": latents,
        "key_rope": draw.tensor(*places.shape, 1, ROPE),
        "sparse_indices": indices,
        "scale_value": (HEAD + ROPE) ** -0.5 / 4,
        "attention_mode": 2,
    }


def _int8_sparse_attention(draw: RandomInputs) -> dict[str, Any]:
    """Draw rows of int8 latents with their scales, in bfloat16 only."""
    draw.dtype = torch.bfloat16
    made = _sparse_attention(draw)
    ropes = made.pop("query_rope"), made.pop("key_rope")
    rows = packed(made["key"], ropes[1])
    modes = {"key_quant_mode": 2, "value_quant_mode": 2}
    return made | modes | {"query": torch.cat((made["query"], ropes[0]), -1), "key": rows, "value": rows}


def _gating(draw: RandomInputs) -> dict[str, Any]:
    """Draw scores so far apart that rounding does not change their order."""
    tokens, experts = draw.number(1, 200), draw.one(8, 64, 128)
    scores = torch.stack([draw.order(experts) for _ in range(tokens)]).float() / 4
    return {"x": scores, "k": draw.one(1, 2, 8)}


def _divided_gating(draw: RandomInputs) -> dict[str, Any]:
    return _gating(draw) | {"renorm": draw.one(0, 1)}


def _gating_in_groups(draw: RandomInputs) -> dict[str, Any]:
    """Draw gating in groups, as of DeepSeek-V3 or V2, with scores too far apart for rounding to matter."""
    tokens, groups, size = draw.number(1, 200), draw.one(1, 8), draw.one(16, 32)
    experts = groups * size
    scores = torch.stack([draw.order(experts) for _ in range(tokens)]).float() * (12.0 / experts) - 6
    by_sigmoid = draw.one(0, 1)
    return {
        "x": scores,
        "k": draw.one(6, 8),
        "bias": draw.one(None, torch.zeros(experts)) if by_sigmoid else None,
        "k_group": draw.one(1, max(1, groups // 2)),
        "group_count": groups,
        "group_select_mode": by_sigmoid,
        "norm_type": by_sigmoid,
    }


def _routing(draw: RandomInputs) -> dict[str, Any]:
    """Draw tokens that each choose several of many experts."""
    tokens, chosen, experts = draw.number(1, 200), draw.one(1, 2, 8), draw.one(8, 64, 128)
    return {
        "x": draw.tensor(tokens, draw.one(64, 2048)),
        "expert_idx": torch.stack([draw.order(experts)[:chosen] for _ in range(tokens)]).int(),
        "active_num": tokens * chosen,
        "expert_num": experts,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, experts],
        "quant_mode": -1 if draw.product is A5 else draw.one(-1, 1),
    }


def _combining(draw: RandomInputs) -> dict[str, Any]:
    """Draw rows in any order, with a weight for each."""
    tokens, chosen = draw.number(1, 200), draw.one(1, 2, 8)
    return {
        "permuted_tokens": draw.tensor(tokens * chosen, draw.one(64, 2048)),
        "sorted_indices": draw.order(tokens * chosen).int(),
        "probs": torch.rand(tokens, chosen, generator=draw.generator).to(draw.dtype),
    }


def _expert_products(draw: RandomInputs) -> dict[str, Any]:
    """Draw rows of experts, some of which have none; some draws have biases, some have 4-bit weights."""
    counts = torch.tensor([draw.one(0, draw.number(1, 40)) for _ in range(draw.one(8, 64))] + [1])
    inputs, width = draw.one(64, 512), draw.one(64, 256)
    weight, more = draw.tensor(len(counts), inputs, width), {}
    if draw.one(True, False):
        bias = draw.tensor(len(counts), width)
        more["bias"] = [bias if draw.dtype == torch.float16 else bias.float()]
    if draw.one(True, False) and draw.product is not A5:  # no operator here packs 4-bit weights on the 950
        groups = draw.one((), (inputs // 32,))
        weight = draw.int4(len(counts), inputs, width)
        more["antiquant_scale"] = [draw.scale(len(counts), *groups, width).to(draw.dtype)]
        more["antiquant_offset"] = [draw.int4(len(counts), *groups, width).to(draw.dtype)]
    return more | {
        "x": [draw.tensor(int(counts.sum()), inputs)],
        "weight": [weight],
        "split_item": 2,
        "group_type": 0,
        "group_list": counts,
        "group_list_type": 1,
    }


def _int8_expert_products(draw: RandomInputs) -> dict[str, Any]:
    """Draw int8 rows of experts, whose weights are int8, or 4 bits with what the split of a row takes away.

    Weights in 4 bits are drawn as numbers, which are paired as a checkpoint's are.
    """
    counts = torch.tensor([draw.one(0, draw.number(1, 40)) for _ in range(draw.one(8, 64))] + [1])
    inputs, width, rows = draw.one(64, 512), draw.one(64, 256), int(counts.sum())
    experts = len(counts)
    scale, beside = draw.scale(experts, width), dict[str, Any]()
    if draw.one(True, False):
        weight = draw.int4(experts, inputs, width)
        beside["bias"] = [8 * weight.sum(1) * scale]
        bits = scale.view(torch.int32).long()
        beside["scale"] = [draw.one(bits, bits[:, None])]
    else:
        weight = draw.int8(experts, inputs, width)
        beside["scale"] = [scale if draw.dtype == torch.float16 else scale.to(draw.dtype)]
    beside |= {"per_token_scale": [draw.scale(rows)], "output_dtype": draw.dtype}
    if weight.dtype == torch.int8 and draw.one(True, False):  # scaled by the operator after it
        beside = {"output_dtype": torch.int32}
    return beside | {
        "x": [draw.int8(rows, inputs)],
        "weight": [weight],
        "split_item": 2,
        "group_type": 0,
        "group_list": counts,
        "group_list_type": 1,
    }


MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)  # the mask of sparse_mode 3 and 4
LATENT_PRODUCTS = contract_of("npu_kv_rmsnorm_rope_cache").products
ATB_MASK = MASK.half() * -10000  # splitfuse adds it to the scores
FRACTAL_NZ = 29  # the format in which the matrix unit reads a weight
NEAR = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-3, torch.int8: 1.0}
SAME = {torch.int32: 0.0, torch.int64: 0.0, torch.bool: 0.0}


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A call that the contract admits on a product."""

    operator: str  # the name in torch_npu
    product: Product
    arguments: Mapping[str, Any]
    results: tuple[int, ...] | None  # results that an engine uses; None: all
    written: tuple[str, ...]  # arguments that the operator fills
    tiled: tuple[str, ...]  # arguments that have the FRACTAL_NZ format on the device
    packed: tuple[str, ...]  # arguments that the device packs to 4 bits, in an order that no document states
    may_move: bool  # results may differ in their last bits; otherwise they are bits that are only copied
    in_any_order: bool = False  # the numbers of a row of a result may come in any order

    def near(self, dtype: torch.dtype) -> float:
        """Return how far a result of this dtype may be from the reference, absolutely and relative to it."""
        return (NEAR | SAME)[dtype] if self.may_move else 0.0


def _attention(draw: RandomInputs) -> dict[str, Any]:
    made = draw.one(_by_heads, _by_heads, _latent_attention)(draw)
    return made if draw.product in LATENT_PRODUCTS else _by_heads(draw)


def _by_heads(draw: RandomInputs) -> dict[str, Any]:
    """Draw a packed batch of decodes, chunks and prompts over shuffled pages."""
    num_kv_heads, dim, page_size = draw.one(1, 2, 4), draw.one(64, 128), draw.one(16, 64, 128)
    page_size = 128 if draw.product is A5 else page_size
    num_heads = num_kv_heads * draw.one(1, 2, 4, 7)
    lens = []
    for _ in range(draw.number(1, 6)):
        computed = draw.one(0, draw.number(1, 700))
        count = draw.one(1, 1, draw.number(1, 200))
        lens.append((count, computed + count))
    if not draw.product.mixed_spans:
        lens = [each for each in lens if each[0] > 1] or lens
    counts = [-(-kv // page_size) for _, kv in lens]
    table = draw.page_table(counts)
    ends = torch.tensor([count for count, _ in lens]).cumsum(0)
    window = draw.one(None, draw.number(1, 300))
    arguments = {
        "query": draw.tensor(int(ends[-1]), num_heads, dim),
        "key": draw.tensor(1 + sum(counts), page_size, num_kv_heads * dim),
        "value": draw.tensor(1 + sum(counts), page_size, num_kv_heads * dim),
        "atten_mask": MASK,
        "actual_seq_lengths": ends.tolist(),
        "actual_seq_lengths_kv": [kv for _, kv in lens],
        "block_table": table,
        "num_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "scale": dim**-0.5,
        "input_layout": "TND",
        "block_size": page_size,
        "sparse_mode": 3,
    }
    if window is not None:
        arguments |= {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    return arguments


def _with_sinks(draw: RandomInputs) -> dict[str, Any]:
    """Draw a packed batch for the second version, which alone takes sinks, in bfloat16 only."""
    draw.dtype = torch.bfloat16
    said = {first: second for second, first in contract_of("npu_fused_infer_attention_score").names.items()}
    made = {said.get(name, name): value for name, value in _by_heads(draw).items()}
    return made | {"learnable_sink": draw.tensor(made["num_query_heads"])}


def _atb_decodes(draw: RandomInputs) -> dict[str, Any]:
    """Draw one query for each sequence over shuffled pages, each page in columns of 16."""
    return _atb(draw, [1] * draw.number(1, 6))


def _atb_spans(draw: RandomInputs) -> dict[str, Any]:
    """Draw decodes, chunks and prompts over pages in columns of 16."""
    lens = [draw.one(1, draw.number(1, 200)) for _ in range(draw.number(1, 6))]
    return _atb(draw, lens) | {"seq_len": torch.tensor(lens, dtype=torch.int32), "mask": ATB_MASK}


def _atb(draw: RandomInputs, lens: list[int]) -> dict[str, Any]:
    num_kv_heads, dim, page_size = draw.one(1, 2, 4), draw.one(64, 128), draw.one(64, 128)
    num_heads = num_kv_heads * draw.one(1, 2, 4)
    context = [count + draw.one(0, draw.number(1, 700)) for count in lens]
    counts = [-(-length // page_size) for length in context]
    pages = (1 + sum(counts), num_kv_heads * dim // 16, page_size, 16)
    query = draw.tensor(sum(lens), num_heads, dim)
    return {
        "query": query,
        "key_cache": draw.tensor(*pages),
        "value_cache": draw.tensor(*pages),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_heads,
        "scale_value": dim**-0.5,
        "block_table": draw.page_table(counts),
        "context_lens": torch.tensor(context, dtype=torch.int32),
        "out": torch.zeros_like(query),
    }


def _atb_write(draw: RandomInputs) -> dict[str, Any]:
    """Draw the call of `_write` for pages [P, C, B, 16]."""
    made = _write(draw)
    del made["cache_mode"]
    for name in ("key_cache", "value_cache"):
        num_pages, page_size, heads, dim = made[name].shape
        made[name] = draw.tensor(num_pages, heads * dim // 16, page_size, 16)
    return made | {"slot_indices": made.pop("slot_mapping")}


def _write(draw: RandomInputs) -> dict[str, Any]:
    tokens, heads, dim, page_size = (
        draw.number(1, 300),
        draw.one(1, 2, 8),
        draw.one(64, 128),
        draw.one(*draw.product.page_sizes or (16, 128)),
    )
    num_pages = 2 + tokens // page_size
    return {
        "key": draw.tensor(tokens, heads, dim),
        "value": draw.tensor(tokens, heads, dim),
        "key_cache": draw.tensor(num_pages, page_size, heads, dim),
        "value_cache": draw.tensor(num_pages, page_size, heads, dim),
        "slot_mapping": draw.order(num_pages * page_size)[:tokens].int(),
        "cache_mode": "Norm",
    }


def _norm(draw: RandomInputs) -> dict[str, Any]:
    width = draw.one(64, 128, 1024, 4096)
    return {"input": draw.tensor(draw.number(1, 200), width), "gamma": draw.tensor(width), "epsilon": 1e-6}


def _add_norm(draw: RandomInputs) -> dict[str, Any]:
    width, tokens = draw.one(64, 1024, 4096), draw.number(1, 200)
    return {
        "x1": draw.tensor(tokens, width),
        "x2": draw.tensor(tokens, width),
        "gamma": draw.tensor(width),
        "epsilon": 1e-6,
    }


def _joined_heads(draw: RandomInputs) -> dict[str, Any]:
    """Draw a call that skips every token, as an engine's do, or one that writes them."""
    tokens, kv_heads = draw.number(1, 200), draw.one(1, 4, 8)
    heads, angles = kv_heads * draw.one(1, 4), _angles(draw, tokens, 128)
    skips = torch.full((tokens,), -1)
    return {
        "qkv": draw.tensor(tokens, (heads + 2 * kv_heads) * 128),
        "q_gamma": draw.tensor(128),
        "k_gamma": draw.tensor(128),
        "cos": angles.cos().to(draw.dtype),
        "sin": angles.sin().to(draw.dtype),
        "index": draw.one(skips, draw.order(256)[:tokens]),
        "q_out": draw.tensor(tokens, heads * 128),
        "k_cache": draw.tensor(1, kv_heads * 8, 256, 16),
        "v_cache": draw.tensor(1, kv_heads * 8, 256, 16),
        "qkv_size": [1, tokens, heads + 2 * kv_heads, 128],
        "head_nums": [heads, kv_heads, kv_heads],
        "epsilon": 1e-6,
        "cache_mode": "PA_NZ",
        "is_output_qkv": True,
    }


def _delta_rule(draw: RandomInputs, lens: list[int], most_heads: int, widths: int) -> dict[str, Any]:
    """Draw what both operators of the delta rule take, which is bfloat16 alone."""
    draw.dtype = torch.bfloat16
    tokens, key_heads = sum(lens), draw.one(1, 4, most_heads // 4)
    heads, key_width, width = key_heads * draw.one(1, 2, 4), draw.one(128, widths), draw.one(128, widths)

    def direction() -> Tensor:
        drawn = draw.tensor(tokens, key_heads, key_width).float()
        return torch.nn.functional.normalize(drawn, dim=-1).to(draw.dtype)

    return {
        "query": direction(),
        "key": direction(),
        "value": draw.tensor(tokens, heads, width),
        "beta": torch.rand(tokens, heads, generator=draw.generator).to(draw.dtype),
        "scale": key_width**-0.5,
        "actual_seq_lengths": torch.tensor(lens, dtype=torch.int32),
        "g": -torch.rand(tokens, heads, generator=draw.generator),
    }


def _recurrent_rule(draw: RandomInputs) -> dict[str, Any]:
    """Draw decodes, whose states lie anywhere."""
    made = _delta_rule(draw, [1] * draw.number(1, 32), 16, 64)
    tokens, heads, width = made["value"].shape
    return made | {
        "state": draw.tensor(tokens + 4, heads, width, made["key"].shape[2]),
        "ssm_state_indices": draw.order(tokens + 4)[:tokens].int(),
    }


def _chunk_rule(draw: RandomInputs) -> dict[str, Any]:
    """Draw spans of prompts, some of which go on from a state."""
    lens = [draw.number(1, 200) for _ in range(draw.number(1, 4))]
    made = _delta_rule(draw, lens, 16, 128)
    initial = draw.tensor(len(lens), made["value"].shape[1], 128, 128)
    return made | {"initial_state": draw.one(initial, torch.zeros_like(initial))}


def _angles(draw: RandomInputs, tokens: int, dim: int) -> Tensor:
    """Draw angles [T, D], whose halves are alike."""
    angles = 10 * torch.rand(tokens, dim // 2, generator=draw.generator)
    return torch.cat([angles, angles], -1)


def _rotary(draw: RandomInputs) -> dict[str, Any]:
    tokens, dim, kv_heads = draw.number(1, 200), draw.one(64, 128), draw.one(1, 2, 8)
    both = _angles(draw, tokens, dim)[:, None]
    return {
        "query": draw.tensor(tokens, kv_heads * draw.one(1, 2, 4), dim),
        "key": draw.tensor(tokens, kv_heads, dim),
        "cos": both.cos().to(draw.dtype),
        "sin": both.sin().to(draw.dtype),
        "layout": "TND",
        "rotary_mode": "half",
    }


def _rotary_mul(draw: RandomInputs) -> dict[str, Any]:
    made = _rotary(draw)
    return {"input": made["query"], "r1": made["cos"], "r2": made["sin"]}


def _swiglu(draw: RandomInputs) -> dict[str, Any]:
    return {"input": draw.tensor(draw.number(1, 200), 2 * draw.one(96, 512, 11008)), "dim": -1}


def _clipped_swiglu(draw: RandomInputs) -> dict[str, Any]:
    # The factor takes many of the values beyond the limit.
    gate_up = draw.tensor(draw.number(1, 200), 2 * draw.one(96, 512, 2880)) * 8
    return {"x": gate_up, "interleaved": False, "alpha": 1.702, "limit": 7.0, "bias": 1.0}


def _grouped_matmul(draw: RandomInputs) -> dict[str, Any]:
    kinds = [_products_of_their_own, _expert_products]
    # The engine multiplies no int8 on the 950
    return draw.one(*kinds, *([] if draw.product is A5 else [_int8_expert_products] * 2))(draw)


def _products_of_their_own(draw: RandomInputs) -> dict[str, Any]:
    tokens, inputs = draw.number(1, 200), draw.one(64, 512, 4096)
    widths = draw.one((256, 64, 64), (128, 128, 128))
    bias = draw.one(None, [draw.tensor(width) for width in widths])
    if bias is not None and draw.dtype != torch.float16:
        bias = [each.float() for each in bias]
    return {
        "x": [draw.tensor(tokens, inputs)] * len(widths),
        "weight": [draw.tensor(inputs, width) for width in widths],
        "bias": bias,
        "split_item": 0,
        "group_type": -1,
    }


def _dynamic_quant(draw: RandomInputs) -> dict[str, Any]:
    return {"input": draw.tensor(draw.number(1, 200), draw.one(64, 512, 4096))}


def _static_quant(draw: RandomInputs) -> dict[str, Any]:
    inputs = draw.one(64, 512, 4096)
    offset = torch.full((inputs,), draw.number(-20, 20), dtype=draw.dtype)
    inverse = torch.full((inputs,), draw.number(10, 60), dtype=draw.dtype)
    x = draw.tensor(draw.number(1, 200), inputs)
    return {
        "input": x,
        "scales": inverse,
        "zero_points": offset,
        "dtype": torch.qint8,
        "axis": -1,
        "div_mode": False,
    }


def _quant_matmul(draw: RandomInputs) -> dict[str, Any]:
    tokens, inputs, outputs = draw.number(1, 200), draw.one(64, 512, 4096), draw.one(32, 256)
    return {
        "x1": draw.int8(tokens, inputs),
        "x2": draw.int8(inputs, outputs),
        "scale": draw.scale(outputs),
        "pertoken_scale": draw.scale(tokens),
        "bias": draw.one(None, draw.tensor(outputs).float()),
        "output_dtype": draw.dtype,
    }


def _static_product(draw: RandomInputs) -> dict[str, Any]:
    """Draw a product of rows that share a scale, whose weight is read transposed."""
    tokens, inputs, outputs = draw.number(1, 200), draw.one(64, 512, 4096), draw.one(32, 256)
    return {
        "x1": draw.int8(tokens, inputs),
        "x2": draw.int8(outputs, inputs).t(),
        "scale": draw.scale(outputs).view(torch.int32).long(),
        "bias": draw.int8(outputs).int() * 100,
        "output_dtype": draw.dtype,
    }


def _gated_products(draw: RandomInputs) -> dict[str, Any]:
    experts, rows = draw.number(1, 16), draw.number(1, 200)
    inputs, width = draw.one(64, 512), 2 * draw.one(96, 768, 5120)
    made = draw.order(experts * rows)[:rows] % experts  # the expert of each row
    return {
        "x": draw.int8(rows, inputs),
        "weight": [draw.int8(experts, inputs, width)],
        "weight_scale": [draw.scale(experts, width)],
        "x_scale": draw.scale(rows),
        "group_list": made.bincount(minlength=experts),
        "group_list_type": 1,
    }


def _add_norm_quant(draw: RandomInputs) -> dict[str, Any]:
    return _add_norm(draw) | {"output_mask": [True, False]}


def _swiglu_quant(draw: RandomInputs) -> dict[str, Any]:
    tokens, width = draw.number(1, 200), 2 * draw.one(96, 512, 11008)
    return {
        "x": draw.int8(tokens, width).int() * 100,
        "weight_scale": draw.scale(1, width),
        "activation_scale": draw.scale(tokens, 1),
        "activate_left": True,
        "quant_mode": 1,
    }


def _format_cast(draw: RandomInputs) -> dict[str, Any]:
    weight = draw.one(draw.tensor, draw.int8)(draw.one(64, 512), draw.one(96, 1024))
    return {"input": weight, "acl_format": FRACTAL_NZ}


def _prefetch(draw: RandomInputs) -> dict[str, Any]:
    return {"input": draw.tensor(64, 512), "dependency": draw.tensor(4), "max_size": draw.one(100, 2**20)}


Maker = Callable[[RandomInputs], dict[str, Any]]
MAKERS: Mapping[str, Maker] = {
    "npu_fused_infer_attention_score": _attention,
    "npu_fused_infer_attention_score_v2": _with_sinks,
    "npu_scatter_pa_kv_cache": _write,
    "npu_kv_rmsnorm_rope_cache": _latent_write,
    "npu_transpose_batchmatmul": _latent_product,
    "npu_mla_prolog_v3": _latent_prolog,
    "npu_lightning_indexer": _indexer,
    "npu_quant_lightning_indexer": _int8_indexer,
    "npu_sparse_flash_attention": _sparse_attention,
    "npu_kv_quant_sparse_flash_attention": _int8_sparse_attention,
    "npu_rms_norm": _norm,
    "npu_add_rms_norm": _add_norm,
    "npu_add_rms_norm_cast": _add_norm,
    "npu_qkv_rms_norm_rope_cache": _joined_heads,
    "npu_apply_rotary_pos_emb": _rotary,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _swiglu,
    "npu_clipped_swiglu": _clipped_swiglu,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_quantize": _static_quant,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_gating_top_k_softmax": _gating,
    "npu_moe_gating_top_k_softmax_v2": _divided_gating,
    "npu_moe_gating_top_k": _gating_in_groups,
    "npu_moe_init_routing_v2": _routing,
    "npu_moe_token_unpermute": _combining,
    "npu_quant_matmul": _quant_matmul,
    "npu_weight_quant_batchmatmul": _int4_product,
    "npu_add_rms_norm_dynamic_quant": _add_norm_quant,
    "npu_dequant_swiglu_quant": _swiglu_quant,
    "npu_grouped_matmul_swiglu_quant_v2": _gated_products,
    "npu_recurrent_gated_delta_rule": _recurrent_rule,
    "npu_chunk_gated_delta_rule": _chunk_rule,
    "npu_format_cast": _format_cast,
    "npu_prefetch": _prefetch,
}
# ATB's operators replace fused attention and its cache write; a first 910 has none of these operators.
ATB_MAKERS: Mapping[str, Maker] = {
    "_npu_paged_attention": _atb_decodes,
    "_npu_paged_attention_splitfuse_v2": _atb_spans,
    "_npu_reshape_and_cache": _atb_write,
    "npu_rms_norm": _norm,
    "npu_add_rms_norm": _add_norm,
    "npu_apply_rotary_pos_emb": _rotary,
    "npu_swiglu": _swiglu,
    "npu_format_cast": _format_cast,
    "npu_quantize": _static_quant,
    "npu_quant_matmul": _static_product,
}
RESULTS = {
    "npu_fused_infer_attention_score": (0,),
    "npu_fused_infer_attention_score_v2": (0,),
    "npu_kv_rmsnorm_rope_cache": (),  # its caches are arguments
    "npu_mla_prolog_v3": (0, 1, 3, 4),
    "npu_lightning_indexer": (0,),
    "npu_sparse_flash_attention": (0,),
    "npu_rms_norm": (0,),
    "npu_add_rms_norm": (0, 2),
    "npu_add_rms_norm_cast": (0, 1, 3),
    "npu_qkv_rms_norm_rope_cache": (1, 2),
    "npu_add_rms_norm_dynamic_quant": (0, 2, 3),
    "npu_moe_gating_top_k_softmax": (0, 1),
    "npu_moe_gating_top_k_softmax_v2": (0, 1),
    "npu_moe_gating_top_k": (0, 1),
    "npu_moe_init_routing_v2": (0, 1, 2),
}
_CACHES = ("key_cache", "value_cache")
WRITTEN = {
    "npu_scatter_pa_kv_cache": _CACHES,
    "_npu_reshape_and_cache": _CACHES,
    "npu_kv_rmsnorm_rope_cache": ("k_cache", "ckv_cache"),
    "npu_qkv_rms_norm_rope_cache": ("q_out", "k_cache", "v_cache"),
    "npu_mla_prolog_v3": ("kv_cache", "kr_cache"),
    "npu_recurrent_gated_delta_rule": ("state",),
    "npu_prefetch": ("input",),  # the weight must stay as it is
    "_npu_paged_attention": ("out",),
    "_npu_paged_attention_splitfuse_v2": ("out",),
}
TILED = {"npu_mla_prolog_v3": ("weight_dq", "weight_uq_qr", "weight_dkv_kr")}
PACKED = {"npu_weight_quant_batchmatmul": ("weight",)}
UNORDERED = ("npu_lightning_indexer", "npu_quant_lightning_indexer")
COPIES = (
    *("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache", "npu_format_cast"),
    "npu_prefetch",
)


def makers(product: Product) -> Mapping[str, Maker]:
    """Return the functions that draw calls of each operator that an engine uses on a product."""
    chosen = MAKERS if product.fused_attention else ATB_MAKERS
    return {name: maker for name, maker in chosen.items() if product in contract_of(name).products}


def sample_call(operator: str, seed: int, product: Product = A2) -> SampleCall:
    """Draw the call of this operator for a seed; successive seeds take the product's dtypes in turn."""
    return SampleCall(
        operator,
        product,
        makers(product)[operator](RandomInputs(seed, product)),
        RESULTS.get(operator),
        WRITTEN.get(operator, ()),
        _CACHES if product.split_heads else TILED.get(operator, ()),
        PACKED.get(operator, ()),
        operator not in COPIES,
        operator in UNORDERED,
    )
