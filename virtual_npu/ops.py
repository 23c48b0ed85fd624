"""List the operators that the virtual NPU checks, with their rules and the rules' sources.

python -m virtual_npu.ops                 one line for each operator
python -m virtual_npu.ops npu_rms_norm    one operator, rule by rule
python -m virtual_npu.ops --json          all of them as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

from virtual_npu.contract import Operator
from virtual_npu.operators import OPERATORS, operator
from virtual_npu.simulated_products import PRODUCTS


def described(each: Operator) -> dict[str, Any]:
    """Return an operator as plain data."""
    return {
        "name": each.qualified,
        "schema": each.schema,
        "products": [product.name for product in each.products],
        "source": each.source,
        "rules": [
            {"name": rule.name, "demands": rule.demands, "source": rule.source, "fix": rule.fix}
            for rule in each.all_rules
        ],
    }


def table() -> str:
    """Format one line for each operator: its name, its number of rules, and a column for each product."""
    width = max(len(each.qualified) for each in OPERATORS)
    head = f"{'operator':{width}}  rules  {'  '.join(PRODUCTS)}"
    lines = [
        f"{each.qualified:{width}}  {len(each.all_rules):5}  "
        + "  ".join(
            f"{'x' if product in each.products else '':{len(name)}}" for name, product in PRODUCTS.items()
        )
        for each in OPERATORS
    ]
    return "\n".join(line.rstrip() for line in (head, *lines))


def page(each: Operator) -> str:
    """Format one operator with all of its rules."""
    lines = [each.schema, f"products: {', '.join(product.name for product in each.products)}"]
    lines.append(f"source: {each.source}")
    for rule in each.all_rules:
        lines += ["", f"{rule.name}: {rule.demands}", f"    source: {rule.source}", f"    fix: {rule.fix}"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m virtual_npu.ops", description="operators and their rules"
    )
    parser.add_argument("name", nargs="?", help="one operator, in full")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(argv)
    try:
        chosen = OPERATORS if arguments.name is None else (operator(arguments.name),)
    except ValueError as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps([described(each) for each in chosen], indent=2))
    else:
        print(table() if arguments.name is None else page(chosen[0]))
    return 0


def run() -> int:
    """Run the command; one whose reader has seen enough, as in `... | head`, ends without a traceback."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        status = 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(run())
