"""Would a test notice if this were wrong? Plants faults, one at a time, and runs the test that each names.

The faults stand with the tests (tests/mutation), which run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys

from recipes.schema import verb


def main(argv: list[str]) -> int:
    """Run that process; its status is ours."""
    return subprocess.run([sys.executable, "-m", "tests.mutation", *argv], check=False).returncode


if __name__ == "__main__":
    verb.run(main)
