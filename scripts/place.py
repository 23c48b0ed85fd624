"""Propose on which rank each expert should lie, by measured counts.

    curl -s localhost:8000/experts > COUNTS
    python -m scripts.place COUNTS --ranks N --output PLACEMENT
    python -m scripts.serve RECIPE parallel.tensor=N parallel.expert=N parallel.placement=PLACEMENT

COUNTS comes from a server that counts (device.count_experts): how many tokens chose each expert. N is
parallel.expert. The command prints the load of the most loaded rank divided by the mean of all ranks, before
and after, and says where placing does not pay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from borders.files import whole_file
from models.parallel.placement import proposed
from recipes.schema import verb
from recipes.schema.command_line import keep_apart
from recipes.schema.numbers import whole
from recipes.schema.parallel_section import MOST_RANKS


def main(argv: list[str]) -> None:
    """Propose a placement; raises ValueError or OSError for what cannot be read, divided or written."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.place", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("counts", type=Path, metavar="COUNTS", help="what GET /experts said")
    parser.add_argument("--ranks", type=whole(2, MOST_RANKS), required=True, help="parallel.expert")
    parser.add_argument("--output", type=Path, metavar="PLACEMENT", help="the file to write")
    options = parser.parse_args(argv)
    if options.output is not None:
        keep_apart(options.output, options.counts)
    placement, lines = proposed(options.counts, options.ranks)
    print(*lines, sep="\n")
    if options.output is not None:
        with whole_file(options.output) as output:
            output.write(json.dumps({"placement": placement, "ranks": options.ranks}) + "\n")


if __name__ == "__main__":
    verb.run(main)
