"""Define a case of an experiment: a load, and the engine to which it is offered."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmark.workloads.lengths import lengths
from benchmark.workloads.synthetic import SyntheticLoad, draw_requests
from continuous_batching.request import Request, SamplingParams

VOCAB_SIZE = 32_000
SIGMA = 0.8  # sigma of the logarithm of lengths: most are short, few are long
QUICK_REQUESTS, QUICK_SHORTER = 48, 8


@dataclass(frozen=True, slots=True)
class Offered:
    """Poisson arrivals of requests with log-normal lengths, cut at the most.

    The requests are the same for the same seed; another rate only changes their distance. Every
    `long_every`th prompt has `long_tokens`.
    """

    requests: int
    rate_per_s: float = math.inf  # inf: all at once
    prompt_tokens: int = 256  # mean, before the cut
    most_prompt_tokens: int = 1024
    answer_tokens: int = 256
    most_answer_tokens: int = 1024
    long_every: int = 0
    long_tokens: int = 0
    shared_tokens: int = 0  # tokens that begin every prompt
    seed: int = 7

    def trace(self) -> list[Request]:
        """Return the requests, in order of arrival."""
        load = SyntheticLoad(
            self._prompts,
            _drawn(self.answer_tokens, self.most_answer_tokens),
            VOCAB_SIZE,
            self.seed,
            self.rate_per_s,
            system_prompts=(1, lengths(str(self.shared_tokens))) if self.shared_tokens else None,
        )
        return [
            Request(
                line["id"],
                np.array(line["prompt_token_ids"], dtype=np.int32),
                SamplingParams(max_tokens=line["max_tokens"], temperature=0.0, ignore_eos=True),
                arrival_s=line["arrival_s"],
            )
            for line in draw_requests(load, self.requests)
        ]

    def quick(self) -> Offered:
        """Return a much smaller load, to check that a case runs."""
        return replace(
            self,
            requests=min(self.requests, QUICK_REQUESTS),
            answer_tokens=max(4, self.answer_tokens // QUICK_SHORTER),
            most_answer_tokens=max(8, self.most_answer_tokens // QUICK_SHORTER),
        )

    def _prompts(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        drawn = _drawn(self.prompt_tokens, self.most_prompt_tokens)(random, count)
        if self.long_every:
            drawn[self.long_every // 2 :: self.long_every] = self.long_tokens
        return drawn


def _drawn(mean: int, most: int):
    draw = lengths(f"lognormal:{mean}:{SIGMA}")
    return lambda random, count: np.clip(draw(random, count), 2, most)


@dataclass(frozen=True, slots=True)
class Case:
    """One run: the load, and the recipe's keys that it sets.

    `tensor` devices share each layer; `replicas` engines run side by side; `split` are engines for prompts
    and for answers, and all prompts go to the former.
    """

    label: str
    offered: Offered
    keys: tuple[str, ...] = ()
    device: str = "ascend910"
    tensor: int = 8
    pipeline: int = 1
    replicas: int = 1
    split: tuple[int, int] | None = None

    @property
    def series(self) -> str:
        """The label without the rate, which names a line in a chart."""
        return self.label.partition(", ")[0]

    def quick(self) -> Case:
        """Return the case with a small part of its load."""
        return replace(self, offered=self.offered.quick())

    def at(self, rate_per_s: float) -> Case:
        """Return the case at another rate."""
        name = "all at once" if rate_per_s == math.inf else f"{rate_per_s:g}/s"
        return replace(
            self, label=f"{self.label}, {name}", offered=replace(self.offered, rate_per_s=rate_per_s)
        )


def keys(**values: object) -> tuple[str, ...]:
    """Return keys of the recipe's scheduler section as overrides."""
    return tuple(f"scheduler.{name}={value}" for name, value in values.items())


def static(batch_size: int) -> tuple[str, ...]:
    """Return the keys of FasterTransformer's batching; the first of a batch waits 100 ms for the others."""
    return keys(
        policy="static",
        batch_size=batch_size,
        max_wait_ms=100,
        num_slots=batch_size,
        max_batch_tokens=WHOLE_TOKENS,
    )


def chunked(tokens: int, num_slots: int = 64) -> tuple[str, ...]:
    """Return the keys of Sarathi's scheduling: decodes first, then chunks up to a step's budget."""
    return keys(policy="stall_free", num_slots=num_slots, max_batch_tokens=tokens)


def whole(policy: str, num_slots: int = 64) -> tuple[str, ...]:
    """Return the keys for prompts in one step: `orca` beside the decodes, `prefill_first` in their place."""
    return keys(policy=policy, num_slots=num_slots, max_batch_tokens=WHOLE_TOKENS)


WHOLE_TOKENS = 8192  # budget of a step that holds the longest prompt, and more
