"""How do the operator's own logits processors change the logits of a request?

A processor is a function of the prompt, the answer and the logits, and of nothing that it remembers: it is
called for each place of a step, drafts included, and again after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kv_cache.pages import Index

Logits: TypeAlias = Any  # a tensor of the device wing, float32 [vocabulary]
Processor = Callable[
    [Index, Index, Logits], Logits
]  # tokens of prompt and answer; may change logits in place


class OwnProcessors:
    """Those of one request, by their names, in the order in which they act."""

    def __init__(self, named: Sequence[tuple[str, Processor]]) -> None:
        self._named = named
        self.error = ""  # why there are no logits any more

    def changed(self, prompt: Index, answer: Index, logits: Logits) -> Logits | None:
        """The logits behind these tokens; None where one of them fails, of which `error` tells."""
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
