"""Define the inputs of one step's forward pass.

Legend: T tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attention.recurrent import DraftRows, StateMetadata
from attention.reference import AttentionMetadata
from kv_cache.device.storage import CacheLayers
from models.ops.divided_rows import DividedRows


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step's forward pass, all of them on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T] position of each token in its request
    metadata: AttentionMetadata  # where each token's key and value go, and what each query sees
    cache: CacheLayers
    rope_lens: Tensor | None = None  # [T] lengths that set the base of dynamic rope (see Rope.cos_sin)
    before_index: Tensor | None = None  # [T] cache place of the position before each token, for heads
    # int32 [T], 0 for padding of a captured step and 1 otherwise; None if there is no padding
    is_asked: Tensor | None = None
    # int32 [T], the place of each token's adapter, 0 for none; None if no token has one
    adapters: Tensor | None = None
    window_metadata: tuple[AttentionMetadata, ...] = ()  # the same for each group of windows
    # Which states spans go on from and leave; None if no layer has one
    states: StateMetadata | DraftRows | None = None
    divided: DividedRows | None = None  # how ranks divide the rows between products; None: they do not
    # int64 [R], the only tokens whose hidden states are read (see Decoder.skips_rows); None: all of them
    read: Tensor | None = None

    def metadata_of(self, group: int) -> AttentionMetadata:
        """Return what the layers of a group share (see kv_cache/groups.py)."""
        return self.window_metadata[group - 1] if group else self.metadata
