"""Logits processors as an operator could write them, and as he should not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kv_cache.pages import Index


class Ban:
    """These tokens never come."""

    def __init__(self, vocab_size: int, tokens: list[int]) -> None:
        if max(tokens) >= vocab_size:
            raise ValueError(f"token {max(tokens)} is not in the vocabulary")
        self._tokens = tokens

    def __call__(self, prompt: Index, answer: Index, logits: Tensor) -> Tensor:
        logits[self._tokens] = -torch.inf
        return logits


class Echo:
    """The answer is the prompt, again and again."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __call__(self, prompt: Index, answer: Index, logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[int(prompt[len(answer) % len(prompt)])] = 0
        return only


class Fail:
    """Wrong in one way or another from the third token on."""

    def __init__(self, vocab_size: int, how: str = "raises") -> None:
        if how == "never":
            raise ValueError("not \ud800")
        self._how = how

    def __call__(self, prompt: Index, answer: Index, logits: Tensor) -> Any:
        if len(answer) < 2:
            return logits
        if self._how == "half a pair":
            raise ValueError("no \ud800")
        if self._how == "raises":
            raise ValueError("no luck")
        if self._how == "leaves nothing":
            return torch.full_like(logits, -torch.inf)
        if self._how in ("nan", "inf"):
            logits[7] = float(self._how)
        return {
            "nan": logits,
            "inf": logits,
            "short": logits[:-1],
            "nothing": None,
            "double": logits.double(),
        }[self._how]


class Script:
    """The answer is these tokens."""

    def __init__(self, vocab_size: int, tokens: list[int]) -> None:
        self._tokens = tokens

    def __call__(self, prompt: Index, answer: Index, logits: Tensor) -> Tensor:
        only = torch.full_like(logits, -torch.inf)
        only[self._tokens[min(len(answer), len(self._tokens) - 1)]] = 0
        return only
