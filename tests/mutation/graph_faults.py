"""Faults of captured steps, and of collectives on the NPU."""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

FAULTS = {
    "tokens_chosen_outside_stay_there": Fault(
        "models/step/graphs.py::DecodeGraphs.run",
        "last.tokens is not self._held",
        "self._held is None",
        "the step after a draw outside the graph reads the best tokens in place of the drawn",
        "tests/models/test_captured_draws.py::test_tokens_are_those_of_steps_that_are_not_captured",
    ),
    "no_token_is_looked_up": Fault(
        "models/step/graphs.py::DecodeGraphs._step",
        "self._table.index_select(0, source).clamp_(min=0)",
        "self._table.index_select(0, source)",
        "the embedding is read before its first row",
        "tests/models/test_captured_draws.py::test_what_is_no_token_is_not_looked_up_by_the_step_after_it",
    ),
    "drafts_overwritten_by_the_next": Fault(
        "models/drafting/drafter.py::Drafter.follow",
        "best.tokens.clone()",
        "best.tokens",
        "all drafts of a row are the last one",
        "tests/models/test_captured_drafts.py::test_a_step_of_the_draft_model_costs_a_replay_and_not_its_launches",
    ),
    "draft_model_s_graphs_outlive_its_cache": Fault(
        "models/step/runner.py::ModelRunner._captured",
        "[self.graphs, None if self.drafter is None else self.drafter.graphs]",
        "[self.graphs]",
        "after a resize, drafts follow from keys that nobody writes any more",
        "tests/models/test_captured_drafts.py::test_drafts_are_made_and_checked_in_captured_steps",
    ),
    "drafts_read_to_the_end_of_their_span": Fault(
        "models/step/graph_inputs.py::GraphInputs.fill",
        "packed.positions + 1",
        "np.repeat(batch.stops, lens)",
        "a token is chosen by what is guessed to follow it",
        "tests/models/test_graphs.py::test_each_draft_takes_a_row_of_a_step_of_one_token_each",
    ),
    "padding_among_what_is_drawn": Fault(
        "models/step/graphs.py::DecodeGraphs._step",
        "hidden = hidden.index_select(0, columns[PLACE])",
        "pass",
        "a request gets the token of the padding before it",
        "tests/models/test_captured_draws.py::test_drafts_are_checked_in_captured_steps",
    ),
    "inputs_written_while_they_are_copied": Fault(
        "models/step/graphs.py::DecodeGraphs.__init__",
        "max(2, stages)",
        "stages",
        "a device that is a step behind reads the inputs of the step after",
        "tests/models/test_captured_draws.py::test_inputs_stay_until_a_slow_device_has_copied_them",
    ),
    "missed_after_its_part": TextFault(
        "virtual_npu/cann/communicator.c",
        "    watch->is_gone = is_gone(communicator, rank);\n",
        "    if (is_gone(communicator, rank)) return say_gone(communicator, rank);\n",
        "a collective is refused that was complete when a rank ended",
        "tests/virtual_npu/test_hccl.py::test_a_rank_that_leaves_after_its_part_is_not_missed",
    ),
    "results_of_collectives_not_compared": Fault(
        "doctor/verify/collectives.py::collectives_of",
        "not torch.equal(run().cpu(), wanted)",
        "run() is None",
        "the report calls collectives right that bring wrong numbers",
        "tests/doctor/test_verify.py::test_a_collective_that_is_wrong_is_found",
    ),
    "ranks_not_compared": TextFault(
        "virtual_npu/cann/collectives.c",
        "if (memcmp(theirs, said, sizeof *said)) code",
        "if (theirs == said) code",
        "two ranks that call different things mix up their data",
        "tests/virtual_npu/test_hccl.py::test_ranks_that_disagree_or_are_killed_are_named_at_once",
    ),
}
