"""Which faults are seeded in the collectives of the virtual NPUs?"""

from __future__ import annotations

from tests.mutation.fault import Fault, TextFault

COLLECTIVES, RANKS = "virtual_npu/cann/collectives.c", "virtual_npu/cann/communicator.c"
HCCL_TESTS_OF = dict.fromkeys((COLLECTIVES, RANKS), ("tests/virtual_npu/test_hccl.py",))

HCCL_FAULTS = {
    "ranks_not_compared": TextFault(
        COLLECTIVES,
        "if (memcmp(theirs, said, sizeof *said)) code",
        "if (theirs == said) code",
        "two ranks that call different things mix up their data",
    ),
    "piece_from_the_start": TextFault(
        COLLECTIVES,
        "(part * call->said.count + at) * size, count * size);",
        "part * call->said.count * size, count * size);",
        "of what is larger than a window, each piece is the first again",
    ),
    "part_of_another_rank": TextFault(
        COLLECTIVES,
        "case REDUCE_SCATTER: reduce(c, said, c->rank * count, count, to); break;",
        "case REDUCE_SCATTER: reduce(c, said, 0, count, to); break;",
        "every rank gets the first rank's part of a sum",
    ),
    "sum_of_a_product_is_its_own": TextFault(
        COLLECTIVES,
        "    if (!call.communicator) return refuse(",
        "    if (call.communicator) return 0;\n    if (!call.communicator) return refuse(",
        "each rank goes on with its own part of a product",
    ),
    "sums_of_a_bias": Fault(
        "models/ops/npu.py::NpuOps.linear_summed",
        "x.dtype in self.product.dtypes and bias is None and group.size in SUMMED_RANKS",
        "x.dtype in self.product.dtypes and group.size in SUMMED_RANKS",
        "the bias of a linear is lost",
    ),
    "nobody_is_gone": TextFault(
        RANKS,
        "    if (is_gone(communicator, rank)) return say_gone(communicator, rank);\n",
        "",
        "half an hour passes until a rank that was killed is missed",
    ),
}
