"""How many random cases are enough? What CI has time for; with THOROUGH=1, as many as docs/tests.md says."""

import os

THOROUGH = os.environ.get("THOROUGH") == "1"


def cases(few: int, many: int) -> int:
    """`many` where time does not matter."""
    return many if THOROUGH else few
