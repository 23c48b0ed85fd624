"""Filter tokens by top-k, top-p and min-p, and draw one of those that remain.

A row's weights are exp((logit - best logit) / temperature): the best token has weight 1. Every filter is then
a threshold on weights: `top_k` is the k-th largest weight, `min_p` is itself, and `top_p` is the weight at
which the largest weights first sum to that share. All tokens that tie with the threshold are kept, so what a
row keeps depends neither on how a device sorts equal weights nor on other rows.

Sources: top-k, Fan et al. 2018 (arXiv 1805.04833); top-p, Holtzman et al. 2019 (1904.09751); min-p, Nguyen et
al. 2024 (2407.01082). They apply in the order of Hugging Face's generate: temperature, top_k, top_p within
those k, min_p.

Legend: R rows, V vocabulary, C tiles of the vocabulary, B tokens of a tile; B = `tile` divides V.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kv_cache.device.transfer import Arrays, Tensors


def top_k_threshold(weights: Tensor, top_k: Tensor, top_p: Tensor, largest_k: int) -> Tensor:
    """Return the weight [R, 1] of the last token that top_k, then top_p within it, keeps.

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
    """Return the largest weight t [R, 1] such that tokens of at least t have the share top_p [R] of all.

    This is for the CPU, where numpy sorts plain floats with vector instructions, 15 to 30 times faster than
    torch.
    """
    rising = torch.from_numpy(np.sort(weights.numpy(), axis=1))
    return rising.gather(1, _reach(rising, 1 - top_p[:, None], tile))


def sort_parameters(top_k: NDArray[np.int64], top_p: NDArray[np.float32], vocab_size: int) -> Arrays:
    """Return what `thresholds_by_sorting` needs for top_k [R], from 1 to the vocabulary, and top_p [R]."""
    arrays: Arrays = {"excess": 1 - top_p}
    outside = vocab_size - top_k  # number of tokens that top_k drops
    if outside.any():
        places = np.concatenate((outside, np.maximum(outside - 1, 0)))
        arrays |= {"k_places": places, "k_share": np.where((outside > 0) & (top_p < 1), top_p, np.float32(0))}
    return arrays


def thresholds_by_sorting(weights: Tensor, sent: Tensors, tile: int) -> Tensor:
    """Return the weight [R, 1] of the last token that top_k, then top_p within it, keeps; for other devices.

    One sort of weights [R, V] serves both, in few launches: in the running sum over rising weights, what
    top_p drops of the tokens within top_k lies above what top_k drops.
    """
    rising = weights.sort(dim=-1).values
    if "k_places" not in sent:
        return rising.gather(1, _reach(rising, sent["excess"][:, None], tile))
    first, last_dropped = sent["k_places"].view(2, -1, 1)
    mass = _running_sum(rising, tile)
    # Zero if top_p is 1, so that top_k decides alone
    target = mass.gather(1, last_dropped) * sent["k_share"][:, None] + mass[:, -1:] * sent["excess"][:, None]
    kept_from = torch.searchsorted(mass, target, right=True).clamp(max=weights.shape[1] - 1)
    return rising.gather(1, torch.maximum(kept_from, first))


def _running_sum(weights: Tensor, tile: int) -> Tensor:
    """Return the running sums [R, V], tile by tile.

    Torch would split one long sum among threads, but only if R is 1.
    """
    if tile == weights.shape[1]:
        return weights.cumsum(-1)
    tiles = weights.view(weights.shape[0], -1, tile)
    sums = tiles.sum(-1)
    return (tiles.cumsum(-1) + (sums.cumsum(-1) - sums)[:, :, None]).flatten(1)


def draw(weights: Tensor, uniform: Tensor, otherwise: Tensor, tile: int) -> Tensor:
    """Return the token [R] at which the running sum of weights [R, V] passes the share uniform [R] of it.

    A token of weight 0 is never drawn: if rounding leads to one, or a row is not finite, `otherwise` [R]
    takes its place.
    """
    tokens = _reach(weights, uniform[:, None], tile)
    return torch.where(weights.gather(1, tokens) > 0, tokens, otherwise[:, None])[:, 0]


def _reach(weights: Tensor, share: Tensor, tile: int) -> Tensor:
    """Return the first index [R, 1] whose running sum exceeds this share [R, 1] of the row's total.

    With tiles smaller than the vocabulary, only one tile of each row is summed token by token.
    """
    if tile == weights.shape[1]:
        mass = weights.cumsum(-1)
        return torch.searchsorted(mass, share * mass[:, -1:], right=True).clamp(max=tile - 1)
    tiles = weights.view(weights.shape[0], -1, tile)  # [R, C, B]
    mass = tiles.sum(-1).cumsum(-1)
    target = share * mass[:, -1:]
    chosen = (mass <= target).sum(-1, keepdim=True).clamp(max=mass.shape[1] - 1)
    before = torch.where(chosen > 0, mass.gather(1, (chosen - 1).clamp(min=0)), 0.0)
    inside = tiles.gather(1, chosen[:, :, None].expand(-1, -1, tile))[:, 0].cumsum(-1)
    offset = (inside <= target - before).sum(-1, keepdim=True).clamp(max=tile - 1)
    return chosen * tile + offset
