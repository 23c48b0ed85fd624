"""How does a command line name a recipe? In the same way for every verb."""

from __future__ import annotations

import argparse


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """A file, the keys that replace its own, and a profile."""
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, such as recipes/tiny/cpu.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as cache.page_size=32")
    parser.add_argument("--profile", metavar="NAME", help="a name in recipes/profiles, such as low_latency")
