"""Which faults are seeded where the operator's own logits processors act?"""

from __future__ import annotations

from tests.mutation.fault import Fault

OWN, KNOWN = "continuous_batching/own_processors.py", "serving/own_processors.py"
PROCESSOR_TESTS_OF = dict.fromkeys((OWN, KNOWN), ("tests/serving/test_own_processors.py",))

PROCESSOR_FAULTS = {
    "processor_fails_for_all": Fault(
        OWN + "::OwnProcessors.changed",
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nreturn None',
        'self.error = f"logits processor {name} raised {type(error).__name__}: {error}"\nraise',
        "one request's processor ends the engine, and with it all others",
    ),
    "processor_of_any_shape": Fault(
        OWN + "::OwnProcessors.changed",
        "(shape, kind) != (tuple(logits.shape), logits.dtype)",
        "kind != logits.dtype",
        "logits that are too short end the engine when they are written back",
    ),
    "processor_of_the_leader_alone": Fault(
        KNOWN + "::KnownProcessors.give",
        "(request, *request.followers)",
        "(request,)",
        "the further samples of a request meet an assertion",
    ),
}
