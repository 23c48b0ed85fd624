"""How does a command line name a recipe, and files? In the same way for every verb."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A file, the keys that replace its own, and a profile."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, such as recipes/tiny/cpu.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as cache.page_size=32")
    parser.add_argument("--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency")


def keep_apart(output: str | Path, *inputs: str | Path) -> None:
    """Raise ValueError where a command would write over a file that it reads, whatever its name is."""
    for each in inputs:
        if os.path.exists(output) and os.path.exists(each) and os.path.samefile(output, each):
            raise ValueError(
                f"{output} is read by this command, which would write over it; name another file"
            )
