"""A 310P answers by a model in static W8A8; test_every_product.py has its other models.

A process has one NPU for as long as it lives, so the engines run in another process than that of the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device_kinds import stand_in_alone
from tests.models.families import generated
from tests.models.modelslim_checkpoints import checkpoint
from tests.models.test_modelslim import everywhere
from tests.serving.warm import CODE, completed

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]

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
