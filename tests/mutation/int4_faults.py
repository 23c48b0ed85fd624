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

INT4_FAULTS = {
    "kept_nibbles_the_other_way_round": Fault(
        OPS_INT4 + "::in_words",
        "values[:, ::2] | values[:, 1::2] << 4",
        "values[:, 1::2] | values[:, ::2] << 4",
        "neighbours change places",
    ),
    "offset_scaled_before_it_is_added": Fault(
        OPS_INT4 + "::Int4Weight.weight",
        "made * self._by_input(self.scale)",
        "self.numbers().float() * self._by_input(self.scale) + self._by_input(self.offset)",
        "a zero is a number, and no weight",
    ),
    "last_group_as_long_as_the_others": Fault(
        OPS_INT4 + "::Int4Weight._by_input",
        "self.group_size",
        "-(-num_inputs // groups.shape[1])",
        "where the last group is short, inputs have the scales of others",
    ),
    "zero_and_middle_exchanged": Fault(
        UNPACKING + "::Unpacking.int4",
        "MIDDLE - zeros[:, groups]",
        "zeros[:, groups] - MIDDLE",
        "every weight of a group is off by twice its zero",
    ),
    "groups_of_the_first_rank": Fault(
        UNPACKING + "::Unpacking.int4",
        "slice(self.columns.start // size, -(-self.columns.stop // size))",
        "slice(0, -(-(self.columns.stop - self.columns.start) // size))",
        "all ranks scale by what belongs to the first",
    ),
    "any_order_of_groups_taken": Fault(
        UNPACKING + "::Unpacking.int4",
        "not torch.equal(self._groups(found), self._groups({}))",
        "False",
        "inputs that a file moved have the scales of others, in silence",
    ),
    "a_group_on_two_ranks": Fault(
        INT4 + "::check_groups", "inputs // ranks", "inputs", "a rank's words begin within a group"
    ),
    "latents_kept_packed": Fault(
        INT4 + "::kept_int4",
        "config.latent is not None",
        "False",
        "latent attention has no products in 4 bits",
    ),
    "a_group_of_an_expert_on_two_ranks": Fault(
        INT4 + "::check_groups", "tensors // experts", "1", "a rank's words of an expert begin within a group"
    ),
    "whole_experts_divided_in_groups": Fault(
        INT4 + "::check_groups",
        "tensors // experts",
        "tensors",
        "experts that are spread are refused as if they were cut",
    ),
    "groups_of_experts_not_whole": Fault(
        LIMITS + "::AscendProduct.check_int4",
        "inputs % group_size",
        "False",
        "CANN refuses the first step, after minutes of loading",
    ),
}
