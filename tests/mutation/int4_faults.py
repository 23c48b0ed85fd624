"""Which faults are seeded in weights that stay in 4 bits?"""

from __future__ import annotations

from tests.mutation.fault import Fault
from tests.mutation.packing_faults import PACKED_TESTS, UNPACKING

INT4, OPS_INT4 = "models/int4.py", "models/int4_weight.py"
INT4_TESTS = ("tests/models/test_int4.py",)
INT4_TESTS_OF = {**dict.fromkeys((INT4, OPS_INT4), INT4_TESTS), UNPACKING: (*PACKED_TESTS, *INT4_TESTS)}

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
        "if inputs // tensors % size:",
        "if inputs % size:",
        "a rank's words begin within a group",
    ),
    Fault(
        "experts_kept_packed",
        INT4,
        "if config.mixture is not None or config.latent is not None:",
        "if config.latent is not None:",
        "experts that are joined into one product have no words",
    ),
)
