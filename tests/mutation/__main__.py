"""Plant faults in the code, and check that the tests kill them.

Each fault is planted in a copy of the tree, and the one test runs there that is to kill it. Prints which test
killed which fault; the status is 1 if a fault is not killed, if its place in the code is no longer found, or
if one of the tests fails without any fault.
"""

from __future__ import annotations

import argparse
import os

from recipes.schema import verb
from tests.mutation.every import FAULTS
from tests.mutation.fault import Fault
from tests.mutation.trees import Outcome, outcomes
from tests.patience import PATIENCE_S

SOUND = "(no fault)"


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    unknown = sorted({*arguments.only} - FAULTS.keys())
    if unknown:
        raise ValueError(f"there is no fault called {', '.join(unknown)}; --list names them")
    chosen = {name: FAULTS[name] for name in FAULTS if not arguments.only or name in arguments.only}
    if arguments.list:
        for called, fault in chosen.items():
            print(f"{called:36} {fault.place:60} {fault.why}")
        return 0
    bad = []
    for name, outcome in outcomes(chosen, arguments.jobs, arguments.timeout_s):
        is_good, verdict = judged(outcome, chosen[name] if name else None)
        print(f"{' ' if is_good else '!'} {name or SOUND:36} {outcome.seconds:6.1f} s  {verdict}", flush=True)
        bad += [] if is_good else [name or SOUND]
    print(f"{len(chosen) - len({*bad} - {SOUND})} of {len(chosen)} faults killed")
    print("".join(f"! {name}\n" for name in bad), end="")
    return 1 if bad else 0


def judged(outcome: Outcome, fault: Fault | None) -> tuple[bool, str]:
    """Return whether a test killed the fault, or the sound tree passed, and what to say of it."""
    if outcome.problem:
        return False, outcome.problem
    if fault is None:
        failed = ", ".join(outcome.killers)
        return not failed, f"fails without a fault: {failed}" if failed else "passes"
    if outcome.killers:
        return True, f"killed by {outcome.killers[0]}"
    return False, f"NOT KILLED by {fault.killed_by}"


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
    most_s = PATIENCE_S + 60  # a test that loses its patience is to fail by itself
    options.add_argument("--timeout-s", type=float, default=most_s, help="seconds for the test of one fault")
    return options


if __name__ == "__main__":
    verb.run(main)
