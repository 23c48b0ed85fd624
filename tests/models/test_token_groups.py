"""Ranks get a communicator for the tokens that they send to experts only if all have buffers for it.

Its size is the smallest that a rank has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.parallel.group import Group


class Opened(Group):
    """Ranks whose communicator is asked for or not."""

    def __init__(self) -> None:
        self.num_asked = 0

    @property
    def hccl_name(self) -> str:
        self.num_asked += 1
        return "tokens"


class OneOfTwo(Group):
    """A rank, and what the other one has."""

    def __init__(self, other_mib: int, tokens: Group | None, *, is_near: bool = True) -> None:
        self.other_mib, self.tokens, self.is_near = other_mib, tokens, is_near

    def least(self, value: int, device: torch.device) -> int:
        return min(value, self.other_mib)

    @property
    def is_on_one_machine(self) -> bool:
        return self.is_near


@pytest.mark.parametrize(
    ("own", "other", "more", "found"),
    [
        (200, 300, {}, 200),
        (300, 120, {}, 120),
        (0, 200, {}, 0),
        (200, 0, {}, 0),
        (200, 200, {"is_near": False}, 0),
    ],
)
def test_tokens_go_where_all_ranks_have_buffers(
    own: int, other: int, more: dict[str, Any], found: int
) -> None:
    tokens = Opened()
    OneOfTwo(other, tokens, **more).open_for_tokens(own, torch.device("cpu"))
    assert (tokens.buffer_mib, tokens.num_asked) == (found, int(found > 0))


def test_ranks_without_experts_of_their_own_ask_for_nothing() -> None:
    group = OneOfTwo(200, None)
    group.open_for_tokens(200, torch.device("cpu"))
    assert group.tokens is None
