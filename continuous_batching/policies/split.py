"""Split a step into one budget for prompts and one for decodes; neither uses what the other leaves.

After the mixed scheduler of the sources' chapter on dynamic batching (`MaxPrefillTokens`, `MaxDecodeTokens`,
`PrefillDecodeRatio`). It deviates in four ways. The ratio, which the chapter declares and never reads,
divides the budget here, so that both parts together bound a step. A chunk that is larger than what is left of
its budget shrinks, where the chapter leaves it out, and a long prompt with it for ever. Requests go by
arrival, where the chapter's go in the order of a map. And the decodes' budget covers every slot (a recipe
that does not is refused), because the chapter's leaves the same ones behind at every step.
"""

from __future__ import annotations

import numpy as np

from continuous_batching.policies.long_prompts import LongPrompts
from continuous_batching.policies.policy import Busy
from continuous_batching.policies.prefill_budget import Chunks, Limit
from continuous_batching.policies.stall_free import StallFree


class Split(StallFree):
    """Prompts get at most `prompt_tokens` tokens of a step, however few decodes there are."""

    def __init__(
        self, prompt_tokens: int, chunks: Chunks | None = None, long_prompts: LongPrompts | None = None
    ) -> None:
        super().__init__(chunks, long_prompts)
        self._prompt_tokens = prompt_tokens

    def _limit(self, busy: Busy, budget: int) -> Limit:
        left = budget - int(np.count_nonzero(busy.decodes))
        return self._limit_of(busy, min(left, self._prompt_tokens))
