"""Compute what a device must read and multiply in one step."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import numpy as np

from models.config import DecoderConfig
from models.cost import attention_operations
from recipes.schema.numbers import MOST_TOKENS, whole


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The spans of one step: decodes at one context, prompts of one length, or both."""

    num_decodes: int = 0
    context: int = 0
    num_prompts: int = 0
    prompt: int = 0

    def __str__(self) -> str:
        parts = []
        if self.num_decodes:
            parts.append(f"{self.num_decodes} decodes at {self.context}")
        if self.num_prompts:
            parts.append(f"{self.num_prompts} prompts of {self.prompt}")
        return ", ".join(parts)

    @property
    def stops(self) -> list[int]:
        return [self.context] * self.num_decodes + [self.prompt] * self.num_prompts

    @property
    def lens(self) -> list[int]:
        return [1] * self.num_decodes + [self.prompt] * self.num_prompts


def pair(text: str) -> tuple[int, int]:
    """Parse `32x1024` as a count and a number of tokens; raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"{text} is not of the form COUNTxTOKENS, as in 32x1024")
    one = whole(1, MOST_TOKENS)
    try:
        return one(found[1]), one(found[2])
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{text:.60}: {error}") from error


def read_bytes(config: DecoderConfig, load: StepLoad) -> int:
    """Return the bytes that a step must read: keys, values and all weights except rows of an embedding."""
    return config.step_weight_bytes + cached_bytes(config, load)


def cached_bytes(config: DecoderConfig, load: StepLoad) -> int:
    """Return the bytes of keys and values that the spans of a step see, over all layers."""
    seen = sum(min(stop, window or stop) for window in config.windows for stop in load.stops)
    return config.num_kv_heads * config.kv_head_bytes * seen


def operations(config: DecoderConfig, load: StepLoad) -> int:
    """Return a step's operations: linears for each token, logits for each span, and attention."""
    table = config.vocab_size * config.hidden_size
    linears = config.num_active_parameters - table * (1 if config.tie_embeddings else 2)
    pairs = 0
    for window in config.windows:
        for length, stop in zip(load.lens, load.stops):
            positions = np.arange(stop - length + 1, stop + 1)
            pairs += int(positions.sum() if window is None else np.minimum(positions, window).sum())
    spans = len(load.stops)
    context = sum(load.stops) * len(config.windows)
    scores = config.num_heads * attention_operations(config, context, pairs)
    return 2 * (linears * sum(load.lens) + table * spans) + int(scores)
