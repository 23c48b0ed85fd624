"""Faults of captured steps, and of collectives on the NPU."""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

FAULTS = {
    "tokens_chosen_outside_stay_there": Fault(
        "models/graphs.py::DecodeGraphs.run",
        "last.tokens is not self._held",
        "self._held is None",
        "the step after a draw outside the graph reads the best tokens in place of the drawn",
        "tests/models/test_captured_draws.py::test_tokens_are_those_of_steps_that_are_not_captured",
    ),
    "no_token_is_looked_up": Fault(
        "models/graphs.py::DecodeGraphs._step",
        "self._table.index_select(0, source).clamp_(min=0)",
        "self._table.index_select(0, source)",
        "the embedding is read before its first row",
        "tests/models/test_captured_draws.py::test_what_is_no_token_is_not_looked_up_by_the_step_after_it",
    ),
    "draft_model_s_graphs_outlive_its_cache": Fault(
        "models/runner.py::ModelRunner.resize",
        "[self.graphs, None if self.drafter is None else self.drafter.graphs]",
        "[self.graphs]",
        "after a resize, drafts follow from keys that nobody writes any more",
        "tests/models/test_captured_drafts.py::test_drafts_are_made_and_checked_in_captured_steps",
    ),
    "draws_never_replayed": Fault(
        "models/graphs.py::DecodeGraphs.run",
        "step.draw.replay()",
        "pass",
        "every step gets the tokens of the capture",
        "tests/models/test_captured_draws.py::test_tokens_are_those_of_steps_that_are_not_captured",
    ),
    "padding_among_what_is_drawn": Fault(
        "models/graphs.py::DecodeGraphs._step",
        "hidden = hidden.index_select(0, columns[PLACE])",
        "pass",
        "a request gets the token of the padding before it",
        "tests/models/test_captured_draws.py::test_drafts_are_checked_in_captured_steps",
    ),
    "prefetch_that_nobody_awaits": Fault(
        "models/ops/npu.py::NpuOps.await_prefetch",
        "torch.npu.current_stream().wait_stream(self._prefetches)",
        "pass",
        "a capture ends while a stream of it is not joined",
        "tests/models/test_prefetch.py::test_tokens_are_the_same",
    ),
    "ranks_not_compared": TextFault(
        "virtual_npu/cann/collectives.c",
        "if (memcmp(theirs, said, sizeof *said)) code",
        "if (theirs == said) code",
        "two ranks that call different things mix up their data",
        "tests/virtual_npu/test_hccl.py::test_ranks_that_call_different_things_are_named",
    ),
}
