"""Engines over two stages, and over ranks and stages of virtual NPUs, give the answers of transformers.

tests/models/test_rank_identity.py shows so of two ranks on CPUs, for each way in which they divide a model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, Variant, make, wide
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.models.test_rank_identity import CPU, LONGER, NPU, VOCABULARY, Asking, Cell, Crowd, check, found_by
from tests.thorough import cases

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_ranks")]

ON_NPUS = Crowd(8, 60, 30, 24, page_size=16, num_pages=9, num_slots=4, batch_tokens=24)
CAPTURED, EAGER = f"device.graphs={ON_NPUS.num_slots}", "device.graphs=0"
WAYS = {"TP 2": "parallel.tensor=2", "PP 2": "parallel.pipeline=2"}


def asking(variant: Variant, crowd: Crowd, *more: str) -> Asking:
    options = variant.options | {"vocab_size": VOCABULARY, "num_hidden_layers": 3}
    variant = replace(variant, options=options, saved_as=torch.float32)
    return Asking(partial(make, variant), (*crowd.settings, *more), crowd.prompts(), crowd.num_new)


def test_a_stage_reads_what_the_stage_before_has_chosen(tmp_path: Path) -> None:
    """Each layer of the second stage shares the choice of a layer of the first."""
    (variant,) = (each for each in SPARSE_VARIANTS if each.name == "glm_5_pattern")
    cell: Cell = ("choices", "PP 2")
    asked = {cell: asking(variant, LONGER, WAYS["PP 2"])}
    check(found_by(asked, tmp_path, *CPU), cell, asked[cell])


@pytest.mark.npu
@stand_in_alone
def test_ranks_and_stages_of_virtual_npus_answer_as_transformers_does(tmp_path: Path) -> None:
    (llama,) = (each for each in VARIANTS if each.name == "llama_biased")
    asked: dict[Cell, Asking] = {
        (name, way): asking(wide(llama), ON_NPUS, WAYS[way], graphs)
        for way in WAYS
        for name, graphs in cases([("captured", CAPTURED)], [("captured", CAPTURED), ("eager", EAGER)])
    }
    found = found_by(asked, tmp_path, *NPU)
    for cell, each in asked.items():
        check(found, cell, each)
        assert all((rank.happened["replays"] > 0) == (cell[0] == "captured") for rank in found.ranks[cell])
