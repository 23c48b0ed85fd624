"""Faults of a draft model: which keys it computes, where, and what it may share."""

from __future__ import annotations

from tests.mutation.fault import Fault

ROOM = "continuous_batching/"
SPANS, BOOKED = ROOM + "speculation/draft_model.py", ROOM + "sampling/drafts.py"
LIFECYCLE, MATCHING = ROOM + "paging/slot_lifecycle.py", ROOM + "paging/prefix_matching.py"
DRAFTER = "models/drafter.py"
BENCHMARK = "benchmark/offline/speculation.py"

DRAFT_MODEL_FAULTS = {
    "the_benchmark_leaves_the_draft_model_idle": Fault(
        BENCHMARK + "::_rows", "ON_DEVICE.get(name)", "None", "a draft model is measured that makes no drafts"
    ),
    "prompt_not_computed_by_the_draft_model": Fault(
        SPANS + "::model_spans",
        "has_drafts | ~slots.decoding(rows, starts, known)",
        "has_drafts",
        "drafts follow from a prompt that the draft model has not read",
    ),
    "lag_not_caught_up": Fault(
        SPANS + "::model_spans",
        "starts - slots.draft_lag[rows]",
        "starts",
        "tokens of steps without drafts stay unread",
    ),
    "shared_page_written_by_the_draft_model": Fault(
        SPANS + "::model_spans",
        "starts - slots.draft_lag[rows]",
        "np.zeros_like(starts)",
        "what was found in the cache is computed once more, into pages that others hold",
    ),
    "last_draft_fed": Fault(
        SPANS + "::model_spans",
        "stops - has_drafts",
        "stops",
        "the draft model computes a token more than it makes drafts for",
    ),
    "lag_forgotten_where_all_drafts_are_right": Fault(
        BOOKED + "::book_drafts",
        "np.maximum(slots.num_computed[rows] - batch.draft_stops, 0)",
        "np.zeros_like(rows)",
        "the last draft, which was never fed, counts as read",
    ),
    "lag_lost_in_a_swap": Fault(
        LIFECYCLE + "::SlotLifecycle._swap_in",
        "slots.draft_lag[row] = swapped.draft_lag",
        "",
        "a request that comes back counts as read by the draft model where it is not",
    ),
    "published_before_the_draft_model_computed_it": Fault(
        MATCHING + "::PrefixMatching.publish_all",
        "slots.num_computed[row] - slots.draft_lag[row]",
        "slots.num_computed[row]",
        "a later request finds pages without the draft model's keys",
    ),
    "draft_fed_at_the_place_behind": Fault(
        DRAFTER + "::Drafter.run",
        "known + ahead - 1",
        "known + ahead",
        "a draft is turned by the position of the next, whose keys it leaves out",
    ),
    "draft_of_another_row": Fault(
        DRAFTER + "::Drafter.run",
        "np.argsort(np.concatenate(places))",
        "np.arange(len(np.concatenate(places)))",
        "drafts stand place after place where they are read row after row",
    ),
    "drafts_of_rows_that_dropped_out": Fault(
        DRAFTER + "::Drafter.follow",
        "tokens[to_device(places, self._device)]",
        "tokens[: len(places)]",
        "rows are fed what was drafted for others",
    ),
    "piece_ends_every_span": Fault(
        DRAFTER + "::Drafter._pieces",
        "(upto == ends[now]) & yields[spans[now]]",
        "yields[spans[now]]",
        "a row that catches up in pieces gets drafts after each of them",
    ),
}
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
