"""Count what a step of a draft model or a head asks of an NPU, after the step that reads the known tokens.

The draft model keeps its own heads, norms, biases, windows and dtypes; as in `launches`, it has few layers
and narrow products, so that it fits a narrow target. A head has one layer, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from models.checkpoint import weights
from models.config import DecoderConfig, HeadConfig
from models.decoder import Decoder
from models.drafting.config import Eagle3Config, MtpConfig, mtp_config
from models.drafting.drafter import Drafter
from models.drafting.eagle import Eagle3
from models.drafting.mtp import Mtp
from models.head import Head
from models.parallel.group import ALONE
from models.parallel.share import Share
from recipes.assembly import decoders
from recipes.assembly.decoders import cache_of, shape_of
from recipes.assembly.engine import BuiltEngine
from recipes.machine import Npu
from recipes.schema.recipe import Recipe


def narrow(draft: DecoderConfig, target: DecoderConfig, num_layers: int) -> DecoderConfig:
    """Return the draft model's configuration with few layers and the target's widths and vocabulary."""
    if isinstance(draft, MtpConfig):
        return mtp_config(replace(target, num_unread_layers=1), draft.num_kept)
    if isinstance(draft, Eagle3Config):
        taps = tuple(range(num_layers))
        draft = replace(draft, taps=taps, draft_vocab_size=min(draft.draft_vocab_size, target.vocab_size))
        num_layers = draft.num_layers
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
    """Build a draft model or a head of random weights beside an engine that was built without one."""
    slots = built.engine.slots
    if isinstance(config, HeadConfig):
        operators = machine.operators(shape_of(recipe.cache.page_size, config))
        head: Head
        if isinstance(config, Eagle3Config):
            head = Eagle3(config, *operators)
        else:
            assert isinstance(config, MtpConfig), "there are two kinds of heads"
            head = Mtp(config, *operators, ALONE, Share())
        for parameter in head.parameters():
            parameter.data.fill_(1 / config.hidden_size)
        head.pack()
        cache = cache_of(head, recipe, built.memory)
        return decoders.drafter_of(head, built.runner.decoder, cache, slots, slots.num_slots, recipe)
    decoder = Decoder(config, *machine.operators(shape_of(recipe.cache.page_size, config)))
    weights.random(decoder, recipe.model.seed)
    return Drafter(decoder, cache_of(decoder, recipe, built.memory), slots, slots.num_slots)


def counted(drafter: Drafter, built: BuiltEngine, machine: Npu) -> Iterator[tuple[str, list[Any]]]:
    """Yield what a step for all rows asks for, eager and captured; the rows' tokens are on the null page."""
    log, rows = machine.launch_log, np.arange(built.engine.slots.num_slots)
    assert log is not None, "launches are counted over the stand-in"
    assert built.runner.graphs is not None, "a narrow recipe captures its steps"
    for way in ("eager", "captured"):
        if way == "captured":
            drafter.capture(built.runner.graphs)
        with torch.inference_mode():
            device = drafter.decoder.attention.device
            drafter.begin(torch.zeros(len(rows), dtype=torch.int64, device=device), rows)
            drafter.follow(rows, np.full_like(rows, 5))  # reaches the state in which later steps run
            with log.reading() as asked:
                drafter.follow(rows, np.full_like(rows, 6))
        yield way, asked
