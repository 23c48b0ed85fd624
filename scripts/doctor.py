"""Diagnose why an engine does not run on this Ascend machine.

    python -m scripts.doctor [--json]

The command inspects driver, devices, CANN, torch, torch_npu, the shell and the system, changes nothing, and
prints each fault with its cause, its fix and the document that says so. Exit status 0: fit to compute on an
NPU; 1: not.
"""

from __future__ import annotations

import argparse
import json

from doctor.diagnosis import diagnose, in_json, in_words
from doctor.facts import gather
from recipes.schema import verb


def main(argv: list[str]) -> int:
    """Print the diagnosis; returns 0 where nothing keeps an NPU from computing."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.doctor", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    facts = gather()
    findings = diagnose(facts)
    print(json.dumps(in_json(facts, findings), indent=2) if options.json else in_words(facts, findings))
    return int(any(finding.is_fatal for finding in findings.values()))


if __name__ == "__main__":
    verb.run(main)
