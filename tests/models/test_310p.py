"""The whole engine answers on a 310P as it does on a CPU, by the operators that the chip has.

A process has one NPU for as long as it lives, so both engines run in another process than that of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.test_npu import serve

pytestmark = [pytest.mark.npu, stand_in_alone]

SERVED = """
import json, sys
from collections import Counter
from tests.models.test_npu import engine_of, serve

found = []
for overrides in ((), ("device.graphs=8", "scheduler.overlap=true")):
    engine = engine_of("device.product=310P", "cache.page_size=128", *overrides)
    import torch_npu

    counted = Counter()
    inner = {name: getattr(torch_npu, name) for name in NAMES}
    for name in NAMES:
        def call(*args, name=name, **kwargs):
            counted[name] += 1
            return inner[name](*args, **kwargs)
        setattr(torch_npu, name, call)
    answers, steps = serve(engine)
    found.append([answers, len(steps), sum(only for only, _ in steps), counted])
    for name in NAMES:
        setattr(torch_npu, name, inner[name])
print(json.dumps(found))
"""
DECODES, SPANS, WRITES = "_npu_paged_attention", "_npu_paged_attention_splitfuse_v2", "_npu_reshape_and_cache"
NUM_LAYERS = 4


Served = tuple[list[list[int]], int, int, dict[str, int]]


@pytest.fixture(scope="module")
def served() -> tuple[Served, Served]:
    """What an eager engine on a virtual 310P does, and one with captured and overlapped steps.

    The answers, the number of steps and of those with decodes alone, and the calls of each operator.
    """
    code = SERVED.replace("NAMES", str((DECODES, SPANS, WRITES)))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    eager, captured = map(tuple, json.loads(done.stdout.splitlines()[-1]))
    return eager, captured


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    few = ["cache.num_pages=64", "scheduler.num_slots=6", "scheduler.max_batch_tokens=48"]
    return serve(build(load(ROOT / "recipes/tiny/cpu.yaml", few)).engine)[0]


def test_an_engine_on_a_310p_gives_the_tokens_of_a_processor(
    expected: list[list[int]], served: tuple[Served, Served]
) -> None:
    answers, steps, decodes, calls = served[0]
    assert answers == expected
    assert 0 < decodes < steps
    assert calls == {
        DECODES: NUM_LAYERS * decodes,
        SPANS: NUM_LAYERS * (steps - decodes),
        WRITES: NUM_LAYERS * steps,
    }


def test_captured_and_overlapped_steps_give_the_same(
    expected: list[list[int]], served: tuple[Served, Served]
) -> None:
    answers, steps, decodes, calls = served[1]
    assert answers == expected
    assert calls == dict.fromkeys((SPANS, WRITES), NUM_LAYERS * (steps - decodes))
