"""Which faults are seeded in the collectives of the virtual NPUs?"""

from __future__ import annotations

from tests.mutation.fault import Fault

COLLECTIVES, RANKS = "virtual_npu/cann/collectives.c", "virtual_npu/cann/communicator.c"
HCCL_TESTS_OF = dict.fromkeys((COLLECTIVES, RANKS), ("tests/virtual_npu/test_hccl.py",))

HCCL_FAULTS = (
    Fault(
        "ranks_not_compared",
        COLLECTIVES,
        "if (memcmp(theirs, said, sizeof *said)) code",
        "if (theirs == said) code",
        "two ranks that call different things mix up their data",
    ),
    Fault(
        "piece_from_the_start",
        COLLECTIVES,
        "(part * call->said.count + at) * size, count * size);",
        "part * call->said.count * size, count * size);",
        "of what is larger than a window, each piece is the first again",
    ),
    Fault(
        "part_of_another_rank",
        COLLECTIVES,
        "case REDUCE_SCATTER: reduce(c, said, c->rank * count, count, to); break;",
        "case REDUCE_SCATTER: reduce(c, said, 0, count, to); break;",
        "every rank gets the first rank's part of a sum",
    ),
    Fault(
        "sum_of_a_product_is_its_own",
        COLLECTIVES,
        "    if (!call.communicator) return refuse(",
        "    if (call.communicator) return 0;\n    if (!call.communicator) return refuse(",
        "each rank goes on with its own part of a product",
    ),
    Fault(
        "sums_of_a_bias",
        "models/ops/npu.py",
        "x.dtype in self.product.dtypes and bias is None and",
        "x.dtype in self.product.dtypes and",
        "the bias of a linear is lost",
    ),
    Fault(
        "nobody_is_gone",
        RANKS,
        "    if (is_gone(communicator, rank)) return say_gone(communicator, rank);\n",
        "",
        "half an hour passes until a rank that was killed is missed",
    ),
)
