"""Simulate a recipe on a machine that is not here; nothing of it is measured.

    python -m scripts.simulate RECIPE [key=value] --trace FILE --device ascend910b --tp 8
    python -m scripts.simulate search RECIPE [key=value] --trace FILE --ttft-ms 500 --itl-ms 50
    python -m scripts.simulate routes RECIPE [key=value] --trace FILE --dp 64 [--plot OUT.png]
    python -m scripts.simulate splits RECIPE [key=value] --trace FILE --split 2:2
    python -m scripts.simulate fleet RECIPE [key=value] --dp 10000 --requests 10000000 --sample 100 ...
    python -m scripts.simulate held-out RECIPE [key=value] --train FILE [--held FILE] [--runs N]
    python -m scripts.simulate fit RECORDING --output COSTS.json     what --costs takes

The scheduler is the real one; the time of a step comes from a model of the device (`simulation/profiles`), or
was fitted to a recorded run (`scheduler.record` in its recipe).
"""

from __future__ import annotations

from benchmark.verbs import simulate
from recipes.schema import verb


def main(argv: list[str]) -> None:
    """Simulate, search or fit; raises ValueError or OSError for what cannot be read or is impossible."""
    simulate(argv, __doc__ or "Simulate a recipe on a machine that is not here; nothing of it is measured.")


if __name__ == "__main__":
    verb.run(main)
