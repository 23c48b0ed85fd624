"""What does a case consist of: which load, offered to which engine?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmark.workloads.lengths import lengths
from benchmark.workloads.synthetic import SyntheticLoad, draw_requests
from continuous_batching.request import Request, SamplingParams

VOCAB_SIZE = 32_000
SIGMA = 0.8  # of the logarithm of lengths: most are short, few are long
QUICK_REQUESTS, QUICK_SHORTER = 48, 8


@dataclass(frozen=True, slots=True)
class Offered:
    """Poisson arrivals of requests with log-normal lengths, cut at the most; the same for the same seed, and
    at another rate the same requests nearer together. Every `long_every`th prompt has `long_tokens`.
    """

    requests: int
    rate_per_s: float = math.inf  # all at once
    prompt_tokens: int = 256  # mean, before the cut
    most_prompt_tokens: int = 1024
    answer_tokens: int = 256
    most_answer_tokens: int = 1024
    long_every: int = 0
    long_tokens: int = 0
    shared_tokens: int = 0  # at the start of every prompt
    seed: int = 7

    def trace(self) -> list[Request]:
        """The requests, in order of arrival."""
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
        """Far less of the load, to check that a case runs."""
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
    """One run: the trace, and the keys of the recipe that it sets. `tensor` devices share each layer;
    `replicas` engines stand side by side; `split` are engines for prompts and for answers, and all prompts
    go there.
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
        """The label without the rate: what a line in a picture is called."""
        return self.label.partition(", ")[0]

    def quick(self) -> Case:
        """The same with little of its load."""
        return replace(self, offered=self.offered.quick())

    def at(self, rate_per_s: float) -> Case:
        """The same at another rate."""
        name = "all at once" if rate_per_s == math.inf else f"{rate_per_s:g}/s"
        return replace(
            self, label=f"{self.label}, {name}", offered=replace(self.offered, rate_per_s=rate_per_s)
        )


def keys(**values: object) -> tuple[str, ...]:
    """Keys of the recipe's section for the scheduler, as overrides."""
    return tuple(f"scheduler.{name}={value}" for name, value in values.items())


def static(batch_size: int) -> tuple[str, ...]:
    """FasterTransformer's way; the first of a batch waits 100 ms for the others."""
    return keys(
        policy="static",
        batch_size=batch_size,
        max_wait_ms=100,
        num_slots=batch_size,
        max_batch_tokens=WHOLE_TOKENS,
    )


def chunked(tokens: int, num_slots: int = 64) -> tuple[str, ...]:
    """Sarathi's way: decodes first, and chunks of prompts up to so many tokens of a step together."""
    return keys(policy="stall_free", num_slots=num_slots, max_batch_tokens=tokens)


def whole(policy: str, num_slots: int = 64) -> tuple[str, ...]:
    """Prompts in one step: `orca` beside the decodes, `prefill_first` in their place."""
    return keys(policy=policy, num_slots=num_slots, max_batch_tokens=WHOLE_TOKENS)


WHOLE_TOKENS = 8192  # of a step that holds the longest prompt, and more
