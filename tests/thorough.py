"""The number of random cases: what CI has time for, or with THOROUGH=1 what docs/tests.md says."""

import os
from typing import TypeVar

THOROUGH = os.environ.get("THOROUGH") == "1"


Cases = TypeVar("Cases")


def cases(few: Cases, many: Cases) -> Cases:
    """`many` where time does not matter; a number of cases, or the cases themselves."""
    return many if THOROUGH else few
