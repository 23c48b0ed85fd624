"""What happens on the device in one step, where this rank holds only some of the layers?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from continuous_batching.batch import Batch, Sampled
from kv_cache.transfer import to_host
from models.runner import ModelRunner
from models.sampling import prompt_logprobs
from models.sampling.sampler import Chosen
from models.step import StepInputs


class StageRunner(ModelRunner):
    """One step of a stage: what the stage before has sent, own layers, and what the stage after is sent.

    The leader, who is in the last stage, computes a batch when its result is asked for: then the batch after
    it has been made already, and the stages before compute that one meanwhile.
    """

    def run(self, batch: Batch) -> Sampled:
        """As `ModelRunner.run`; a stage that is not the last chooses nothing."""
        return self.start(batch)()

    @torch.inference_mode()
    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """Begin a step, or make what the leader will begin it with: by then the slots may have changed."""
        inputs = self._inputs(batch, None)
        wanted = None
        if self.slots.scoring[batch.slots].any() and self.decoder.share.is_last:
            wanted = prompt_logprobs.wanted_of(batch, self.slots)
        if self._is_leader:
            return lambda: self._computed(batch, inputs, wanted).wait()
        return self._computed(batch, inputs, wanted).wait

    @property
    def _is_leader(self) -> bool:
        share = self.decoder.share
        return share.is_last and share.tensor == 0

    @torch.inference_mode()
    def _computed(self, batch: Batch, inputs: StepInputs, wanted: prompt_logprobs.Wanted | None) -> Chosen:
        if batch.copies:
            self.cache.apply(batch.copies)
        hidden = self.decoder(inputs)
        if self.decoder.share.is_last:
            return self._finished(batch, hidden, wanted)
        computed = to_host(hidden[:1, :1])

        def wait() -> Sampled:
            computed()
            return Sampled(np.empty(0, np.int64))

        return Chosen(self._last.tokens[:0], wait)
