"""Determine which parts of a page each rank of one engine sends to each rank of another.

An engine of several ranks divides its layers among stages, and each layer's key-value heads among the ranks
of a stage; where there are fewer heads than ranks, several ranks hold the same, or divide the tokens of each
page in turn. Once both engines know what each rank of both holds, each rank finds by itself what it sends and
what it gets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import lcm
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_LAYERS, MOST_HEADS, MOST_RANKS, MOST_RUNS = 2**12, 2**12, 2**10, 64


class Held(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive layers, counted over the whole model, of which a rank holds the same heads of all."""

    first_layer: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    stop_layer: Annotated[int, Meta(ge=0, le=MOST_LAYERS)]
    first_head: Annotated[int, Meta(ge=0, le=MOST_HEADS)] = 0
    stop_head: Annotated[int, Meta(ge=0, le=MOST_HEADS)] = 1
    # The tokens of each page that it holds are those whose number is `turn` modulo `turns`
    turn: Annotated[int, Meta(ge=0, lt=MOST_RANKS)] = 0
    turns: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1


# What a rank holds, in the order of its cache; latents, and whatever has no heads, count as one
RankShare = Annotated[tuple[Held, ...], Meta(max_length=MOST_RUNS)]
Shares = Annotated[tuple[RankShare, ...], Meta(min_length=1, max_length=MOST_RANKS)]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some heads of one layer, by their numbers in the whole model, for every `turns`-th token of a page."""

    layer: int
    first_head: int
    stop_head: int
    turn: int = 0
    turns: int = 1

    def has(self, turn: int) -> bool:
        """Whether it has the tokens whose number is `turn` modulo a multiple of its turns."""
        return turn % self.turns == self.turn


def layers_of(share: RankShare) -> list[Piece]:
    """Return what a rank holds, layer by layer, in the order of its cache."""
    return [
        Piece(layer, each.first_head, each.stop_head, each.turn, each.turns)
        for each in share
        for layer in range(each.first_layer, each.stop_layer)
    ]


def sent_to(receiver: int, receivers: Shares, senders: Shares) -> list[list[Piece]]:
    """Return, for each rank of the senders, the pieces that it sends to one rank of the receivers.

    They are in the order of the receiver's cache. Of several ranks that hold the same, each receiver takes
    another one. Raises ValueError for what no sender holds.
    """
    held = [{each.layer: each for each in layers_of(share)} for share in senders]
    found: list[list[Piece]] = [[] for _ in senders]
    for wanted in layers_of(receivers[receiver]):
        holders = [(rank, layers[wanted.layer]) for rank, layers in enumerate(held) if wanted.layer in layers]
        turns = lcm(wanted.turns, *(each.turns for _, each in holders))
        parts = [
            Piece(wanted.layer, first, stop, turn, turns)
            for first, stop in _segments(wanted, [each for _, each in holders])
            for turn in range(turns)
            if wanted.has(turn)
        ]
        for part in parts:
            ranks = [rank for rank, each in holders if _holds(each, part)]
            if not ranks:
                raise ValueError(
                    f"heads {part.first_head} to {part.stop_head - 1} of layer {wanted.layer} are on no rank"
                    " of the engine of prompts"
                )
            found[ranks[receiver % len(ranks)]].append(part)
    return found


def sent_by(sender: int, senders: Shares, receivers: Shares) -> list[list[Piece]]:
    """Return, for each rank of the receivers, the pieces that one rank of the senders sends it."""
    return [sent_to(rank, receivers, senders)[sender] for rank in range(len(receivers))]


def _holds(held: Piece, part: Piece) -> bool:
    return held.first_head <= part.first_head and part.stop_head <= held.stop_head and held.has(part.turn)


def _segments(wanted: Piece, holders: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of heads within `wanted` that no holder holds in part."""
    ends = {wanted.first_head, wanted.stop_head}
    ends |= {each.first_head for each in holders} | {each.stop_head for each in holders}
    cuts = sorted(each for each in ends if wanted.first_head <= each <= wanted.stop_head)
    yield from pairwise(cuts)
