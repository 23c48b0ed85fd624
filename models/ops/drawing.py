"""Draw tokens in plain torch, of those that top-k, top-p and min-p keep.

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


def limits_of(
    top_k: NDArray[np.int64], top_p: NDArray[np.float32], min_p: NDArray[np.float32], vocab_size: int
) -> Arrays:
    """Return the limits of rows for `draw`: top_k [R], from 1 to the vocabulary, top_p [R], and min_p [R].

    "excess" [R] is 1 - top_p. Of "k_places" [2 R] the first R are the numbers of tokens that top_k drops,
    the rest the last of these in rising order; "k_share" [R] is top_p where both are asked for. What limits
    no row is left out.
    """
    arrays: Arrays = {"min_p": min_p} if min_p.any() else {}
    outside = vocab_size - top_k
    if not outside.any() and (top_p == 1).all():
        return arrays
    arrays["excess"] = 1 - top_p
    if outside.any():
        places = np.concatenate((outside, np.maximum(outside - 1, 0)))
        arrays |= {"k_places": places, "k_share": np.where((outside > 0) & (top_p < 1), top_p, np.float32(0))}
    return arrays


def draw(logits: Tensor, best: Tensor, otherwise: Tensor, limits: Tensors, tile: int) -> Tensor:
    """Return a token [R] of each row of logits [R, V], whose largest is at `best` [R].

    It is the first at which the running sum of kept weights passes the share "uniform" [R] of it; weights
    are sharpened by "sharpness" [R], 1 / temperature, and kept by what `limits_of` returned. A token of
    weight 0 is never drawn: if rounding leads to one, or a row is not finite, or not "drawn" [R], its token
    of `otherwise` [R] takes its place.
    """
    weights = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    weights = weights.sub_(weights.gather(1, best[:, None])).mul_(limits["sharpness"][:, None]).exp_()
    least = limits["min_p"][:, None] if "min_p" in limits else None
    if "excess" in limits:
        sorted_out = _thresholds(weights, limits, tile)
        least = sorted_out if least is None else torch.maximum(least, sorted_out)
    if least is not None:
        weights.masked_fill_(weights < least, 0.0)
    tokens = _reach(weights, limits["uniform"][:, None], tile)
    tokens = torch.where(weights.gather(1, tokens) > 0, tokens, otherwise[:, None])[:, 0]
    return tokens if "drawn" not in limits else torch.where(limits["drawn"] > 0, tokens, otherwise)


def _thresholds(weights: Tensor, limits: Tensors, tile: int) -> Tensor:
    """Return the weight [R, 1] of the last token that top_k, then top_p within it, keeps.

    One sort of weights [R, V] serves both, in few launches: in the running sum over rising weights, what
    top_p drops of the tokens within top_k lies above what top_k drops.
    """
    rising = _rising(weights)
    if "k_places" not in limits:
        return rising.gather(1, _reach(rising, limits["excess"][:, None], tile))
    first, last_dropped = limits["k_places"].view(2, -1, 1)
    mass = _running_sum(rising, tile)
    # Zero if top_p is 1, so that top_k decides alone
    target = (
        mass.gather(1, last_dropped) * limits["k_share"][:, None] + mass[:, -1:] * limits["excess"][:, None]
    )
    kept_from = torch.searchsorted(mass, target, right=True).clamp(max=weights.shape[1] - 1)
    return rising.gather(1, torch.maximum(kept_from, first))


def _rising(weights: Tensor) -> Tensor:
    """Sort each row; on a CPU numpy's vector instructions sort floats 15 to 30 times as fast as torch."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), axis=1))
    return weights.sort(dim=-1).values


def _running_sum(weights: Tensor, tile: int) -> Tensor:
    """Return the running sums [R, V], tile by tile.

    Torch would split one long sum among threads, but only if R is 1.
    """
    if tile == weights.shape[1]:
        return weights.cumsum(-1)
    tiles = weights.view(weights.shape[0], -1, tile)
    sums = tiles.sum(-1)
    return (tiles.cumsum(-1) + (sums.cumsum(-1) - sums)[:, :, None]).flatten(1)


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
