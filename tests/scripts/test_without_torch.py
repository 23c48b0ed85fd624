"""A command that needs no tensors starts without torch, whose import takes a second of every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.verbs import BENCHMARKS
from recipes.schema.recipe import ROOT

# The commands run in one process that refuses to import torch; a command of one word is only imported
RUN = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Refusing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_npu", "transformers", "triton"):
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refusing())
for command in sys.argv[1:]:
    module, *arguments = command.split()
    print(f"$ {command}", file=sys.stderr)  # the last of these lines names the command that failed
    found = importlib.import_module(module)
    if not arguments:
        continue
    try:
        status = found.main(arguments)
    except SystemExit as end:
        status = end.code
    assert not status
"""
NPU, CUDA, CPU = (
    "recipes/tiny/npu.yaml device.memory_gib=32",
    "recipes/bench/qwen3_8b_cuda.yaml device.memory_gib=80",
    "recipes/tiny/cpu.yaml",
)
HELP = [
    *("scripts.audit", "scripts.doctor", "scripts.follow", "scripts.mutants", "scripts.on_ray"),
    *("scripts.place", "scripts.replay", "scripts.route", "scripts.serve", "scripts.top", "scripts.verify"),
    *(f"scripts.benchmark {verb.title}" for verb in BENCHMARKS),
    *(f"scripts.simulate {verb}" for verb in ("search", "routes", "splits", "lengths")),
    *("scripts.simulate fit", "scripts.reproduce"),
    "tests.mutation.__main__",
]
# Modules of verbs that need no tensors, which their --help does not import
VERBS = [
    *("micro.host", "offline.speculation", "recordings"),
    *(f"serve.{name}" for name in ("fleet", "measure", "report", "router")),
]


@pytest.mark.slow
def test_commands_that_need_no_tensors_run_without_torch(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    commands = [
        "recipes.__main__ keys",
        *(f"recipes.__main__ show {recipe}" for recipe in (NPU, CUDA)),
        f"scripts.trace --requests 4 --vocab-size 512 --output {trace}",
        f"scripts.simulate {NPU} --trace {trace} --device ascend910b",
        f"scripts.simulate {CPU} --trace {trace}",
        *(f"{command} --help" for command in HELP),
        *(f"benchmark.{module}" for module in VERBS),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *commands], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
