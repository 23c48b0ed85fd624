"""Would a test notice if this were wrong? Plants faults, one at a time, and runs the tests that should fail.

The faults stand with the tests (tests/mutation), which run in a process of their own.
"""

from __future__ import annotations

import os
import sys

from scripts import verb


def main(argv: list[str]) -> int:
    """Become that process."""
    os.execv(sys.executable, [sys.executable, "-m", "tests.mutation", *argv])


if __name__ == "__main__":
    verb.run(main)
