"""A layer that predicts further tokens makes the same guesses when its pre-attention work is one launch.

They are held against DeepSeek-V3's formulas, with a target whose layers are joined likewise, on the virtual
NPU in float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from models.drafting.mtp import Mtp
from models.step.runner import ModelRunner
from recipes import machine as machines
from recipes.machine import Npu
from tests.device_kinds import section, stand_in_alone
from tests.models.eagle3_heads import check_head_drafts
from tests.models.families import VOCABULARY, generated
from tests.models.mtp_layers import NUM_LAYERS, target_of
from tests.models.test_captured_heads import ROOMY
from tests.models.test_draft_model import Watched, tokens_of
from tests.models.test_latent_prolog import PROLOG, SMALLEST, say_that_it_gains
from tests.models.test_mtp import engine_of

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]

MOST, NUM_NEW = 3, 16  # guesses of a row and step; tokens of an answer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The smallest that npu_mla_prolog_v3 takes, with a layer behind its own."""
    options = {name: value for name, value in SMALLEST.items() if name != "num_hidden_layers"}
    model, path = target_of("deepseek_v3", tmp_path_factory.mktemp("mtp"), is_wide=True, **options)
    model.further.reads_zeros = True  # the operator leaves no key out
    return model, path


def count(engine: Engine) -> list[int]:
    """How often each step from now on will have called the operator."""
    machine, counts, inner = machines.start(section("npu")), list[int](), engine.step
    assert isinstance(machine, Npu)
    log = machine.launch_log
    assert log is not None, "the stand-in counts"

    def step() -> Any:
        with log.reading() as asked:
            found = inner()
        counts.append(sum(each.name == PROLOG for each in asked))
        return found

    engine.step = step
    return counts


def answered(engine: Engine, prompts: list[list[int]]) -> dict[str, list[int]]:
    """All tokens by request, one joining at each step."""
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    made = [Request(str(at), np.array(prompt), params) for at, prompt in enumerate(prompts)]
    waiting = list(made)
    while waiting or engine.has_work:
        for request in waiting[:1]:
            engine.add(request)
        waiting = waiting[1:]
        engine.step()
    return tokens_of(made)


def test_a_joined_layer_makes_the_published_guesses_and_changes_no_token(
    checkpoint: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = checkpoint
    random = np.random.default_rng(6)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length in (5, 70, 21, 1)]
    expected = {str(at): prompt + generated(model, prompt, NUM_NEW)[0] for at, prompt in enumerate(prompts)}
    made = []
    for graphs, joins in ((0, False), (0, True), (16, True)):
        if joins:
            say_that_it_gains(tmp_path, monkeypatch)
        engine = engine_of(path, "npu", MOST, **ROOMY, **{"device.graphs": graphs})
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        assert runner.drafter is not None
        assert isinstance(runner.drafter.decoder, Mtp)
        assert runner.drafter.decoder.layer.attention.joins == joins
        assert (runner.drafter.graphs is None) == (graphs == 0)
        watched, counts = Watched(engine), count(engine)
        assert answered(engine, prompts) == expected
        # Each layer of the target, and the layer behind them for each guess
        assert max(counts) == (NUM_LAYERS + MOST if joins else 0)
        made.append(watched.drafts)
    assert made[0] == made[1] == made[2]
    num_made, num_right = check_head_drafts(model.further, made[0], expected)
    assert num_made > 30
    assert num_right > 10
