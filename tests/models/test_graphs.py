"""Captured steps of decodes: which sizes, and what stands in the rows that no request has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.npu.ascend_attention import AscendAttention
from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from devices.ascend_limits import product
from devices.shapes import AttentionShape
from models.config import layer_specs
from models.parallel.share import Share
from models.step.graph_inputs import PLACE, SOURCE, GraphInputs, num_values, split
from models.step.graphs import captured_sizes, doubling, ladder, smallest
from tests.each_of import each_of
from tests.models.test_share import WHOLE


def sizes_of(share: Share, num_layers: int, most: int) -> list[int]:
    """What a stage of a 910B captures."""
    config = replace(WHOLE, layers=layer_specs((None,) * num_layers))
    shape = AttentionShape(8, 4, 16, 128, 0.25, torch.float32, share.part(config).windows)
    attention = AscendAttention(shape, "cpu", product("910B", ""))
    return captured_sizes(attention, most, 1, share.most_layers(config))[0]


def test_stages_of_unlike_numbers_of_layers_capture_the_same_sizes():
    shares = [Share(stage=stage, stages=2) for stage in range(2)]
    assert len(sizes_of(shares[0], 48, 60 * 128)) == 67, "all of 24 layers"
    shorter, longer = (sizes_of(share, 49, 60 * 128) for share in shares)
    assert shorter == longer
    assert len(longer) == 66, "25 layers have too many streams for all"


@each_of("page_size", [1, 16, 128])
@each_of("most", [1, 2, 7, 16, 100, 256])
def test_the_ladder_reaches_the_most_and_leaves_at_most_a_page_of_filling(most, page_size):
    sizes = ladder(most, page_size)
    assert sizes[0] == 1
    assert sizes[-1] == most
    steps = np.diff(sizes)
    assert (steps > 0).all()
    assert (steps - 1 < page_size).all()


def test_the_ladder_doubles_within_a_page():
    assert ladder(256, 128) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert ladder(64, 16) == [1, 2, 4, 8, 16, 32, 48, 64]


def test_sizes_of_spans_double_up_to_the_most():
    assert doubling(0) == []
    assert doubling(1) == [1]
    assert doubling(6) == [1, 2, 4, 6]
    assert doubling(8) == [1, 2, 4, 8]


def inputs_of(rows: int, width: int, slots: SlotPool, first_token: int) -> GraphInputs:
    values = torch.full((num_values(rows, width, slots.max_pages),), 77, dtype=torch.int32)
    return GraphInputs(values, rows, width, slots, first_token)


@pytest.mark.parametrize("width", [1, 3])
def test_padding_is_the_first_token_of_the_null_page(width):
    inputs = inputs_of(5, width, SlotPool(2, 8, 4), first_token=128)
    token_ids, positions, write_index, kv_lens, rope_lens, sources = inputs.columns[: SOURCE + 1]
    assert not token_ids.any()
    assert not positions.any()
    assert write_index.tolist() == [at % 4 for at in range(5 * width)]
    assert (kv_lens == width).all(), "a query without a key"
    assert (rope_lens == width).all()
    assert sources.tolist() == [128 + at for at in range(5 * width)]


def slots_of_two() -> SlotPool:
    """Rows of 6 and 3 known tokens, of which all but the last are computed, on pages 7, 8 and 5."""
    slots = SlotPool(4, 12, 4)
    slots.token_ids[[1, 3]] = np.arange(24).reshape(2, 12)
    slots.page_table[1, :2], slots.page_table[3, :1] = (7, 8), 5
    return slots


def drafted(slots: SlotPool) -> Batch:
    """Row 1 with two drafts, row 3 with none."""
    owners, targets = np.array([1, 1, 1, 3]), np.array([6, 7, 8, 3])
    return Batch(
        np.array([1, 3]), np.array([5, 2]), np.array([8, 3]), np.array([0, 0, 0, 1]), owners, targets,
        unknown=np.array([1]), num_drafts=2,
    )  # fmt: skip


def test_each_draft_takes_a_row_of_a_step_of_one_token_each():
    slots = slots_of_two()
    inputs = inputs_of(5, 1, slots, first_token=100)
    inputs.fill(drafted(slots))
    inputs.read_from(drafted(slots), np.array([3]))
    token_ids, positions, write_index, kv_lens, _, sources = inputs.columns[: SOURCE + 1].tolist()
    assert token_ids == [5, 6, 7, 14, 0]
    assert positions == [5, 6, 7, 2, 0]
    assert write_index == [33, 34, 35, 22, 0]
    assert kv_lens == inputs.kv_lens() == [6, 7, 8, 3, 1]
    assert sources == [100, 101, 102, 3, 104]
    _, pages, *_ = split(inputs.values, 5, 1)
    assert pages.t().tolist() == [[7, 8, 0]] * 3 + [[5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("width", [1, 4])
def test_each_group_of_windows_has_addresses_and_pages_of_its_own(width):
    slots = slots_of_two()
    slots.window_tables = (np.zeros((4, 3), np.int32), np.zeros((4, 3), np.int32))
    slots.window_tables[0][1, 1], slots.window_tables[0][3, 0] = 3, 9
    slots.window_tables[1][1, :2] = 2, 6
    slots.window_tables[1][3, 0] = 4
    values = torch.full((num_values(5, width, slots.max_pages, 2),), 77, dtype=torch.int32)
    inputs = GraphInputs(values, 5, width, slots, 100, 2)
    inputs.fill(drafted(slots))
    _, pages, windows, _ = split(values, 5, width, 2)
    (first, second) = ((places.view(5, width).tolist(), table.t().tolist()) for places, table in windows)
    if width == 1:
        assert first == ([[13], [14], [15], [38], [0]], [[0, 3, 0]] * 3 + [[9, 0, 0], [0, 0, 0]])
        assert second == ([[25], [26], [27], [18], [0]], [[2, 6, 0]] * 3 + [[4, 0, 0], [0, 0, 0]])
        assert pages.t().tolist() == [[7, 8, 0]] * 3 + [[5, 0, 0], [0, 0, 0]]
    else:
        padding = [[0, 1, 2, 3]] * 3
        assert first == ([[0, 13, 14, 15], [1, 2, 3, 38], *padding], [[0, 3, 0], [9, 0, 0], *[[0] * 3] * 3])
        assert second == ([[0, 25, 26, 27], [1, 2, 3, 18], *padding], [[2, 6, 0], [4, 0, 0], *[[0] * 3] * 3])
        assert pages.t().tolist() == [[7, 8, 0], [5, 0, 0], *[[0] * 3] * 3]


def test_padding_writes_no_state_of_a_row():
    slots = slots_of_two()
    slots.state_pages = np.array([0, 6, 0, 4], dtype=np.int32)
    values = torch.full((num_values(5, 1, slots.max_pages, 0, 1),), 77, dtype=torch.int32)
    inputs = GraphInputs(values, 5, 1, slots, 100, num_states=1)
    both, one = (Batch(np.array(rows), *[np.array([2])] * 5) for rows in ([1, 3], [3]))
    for batch, wanted in ((both, [6, 4, 0, 0, 0]), (one, [4, 0, 0, 0, 0])):
        count = len(batch.slots)
        inputs.fill(replace(batch, starts=np.full(count, 1), stops=np.full(count, 2)))
        assert split(values, 5, 1, 0, 1)[3].tolist() == [wanted]


def test_tokens_stand_at_the_end_of_a_row_of_several():
    slots = slots_of_two()
    inputs = inputs_of(3, 4, slots, first_token=100)
    inputs.fill(drafted(slots))
    inputs.read_from(drafted(slots), np.array([3]))
    token_ids, positions, write_index, kv_lens, _, sources = inputs.columns[: SOURCE + 1].tolist()
    assert token_ids == [0, 5, 6, 7, 0, 0, 0, 14, 0, 0, 0, 0]
    assert positions == [0, 5, 6, 7, 0, 0, 0, 2, 0, 0, 0, 0]
    assert write_index == [0, 33, 34, 35, 1, 2, 3, 22, 0, 1, 2, 3]
    assert kv_lens == [4, 6, 7, 8, 4, 4, 4, 3, 4, 4, 4, 4]
    assert inputs.kv_lens() == [8, 3, 4]
    assert sources[7] == 3
    assert inputs.columns[PLACE, :4].tolist() == [1, 2, 3, 7]
    _, pages, *_ = split(inputs.values, 3, 4)
    assert pages.t().tolist() == [[7, 8, 0], [5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("width", "places"), [(1, [1, 2]), (4, [2, 3])])
def test_drafts_that_the_device_made_are_read_where_it_left_them(width, places):
    slots = slots_of_two()
    inputs = inputs_of(4, width, slots, first_token=100)
    inputs.fill(drafted(slots))
    inputs.read_drafts(drafted(slots), 0)
    sources = inputs.columns[SOURCE].tolist()
    assert [sources[place] for place in places] == [0, 1]
    assert sorted(set(range(4 * width)) - set(places)) == [each - 100 for each in sources if each >= 100]


def spans(*lens_and_drafts: tuple[int, int], stop: int = 9) -> Batch:
    """Decodes of these lengths, drafts included, which all stop there."""
    lens, drafts = np.array(lens_and_drafts).T
    rows = np.arange(len(lens))
    stops = np.full_like(rows, stop)
    return Batch(rows, stops - lens, stops, rows, rows, stops, num_drafts=int(drafts.sum()))


@each_of(
    "batch, expected",
    [
        (spans((4, 3), (4, 3)), (2, 4)),
        (spans((4, 3), (4, 3), (4, 3)), (4, 4)),  # a row of padding
        (spans((4, 3), (1, 0), (1, 0)), (8, 1)),  # 6 of 16 would be real
        (spans((4, 3), (3, 2), (1, 0)), (4, 4)),  # 8 of 16 are
        (spans((4, 3), stop=4), (1, 4)),
        (spans((3, 2), stop=3), (4, 1)),  # fewer keys than tokens of a row
        (spans((5, 4)), (8, 1)),  # longer than a row
        (spans(*[(2, 1)] * 5), (16, 1)),  # more than rows of spans
        (spans((1, 0), (1, 0)), (2, 1)),
    ],
)
def test_spans_are_taken_where_they_fit_and_are_not_mostly_padding(batch, expected):
    assert smallest(batch, [1, 2, 4, 8, 16], [1, 2, 4], 4, 8) == expected


def test_no_spans_are_taken_whose_padding_has_more_tokens_than_a_page_has_places():
    batch = spans((4, 3), (3, 2), (1, 0))
    assert smallest(batch, [1, 2, 4, 8], [1, 2, 4], 4, 8) == (4, 4)
    assert smallest(batch, [1, 2, 4, 8], [1, 2, 4], 4, 7) == (8, 1)


@each_of("seed", range(4))
def test_padding_writes_to_places_of_its_own(seed):
    """In the null page of each group of layers, in steps of spans and in those of one token a row."""
    rng, most, width, page_size = np.random.default_rng(seed), 64, 4, 16
    slots = SlotPool(most, 64, page_size)
    slots.page_table[:] = 1 + np.arange(slots.page_table.size).reshape(slots.page_table.shape)
    slots.window_tables = (slots.page_table[::-1].copy(),)
    sizes, span_rows = ladder(most * width, page_size), doubling(most)
    taken = set[int]()
    for _ in range(40):
        lens = rng.choice([1, 2, 3, 4], int(rng.integers(1, most + 1)), p=rng.dirichlet(np.ones(4)))
        batch = spans(*[(each, each - 1) for each in lens.tolist()])
        rows, tokens = smallest(batch, sizes, span_rows, width, page_size)
        values = torch.zeros(num_values(rows, tokens, slots.max_pages, 1), dtype=torch.int32)
        inputs = GraphInputs(values, rows, tokens, slots, 100, 1)
        inputs.fill(batch)
        groups = split(values, rows, tokens, 1)
        for places in (inputs.columns[2], groups[2][0][0].numpy()):
            in_null_page = places[places < page_size]
            assert len(in_null_page) == rows * tokens - batch.num_tokens
            assert len(set(in_null_page.tolist())) == len(in_null_page)
        taken.add(tokens)
    assert taken == {1, width}


def test_no_spans_are_taken_where_none_is_captured():
    assert smallest(spans((4, 3), (4, 3)), [1, 2, 4, 8], [], 4, 8) == (8, 1)
