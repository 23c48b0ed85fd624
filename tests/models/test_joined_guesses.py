"""A layer that predicts further tokens makes the same guesses when its pre-attention work is one launch.

They are held against DeepSeek-V3's formulas, with a target whose layers are joined likewise, on the virtual
NPU in float32 and in captured steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from models.drafting.mtp import Mtp
from models.step.runner import ModelRunner
from recipes.machine import Npu, start
from tests.device_kinds import section, stand_in_alone
from tests.models.eagle3_heads import check_head_drafts
from tests.models.families import followed
from tests.models.mtp_layers import NUM_LAYERS, target_of
from tests.models.test_draft_model import Watched
from tests.models.test_eagle3 import ROOMY
from tests.models.test_joined_heads import PROMPTS, steps_of
from tests.models.test_latent_prolog import PROLOG, SMALLEST, say_that_it_gains
from tests.models.test_mtp import engine_of

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]

MOST, NUM_NEW = 3, 16  # guesses of a row and step; tokens of an answer
SHORT = PROMPTS[:3]


def test_a_joined_layer_makes_the_published_guesses_and_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the smallest model that npu_mla_prolog_v3 takes, with a layer behind its own."""
    options = {name: value for name, value in SMALLEST.items() if name != "num_hidden_layers"}
    model, path = target_of("deepseek_v3", tmp_path, is_wide=True, **options)
    model.further.reads_zeros = True  # the operator leaves no key out
    say_that_it_gains(tmp_path, monkeypatch)
    engine = engine_of(path, "npu", MOST, **ROOMY, **{"device.graphs": 16})
    runner, machine = engine.runner, start(section("npu"))
    assert isinstance(machine, Npu)
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    assert runner.drafter.graphs is not None
    assert isinstance(runner.drafter.decoder, Mtp)
    assert runner.drafter.decoder.layer.attention.joins
    watched = Watched(engine)
    answers, steps = steps_of(engine, machine.launch_log, SHORT, NUM_NEW)
    assert answers == [followed(model, *each, NUM_NEW)[0] for each in zip(SHORT, answers)]
    # Each layer of the target, and the layer behind them for each guess
    assert max(step[PROLOG] for step in steps) == NUM_LAYERS + MOST
    tokens = {str(at): prompt + answer for at, (prompt, answer) in enumerate(zip(SHORT, answers))}
    num_made, num_right = check_head_drafts(model.further, watched.drafts, tokens)
    assert num_made > 30
    assert num_right > 10
