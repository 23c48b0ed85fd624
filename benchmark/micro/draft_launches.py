"""What does a step of a draft model ask of an NPU, after the one that reads what was said?

The draft model has its own heads, norms, biases, windows and types; as in `launches`, it has few layers and
narrow products, so that it stands beside a narrow target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from models import weights
from models.config import DecoderConfig
from models.decoder import Decoder
from models.drafter import Drafter
from recipes.build.decoders import cache_of, shape_of
from recipes.build.engine import BuiltEngine
from recipes.build.machine import Npu
from recipes.schema.recipe import Recipe


def narrow(draft: DecoderConfig, target: DecoderConfig, num_layers: int) -> DecoderConfig:
    """The same draft model with few layers, and the narrow target's widths and vocabulary."""
    quantization = draft.quantization and replace(draft.quantization, is_stored=False)
    return replace(
        draft,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        windows=(draft.windows * num_layers)[:num_layers],
        eos_token_ids=target.eos_token_ids,
        quantization=quantization,
    )


def drafter_of(recipe: Recipe, config: DecoderConfig, built: BuiltEngine, machine: Npu) -> Drafter:
    """A draft model of random weights beside an engine that was built without one."""
    decoder = Decoder(config, *machine.operators(shape_of(recipe, config)))
    weights.random(decoder, recipe.model.seed)
    slots = built.engine.slots
    return Drafter(decoder, cache_of(decoder, recipe, built.memory), slots, slots.num_slots)


def counted(drafter: Drafter, built: BuiltEngine, machine: Npu) -> Iterator[tuple[str, list[Any]]]:
    """Of each way, what a step for all rows asks for; their tokens are on the null page."""
    log, rows = machine.launch_log, np.arange(built.engine.slots.num_slots)
    assert log is not None, "launches are counted over the stand-in"
    assert built.runner.graphs is not None, "a narrow recipe captures its steps"
    for way in ("eager", "captured"):
        if way == "captured":
            drafter.capture(built.runner.graphs)
        with torch.inference_mode():
            drafter.begin(drafter.decoder.embedding.new_zeros(len(rows)).long(), rows)
            drafter.follow(rows, np.full_like(rows, 5))  # settles what later steps find
            with log.reading() as asked:
                drafter.follow(rows, np.full_like(rows, 6))
        yield way, asked
