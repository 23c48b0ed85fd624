"""Pages keep the hidden states (features) of their last positions, which a drafting head reads.

The head computes whole spans at once, up to the tokens of a step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from continuous_batching.batch import Batch
from kv_cache.device.storage import KVCache
from models.drafting.drafter import HeadDrafter
from models.head import FeaturePages
from tests.kv_cache.caches import plain_pages

PAGE, KEPT = 8, 3


def places(page: int, start: int, stop: int) -> Tensor:
    return torch.arange(page * PAGE + start, page * PAGE + stop)


def pages() -> FeaturePages:
    return FeaturePages(KVCache([plain_pages((KEPT, 2), torch.float32, 1)], PAGE, [5]), 0)


def numbered(index: Tensor, first: int = 0) -> Tensor:
    """A feature for each place, which tells it."""
    return (index + first)[:, None].expand(-1, 2).float()


def test_a_page_keeps_the_features_of_its_last_positions() -> None:
    made = pages()
    # A chunk over two pages, one of another row, and a decode
    index = torch.cat((places(3, 2, 8), places(1, 0, 7), places(2, 0, 2), places(4, 5, 6)))
    made.write(numbered(index), index)
    for kept in (places(3, 5, 8), places(1, 4, 7), places(2, 0, 2), places(4, 5, 6)):
        assert torch.equal(made.read(kept), numbered(kept))
    one = places(1, 7, 8)
    made.write(numbered(one), one)
    assert torch.equal(made.read(places(1, 5, 8)), numbered(places(1, 5, 8)))


def test_what_a_head_says_stands_at_ends_of_spans_alone() -> None:
    made = pages()
    known = torch.cat((places(3, 5, 8), places(1, 0, 3), places(2, 2, 4)))
    made.write(numbered(known), known)
    # Positions 6 and 7 of page 3 and 0 and 1 of page 1 are one span over both; page 2 has one of one token
    index = torch.cat((places(3, 6, 8), places(1, 0, 2), places(2, 3, 4)))
    before = torch.cat((places(3, 5, 8), places(1, 0, 1), places(2, 2, 3)))
    made.write_ends(numbered(index, 100), index, before)
    for kept in (places(3, 5, 8), places(1, 0, 1), places(2, 2, 3)):
        assert torch.equal(made.read(kept), numbered(kept))
    for ends in (places(1, 1, 2), places(2, 3, 4)):
        assert torch.equal(made.read(ends), numbered(ends, 100))


def test_whole_spans_are_computed_at_once_up_to_a_steps_tokens() -> None:
    drafter = object.__new__(HeadDrafter)
    drafter._most_tokens = 5
    starts, stops = np.array([4, 9, 0, 3, 7, 2]), np.array([6, 11, 0, 9, 9, 5])
    none = np.empty(0, np.int64)
    batch = Batch(np.arange(6), starts, stops + 1, none, none, none, draft_starts=starts, draft_stops=stops)
    pieces = list(drafter._pieces(batch, stops, stops > starts))
    assert [each.slots.tolist() for each in pieces] == [[0, 1], [3], [4, 5]]  # one alone may be longer
    assert [each.num_tokens for each in pieces] == [4, 6, 5]
    assert all((each.targets == each.stops).all() for each in pieces)
