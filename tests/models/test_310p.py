"""The whole engine answers on a 310P as it does on a CPU, by the operators that the chip has.

A process has one NPU for as long as it lives, so both engines run in another process than that of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.families import generated
from tests.models.modelslim_checkpoints import checkpoint
from tests.models.test_modelslim import everywhere
from tests.models.test_npu import serve
from tests.serving.warm import CODE, completed

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]

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
IN_INT8 = """
import json, sys
from pathlib import Path
from typing import Any
from tests.models.test_modelslim import greedy

asked = "model.dtype=float16", "device.product=310P", "device.virtual_fp32=false", "cache.page_size=128"
static, by_token = map(Path, sys.argv[1:])
found = [greedy(static, *asked, *more, kind="npu") for more in ((), ("device.graphs=2",))]
try:
    greedy(by_token, *asked, kind="npu")
except ValueError as error:
    found.append(str(error))
print(json.dumps(found))
"""


Served = tuple[list[list[int]], int, int, dict[str, int]]


@pytest.fixture(scope="module")
def served() -> tuple[Served, Served]:
    """What an eager engine on a virtual 310P does, and one with captured and overlapped steps.

    The answers, the number of steps and of those with decodes alone, and the calls of each operator.
    """
    code = SERVED.replace("NAMES", str((DECODES, SPANS, WRITES)))
    done = completed(CODE, code)
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


def test_a_model_in_static_w8a8_gives_the_tokens_of_its_arithmetic(tmp_path: Path) -> None:
    """In float16, by decisive tokens; a model whose tokens have scales of their own is refused."""
    name, more = "llama_biased", dict[str, Any](is_wide=True, dtype=torch.float16)
    for salt in range(12):
        model, static = checkpoint(name, tmp_path / str(salt), everywhere("W8A8"), salt=salt, **more)
        right, logprobs = generated(model, list(range(3, 40)), 8)
        if float(logprobs.topk(2).values.diff().abs().min()) > 0.3:
            break
    _, by_token = checkpoint(name, tmp_path / "by_token", everywhere("W8A8_DYNAMIC"), **more)
    done = completed(CODE, IN_INT8, str(static), str(by_token))
    assert done.returncode == 0, done.stderr
    *found, refused = json.loads(done.stdout.splitlines()[-1])
    assert found == [right, right]
    assert refused.startswith("the model is in W8A8; the 310P takes no scale for each token, 910B, 910C do: ")
