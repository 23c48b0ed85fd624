"""Count the tokens that chose each expert.

The counts are made on the device, in captured steps too, and read from time to time; a step never waits for
them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from models.decoder import Decoder
from models.layers.mixture import Mixture
from models.parallel.group import Group
from models.parallel.share import Share

_COUNTED = "experts/{}"  # the key of the ranks' store under which a stage leaves its last counts


class ExpertCounts:
    """The counts of all mixtures of a decoder, which starts counting; steps must be captured afterwards.

    The device has 32 bits for each count, and a reading takes the difference to the one before: the counters
    may overflow, but not twice between two readings, which takes 4e9 tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.part.mixture is not None, "the model has experts"
        self._layers = [layer.mlp for layer in decoder.layers]
        shape = decoder.part.num_mixtures, decoder.part.mixture.num_experts
        self._rows = torch.zeros(shape, dtype=torch.int32, device=decoder.attention.device)
        for mixture, row in zip((each for each in self._layers if isinstance(each, Mixture)), self._rows):
            mixture.counts = row
        decoder.counts_experts = True
        self._last = np.zeros(shape, np.uint32)
        self._totals = np.zeros(shape, np.int64)

    def read(self) -> list[list[int]]:
        """Return, for each layer, how many tokens chose each expert.

        The list is empty for a dense layer. This waits for the device.
        """
        now = self._rows.cpu().numpy().view(np.uint32)
        self._totals += now - self._last  # modulo 2**32
        self._last = now.copy()
        rows = iter(self._totals.tolist())
        return [next(rows) if isinstance(each, Mixture) else [] for each in self._layers]

    def restart(self) -> None:
        """Reset the counts, for example after warm-up steps."""
        self.read()
        self._totals[:] = 0


class StageReading(msgspec.Struct, frozen=True):
    """What one stage has counted when the leader asked for the reading of this name."""

    name: str
    counts: list[list[Annotated[int, Meta(ge=0)]]]


class StageCounts:
    """The counts of all stages of an engine, of which this rank has those of its own layers.

    `decide` is called on all ranks between the same two steps, as the work of a question is
    (`continuous_batching/recording/agreement.py`); nothing has to be made ready before. The first rank of
    each stage that is not the last leaves its counts in the ranks' store, where the leader finds them later.
    """

    def __init__(self, counts: ExpertCounts | None, world: Group, share: Share) -> None:
        self._counts, self._world, self._share = counts, world, share
        self._own = StageReading("", [])

    def work(self, name: str, body: bytes) -> int:
        """Have nothing to make ready."""
        return 1

    def decide(self, name: str, is_agreed: bool) -> None:
        """Read this rank's counts, if it counts, and leave them for the leader."""
        if self._counts is None:
            return
        self._own = StageReading(name, self._counts.read())
        if self._world.rank:
            assert self._world.store is not None, "these ranks have joined through a store"
            self._world.store.set(_COUNTED.format(self._share.stage), msgspec.json.encode(self._own).decode())

    def collected(self, name: str) -> list[list[int]] | None:
        """Return the reading of this name, layer by layer, on the leader; None until all stages have it."""
        store, others = self._world.store, range(self._share.stages - 1)
        assert store is not None, "these ranks have joined through a store"
        keys = [_COUNTED.format(stage) for stage in others]
        if self._own.name != name or not store.check(keys):
            return None
        found = [msgspec.json.decode(store.get(key), type=StageReading) for key in keys]
        if any(each.name != name for each in found):
            return None
        return [layer for stage in (*found, self._own) for layer in stage.counts]
