"""A shared expert on a second stream of captured steps changes no token and no launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from devices.ascend_limits import answers_file, write_answers
from recipes import machine as machines
from recipes.machine import Npu, start
from tests.device_kinds import section, stand_in_alone
from tests.models.families import VARIANTS, followed, make, wide
from tests.models.test_joined_heads import NEW, PROMPTS, engine_of, steps_of
from tests.thorough import first_quick

pytestmark = [pytest.mark.npu, stand_in_alone]


@pytest.fixture(params=first_quick(1, ["qwen2_moe", "deepseek_v2"]))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A model with a shared expert, whose part has a gate in the first.

    It is in float32: in a narrower type, roundings that hang on the processor would choose other tokens.
    """
    variant = next(each for each in VARIANTS if each.name == request.param)
    return make(replace(wide(variant), saved_as=torch.float32), tmp_path)


def test_tokens_are_those_of_transformers_and_launches_as_many(
    checkpoint: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = checkpoint
    machine = start(section("npu"))
    assert isinstance(machine, Npu)
    monkeypatch.setattr(machines, "ANSWERS", tmp_path)
    streams: list[torch.npu.Stream] = []
    inner = torch.npu.Stream.wait_stream
    monkeypatch.setattr(
        torch.npu.Stream, "wait_stream", lambda own, other: streams.append(own) or inner(own, other)
    )
    launched = []
    for answer in (False, True):
        answers = answers_file(tmp_path, machine.product.name, machine.cann, virtual=True)
        write_answers(answers, {"overlaps_experts": answer})
        engine = engine_of(path, 4)
        beside = engine.runner.decoder.ops._beside
        assert (beside is not None) == answer
        assert (beside in streams) == answer
        found, steps = steps_of(engine, machine.launch_log)
        assert found == [followed(model, *each, NEW)[0] for each in zip(PROMPTS, found)]
        launched.append(steps)
    assert launched[0] == launched[1]
