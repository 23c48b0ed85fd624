"""Ranks that each have a part of the logits find the best token of all of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.layers.logit_parts import LogitParts
from models.ops.reference import Ops
from models.parallel.group import Group
from models.parallel.share import Share
from tests.each_of import each_of
from tests.models.test_share import WHOLE

NAN, INF = float("nan"), float("inf")


class Told(Group):
    """A group in which the other ranks have already brought theirs."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.brought: list[Tensor] = []

    def all_gather(self, x: Tensor) -> Tensor:
        assert any(x.equal(each) or x.isnan().any() for each in self.brought)
        return torch.stack(self.brought)


def parts(logits: Tensor, ranks: int) -> tuple[Told, list[LogitParts], list[Tensor]]:
    """Each rank's part of logits [R, V], which has padding as a head's product has it: zeros."""
    config = replace(WHOLE, vocab_size=logits.shape[1])
    size = -(-config.vocab_size // ranks)
    shares = [Share(rank, ranks).tokens(config) for rank in range(ranks)]
    group = Told(ranks)
    all_parts = [LogitParts(group, tokens, config.vocab_size, Ops()) for tokens in shares]
    own = [
        torch.nn.functional.pad(logits[:, tokens.start : tokens.stop], (0, size - len(tokens)))
        for tokens in shares
    ]
    return group, all_parts, own


def greedy(logits: Tensor, ranks: int) -> tuple[list[int], list[bool]]:
    group, all_parts, own = parts(logits, ranks)
    group.brought = [each.own_best(of_rank) for each, of_rank in zip(all_parts, own)]
    assert {len(each.flatten()) for each in group.brought} == {2 * len(logits)}
    found = [tuple(kind.tolist() for kind in each.greedy(of)) for each, of in zip(all_parts, own)]
    assert all(each == found[0] for each in found)
    return found[0]


@each_of("ranks", [1, 2, 3, 4, 8])
@each_of("vocab_size", [7, 64, 509])
@each_of("dtype", [torch.float32, torch.bfloat16])
def test_the_best_of_all_parts_is_the_first_of_the_best(
    ranks: int, vocab_size: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(200, vocab_size, generator=generator).to(dtype) - 9  # the padding is above them
    logits[:100] = logits[:100].round()  # many are equal
    tokens, is_finite = greedy(logits, ranks)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert tokens == first.tolist()
    assert all(is_finite)


@each_of("ranks", [2, 3])
@each_of(
    "row, is_finite",
    [
        ([0, 1, 2, NAN, 1, 0], False),
        ([NAN, 1, 2, 3, 4, 5], False),
        ([0, 1, 2, 3, INF, 0], False),
        ([-INF, -INF, -INF, -INF, -INF, -INF], False),
        ([-INF, -INF, -INF, -7, -8, -INF], True),
        ([-3, -INF, -INF, -INF, -INF, -INF], True),
    ],
)
def test_a_row_fails_by_its_largest_logit_alone(ranks: int, row: list[float], is_finite: bool) -> None:
    others = [0, 0, 9, 0, 0, 0]
    tokens, found = greedy(torch.tensor([others, row, others], dtype=torch.float32), ranks)
    assert found == [True, is_finite, True]
    assert tokens[0] == tokens[2] == 2
    if is_finite:
        assert tokens[1] == torch.tensor(row).argmax()


def test_all_parts_joined_are_the_logits() -> None:
    logits = torch.randn(5, 509, generator=torch.Generator().manual_seed(0))
    group, all_parts, own = parts(logits, 4)
    group.brought = own
    assert torch.equal(all_parts[0].joined(own[0]), logits)


def test_where_others_hold_all_tokens_a_rank_has_no_best_one() -> None:
    assert len(Share(4, 6).tokens(replace(WHOLE, vocab_size=8))) == 0
    tokens, is_finite = greedy(torch.arange(16.0).reshape(2, 8) - 20, 6)
    assert (tokens, is_finite) == ([7, 7], [True, True])
