"""Which faults are seeded in tokens that are sent to the ranks of their experts?"""

from __future__ import annotations

from tests.mutation.fault import Fault
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

DISPATCH_FAULTS = (
    Fault(
        "sent_by_the_numbers_of_experts",
        MIXTURE,
        "places = self._places.index_select(0, chosen.flatten()).view_as(chosen)",
        "places = chosen",
        "where experts were placed, tokens go to others than their router chose",
    ),
    Fault(
        "sent_beside_sums",
        GROUP,
        "        tokens = Group(in_parts(size)[rank // size])\n",
        "        tokens = world\n",
        "a communicator carries tokens and sums, which HCCL does not take",
    ),
    Fault(
        "first_ranks_tokens_are_sent_by_all",
        SENT,
        "each[rank * count : (rank + 1) * count]",
        "each[:count]",
        "every rank sends the same tokens, and all others get what became of these",
    ),
    Fault(
        "last_tokens_stay_behind",
        SENT,
        "count = -(-total // size)",
        "count = total // size",
        "tokens that cannot be shared out evenly are lost",
    ),
    Fault(
        "int8_sent_in_16_bits",
        SENT,
        "quant_mode=2 if is_int8 else 0",
        "quant_mode=0",
        "products in int8 get rows that are none",
    ),
    Fault(
        "both_buffers_taken_for_one",
        LIMITS,
        "room = buffer_mib * _MIB // 2",
        "room = buffer_mib * _MIB",
        "more tokens are sent than the communicator's buffers hold",
    ),
    Fault(
        "sent_where_one_rank_has_no_buffers",
        GROUP,
        "        if least and self.is_on_one_machine:\n",
        "        if buffer_mib and self.is_on_one_machine:\n",
        "ranks whose machines were asked and those of others wait for each other",
    ),
    Fault(
        "any_chosen_expert_is_here",
        LIMITS,
        "(ranks * min(held, num_chosen) * hidden * 2)",
        "(ranks * hidden * 2)",
        "a token that chose several experts of one rank overruns its buffer",
    ),
    Fault(
        "tokens_and_sums_together",
        COLLECTIVES,
        "    if (c->carries_tokens && c->carries_sums)\n",
        "    if (false)\n",
        "the stand-in takes what hangs on hardware",
    ),
    Fault(
        "an_expert_twice",
        CONTRACT,
        "    elif (ids.sort(1).values.diff(dim=1) == 0).any():\n",
        "    elif False:\n",
        "more rows arrive than there is room for",
    ),
    Fault(
        "what_was_not_sent_is_judged",
        PROBES,
        "numbers = (chosen - own.start) % config.num_experts",
        "numbers = chosen",
        "the probe compares with the first rank's experts on every rank, and never says yes",
    ),
)
