"""Simulate a recipe on a machine that is not here: `python -m scripts.simulate [VERB] RECIPE ...`.

The scheduler is the real one; the time of a step comes from a model of the device (`devices/profiles`), or
was fitted to a recorded run (`scheduler.record` in its recipe). Nothing of it is measured.
"""

from __future__ import annotations

from benchmark.verbs import simulate as main
from recipes.schema import verb

if __name__ == "__main__":
    verb.run(main)
