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

GRAPH_FAULTS = (
    Fault(
        "tokens_chosen_outside_stay_there",
        GRAPHS,
        "if last.tokens is not self._held:",
        "if self._held is None:",
        "the step after a draw outside the graph reads the best tokens in place of the drawn",
    ),
    Fault(
        "drawn_tokens_left_out_of_the_table",
        GRAPHS,
        "        self._table[: len(tokens)].copy_(tokens)\n",
        "",
        "the step after a captured draw reads the best tokens in place of the drawn",
    ),
    Fault(
        "no_token_is_looked_up",
        GRAPHS,
        ".clamp_(min=0)",
        "",
        "the embedding is read before its first row",
    ),
    Fault(
        "drafts_read_one_place_on",
        INPUTS,
        "ends[spans] - batch.stops[spans] + targets",
        "ends[spans] - batch.stops[spans] + targets - 1",
        "a step checks each draft in the place of the token before it",
    ),
    Fault(
        "draft_model_told_nothing_of_its_drafts",
        DRAFTER,
        "            self._last.keep(best.chosen, rows)\n",
        "",
        "every draft follows the first",
    ),
    Fault(
        "drafts_overwritten_by_the_next",
        DRAFTER,
        "return best.tokens.clone()",
        "return best.tokens",
        "all drafts of a row are the last one",
    ),
    Fault(
        "draft_model_s_graphs_outlive_its_cache",
        RUNNER,
        "graphs = [self.graphs, None if self.drafter is None else self.drafter.graphs]",
        "graphs = [self.graphs]",
        "after a resize, drafts follow from keys that nobody writes any more",
    ),
    Fault(
        "draft_model_reads_one_token_of_two",
        DRAFTER,
        "short = replace(piece, num_drafts=piece.num_tokens - piece.num_spans)",
        "short = replace(piece, starts=piece.stops - 1)",
        "the last draft, which was never fed, stays unread",
    ),
    Fault(
        "graphs_of_spans_not_counted_beside_a_draft_model_s",
        GRAPHS,
        "each.holds(sizes, beside + len(self.span_rows), joins=joins)",
        "each.holds(sizes, beside, joins=joins)",
        "a capture fails on a device that has no stream left",
    ),
    Fault(
        "draws_never_replayed",
        GRAPHS,
        "step.draw.replay()",
        "pass",
        "every step gets the tokens of the capture",
    ),
    Fault(
        "drafts_read_to_the_end_of_their_span",
        INPUTS,
        "kv_lens = packed.positions + 1\n",
        "kv_lens = np.repeat(batch.stops, lens)\n",
        "a token is chosen by what is guessed to follow it",
    ),
    Fault(
        "tokens_at_the_beginning_of_their_row",
        INPUTS,
        "places = ragged_ranges(ends - lens, ends)",
        "places = ragged_ranges(ends - self.width, ends - self.width + lens)",
        "the last token of a row does not see its last keys",
    ),
    Fault(
        "padding_among_what_is_drawn",
        GRAPHS,
        "            hidden = hidden.index_select(0, columns[PLACE])\n",
        "            pass\n",
        "a request gets the token of the padding before it",
    ),
    Fault(
        "short_rows_in_wide_steps",
        GRAPHS,
        " <= width <= int(batch.stops.min())",
        " <= width",
        "padding before the first token of a request is a query without a key",
    ),
    Fault(
        "places_in_the_order_of_slots",
        LAST,
        "self._places[owners] = np.arange(len(owners))",
        "self._places[owners] = owners",
        "a row reads another one's token",
    ),
    Fault(
        "greedy_rows_drawn",
        COLUMNS,
        'columns[-1] = arrays.get("drawn", 1)',
        "columns[-1] = 1",
        "a greedy row beside drawn ones is drawn",
    ),
    Fault(
        "top_k_not_sent",
        COLUMNS,
        'columns[-3:-1] = arrays["k_places"].reshape(2, num_rows)',
        "pass",
        "top-k drops nothing",
    ),
    Fault(
        "prefetch_that_nobody_awaits",
        FUSED,
        "            torch.npu.current_stream().wait_stream(self._prefetches)\n",
        "            pass\n",
        "a capture ends while a stream of it is not joined",
    ),
    Fault(
        "prefetch_of_all_of_a_weight",
        FUSED,
        "min(weight.nbytes, PREFETCHED_BYTES)",
        "weight.nbytes",
        "it drives what attention reads out of the L2 cache",
    ),
    Fault(
        "prefetch_beyond_the_weight",
        FETCH_RULES,
        '<= call["offset"] < num_bytes',
        '<= call["offset"] <= num_bytes',
        "an offset at the weight's end passes",
    ),
)
