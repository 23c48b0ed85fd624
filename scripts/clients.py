"""Try other people's client libraries on a server of the tiny agent, and print a table of what came out.

The clients are defined with the tests (tests/serving/clients), which run in a process of their own.
"""

from __future__ import annotations

import subprocess
import sys

from recipes.schema import verb


def main(argv: list[str]) -> int:
    """Run that process, and return its exit status."""
    return subprocess.run([sys.executable, "-m", "tests.serving.clients", *argv], check=False).returncode


if __name__ == "__main__":
    verb.run(main)
