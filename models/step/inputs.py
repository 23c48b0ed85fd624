"""What does a decoder read in one step, and where does it come from?"""

from __future__ import annotations

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import KVCache
from kv_cache.device.transfer import to_device
from models.decoder import Decoder
from models.head import Head
from models.step_inputs import StepInputs


def step_inputs(batch: Batch, slots: SlotPool, decoder: Decoder | Head, cache: KVCache) -> StepInputs:
    """Send all tokens of a batch, as far as the host knows them, to the device."""
    attention = decoder.attention
    packed = slots.inputs(batch)
    rope_lens = None
    if decoder.config.rope.kind == "dynamic":
        num_prompt = np.repeat(slots.num_prompt[batch.slots], batch.stops - batch.starts)
        rope_lens = to_device(np.maximum(num_prompt, packed.positions + 1), attention.device)
    token_ids = to_device(packed.token_ids, attention.device)
    metadata = attention.plan(batch, slots.page_table, packed.write_index)
    positions = to_device(packed.positions, attention.device)
    before_index = None
    if isinstance(decoder, Head):
        rows = np.repeat(batch.slots, batch.stops - batch.starts)
        pages, offsets = np.divmod(np.maximum(packed.positions - 1, 0), slots.page_size)
        places = slots.page_table[rows, pages] * np.int64(slots.page_size) + offsets
        before_index = to_device(places, attention.device)
    adapters = None
    if isinstance(decoder, Decoder) and decoder.adapters is not None and slots.adapter[batch.slots].any():
        numbers = np.repeat(slots.adapter[batch.slots], batch.stops - batch.starts)
        adapters = to_device(numbers, attention.device)
    return StepInputs(token_ids, positions, metadata, cache, rope_lens, before_index, adapters=adapters)
