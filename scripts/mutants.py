"""Check the tests by mutation: plant faults, one at a time, and run the test that each names.

The faults are defined with the tests (tests/mutation), which run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys

from recipes.schema import verb


def main(argv: list[str]) -> int:
    """Run that process, and return its exit status."""
    return subprocess.run([sys.executable, "-m", "tests.mutation", *argv], check=False).returncode


if __name__ == "__main__":
    verb.run(main)
