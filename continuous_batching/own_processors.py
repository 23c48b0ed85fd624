"""Apply the operator's own logits processors to the logits of a request.

A processor is a pure function of the prompt, the answer and the logits: it is called for every sampled
position of a step, drafts included, and again after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kv_cache.page_keys import TokenIds

Logits: TypeAlias = Any  # a float32 tensor [vocabulary] on the device side; this package imports no torch
Processor = Callable[
    [TokenIds, TokenIds, Logits], Logits
]  # prompt tokens, answer tokens, logits; may change the logits in place


class OwnProcessors:
    """The processors of one request with their names, in the order in which they apply."""

    def __init__(self, named: Sequence[tuple[str, Processor]]) -> None:
        self._named = named
        self.error = ""  # why this request gets no logits any more

    @property
    def names(self) -> str:
        """What they are called in a message."""
        return f"the logits processors {', '.join(name for name, _ in self._named)}"

    def changed(self, prompt: TokenIds, answer: TokenIds, logits: Logits) -> Logits | None:
        """Return the processed logits behind these tokens, or None if a processor fails.

        `error` then says why.
        """
        for name, change in self._named:
            try:
                found = change(prompt, answer, logits.clone())
                shape, kind = tuple(found.shape), found.dtype
            except Exception as error:  # noqa: BLE001 not our code: it ends this request alone
                self.error = f"logits processor {name} raised {type(error).__name__}: {error}"
                return None
            if (shape, kind) != (tuple(logits.shape), logits.dtype):
                wanted = f"{logits.dtype} of {tuple(logits.shape)}"
                self.error = f"logits processor {name} returned {kind} of {shape} and not {wanted}"
                return None
            logits = found
        return logits
