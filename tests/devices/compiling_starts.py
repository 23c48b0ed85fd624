"""Processes that compile one function: `python -m tests.devices.compiling_starts COUNT`.

So many are forked from one that has imported torch's compiler, which takes longer than to start with what
was compiled before. They begin together, and each prints how many functions it compiled and how many it found
compiled; what they log is on stderr.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

import torch

from devices.compiled import Compiled, keep_results


def compile_one() -> None:
    """As an engine does at its start."""
    from torch._dynamo.utils import counters

    keep_results()
    assert Compiled(lambda x: x * 2 + 1, ((0,),))(torch.ones(4, 8)).sum() == 96
    counted = counters["inductor"]
    print(counted["fxgraph_cache_miss"], counted["fxgraph_cache_hit"], flush=True)


def main(count: int) -> int:
    logging.basicConfig(format="%(message)s")
    keep_results()  # before the import that settles where torch looks
    importlib.import_module("torch._inductor.compile_fx")
    status = 0
    for _ in range(count):
        if os.fork() == 0:
            compile_one()
            os._exit(0)
    for _ in range(count):
        status |= os.wait()[1]
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
