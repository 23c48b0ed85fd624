"""At its peak, loading takes the weights and a few copies of one tensor.

The peak is counted by the bytes of all tensors that exist at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.checkpoint import weights
from models.quantization import Quantization
from recipes.assembly.families import config_in
from tests.models.families import VARIANTS, make
from tests.models.packed_checkpoints import FORMS, store
from tests.models.test_block_scales import stored as stored_in_blocks
from tests.models.test_weights import bare
from tests.pairs import pairs
from tests.recipes.test_plain_attention import PeakBytes
from tests.thorough import first_quick

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 16}
LARGEST = 256 * 128  # weights of one tensor


@pytest.mark.parametrize(
    ("stored", "w8a8", "is_random"),
    first_quick(
        2, pairs(["plain", "awq", "gptq_by_activation", "packed_zeros", "fp8"], [False, True], [False, True])
    ),
)
def test_it_takes_the_weights_and_a_few_copies_of_one_tensor(
    stored: str, w8a8: bool, is_random: bool, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, stored)
    config = config_in(path)
    config = replace(config, quantization=Quantization(is_stored=False) if w8a8 else None)
    with PeakBytes() as peak:
        decoder = bare(config)
        if is_random:
            weights.random(decoder, 0)
        else:
            weights.load(decoder, path)
    assert config.weight_bytes > 20 * LARGEST
    assert peak.most >= config.weight_bytes
    assert peak.most <= config.weight_bytes + 5 * 4 * LARGEST


def checkpoint(root: Path, stored: str) -> Path:
    variant = next(each for each in VARIANTS if each.name == "qwen3")
    options = variant.options | WIDE
    _, path = make(replace(variant, shard_size="5GB", options=options, saved_as=torch.bfloat16), root)
    if stored == "fp8":
        stored_in_blocks(path)
    elif stored != "plain":
        store(path, FORMS[stored])
    return path
