"""Which faults are seeded where the operator's own logits processors act?"""

from __future__ import annotations

from tests.mutation.fault import Fault

OWN, KNOWN = "continuous_batching/own_processors.py", "serving/own_processors.py"
PROCESSOR_TESTS_OF = dict.fromkeys((OWN, KNOWN), ("tests/serving/test_own_processors.py",))

PROCESSOR_FAULTS = (
    Fault(
        "processor_fails_for_all",
        OWN,
        "                return None\n            if (shape",
        "                raise\n            if (shape",
        "one request's processor ends the engine, and with it all others",
    ),
    Fault(
        "processor_of_any_shape",
        OWN,
        "if (shape, kind) != (tuple(logits.shape), logits.dtype):",
        "if kind != logits.dtype:",
        "logits that are too short end the engine when they are written back",
    ),
    Fault(
        "processor_of_the_leader_alone",
        KNOWN,
        "for each in (request, *request.followers):",
        "for each in (request,):",
        "the further samples of a request meet an assertion",
    ),
)
