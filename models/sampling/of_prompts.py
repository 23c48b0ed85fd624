"""Find what requests want about their prompts besides the next token: log-probabilities and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from continuous_batching.batch import Batch, Sampled
from continuous_batching.slots import SlotPool
from models.decoder import Decoder
from models.sampling import pooling, prompt_logprobs


@dataclass(frozen=True, slots=True)
class PromptWants:
    """What a step must find about prompts, as the host knows it when the step begins."""

    logprobs: prompt_logprobs.Wanted | None
    pooled: pooling.Pooled | None


def wanted_of(batch: Batch, slots: SlotPool) -> PromptWants | None:
    """Return what the step's requests want about their prompts; None if nothing, as in nearly every step."""
    scoring, pools = slots.scoring[batch.slots].any(), slots.pooling[batch.slots].any()
    if not scoring and not pools:
        return None
    logprobs = prompt_logprobs.wanted_of(batch, slots) if scoring else None
    pooled = pooling.pooled_of(batch, slots) if pools else None
    return None if logprobs is None and pooled is None else PromptWants(logprobs, pooled)


def find(wanted: PromptWants, hidden: Tensor, decoder: Decoder) -> Callable[[Sampled], Sampled]:
    """Start to find it from the hidden states [T, hidden] of a step.

    The function returned waits and adds it.
    """
    scored = None if wanted.logprobs is None else prompt_logprobs.score(wanted.logprobs, hidden, decoder)
    pooled = None if wanted.pooled is None else pooling.pool(wanted.pooled, hidden, decoder)

    def add(sampled: Sampled) -> Sampled:
        return replace(
            sampled,
            prompt_logprobs=scored() if scored is not None else {},
            pooled=pooled() if pooled is not None else {},
        )

    return add
