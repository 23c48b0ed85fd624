"""Provide modules that take long to import, which only the tests that use them import.

Every worker of a test run collects all files, and most runs are of a few tests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """A module that is imported when one of its names is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything that stands in a test file for such names
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


openai = LazyModule("openai")
peft = LazyModule("peft")
transformers = LazyModule("transformers")
