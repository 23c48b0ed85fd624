"""Ranks compute what one rank computes, whatever the decoder and however many ranks there are.

The ranks are threads here, so that many cases cost little; test_tensor_parallel.py has processes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from models.checkpoint import weights
from models.config import DecoderConfig, RopeConfig, layer_specs
from models.parallel.group import ALONE, Alone, Group
from models.parallel.share import check_ranks
from tests.models.tensor_rank import empty, logits_of
from tests.patience import PATIENCE_S
from tests.thorough import cases, first_quick

Made = TypeVar("Made")


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

    def exchange(self, x: Tensor) -> Tensor:
        return self.all_gather(x)[:, self.rank]


def drawn(rng: random.Random) -> DecoderConfig:
    """Any decoder of plain rope."""
    num_heads, head_dim = rng.choice([4, 6, 8, 12]), rng.choice([4, 8, 16])
    flags = ("tie_embeddings", "attention_bias", "output_bias", "mlp_bias")
    return DecoderConfig(
        family="llama",
        vocab_size=rng.randint(30, 200),
        hidden_size=rng.choice([24, 40]),
        num_heads=num_heads,
        num_kv_heads=rng.choice([each for each in range(1, num_heads + 1) if num_heads % each == 0]),
        head_dim=head_dim,
        intermediate_size=rng.choice([24, 48, 96]),
        rms_eps=1e-5,
        rope=RopeConfig("default", 1e4, head_dim),
        layers=layer_specs((None, rng.choice([None, 5]))),
        dtype="float32",
        max_positions=128,
        eos_token_ids=(2,),
        qk_norm=rng.choice(["none", "heads", "rotated", "joined"]),
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


def met(size: int) -> list[Thread]:
    """All members of a group."""
    barrier, brought = threading.Barrier(size), [torch.empty(0)] * size
    return [Thread(rank, brought, barrier) for rank in range(size)]


def together(size: int, compute: Callable[[Group], Made]) -> list[Made]:
    """What each of so many ranks computes; where one fails, so do those that wait for it."""
    every, pairs = met(size), [member for _ in range(size // 2) for member in met(2)]
    for one, of_two in zip(every, pairs if size > 2 else []):
        one.few = of_two

    def computed(rank: int) -> Made:
        try:
            return compute(every[rank])
        except BaseException:
            for each in (*every, *pairs):
                each._barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(computed, range(size)))


def logits_with(config: DecoderConfig, group: Group, seed: int, experts: int = 1) -> Tensor:
    """The logits of a decoder with seeded weights."""
    decoder = empty(config, group, experts=experts)
    weights.random(decoder, seed)
    return logits_of(decoder)


@pytest.mark.parametrize("seed", first_quick(3, range(cases(5, 400))))
def test_any_decoder_on_any_number_of_ranks(seed: int) -> None:
    rng = random.Random(seed)
    config = drawn(rng)
    while not counts(config):
        config = drawn(rng)
    expected = logits_with(config, ALONE, seed)
    for size in counts(config):
        for each in together(size, lambda group: logits_with(config, group, seed)):
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-4)
