"""Score texts by a model's log-probabilities, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention.int8_sparse import latent_attention
from attention.reference import Attention
from continuous_batching.batch import Batch
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from devices.host_limits import host_memory_bytes
from kv_cache.device.storage import KVCache
from kv_cache.groups import DType
from models.checkpoint import weights
from models.decoder import Decoder
from models.ops.cpu.ops import CpuOps
from models.step.inputs import step_inputs
from recipes.assembly.decoders import layers_of, shape_of
from recipes.assembly.families import config_in
from recipes.assembly.memory_plan import in_gib

PAGE_SIZE = 16
MOST_LOGITS = 2**24  # computed at once, of a line's tokens; as float32 they take 64 MiB


@dataclass(frozen=True, slots=True)
class Score:
    """For each token but a line's first, its log-probability, and the token that was likeliest there."""

    logprobs: Tensor
    likeliest: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        return float(self.logprobs.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(-self.mean_logprob)

    def distance(self, other: Score) -> float:
        """Return the mean absolute change of a token's log-probability."""
        return float((self.logprobs - other.logprobs).abs().mean())

    def agreement(self, other: Score) -> float:
        """Return the fraction of tokens at which both find the same token likeliest."""
        return float((self.likeliest == other.likeliest).double().mean())


def check(path: Path, lines: Sequence[Sequence[int]]) -> None:
    """Raise ValueError for lines or a model that cannot be scored, before anything is computed.

    That is the case where no line has two tokens, a line is too long, or the model does not fit this machine.
    """
    config = config_in(path)
    missing = config.weight_bytes - host_memory_bytes()
    if missing > 0:  # checked before any allocation, since config.json may claim sizes that no file has
        raise ValueError(f"{path} needs {in_gib(missing)} more than this machine has; score a smaller model")
    longest = max(map(len, lines), default=0)
    if longest < 2:
        raise ValueError("the text has no line of two tokens; name another")
    if longest > config.reach:
        raise ValueError(f"a line has {longest} tokens; the model reaches {config.reach}: break it")
    for token in {token for line in lines for token in line}:
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"{path}: its tokenizer gives token {token}; the model's vocabulary goes from 0 to"
                f" {config.vocab_size - 1}"
            )


@torch.inference_mode()
def score(
    path: Path, lines: Sequence[Sequence[int]], dtype: DType | None = None, *, int8_cache: bool = False
) -> Score:
    """Score each line of tokens on its own on the CPU, in this type (None: the checkpoint's own).

    Raises ValueError for what `check` refuses.
    """
    check(path, lines)
    config = config_in(path)
    config = replace(config, dtype=dtype or config.dtype, int8_cache=int8_cache)
    shape = shape_of(PAGE_SIZE, config)
    decoder = Decoder(config, CpuOps(), Attention(shape) if shape.latent is None else latent_attention(shape))
    weights.load(decoder, path)
    decoder.tabulate(max(map(len, lines), default=1))
    parts = [_score(decoder, tokens) for tokens in lines if len(tokens) > 1]
    logprobs, likeliest = zip(*parts)
    return Score(torch.cat(logprobs), torch.cat(likeliest))


def comparison(before: Score, after: Score) -> str:
    """Return two scores of one text as a table, with the distance between them."""
    rows = [
        ("log-probability a token", f"{before.mean_logprob:.4f}", f"{after.mean_logprob:.4f}"),
        ("perplexity", f"{before.perplexity:.4f}", f"{after.perplexity:.4f}"),
    ]
    lines = [f"{'':26}{'before':>12}{'after':>12}"]
    lines += [f"{name:26}{one:>12}{other:>12}" for name, one, other in rows]
    lines.append(
        f"{before.num_tokens} tokens; a log-probability moves by {before.distance(after):.4f} in the mean"
    )
    lines.append(f"the likeliest token is the same at {before.agreement(after):.1%} of them")
    return "\n".join(lines)


def _score(decoder: Decoder, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Score a line as one span over pages of its own."""
    num_tokens = len(tokens)
    num_pages = -(-num_tokens // PAGE_SIZE)
    pools = [1 + num_pages]
    slots = SlotPool(1, num_tokens, PAGE_SIZE)
    if decoder.config.num_recurrent:  # the states of a line are one page, behind the null page
        pools.append(2)
        slots.state_pages = np.ones(1, dtype=np.int32)
    cache = KVCache(layers_of(decoder), PAGE_SIZE, pools)
    row = np.array([slots.take(Request("line", np.array(tokens)))])
    slots.page_table[row, :num_pages] = np.arange(1, 1 + num_pages)
    batch = Batch(row, np.zeros_like(row), np.array([num_tokens]), np.array([0]), row, np.array([num_tokens]))
    hidden = decoder(step_inputs(batch, slots, decoder, cache))
    following, logprobs, likeliest = torch.tensor(tokens[1:]), list[Tensor](), list[Tensor]()
    # The logits of a whole line of 32,768 tokens would take 20 GB and more, beside the model
    num_rows = max(1, MOST_LOGITS // decoder.config.vocab_size)
    for states, wanted in zip(hidden[:-1].split(num_rows), following.split(num_rows)):
        found = decoder.logits(states).float().log_softmax(-1)
        logprobs.append(found.gather(1, wanted[:, None])[:, 0])
        likeliest.append(found.argmax(-1))
    return torch.cat(logprobs), torch.cat(likeliest)
