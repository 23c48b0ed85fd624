"""Would a test notice if this were wrong?

Plants one fault after the other in a copy of the tree and runs the one test there that is to kill it. Prints
which test killed which fault; the status is 1 if a fault is not killed, if its place in the code is no longer
found, or if one of the tests fails without any fault.
"""

from __future__ import annotations

import argparse
import os

from recipes.schema import verb
from tests.mutation.every import FAULTS
from tests.mutation.trees import Outcome, outcomes


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    unknown = sorted({*arguments.only} - FAULTS.keys())
    if unknown:
        raise ValueError(f"there is no fault called {', '.join(unknown)}; --list names them")
    chosen = {name: FAULTS[name] for name in FAULTS if not arguments.only or name in arguments.only}
    if arguments.list:
        for name, fault in chosen.items():
            print(f"{name:36} {fault.place:60} {fault.why}")
        return 0
    judged = outcomes([*chosen.values()], arguments.jobs, arguments.timeout_s)
    sound = next(judged)
    print_outcome("(no fault)", sound, is_good=not (sound.killers or sound.problem), killed_by="")
    left = []
    for (name, fault), outcome in zip(chosen.items(), judged, strict=True):
        is_killed = bool(outcome.killers) and not outcome.problem
        print_outcome(name, outcome, is_good=is_killed, killed_by=fault.killed_by)
        left += [] if is_killed else [name]
    print(
        f"{len(chosen) - len(left)} of {len(chosen)} faults killed" + "".join(f"\n! {name}" for name in left)
    )
    return 1 if left or sound.killers or sound.problem else 0


def print_outcome(name: str, outcome: Outcome, *, is_good: bool, killed_by: str) -> None:
    """Print one line: of the sound tree if no test is to kill it, else of a fault."""
    if outcome.problem:
        verdict = outcome.problem
    elif not killed_by:
        verdict = f"fails without a fault: {', '.join(outcome.killers)}" if outcome.killers else "passes"
    else:
        verdict = f"killed by {outcome.killers[0]}" if outcome.killers else f"NOT KILLED by {killed_by}"
    print(f"{' ' if is_good else '!'} {name:36} {outcome.seconds:6.1f} s  {verdict}", flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    options.add_argument(
        "--only",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these faults; may be given again",
    )
    options.add_argument("--list", action="store_true", help="say what the faults are, and run nothing")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at once (the cores)")
    options.add_argument("--timeout-s", type=float, default=300.0, help="seconds for the test of one fault")
    return options


if __name__ == "__main__":
    verb.run(main)
