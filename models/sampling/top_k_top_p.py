"""Which tokens do top-k, top-p and min-p leave, and which of them is drawn?

A row's weights are exp((logit - best logit) / temperature): the best token has weight 1. Every filter is then
a threshold on weights: `top_k` is the k-th largest weight, `min_p` is itself, and `top_p` is the weight at
which the largest weights first sum to that share. All tokens that tie with the threshold are kept, so what a
row keeps does not depend on how a device sorts equals, nor on other rows.

Sources: top-k, Fan et al. 2018 (arXiv 1805.04833); top-p, Holtzman et al. 2019 (1904.09751); min-p, Nguyen
et al. 2024 (2407.01082). They apply in the order of Hugging Face's generate: temperature, top_k, top_p
within those k, min_p.

Legend: R rows, V vocabulary, C tiles of the vocabulary, B tokens of a tile; B = `tile` divides V.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ONE_BITS = 0x3F800000  # float32 1.0 as an integer; the bits of positive floats are in the floats' order


def tile_size(vocab_size: int) -> int:
    """A divisor of the vocabulary, at most 512, so that sums over it take two short steps."""
    return next(size for size in range(512, 0, -1) if vocab_size % size == 0)


def top_k_threshold(weights: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """The weight [R, 1] of the last token that top_k, then top_p within it, keeps.

    weights [R, V]; top_k [R], from 1 to `largest_k` <= V; top_p [R].
    """
    top_k, top_p = top_k[:, None], top_p[:, None]
    best = weights.topk(largest_k, dim=-1).values
    mass = best.cumsum(-1)
    needed = top_p * mass.gather(1, top_k - 1)
    kept = (mass < needed).sum(-1, keepdim=True) + 1
    kept = torch.where(top_p < 1, torch.minimum(kept, top_k), top_k)
    return best.gather(1, kept - 1)


def top_p_threshold(weights: Tensor, top_p: Tensor, tile: int) -> Tensor:
    """The largest weight t [R, 1] such that the tokens of at least t have the share top_p [R] of all."""
    if weights.device.type == "cpu":
        return _by_sorting(weights, top_p, tile)
    return _by_halving(weights, top_p, tile)


def _by_sorting(weights: Tensor, top_p: Tensor, tile: int) -> Tensor:
    # numpy sorts plain floats with vector instructions: 15 to 30 times faster than torch on the CPU
    rising = torch.from_numpy(np.sort(weights.numpy(), axis=1))
    return rising.gather(1, _reach(rising, 1 - top_p[:, None], tile))


def _by_halving(weights: Tensor, top_p: Tensor, tile: int) -> Tensor:
    """Bisect the 2^30 floats from 0 to 1 in thirty passes over the weights, without a sort or a scatter."""
    needed = top_p[:, None] * _total(weights, tile)
    low = torch.zeros_like(needed, dtype=torch.int32)  # tokens from this weight up have enough mass
    high = torch.full_like(low, _ONE_BITS + 1)  # and from this weight up too little
    for _ in range(_ONE_BITS.bit_length()):
        middle = (low + high) >> 1
        mass = _total(torch.where(weights >= middle.view(torch.float32), weights, 0.0), tile)
        enough = mass >= needed
        low = torch.where(enough, middle, low)
        high = torch.where(enough, high, middle)
    return low.view(torch.float32)


def draw(weights: Tensor, uniform: Tensor, best: Tensor, tile: int) -> Tensor:
    """The token [R] at which the running sum of weights [R, V] passes the share uniform [R] of their total.

    A token of weight 0 is never drawn: should rounding lead to one, `best` [R] stands in.
    """
    tokens = _reach(weights, uniform[:, None], tile)
    return torch.where(weights.gather(1, tokens) > 0, tokens, best[:, None])[:, 0]


def _reach(weights: Tensor, share: Tensor, tile: int) -> Tensor:
    """The first index [R, 1] whose running sum exceeds this share [R, 1] of the row's total.

    Only one tile of each row is summed token by token.
    """
    tiles = weights.view(weights.shape[0], -1, tile)  # [R, C, B]
    mass = tiles.sum(-1).cumsum(-1)
    target = share * mass[:, -1:]
    chosen = (mass <= target).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1)
    before = torch.where(chosen > 0, mass.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = tiles.gather(1, chosen[:, :, None].expand(-1, -1, tile))[:, 0].cumsum(-1)
    offset = (inside <= target - before).sum(-1, keepdim=True).clamp(max=tile - 1)
    return chosen * tile + offset


def _total(weights: Tensor, tile: int) -> Tensor:
    """[R, V] -> [R, 1], tile by tile: only where R is 1 would torch split one long sum among threads."""
    return weights.view(weights.shape[0], -1, tile).sum(-1).sum(-1, keepdim=True)
