"""Define the page events of vLLM, with its names and its MessagePack layout."""

from __future__ import annotations

import msgspec

WINDOW_KIND, STATE_KIND = "sliding_window", "mamba"  # `kv_cache_spec_kind`; vLLM names states by a model


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base class of all events."""


class BlockStored(Event):
    """Pages can be found; they continue each other and the page `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    page_size: int = msgspec.field(name="block_size")
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    group_idx: int | None = None  # layers that see a window, or states; None: all other layers
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    """Pages can no longer be found."""

    block_hashes: list[int]
    medium: str | None = "GPU"
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """No page can be found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events in order; `ts` is the time of day in seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(KVEventBatch).decode
