"""Faults of recurrent states: lost, left in a wrong row, or advanced by another rule than before."""

from __future__ import annotations

from tests.mutation.fault import Fault

RULE = "tests/attention/test_recurrent.py"
SCHEDULES = "tests/continuous_batching/test_state_schedules.py"
STORM = f"{SCHEDULES}::test_each_step_goes_on_from_the_state_of_its_tokens_whatever_happens"
AS_TRANSFORMERS = f"{RULE}::test_any_spans_advance_as_in_transformers"

FAULTS = {
    "leader_finds_more_than_its_beams_share": Fault(
        "continuous_batching/paging/prefix_matching.py::PrefixMatching._look_up",
        "pages[: max(0, most - len(held))]",
        "pages",
        "the other beams of a search that comes back begin from a state of later tokens",
        "tests/continuous_batching/test_state_schedules.py::"
        "test_beams_begin_from_the_state_of_their_own_beginning",
    ),
    "state_of_the_last_owner_for_a_new_request": Fault(
        "attention/recurrent.py::Recurrence.advance",
        "if span.start:\n    state.copy_(states[span.source])",
        "state.copy_(states[span.source])",
        "a new request goes on from what another has left in its row",
        AS_TRANSFORMERS,
    ),
    "pieces_from_where_a_span_starts": Fault(
        "attention/recurrent.py::StateSpan.pieces",
        "min(self.stop, at // GRID * GRID + GRID)",
        "min(self.stop, at + GRID)",
        "the blocks of a prompt depend on where its chunks begin",
        f"{RULE}::test_cuts_on_the_grid_change_no_bit",
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
    "compiled_rule_writes_what_it_shares": Fault(
        "attention/cpu/recurrent.py::_spans",
        "(metadata.tokens, one, one + 1, metadata.sources, metadata.targets)",
        "(metadata.tokens, one, one + 1, metadata.targets, metadata.sources)",
        "the first decode after a hit reads its own row and destroys the state that was found",
        f"{RULE}::test_a_decode_goes_on_from_another_row",
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
    "padding_advances_a_state": Fault(
        "models/layers/recurrent.py::RecurrentMixer.forward",
        "x[:num_tokens]",
        "x",
        "rows that pad a step are taken for tokens",
        "tests/models/test_recurrent.py::test_rows_that_pad_a_step_change_nothing",
    ),
    "slots_without_a_state": Fault(
        "recipes/assembly/memory_plan.py::MemoryPlan.beside_bytes",
        "self.slot_state_bytes",
        "0",
        "the plan fills the memory of the states with pages",
        "tests/recipes/test_state_plans.py::test_each_slot_has_a_state_beside_the_cache",
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
        "tests/models/test_state_schedules.py::test_drafts_change_no_token",
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
    "a_state_on_trial_not_renewed": Fault(
        "kv_cache/states.py::StateGroup.try_to_keep",
        "[*copies, PageCopy(self.live[rows].astype(np.int64), trial, group=self.number)]",
        "copies",
        "the last page of an answer lies beside the state of an earlier one",
        f"{SCHEDULES}::test_an_answer_leaves_a_state_for_the_next_turn",
    ),
    "captured_drafts_change_a_state": Fault(
        "attention/recurrent.py::Recurrence.advance_drafts",
        "not at",
        "True",
        "a captured step leaves the state behind drafts that may be wrong",
        "tests/models/test_recurrent.py::test_a_step_of_fixed_size_checks_drafts_as_packed_spans_do",
    ),
    "padding_writes_a_live_state": Fault(
        "models/step/graph_inputs.py::GraphInputs._pad",
        "self._states[:, first_row:] = 0",
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
    "pages_told_before_their_state": Fault(
        "kv_cache/events.py::PageEvents.stored",
        "self._cache.keeps_states",
        "False",
        "routers hear of pages from which nobody can go on",
        "tests/serving/router/test_page_reader.py::test_a_router_expects_no_more_of_a_replica_than_its_states_allow",
    ),
    "covered_states_kept_as_the_others": Fault(
        "kv_cache/states.py::StateGroup.cover",
        "self._idle.move_to_end(page, last=False)",
        "pass",
        "a conversation keeps a state for each of its turns, and others lose theirs",
        f"{SCHEDULES}::test_a_conversation_that_goes_on_lets_others_keep_their_states",
    ),
    "pages_evicted_before_what_continues_them": Fault(
        "kv_cache/prefix_cache.py::PrefixCache._lone",
        "pages[len(pages) - self.index.num_lone(pages) :]",
        "pages",
        "pages that others go on from leave the device before these, and a lookup stops the engine",
        "tests/kv_cache/test_prefix_cache.py::test_pages_that_go_first_do_not_go_before_what_continues_them",
    ),
}
