"""Faults of recurrent states: lost, left in a wrong row, or advanced by another rule than before."""

from __future__ import annotations

from tests.mutation.fault import Fault

RULE = "tests/attention/test_recurrent.py"
MODEL = "tests/models/test_recurrent.py"
SCHEDULES = "tests/continuous_batching/test_state_schedules.py"
STORM = f"{SCHEDULES}::test_each_step_goes_on_from_the_state_of_its_tokens_whatever_happens"
ENGINE = "tests/models/test_state_schedules.py"
TOLD = "tests/serving/router/test_page_reader.py"
AS_TRANSFORMERS = f"{RULE}::test_any_spans_advance_as_in_transformers"

FAULTS = {
    "leader_finds_more_than_its_beams_share": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching.unblock",
        "pages[: max(0, most - len(held))]",
        "pages",
        "the other beams of a search that comes back begin from a state of later tokens",
        "tests/continuous_batching/test_state_schedules.py::"
        "test_beams_begin_from_the_state_of_their_own_beginning",
    ),
    "state_dropped_at_a_chunks_start": Fault(
        "attention/recurrent.py::Recurrence.advance",
        "if span.start: ...",
        "pass",
        "each chunk of a prompt begins with an empty state",
        AS_TRANSFORMERS,
    ),
    "state_of_the_last_owner_for_a_new_request": Fault(
        "attention/recurrent.py::Recurrence.advance",
        "if span.start:\n    state.copy_(states[span.source])",
        "state.copy_(states[span.source])",
        "a new request goes on from what another has left in its row",
        AS_TRANSFORMERS,
    ),
    "state_left_where_it_was_read": Fault(
        "attention/recurrent.py::Recurrence.advance",
        "states[span.target] = state.to(states.dtype)",
        "states[span.source] = state.to(states.dtype)",
        "a shared state is written, and the request's own is not",
        f"{RULE}::test_a_span_leaves_states_where_it_is_cut",
    ),
    "pieces_from_where_a_span_starts": Fault(
        "attention/recurrent.py::StateSpan.pieces",
        "min(self.stop, at // GRID * GRID + GRID)",
        "min(self.stop, at + GRID)",
        "the blocks of a prompt depend on where its chunks begin",
        f"{RULE}::test_cuts_on_the_grid_change_no_bit",
    ),
    "drafts_as_a_block": Fault(
        "attention/recurrent.py::_piece",
        "len(inputs[0]) > SHORT",
        "len(inputs[0]) > 1",
        "a token beside its drafts is computed to other bits than alone",
        f"{RULE}::test_short_spans_may_be_cut_anywhere",
    ),
    "part_of_one_token_before_the_part_it_follows": Fault(
        "attention/recurrent.py::Recurrence.plan",
        "is_one[1:] &= (sources[1:] != targets[:-1]) | (sources[1:] == 0)",
        "pass",
        "a cut just before a span's last token makes that token read what is not there yet",
        f"{RULE}::test_a_span_leaves_states_where_it_is_cut",
    ),
    "decode_writes_what_it_shares": Fault(
        "attention/cpu/recurrent.py::CpuRecurrence._advance_tokens",
        "state = states[target]",
        "state = states[source]",
        "the first decode after a hit destroys the state that was found",
        f"{RULE}::test_a_decode_goes_on_from_another_row",
    ),
    "decode_from_an_own_row_that_is_empty": Fault(
        "attention/cpu/recurrent.py::CpuRecurrence._advance_tokens",
        "if source != target: ...",
        "pass",
        "a decode after a hit goes on from what its row held before",
        f"{RULE}::test_a_decode_goes_on_from_another_row",
    ),
    "decay_behind_the_update": Fault(
        "attention/recurrent.py::block_by_channel",
        "key * (last - total).exp()",
        "key",
        "what a block writes does not decay until its end",
        AS_TRANSFORMERS,
    ),
    "tiles_without_decay_between_them": Fault(
        "attention/recurrent.py::channel_products",
        "key[:, :first] * (since - total[:, :first]).exp()",
        "key[:, :first]",
        "tokens of other tiles are found as if they had just been written",
        AS_TRANSFORMERS,
    ),
    "inputs_of_the_convolution_kept_from_the_start": Fault(
        "attention/recurrent.py::Recurrence.convolve",
        "inputs[count:]",
        "inputs[: len(weight) - 1]",
        "a chunk begins with the positions that the last one began with",
        f"{RULE}::test_channels_are_mixed_with_the_last_positions",
    ),
    "gate_beside_each_head_read_as_a_half": Fault(
        "models/decoder.py::SelfAttention.order",
        "2 * head * self.head_dim",
        "head * self.head_dim",
        "queries are read from the rows of gates",
        f"{MODEL}::test_greedy_tokens_are_those_of_transformers",
    ),
    "one_added_behind_a_state": Fault(
        "models/layers/recurrent.py::RecurrentMixer.forward",
        "self.norm",
        "self.norm + 1",
        "the norm behind a state is weighed as the others are",
        f"{MODEL}::test_greedy_tokens_are_those_of_transformers",
    ),
    "padding_advances_a_state": Fault(
        "models/layers/recurrent.py::RecurrentMixer.forward",
        "x[:num_tokens]",
        "x",
        "rows that pad a step are taken for tokens",
        f"{MODEL}::test_rows_that_pad_a_step_change_nothing",
    ),
    "channels_cut_as_one": Fault(
        "models/parallel/share.py::Share.ranges",
        "slice(first + own.start, first + own.stop)",
        "slice(own.start, own.stop)",
        "a rank's keys and values are read from the rows of queries",
        f"{MODEL}::test_tensor_ranks_hold_heads_of_the_states",
    ),
    "stacked_experts_up_before_gate": Fault(
        "models/checkpoint/stacked_experts.py::PlainStack.take",
        "expert.chunk(self._num_joined)",
        "reversed(expert.chunk(self._num_joined))",
        "gate and up of Qwen3.5's experts are exchanged",
        f"{MODEL}::test_the_text_is_read_of_a_checkpoint_that_reads_images",
    ),
    "slots_without_a_state": Fault(
        "recipes/assembly/memory_plan.py::MemoryPlan.beside_bytes",
        "self.num_slot_states * self.state_bytes",
        "0",
        "the plan fills the memory of the states with pages",
        "tests/recipes/test_state_plans.py::test_each_slot_has_a_state_beside_the_cache",
    ),
    "state_of_a_hit_written_without_a_copy": Fault(
        "kv_cache/states.py::StateGroup.missing",
        "self.pool.holders[pages] > 1",
        "self.pool.holders[pages] < 0",
        "a row writes to the state that others go on from",
        STORM,
    ),
    "hit_not_cut_back_to_a_state": Fault(
        "kv_cache/states.py::StateGroup.resumable",
        "beside != 0 if rests else beside > 0",
        "beside == beside",
        "a prompt goes on behind pages of which nobody left a state",
        f"{SCHEDULES}::test_hits_go_as_far_as_states_lie",
    ),
    "state_kept_one_block_late": Fault(
        "continuous_batching/paging/checkpoints.py::Checkpoints._cuts_of",
        "StateCut(span, position, page)",
        "StateCut(span, position + 1, page)",
        "what lies behind a page has taken in tokens of the next",
        STORM,
    ),
    "state_of_a_failed_row_published": Fault(
        "kv_cache/states.py::StateGroup.publish",
        "not is_cached[at] or self.beside[name] or each.page in self._entry_of",
        "self.beside[name] or each.page in self._entry_of",
        "a state lies beside a page that has been forgotten because its row failed",
        STORM,
    ),
    "state_advanced_by_drafts": Fault(
        "models/step/inputs.py::state_spans",
        "batch.drafts_by_span if batch.num_drafts else np.zeros_like(lags)",
        "np.zeros_like(lags)",
        "a state takes in drafts before they are verified",
        f"{ENGINE}::test_drafts_change_no_token",
    ),
    "accepted_drafts_not_taken_in": Fault(
        "continuous_batching/speculation/speculation.py::book_drafts",
        "slots.state_lag[batch.slots] = np.maximum(slots.num_computed[batch.slots] - known, 0)",
        "pass",
        "a state lacks the drafts that were accepted",
        STORM,
    ),
    "live_state_left_behind_by_a_swap": Fault(
        "kv_cache/states.py::StateGroup.come_back",
        '[*copies, PageCopy(host_pages, target, "from_host", group=self.number)]',
        "copies",
        "a request comes back without its state",
        STORM,
    ),
    "padding_writes_a_live_state": Fault(
        "models/step/graph_inputs.py::GraphInputs._pad",
        "self._states[first_row:] = 0",
        "pass",
        "padding of a captured step advances the state of an earlier batch's row",
        "tests/models/test_graphs.py::test_padding_writes_no_state_of_a_row",
    ),
    "prompts_cut_off_the_grid": Fault(
        "continuous_batching/paging/checkpoints.py::Checkpoints.aligned",
        "np.where(stops < known, stops // GRID * GRID, stops)",
        "stops.copy()",
        "states depend on how prompts were cut",
        STORM,
    ),
    "states_for_sharing_hold_up_requests": Fault(
        "kv_cache/states.py::StateGroup.give_up",
        "if not self._is_crowded: ...",
        "return",
        "a checkpoint is written where no page is left to copy it to",
        STORM,
    ),
    "refused_swap_drops_what_rests": Fault(
        "continuous_batching/paging/slot_lifecycle.py::SwapTier.leave",
        "group.can_yield_host(len(pages))",
        "group.yield_host(len(pages))",
        "a request that finds no host page for its state drops pages that others would find at rest",
        f"{SCHEDULES}::test_a_swap_that_is_refused_drops_nothing_that_rests",
    ),
    "host_states_beyond_the_memory": Fault(
        "recipes/assembly/sizing.py::_with_host_tier.with_host_pages",
        "beyond += (num_states - count * states) * sizing.state_bytes",
        "pass",
        "a small host tier takes two states more than its memory",
        "tests/recipes/test_state_plans.py::test_a_host_tier_with_states_stays_within_its_memory",
    ),
    "states_of_a_tier_as_pages_of_all_tokens": Fault(
        "kv_cache/states.py::StateGroup.seen_after",
        "max(0, num_pages - 1)",
        "0",
        "a restarted server goes on from no state of its tier, since not every page has one",
        f"{SCHEDULES}::test_so_it_does_from_states_that_a_tier_has_found",
    ),
    "pages_told_before_their_state": Fault(
        "kv_cache/events.py::PageEvents.stored",
        "self._cache.keeps_states",
        "False",
        "routers hear of pages from which nobody can go on",
        f"{TOLD}::test_a_router_expects_no_more_of_a_replica_than_its_states_allow",
    ),
    "states_told_as_nothing_needed": Fault(
        "continuous_batching/routing/routing.py::PagesOfWindow.num_before",
        "self.window - 1 if self.window else 1",
        "max(0, self.window - 1)",
        "a router expects a hit where a replica keeps no state",
        "tests/continuous_batching/test_routing.py::test_a_hit_ends_at_the_last_state_of_a_replica",
    ),
}
