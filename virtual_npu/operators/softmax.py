"""Compute attention over given keys, in float32 and a few hundred query rows at a time.

Legend: R query rows, M keys, H query heads, K kv heads, D head dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from virtual_npu.operators.spans import FusedAttentionCall

QUERY_ROWS = 256  # query rows computed at a time


def attend(asked: FusedAttentionCall, lse: Tensor | None) -> Tensor:
    """Return the output as [T, H, V] or [Q, S, H, V]; fills `lse` [T, H, 1] or [Q, S, H, 1]."""
    query, value = asked.query, asked.value
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    sink = asked.call["learnable_sink"]
    for sequence, (keys, values) in zip(asked.sequences, asked.read):
        rows = asked.queries(asked.full_query, sequence).float()
        keys, values = keys.float(), values.float()
        for some, seen, mask in asked.chunks(sequence, QUERY_ROWS):
            result, weight = softmax_attention(
                rows[some],
                keys[seen],
                values[seen],
                float(asked.call["softmax_scale"]),
                mask,
                None if sink is None else sink.float(),
                want_lse=lse is not None,
            )
            asked.queries(out, sequence)[some] = result.to(query.dtype)
            if lse is not None:
                asked.queries(lse, sequence)[some] = weight[..., None]
    return out


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    sink: Tensor | None = None,
    *,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute attention of [R, H, D] over [M, K, D] and [M, K, V].

    Returns [R, H, V], and the log of the sum of exponents [R, H], which is valid only with `want_lse`. `mask`
    [R, M] is true where a key is seen; a row that sees none becomes zero. `sink` [H] is an additional score
    of each row, without a value.
    """
    rows, heads = query.shape[:2]
    if not key.shape[0]:
        return query.new_zeros(rows, heads, value.shape[-1]), query.new_full((rows, heads), torch.inf)
    blind = None if mask is None or bool(mask.any(1).all()) else ~mask.any(1)
    if sink is None and not want_lse and blind is None:
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            mask,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1), query.new_empty(0)
    grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    scores = torch.einsum("rkgd,mkd->rkgm", grouped, key).mul_(scale)
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None], -torch.inf)
    parts = scores
    if sink is not None:
        parts = torch.cat([scores, sink.view(1, key.shape[1], -1, 1).expand(rows, -1, -1, 1)], -1)
    lse = torch.logsumexp(parts, -1, keepdim=True)
    weights = torch.exp(scores - lse)
    out = torch.einsum("rkgm,mkv->rkgv", weights, value).flatten(1, 2)
    if blind is not None:
        out[blind] = 0
    lse = lse.flatten(1)
    return out, lse if blind is None else lse.masked_fill(blind[:, None], torch.inf)


def uniform(asked: FusedAttentionCall) -> Tensor:
    """Return what TND with sparse_mode 0 and no mask computes: the mean of values (vllm-ascend #13699)."""
    out = torch.zeros(*asked.query.shape[:-1], asked.value.shape[-1], dtype=asked.query.dtype)
    for sequence, (_, values) in zip(asked.sequences, asked.read):
        mean = values.float().mean(0).to(out.dtype)
        asked.queries(out, sequence)[:] = mean.repeat_interleave(asked.num_heads // asked.num_kv_heads, 0)
    return out


def forget_past(mask: Tensor, position: int) -> Tensor:
    """Return a mask as a 910B applies it in sparse_mode 0: it hides nothing past a position (#15503)."""
    mask = mask.clone()
    mask[..., position:] = 0
    return mask
