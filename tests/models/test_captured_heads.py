"""A head in captured steps: the same drafts as single launches make, and as many right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.step.runner import ModelRunner
from tests.device_kinds import stand_in_alone
from tests.models.eagle3_heads import Published, check_head_drafts, head_for, target_of
from tests.models.families import wide
from tests.models.test_draft_model import Watched, serve, tokens_of
from tests.models.test_eagle3 import LLAMA, engine_of

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]

MOST = 3
NUM_SERVED = 7  # requests, of which some fork
ROOMY = {"cache.num_pages": 60, "scheduler.max_batch_tokens": 64}


def test_captured_steps_make_the_published_drafts(tmp_path: Path) -> None:
    model, path = target_of(wide(LLAMA), tmp_path)
    head = head_for(model, tmp_path / "head", head_dim=64)
    plain = tokens_of(serve(engine_of(path, "npu", **ROOMY), most=NUM_SERVED))
    made = []
    for graphs in (0, 24):
        engine = engine_of(path, "npu", head, MOST, **ROOMY, **{"device.graphs": graphs})
        assert isinstance(engine.runner, ModelRunner)
        assert engine.runner.drafter is not None
        assert (engine.runner.drafter.graphs is None) == (graphs == 0)
        watched = Watched(engine)
        drafted = tokens_of(serve(engine, most=NUM_SERVED))
        assert drafted == plain
        made.append(watched.drafts)
    assert made[0] == made[1]
    num_made, num_right = check_head_drafts(Published(model, head), made[0], plain)
    assert num_made > 100
    assert num_right > 10
