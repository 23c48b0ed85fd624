"""Which faults are seeded in captured steps, in what they draw and in what they leave to the next step?"""

from __future__ import annotations

from tests.mutation.cache_faults import RUNNER
from tests.mutation.draft_model_faults import DRAFTER
from tests.mutation.fault import Fault
from tests.mutation.npu_faults import FUSED, RULE_TESTS, RULES

GRAPHS, LAST, COLUMNS = "models/graphs.py", "models/last_tokens.py", "models/sampling/draw_columns.py"
INPUTS = "models/graph_inputs.py"
FETCH_RULES = RULES + "prefetch.py"
GRAPH_TESTS_OF = {
    **dict.fromkeys(
        (GRAPHS, LAST, COLUMNS),
        (
            "tests/models/test_graphs.py",
            "tests/models/test_captured_draws.py",
            "tests/models/test_captured_drafts.py",
            "tests/models/test_captured_heads.py",
        ),
    ),
    INPUTS: ("tests/models/test_graphs.py", "tests/models/test_captured_draws.py"),
    FETCH_RULES: RULE_TESTS,
}

GRAPH_FAULTS = {
    "tokens_chosen_outside_stay_there": Fault(
        GRAPHS + "::DecodeGraphs.run",
        "last.tokens is not self._held",
        "self._held is None",
        "the step after a draw outside the graph reads the best tokens in place of the drawn",
    ),
    "drawn_tokens_left_out_of_the_table": Fault(
        GRAPHS + "::DecodeGraphs._drawn",
        "self._table[: len(tokens)].copy_(tokens)",
        "",
        "the step after a captured draw reads the best tokens in place of the drawn",
    ),
    "no_token_is_looked_up": Fault(
        GRAPHS + "::DecodeGraphs._step",
        "self._table.index_select(0, source).clamp_(min=0)",
        "self._table.index_select(0, source)",
        "the embedding is read before its first row",
    ),
    "drafts_read_one_place_on": Fault(
        INPUTS + "::GraphInputs.read_drafts",
        "ends[spans] - batch.stops[spans] + targets",
        "ends[spans] - batch.stops[spans] + targets - 1",
        "a step checks each draft in the place of the token before it",
    ),
    "draft_model_told_nothing_of_its_drafts": Fault(
        DRAFTER + "::Drafter.follow",
        "self._last.keep(best.chosen, rows)",
        "",
        "every draft follows the first",
    ),
    "drafts_overwritten_by_the_next": Fault(
        DRAFTER + "::Drafter.follow",
        "best.tokens.clone()",
        "best.tokens",
        "all drafts of a row are the last one",
    ),
    "draft_model_s_graphs_outlive_its_cache": Fault(
        RUNNER + "::ModelRunner.resize",
        "[self.graphs, None if self.drafter is None else self.drafter.graphs]",
        "[self.graphs]",
        "after a resize, drafts follow from keys that nobody writes any more",
    ),
    "draft_model_reads_one_token_of_two": Fault(
        DRAFTER + "::Drafter._at_ends",
        "num_drafts=piece.num_tokens - piece.num_spans",
        "starts=piece.stops - 1",
        "the last draft, which was never fed, stays unread",
    ),
    "graphs_of_spans_not_counted_beside_a_draft_model_s": Fault(
        GRAPHS + "::DecodeGraphs.holds_beside",
        "beside + len(self.span_rows)",
        "beside",
        "a capture fails on a device that has no stream left",
    ),
    "draws_never_replayed": Fault(
        GRAPHS + "::DecodeGraphs.run",
        "step.draw.replay()",
        "pass",
        "every step gets the tokens of the capture",
    ),
    "drafts_read_to_the_end_of_their_span": Fault(
        INPUTS + "::GraphInputs.fill",
        "packed.positions + 1",
        "np.repeat(batch.stops, lens)",
        "a token is chosen by what is guessed to follow it",
    ),
    "tokens_at_the_beginning_of_their_row": Fault(
        INPUTS + "::GraphInputs.fill",
        "ragged_ranges(ends - lens, ends)",
        "ragged_ranges(ends - self.width, ends - self.width + lens)",
        "the last token of a row does not see its last keys",
    ),
    "padding_among_what_is_drawn": Fault(
        GRAPHS + "::DecodeGraphs._step",
        "hidden = hidden.index_select(0, columns[PLACE])",
        "pass",
        "a request gets the token of the padding before it",
    ),
    "short_rows_in_wide_steps": Fault(
        GRAPHS + "::smallest",
        "int((batch.stops - batch.starts).max()) <= width <= int(batch.stops.min())",
        "int((batch.stops - batch.starts).max()) <= width",
        "padding before the first token of a request is a query without a key",
    ),
    "places_in_the_order_of_slots": Fault(
        LAST + "::LastTokens.keep", "np.arange(len(owners))", "owners", "a row reads another one's token"
    ),
    "greedy_rows_drawn": Fault(
        COLUMNS + "::packed", 'arrays.get("drawn", 1)', "1", "a greedy row beside drawn ones is drawn"
    ),
    "top_k_not_sent": Fault(
        COLUMNS + "::packed",
        'columns[-3:-1] = arrays["k_places"].reshape(2, num_rows)',
        "pass",
        "top-k drops nothing",
    ),
    "prefetch_that_nobody_awaits": Fault(
        FUSED + "::NpuOps.await_prefetch",
        "torch.npu.current_stream().wait_stream(self._prefetches)",
        "pass",
        "a capture ends while a stream of it is not joined",
    ),
    "prefetch_of_all_of_a_weight": Fault(
        FUSED + "::prefetch",
        "min(weight.nbytes, PREFETCHED_BYTES)",
        "weight.nbytes",
        "it drives what attention reads out of the L2 cache",
    ),
    "prefetch_beyond_the_weight": Fault(
        FETCH_RULES + "::_offset",
        '0 <= call["offset"] < num_bytes',
        '0 <= call["offset"] <= num_bytes',
        "an offset at the weight's end passes",
    ),
}
