"""Every token is counted once for each expert that it chose, captured or not, and padding never is."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from continuous_batching.request import Request, SamplingParams
from models.layers.mixture import Mixture
from models.ops.reference import Ops
from models.parallel.group import ALONE
from models.step.expert_counts import ExpertCounts
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from serving.engine.facts import READ_S, ExpertReadings
from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, make, wide
from tests.models.tensor_rank import STOPS, built, logits_of
from tests.patience import PATIENCE_S
from tests.serving.server import TINY

NUM_CHOSEN = 3


def checkpoint(root: Path, *, is_wide: bool = False) -> Path:
    variant = next(each for each in VARIANTS if each.name == "qwen3_moe")
    changed = replace(variant, saved_as=torch.float32, shard_size="5GB")
    return make(wide(changed) if is_wide else changed, root)[1]


class Kept(Ops):
    """Remembers the experts that were chosen."""

    def __init__(self) -> None:
        self.chosen: list[torch.Tensor] = []

    def route(self, *asked: object) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = super().route(*asked)
        self.chosen.append(chosen)
        return weights, chosen


def test_each_choice_counts_once_in_its_layer(tmp_path: Path) -> None:
    decoder = built(checkpoint(tmp_path), ALONE)[0]
    counts, kept = ExpertCounts(decoder), {}
    for number, layer in enumerate(decoder.layers):
        if isinstance(layer.mlp, Mixture):
            layer.mlp.ops = kept[number] = Kept()
    logits_of(decoder)
    found = counts.read()
    assert sorted(kept) == [0, 2]
    assert found[1] == []
    for number, ops in kept.items():
        expected = torch.cat([each.flatten() for each in ops.chosen]).bincount(minlength=8)
        assert found[number] == expected.tolist()
        assert sum(found[number]) == NUM_CHOSEN * sum(STOPS[-1])
    assert counts.read() == found
    counts.restart()
    assert {sum(each) for each in counts.read()} == {0}


def test_thirty_two_bits_may_begin_again(tmp_path: Path) -> None:
    decoder = built(checkpoint(tmp_path), ALONE)[0]
    counts = ExpertCounts(decoder)
    for added, total in ((2**31 - 1, 2**31 - 1), (2**31 - 1, 2**32 - 2), (5, 2**32 + 3)):
        row = decoder.layers[2].mlp.counts
        assert row is not None
        row += torch.tensor(np.array([added], np.uint32).view(np.int32))
        assert counts.read()[2] == [total] * 8


@pytest.mark.npu
@stand_in_alone
def test_a_captured_step_counts_its_tokens_and_no_padding(tmp_path: Path) -> None:
    path, found = checkpoint(tmp_path, is_wide=True), []
    for graphs in (False, True):
        decoder = built(path, ALONE, "npu")[0]
        counts = ExpertCounts(decoder)
        logits_of(decoder, graphs=graphs)
        found.append(counts.read())
        total = NUM_CHOSEN * sum(STOPS[-1])
        assert [sum(each) for each in found[-1]] == [total, 0, total]
    assert found[0] == found[1]


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"device.count_experts: the model has no experts"):
        build(load(TINY, ["device.count_experts=true"]))


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_readings_of_stages_are_those_of_one_rank(tmp_path: Path) -> None:
    """The leader's second reading counts what came since; its own layers are the last."""
    path, found = checkpoint(tmp_path), []
    small = ("device.compile=false", "device.threads=1", "cache.memory_gib=null", "cache.num_pages=64")
    for ranks in ((), ("parallel.pipeline=2",)):
        changes = [f"model.path={path}", *small, "device.count_experts=true", *ranks]
        built = build(load("recipes/any/cpu.yaml", changes))
        readings = ExpertReadings(built)
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for number in range(2):
            built.engine.add(Request(str(number), np.arange(3 + number, 23), params))
            while built.engine.has_work:
                built.engine.step()
            now_s, until_s = number * READ_S, time.monotonic() + PATIENCE_S
            while (table := readings.due(now_s)) is None:
                assert time.monotonic() < until_s, "the stages have not read their counts"
                time.sleep(0.01)
            assert readings.due(now_s) is None
            found.append((ranks, table.counts, table.num_chosen))
        built.engine.close()
    of_one, of_stages = ([each[1:] for each in found if bool(each[0]) == way] for way in (False, True))
    assert of_stages == of_one
    assert [sum(layer) for layer in of_one[1][0]] == [NUM_CHOSEN * (20 + 19 + 2 * 3), 0, NUM_CHOSEN * 45]
