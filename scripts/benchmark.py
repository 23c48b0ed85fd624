"""Measure speed: `python -m scripts.benchmark VERB ...`; each verb has its own --help."""

from __future__ import annotations

from benchmark.verbs import main
from recipes.schema import verb

if __name__ == "__main__":
    verb.run(main)
