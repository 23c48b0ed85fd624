"""Verify everything on this machine's NPU, measure its speed, and write one report to send back.

    bash scripts/verify_npu.sh [--virtual] [--ranks N] [--output DIR] [--calls 50]
    python -m scripts.verify recipes/tiny/npu.yaml [key=value ...] [--output DIR] [--calls 50]

The parts are the Ascend product, the environment, operators against their contract, probes of undocumented
behaviour, tokens of the tiny model against the CPU's, and a short benchmark with its trace. With --ranks,
which is parallel.tensor, collectives are a part too, and the tiny model gets heads for each rank. Each
part runs in a process of its own, so a crash is one line of the report. Where the product needs it, the
parts override keys of the recipe, for example model.dtype=float16; the user's overrides come last. With
--virtual, a stand-in computes, and its speed means nothing. The exit status is 0 if all parts that count
are right.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark import options as kinds
from doctor.verify.report import (
    PartOutcome,
    VerifyPart,
    is_right,
    needed_overrides,
    parts,
    product_part,
    run,
    weights_part,
    write,
)
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.numbers import whole
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT


def main(argv: list[str]) -> int:
    """Run all parts, print the verdict, write the report; returns 0 where all that counts is right."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_recipe(parser)
    parser.add_argument("--output", type=kinds.folder, default=ROOT / "out", metavar="DIR")
    parser.add_argument("--calls", type=whole(1, 10_000), default=50, metavar="N", help="of each operator")
    options = parser.parse_intermixed_args(with_keys(argv))
    chosen = ["--profile", options.profile] if options.profile else []
    recipe = load(options.recipe, options.overrides, options.profile)
    device, ranks = recipe.device, recipe.parallel.ranks
    kind = "virtual" if device.virtual else device.kind
    folder = options.output.absolute() / f"verify-{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    asked, outcomes = [*options.overrides, *chosen], []  # the user's overrides come last, so they hold
    with TemporaryDirectory(dir=options.output) as room:
        if device.kind == "npu":
            outcomes.append(_announced_run(product_part([options.recipe, *asked])))
            asked = [*needed_overrides(outcomes[0]), *asked]
        if ranks > 1:
            weights = Path(room) / "weights"
            outcomes.append(_announced_run(weights_part(weights, ranks)))
            asked = [f"model.path={weights}", *asked]
        others = parts(
            folder,
            [options.recipe, *asked],
            virtual=device.virtual,
            num_calls=options.calls,
            product=device.product,
            ranks=ranks,
        )
        outcomes += [_announced_run(part) for part in others]
    text, archive = write(folder, outcomes, virtual=device.virtual)
    print(text)
    print(f"\n{'all right' if is_right(outcomes) else 'NOT RIGHT'}; the report to send back: {archive}")
    return int(not is_right(outcomes))


def _announced_run(part: VerifyPart) -> PartOutcome:
    print(f"{part.name}: {part.question}", file=sys.stderr)
    return run(part)


if __name__ == "__main__":
    verb.run(main)
