"""Do ranks compute what one computes, whatever the decoder and whatever the number of ranks?

The ranks are threads here, so that many cases cost little; test_tensor_parallel.py has processes.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from models import weights
from models.config import DecoderConfig, RopeConfig
from models.group import ALONE, Alone
from models.share import check_ranks
from tests.models.tensor_rank import empty, logits_of
from tests.serving.server import PATIENCE_S
from tests.thorough import cases


class Thread(Alone):
    """One of several ranks, which are threads and meet at a barrier."""

    def __init__(self, rank: int, brought: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(brought)
        self._brought, self._barrier = brought, barrier

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        self._brought[self.rank] = x
        self._barrier.wait(PATIENCE_S)
        gathered = torch.stack(self._brought)
        self._barrier.wait(PATIENCE_S)
        return gathered


def drawn(rng: random.Random) -> DecoderConfig:
    """Any decoder of plain rope."""
    num_heads, head_dim = rng.choice([4, 6, 8, 12]), rng.choice([4, 8, 16])
    flags = ("tie_embeddings", "attention_bias", "output_bias", "mlp_bias", "qk_norm")
    return DecoderConfig(
        family="llama",
        vocab_size=rng.randint(30, 200),
        hidden_size=rng.choice([24, 40]),
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=rng.choice([each for each in range(1, num_heads + 1) if num_heads % each == 0]),
        head_dim=head_dim,
        intermediate_size=rng.choice([24, 48, 96]),
        rms_eps=1e-5,
        rope=RopeConfig("default", 1e4, head_dim),
        windows=(None, rng.choice([None, 5])),
        dtype="float32",
        max_positions=128,
        eos_token_ids=(2,),
        **{flag: rng.random() < 0.5 for flag in flags},
    )


def counts(config: DecoderConfig) -> list[int]:
    """The numbers of ranks above one that can share it."""
    possible = []
    for count in range(2, config.num_heads + 1):
        try:
            check_ranks(config, count)
        except ValueError:
            continue
        possible.append(count)
    return possible


def of_rank(config: DecoderConfig, group: Thread, seed: int) -> Tensor:
    """The logits that a rank computes; where it fails, so do those that wait for it."""
    try:
        decoder = empty(config, group)
        weights.random(decoder, seed)
        return logits_of(decoder)
    except BaseException:
        group._barrier.abort()
        raise


@pytest.mark.parametrize("seed", range(cases(10, 400)))
def test_any_decoder_on_any_number_of_ranks(seed: int) -> None:
    rng = random.Random(seed)
    config = drawn(rng)
    while not counts(config):
        config = drawn(rng)
    alone = empty(config, ALONE)
    weights.random(alone, seed)
    expected = logits_of(alone)
    for size in counts(config):
        barrier, brought = threading.Barrier(size), [torch.empty(0)] * size
        groups = [Thread(rank, brought, barrier) for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            found = list(threads.map(lambda group: of_rank(config, group, seed), groups))
        for each in found:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-4)
