"""Write the requests of a benchmark's load: drawn lengths at drawn times, or those of a public trace.

    python -m scripts.trace --requests 64 --rate inf --prompt-tokens uniform:70:210 \\
        --output-tokens uniform:32:96 --vocab-size 32000 --seed 0 --output FILE.jsonl
    python -m scripts.trace --output FILE.jsonl
    python -m scripts.trace --from mooncake:TRACE.jsonl --vocab-size 32000 --output FILE.jsonl

The lines are what `python -m scripts.generate` reads: prompts of token ids, so that any model serves them,
and answers of exactly the drawn length. Requests arrive by a Poisson process, or all at once at rate `inf`;
in bursts, the gaps drawn from a gamma distribution; or at a rate that changes linearly from --rate to a last
one. LENGTHS are `N`, `uniform:LEAST:MOST` or `lognormal:MEAN:SIGMA` (sigma of the logarithm). The same seed
draws the same lengths and prompts at every rate. Requests, lengths and vocabulary have defaults (see below),
and the summary names those that were used.

A session's turns have ids `SESSION/TURN`, each prompt continuing the one before and a stand-in for its
answer. A closed loop has ids `CLIENT/NUMBER` and no times: a client sends a request when the one before has
ended. `generate` knows no clients, and takes such a file as requests that all arrive at once.
"""

from __future__ import annotations

import json
import sys

from benchmark.verbs import TRACE_MAKER, parser_of
from benchmark.workloads.traces import check, fill_in, made, summary
from borders.files import whole_file
from recipes.schema import verb
from recipes.schema.command_line import keep_apart


def main(argv: list[str]) -> None:
    """Write a trace; raises ValueError or OSError for what cannot be drawn, read or written."""
    parser = parser_of(TRACE_MAKER, "python -m scripts.trace")
    parser.description = __doc__ or TRACE_MAKER.help
    options = parser.parse_args(argv)
    check(options)
    if options.source is not None:
        keep_apart(options.output, options.source[1])
    taken = fill_in(options)
    trace, skipped = made(options)
    for reason in skipped:
        print(f"skipped {reason}", file=sys.stderr)
    if not trace:
        raise ValueError(f"{options.source[1]} holds no request that can be read")
    with whole_file(options.output) as output:
        output.writelines(json.dumps(each) + "\n" for each in trace)
    print(summary(trace))
    if taken:
        print(f"not given, so taken: {', '.join(taken)}")


if __name__ == "__main__":
    verb.run(main)
