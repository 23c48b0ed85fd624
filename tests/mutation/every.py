"""All seeded faults by their names: those of each module here whose name ends in `_faults`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.mutation.fault import Fault

FAULTS: dict[str, Fault] = {}
for path in sorted(Path(__file__).parent.glob("*_faults.py")):
    of_module: dict[str, Fault] = import_module(f"tests.mutation.{path.stem}").FAULTS
    if twice := FAULTS.keys() & of_module:
        raise ValueError(f"{path.name}: {', '.join(sorted(twice))} names another fault already")
    FAULTS |= of_module
