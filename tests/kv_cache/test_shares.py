"""Ranks of unequal engines send each other the parts of pages that each of them holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.exchange.shares import Held, Piece, RankShare, Shares, layers_of, sent_by, sent_to

PAGE, HEADS, LAYERS, WIDTH, PAGES = 4, 4, 5, 3, 9


def tensor(ranks: int, heads: int = HEADS) -> Shares:
    """Ranks that divide the heads of all layers, or hold the same where there are fewer heads."""
    each, copies = max(1, heads // ranks), max(1, ranks // heads)
    return tuple(
        (Held(0, LAYERS, rank // copies * each, rank // copies * each + each),) for rank in range(ranks)
    )


def stages(ranks: int, heads: int = HEADS) -> Shares:
    """Stages of consecutive layers, each with all heads."""
    cuts = [rank * LAYERS // ranks for rank in range(ranks + 1)]
    return tuple((Held(first, stop, 0, heads),) for first, stop in pairwise(cuts))


def beside(shares: Shares) -> Shares:
    """What a draft model keeps lies behind the model's layers, whole on each rank."""
    return tuple((*each, Held(LAYERS, LAYERS + 1, 0, 2)) for each in shares)


def whole(num_layers: int, heads: int, *, columns: bool) -> list[tuple[Tensor, Tensor]]:
    """The planes of all layers: [P, B, K, D], or in an order of columns, [P, K * C, B, 2]."""
    shape = (PAGES, heads * WIDTH, PAGE, 2) if columns else (PAGES, PAGE, heads, WIDTH)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(num_layers)]


def cache_of(
    share: RankShare, planes: list[tuple[Tensor, Tensor]], *, columns: bool, filled: bool
) -> KVCache:
    axis, width, layers = (1, WIDTH, []) if columns else (2, 1, [])
    held = layers_of(share)
    cut = [
        tuple(
            each.narrow(axis, piece.first_head * width, (piece.stop_head - piece.first_head) * width)
            for each in planes[piece.layer]
        )
        for piece in held
    ]
    for piece, parts in zip(held, cut):

        def new(count: int, parts: tuple[Tensor, ...] = parts) -> tuple[Tensor, ...]:
            return tuple(torch.zeros(count, *part.shape[1:]) for part in parts)

        layers.append(LayerPages(new, 0, piece.stop_head - piece.first_head, axis))
    cache = KVCache(layers, PAGE, [PAGES])
    for layer, parts in enumerate(cut if filled else ()):
        for target, part in zip(cache.of(layer), parts):
            target.copy_(part)
    return cache


WAYS = {
    "1 to 2": (tensor(1), tensor(2)),
    "2 to 1": (tensor(2), tensor(1)),
    "2 to 4": (tensor(2), tensor(4)),
    "4 to 2": (tensor(4), tensor(2)),
    "4 to 4, of 2 heads": (tensor(4, 2), tensor(4, 2)),
    "1 to 4, of 2 heads": (tensor(1, 2), tensor(4, 2)),
    "4 to 1, of 2 heads": (tensor(4, 2), tensor(1, 2)),
    "latents, 2 to 4": (tensor(2, 1), tensor(4, 1)),
    "2 stages to 1": (stages(2), stages(1)),
    "3 stages to 2": (stages(3), stages(2)),
    "2 stages to 2 ranks": (stages(2), tensor(2)),
    "beside a draft model": (beside(tensor(2)), beside(tensor(4))),
}


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", WAYS)
def test_what_the_receivers_get_is_what_the_senders_have(name: str, columns: bool) -> None:
    senders, receivers = WAYS[name]
    everything = [*map(layers_of, senders)]
    heads = {
        each.layer: max(e.stop_head for s in everything for e in s if e.layer == each.layer)
        for s in everything
        for each in s
    }
    planes = [whole(1, heads[layer], columns=columns)[0] for layer in range(len(heads))]
    sources = [cache_of(each, planes, columns=columns, filled=True) for each in senders]
    theirs, ours = np.array([3, 8, 1]), np.array([2, 5, 4])
    for rank, share in enumerate(receivers):
        target = cache_of(share, planes, columns=columns, filled=False)
        places = {each.layer: (at, each.first_head) for at, each in enumerate(layers_of(share))}
        num_bytes = 0
        for sender, pieces in enumerate(sent_to(rank, receivers, senders)):
            assert pieces == sent_by(sender, senders, receivers)[rank]
            held = {each.layer: (at, each.first_head) for at, each in enumerate(layers_of(senders[sender]))}
            for layer, first, stop in ((each.layer, each.first_head, each.stop_head) for each in pieces):
                (source, begin), (at, own) = held[layer], places[layer]
                data = sources[sender].read_layer(source, theirs, range(first - begin, stop - begin))()
                num_bytes += len(data)
                target.write_layer(at, ours, data, range(first - own, stop - own))
        assert num_bytes == len(ours) * sum(target.layer_bytes), "each byte comes once"
        complete = cache_of(share, planes, columns=columns, filled=True)
        for layer in range(len(target.layers)):
            for got, want in zip(target.of(layer), complete.of(layer)):
                assert torch.equal(got[ours], want[theirs])
                others = np.setdiff1d(np.arange(PAGES), ours)
                assert not got[others].any()


def test_ranks_that_hold_the_same_take_turns() -> None:
    senders, receivers = tensor(4, 1), tensor(4, 1)
    for rank in range(4):
        assert [bool(each) for each in sent_to(rank, receivers, senders)] == [at == rank for at in range(4)]
    assert [len(each) for each in sent_by(1, tensor(2, 1), receivers)] == [0, LAYERS, 0, LAYERS]


def test_heads_that_nobody_holds_are_named() -> None:
    with pytest.raises(ValueError, match="heads 2 to 3 of layer 0 are on no rank"):
        sent_to(0, tensor(1), ((Held(0, LAYERS, 0, 2),),))
    with pytest.raises(ValueError, match="of layer 3"):
        sent_to(0, stages(1), ((Held(0, 3, 0, HEADS),),))
    assert layers_of((Held(1, 3, 2, 4),)) == [Piece(1, 2, 4), Piece(2, 2, 4)]
