"""Which faults are seeded in tokens that are sent to the ranks of their experts?"""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault
from tests.mutation.hccl_faults import HCCL_TESTS_OF
from tests.mutation.spread_faults import SPREAD_TESTS_OF

MIXTURE, GROUP, SENT = "models/mixture.py", "models/group.py", "models/npu/dispatch.py"
LIMITS, CONTRACT = "devices/ascend_dispatch.py", "virtual_npu/operators/dispatch.py"
COLLECTIVES, PROBES = "virtual_npu/cann/collectives.c", "doctor/verify/npu/rank_questions.py"
RANK_TESTS = "tests/models/test_tensor_parallel_npu.py"
DISPATCH_TESTS_OF = {
    SENT: (RANK_TESTS,),
    LIMITS: ("tests/devices/test_ascend_dispatch.py",),
    CONTRACT: ("tests/virtual_npu/test_wrong_calls.py", "tests/virtual_npu/test_hccl.py"),
    PROBES: ("tests/doctor/test_probes.py",),
    MIXTURE: (*SPREAD_TESTS_OF[MIXTURE], RANK_TESTS),
    GROUP: ("tests/models/test_token_groups.py", *SPREAD_TESTS_OF[GROUP], RANK_TESTS),
}
assert COLLECTIVES in HCCL_TESTS_OF, "it is tried there"

DISPATCH_FAULTS = {
    "sent_by_the_numbers_of_experts": Fault(
        MIXTURE + "::Mixture.forward",
        "self._places.index_select(0, chosen.flatten()).view_as(chosen)",
        "chosen",
        "where experts were placed, tokens go to others than their router chose",
    ),
    "sent_beside_sums": Fault(
        GROUP + "::divided",
        "Group(in_parts(size)[rank // size])",
        "world",
        "a communicator carries tokens and sums, which HCCL does not take",
    ),
    "first_ranks_tokens_are_sent_by_all": Fault(
        SENT + "::Dispatch._own",
        "each[rank * count : (rank + 1) * count]",
        "each[:count]",
        "every rank sends the same tokens, and all others get what became of these",
    ),
    "last_tokens_stay_behind": Fault(
        SENT + "::Dispatch._own",
        "-(-total // size)",
        "total // size",
        "tokens that cannot be shared out evenly are lost",
    ),
    "int8_sent_in_16_bits": Fault(
        SENT + "::Dispatch.mixture", "2 if is_int8 else 0", "0", "products in int8 get rows that are none"
    ),
    "both_buffers_taken_for_one": Fault(
        LIMITS + "::most_dispatched",
        "buffer_mib * _MIB // 2",
        "buffer_mib * _MIB",
        "more tokens are sent than the communicator's buffers hold",
    ),
    "sent_where_one_rank_has_no_buffers": Fault(
        GROUP + "::Group.open_for_tokens",
        "least and self.is_on_one_machine",
        "buffer_mib and self.is_on_one_machine",
        "ranks whose machines were asked and those of others wait for each other",
    ),
    "any_chosen_expert_is_here": Fault(
        LIMITS + "::most_dispatched",
        "ranks * min(held, num_chosen)",
        "ranks",
        "a token that chose several experts of one rank overruns its buffer",
    ),
    "tokens_and_sums_together": TextFault(
        COLLECTIVES,
        "    if (c->carries_tokens && c->carries_sums)\n",
        "    if (false)\n",
        "the stand-in takes what hangs on hardware",
    ),
    "an_expert_twice": Fault(
        CONTRACT + "::_known",
        "(ids.sort(1).values.diff(dim=1) == 0).any()",
        "False",
        "more rows arrive than there is room for",
    ),
    "what_was_not_sent_is_judged": Fault(
        PROBES + "::dispatches",
        "(chosen - own.start) % config.num_experts",
        "chosen",
        "the probe compares with the first rank's experts on every rank, and never says yes",
    ),
}
