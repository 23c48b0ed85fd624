"""Stages of layers hold the random weights that one rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.reference import Attention, AttentionShape
from models.checkpoint import weights
from models.config import MixtureConfig, layer_specs
from models.decoder import Decoder
from models.ops.reference import Ops
from models.parallel.group import ALONE, Group
from models.parallel.share import Share
from tests.models.test_share import WHOLE
from tests.models.test_shared_weights import Rank

# Two kinds of layers, so that a stage may have none of the others' kind
FOUR = replace(
    WHOLE,
    layers=layer_specs((None, 5, None, 7), (False, False, True, True)),
    mixture=MixtureConfig(4, 2, 24, normalizes=True),
    mlp_bias=False,
)


def drawn(share: Share, *, tied: bool, group: Group = ALONE) -> dict[str, Tensor]:
    """What a rank holds after drawing, by its name in the whole decoder."""
    config = replace(FOUR, tie_embeddings=tied)
    part = share.part(config)
    sizes = (part.num_heads, part.num_kv_heads, part.head_dim)
    shape = AttentionShape(*sizes, 16, part.head_dim**-0.5, torch.float32, part.windows)
    decoder = Decoder(config, Ops(), Attention(shape), group, share)
    weights.random(decoder, 11)
    found = {}
    for name, parameter in decoder.named_parameters():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            name = f"layers.{int(number) + share.layers(config).start}.{rest}"
        if parameter.numel() and (name != "norm" or share.is_last):
            found[name] = parameter
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group", [ALONE, Rank(0, 2), Rank(1, 2)], ids=["whole", "rank 0", "rank 1"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_hold_the_random_weights_of_one_stage(
    stages: int, group: Group, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "pack", lambda self: None)  # which drops them
    expected, seen = drawn(Share(group.rank, group.size), tied=tied, group=group), set()
    for stage in range(stages):
        found = drawn(Share(group.rank, group.size, stage, stages), tied=tied, group=group)
        assert found
        assert all(torch.equal(each, expected[name]) for name, each in found.items())
        seen |= found.keys()
    assert seen == expected.keys()
