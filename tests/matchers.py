"""A matcher for tests: what may come next is a function of the tokens so far."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

import numpy as np

from continuous_batching.constraints import Mask


class Allowing:
    """Keeps the tokens so far; `end` may be in masks, and ends the answer."""

    vocabulary: int
    end: int | None = None

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.error = ""

    @abstractmethod
    def allowed(self) -> Collection[int]:
        """The tokens that may come next, the end among them."""

    def mask(self) -> Mask:
        bits = np.zeros(-(-self.vocabulary // 32) * 32, dtype=np.uint8)
        bits[list(self.allowed())] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token: int) -> bool:
        if self.error or token == self.end or token not in self.allowed():
            return False
        self.tokens.append(token)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def num_possible(self, tokens: list[int]) -> int:
        count = next((at for at, token in enumerate(tokens) if not self.consume(token)), len(tokens))
        self.rollback(count)
        return count

    def forced(self) -> list[int]:
        return []


class Staircase(Allowing):
    """Lets nothing but 415, 416, ... come, the highest bit of a word among them, and the end behind 419."""

    vocabulary, end = 1024, 2

    def allowed(self) -> Collection[int]:
        return [415 + len(self.tokens) if len(self.tokens) < 5 else self.end]
