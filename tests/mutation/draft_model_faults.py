"""Faults of a draft model: which keys it computes, where, and what it may share."""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
SPANS, BOOKED = ROOM + "speculation/draft_model.py", ROOM + "sampling/drafts.py"
LIFECYCLE, MATCHING = ROOM + "paging/slot_lifecycle.py", ROOM + "paging/prefix_matching.py"
DRAFTER = "models/drafter.py"
BENCHMARK = "benchmark/offline/speculation.py"

DRAFT_MODEL_FAULTS = (
    Fault(
        "the_benchmark_leaves_the_draft_model_idle",
        BENCHMARK,
        "spans=ON_DEVICE.get(name)",
        "spans=None",
        "a draft model is measured that makes no drafts",
    ),
    Fault(
        "prompt_not_computed_by_the_draft_model",
        SPANS,
        "is_computed = has_drafts | ~slots.decoding(rows, starts, known)",
        "is_computed = has_drafts",
        "drafts follow from a prompt that the draft model has not read",
    ),
    Fault(
        "lag_not_caught_up",
        SPANS,
        "first = starts - slots.draft_lag[rows]",
        "first = starts",
        "tokens of steps without drafts stay unread",
    ),
    Fault(
        "shared_page_written_by_the_draft_model",
        SPANS,
        "first = starts - slots.draft_lag[rows]",
        "first = np.zeros_like(starts)",
        "what was found in the cache is computed once more, into pages that others hold",
    ),
    Fault(
        "last_draft_fed",
        SPANS,
        "stops - has_drafts, first)",
        "stops, first)",
        "the draft model computes a token more than it makes drafts for",
    ),
    Fault(
        "lag_forgotten_where_all_drafts_are_right",
        BOOKED,
        "np.maximum(slots.num_computed[rows] - batch.draft_stops, 0)",
        "np.zeros_like(rows)",
        "the last draft, which was never fed, counts as read",
    ),
    Fault(
        "lag_lost_in_a_swap",
        LIFECYCLE,
        "            slots.draft_lag[row] = swapped.draft_lag\n",
        "",
        "a request that comes back counts as read by the draft model where it is not",
    ),
    Fault(
        "published_before_the_draft_model_computed_it",
        MATCHING,
        "int(slots.num_computed[row] - slots.draft_lag[row])",
        "int(slots.num_computed[row])",
        "a later request finds pages without the draft model's keys",
    ),
    Fault(
        "draft_fed_at_the_place_behind",
        DRAFTER,
        "self.follow(rows, known + ahead - 1)",
        "self.follow(rows, known + ahead)",
        "a draft is turned by the position of the next, whose keys it leaves out",
    ),
    Fault(
        "draft_of_another_row",
        DRAFTER,
        "order = np.argsort(np.concatenate(places))",
        "order = np.arange(len(np.concatenate(places)))",
        "drafts stand place after place where they are read row after row",
    ),
    Fault(
        "drafts_of_rows_that_dropped_out",
        DRAFTER,
        "tokens = tokens[to_device(places, self._device)]",
        "tokens = tokens[: len(places)]",
        "rows are fed what was drafted for others",
    ),
    Fault(
        "piece_ends_every_span",
        DRAFTER,
        "is_end = (upto == ends[now]) & yields[spans[now]]",
        "is_end = yields[spans[now]]",
        "a row that catches up in pieces gets drafts after each of them",
    ),
)
DRAFT_MODEL_TESTS_OF = {
    SPANS: (
        "tests/continuous_batching/test_draft_model.py",
        "tests/continuous_batching/test_head.py",
    ),
    DRAFTER: (
        "tests/models/test_draft_model.py",
        "tests/models/test_captured_drafts.py",
        "tests/models/test_eagle3.py",
    ),
    BENCHMARK: ("tests/benchmark/test_speculation.py",),
}
