"""Which faults are seeded in weights that stay in 4 bits?"""

from __future__ import annotations

from tests.mutation.aclop_faults import LIMITS
from tests.mutation.fault import Fault
from tests.mutation.npu_faults import NPU_TESTS_OF
from tests.mutation.packing_faults import PACKED_TESTS, UNPACKING

INT4, OPS_INT4 = "models/int4.py", "models/int4_weight.py"
INT4_TESTS = ("tests/models/test_int4.py", "tests/models/test_int4_experts.py")
INT4_TESTS_OF = {
    **dict.fromkeys((INT4, OPS_INT4), INT4_TESTS),
    UNPACKING: (*PACKED_TESTS, *INT4_TESTS),
    LIMITS: (*NPU_TESTS_OF[LIMITS], *INT4_TESTS),
}

INT4_FAULTS = (
    Fault(
        "kept_nibbles_the_other_way_round",
        OPS_INT4,
        "values[:, ::2] | values[:, 1::2] << 4",
        "values[:, 1::2] | values[:, ::2] << 4",
        "neighbours change places",
    ),
    Fault(
        "offset_scaled_before_it_is_added",
        OPS_INT4,
        "(made * self._by_input(self.scale))",
        "(self.numbers().float() * self._by_input(self.scale) + self._by_input(self.offset))",
        "a zero is a number, and no weight",
    ),
    Fault(
        "last_group_as_long_as_the_others",
        OPS_INT4,
        "repeat_interleave(self.group_size, 1)[:, :num_inputs]",
        "repeat_interleave(-(-num_inputs // groups.shape[1]), 1)[:, :num_inputs]",
        "where the last group is short, inputs have the scales of others",
    ),
    Fault(
        "zero_and_middle_exchanged",
        UNPACKING,
        "MIDDLE - zeros[:, groups]",
        "zeros[:, groups] - MIDDLE",
        "every weight of a group is off by twice its zero",
    ),
    Fault(
        "groups_of_the_first_rank",
        UNPACKING,
        "groups = slice(self.columns.start // size, -(-self.columns.stop // size))",
        "groups = slice(0, -(-(self.columns.stop - self.columns.start) // size))",
        "all ranks scale by what belongs to the first",
    ),
    Fault(
        "any_order_of_groups_taken",
        UNPACKING,
        "if not torch.equal(self._groups(found), self._groups({})):",
        "if False:",
        "inputs that a file moved have the scales of others, in silence",
    ),
    Fault(
        "a_group_on_two_ranks",
        INT4,
        "inputs // ranks % size:",
        "inputs % size:",
        "a rank's words begin within a group",
    ),
    Fault(
        "latents_kept_packed",
        INT4,
        "if config.latent is not None:",
        "if False:",
        "latent attention has no products in 4 bits",
    ),
    Fault(
        "a_group_of_an_expert_on_two_ranks",
        INT4,
        "mixture.inner_size, tensors // experts))",
        "mixture.inner_size, 1))",
        "a rank's words of an expert begin within a group",
    ),
    Fault(
        "whole_experts_divided_in_groups",
        INT4,
        "mixture.inner_size, tensors // experts))",
        "mixture.inner_size, tensors))",
        "experts that are spread are refused as if they were cut",
    ),
    Fault(
        "groups_of_experts_not_whole",
        LIMITS,
        "            if inputs % group_size:",
        "            if False:",
        "CANN refuses the first step, after minutes of loading",
    ),
)
