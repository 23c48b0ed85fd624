"""Count the tokens that chose each expert.

The counts are made on the device, in captured steps too, and read from time to time; a step never waits for
them.
"""

from __future__ import annotations

import numpy as np
import torch

from models.decoder import Decoder
from models.layers.mixture import Mixture


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
