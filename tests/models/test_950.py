"""An engine on a 950, which holds four graphs, starts and says which sizes it captures.

A process has one NPU for as long as it lives, so this runs in a process of its own.
"""

from __future__ import annotations

import json

import pytest

from tests.device_kinds import stand_in_alone
from tests.serving.warm import CODE, completed

pytestmark = [pytest.mark.npu, stand_in_alone]

CAPTURED = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from tests.models.test_npu import engine_of, requests

engine = engine_of("device.product=950", "device.graphs=10", "scheduler.num_slots=10")
engine.add(requests()[0])
while engine.has_work:
    engine.step()
sizes = sorted(size for size, _ in engine.runner.graphs.steps)
import torch
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        pass
    said = "captured"
except RuntimeError as error:
    said = str(error)
print(json.dumps([sizes, said]))
"""


def test_a_sample_of_the_sizes_is_captured_and_said() -> None:
    done = completed(CODE, CAPTURED)
    assert done.returncode == 0, done.stderr
    sizes, said = json.loads(done.stdout.splitlines()[-1])
    assert sizes == [1, 2, 8, 10]
    assert "4 graphs are held, and this product has no room for more" in said
    assert "graphs: of the sizes 1, 2, 4, 8, 10 the device holds 1, 2, 8, 10" in done.stderr
