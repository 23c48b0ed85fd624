"""Constrain an answer that may begin with reasoning, and start its grammar after it.

A block of reasoning is enclosed by two tokens. Inside it every token is allowed except those that would end
the answer; after `budget` tokens the block's end is forced. After the block, the answer follows its grammar,
if it has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from continuous_batching.constraints import Mask, Matcher

KIND = "thinking"  # the kind of grammar, as `SamplingParams.grammar` names it


@dataclass(frozen=True, slots=True)
class Thinking:
    """The tokens around a block of reasoning, and whether an answer begins inside it or may begin with it.

    An answer begins inside the block if `is_open`. `budget` is the largest number of tokens in the block;
    None: any.
    """

    begin: int
    end: int
    is_open: bool
    budget: int | None = None

    def before(self, grammar: str | None, field: str) -> str:
        """Return a grammar of such a block followed by `grammar`, as `SamplingParams.grammar` holds it.

        `field` is the request's field that asked for it.
        """
        asked = {"begin": self.begin, "end": self.end, "is_open": self.is_open, "budget": self.budget}
        return json.dumps([field, KIND, asked | {"then": grammar}])


class ThinkingMatcher:
    """A matcher of a block of reasoning, and of what `follows` it, if anything must."""

    def __init__(
        self, thinking: Thinking, follows: Matcher | None, end_tokens: frozenset[int], vocab_size: int
    ) -> None:
        self._thinking, self._follows, self._end_tokens = thinking, follows, end_tokens
        self._num_words = -(-vocab_size // 32)
        self._seen: list[str] = []  # the kind of each consumed token: "begin", "thought", "end" or "answer"
        self._num_thoughts = 0

    @property
    def error(self) -> str:
        return "" if self._follows is None else self._follows.error

    @property
    def _is_thinking(self) -> bool:
        if self._seen:
            return self._seen[-1] in ("begin", "thought")
        return self._thinking.is_open

    @property
    def _must_end(self) -> bool:
        budget = self._thinking.budget
        return self._is_thinking and budget is not None and self._num_thoughts >= budget

    @property
    def _may_begin(self) -> bool:
        return not self._seen and not self._thinking.is_open

    def mask(self) -> Mask | None:
        if self._must_end:
            return self._of([self._thinking.end])
        if self._is_thinking:
            # An answer that ends inside its reasoning would not have its form.
            return None if self._follows is None else ~self._of(sorted(self._end_tokens))
        if self._follows is None:
            return None
        mask = self._follows.mask()
        if mask is None or not self._may_begin:
            return mask
        wide = np.zeros(max(self._num_words, len(mask)), dtype=np.int32)
        wide[: len(mask)] = mask
        wide[: self._num_words] |= self._of([self._thinking.begin])
        return wide

    def _of(self, tokens: list[int]) -> Mask:
        """Return the mask that allows only these tokens."""
        words = np.zeros(self._num_words, dtype=np.uint32)
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def consume(self, token: int) -> bool:
        if self._is_thinking:
            if token == self._thinking.end:
                self._seen.append("end")
                return True
            if self._must_end or token in self._end_tokens:
                return False
            self._seen.append("thought")
            self._num_thoughts += 1
            return True
        if self._may_begin and token == self._thinking.begin:
            self._seen.append("begin")
            return True
        if self._follows is None:
            if token in self._end_tokens:
                return False
        elif not self._follows.consume(token):
            return False
        self._seen.append("answer")
        return True

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        taken, self._seen = self._seen[-num_tokens:], self._seen[:-num_tokens]
        self._num_thoughts -= taken.count("thought")
        num_answer = taken.count("answer")
        if num_answer and self._follows is not None:
            self._follows.rollback(num_answer)

    def num_possible(self, tokens: list[int]) -> int:
        count = 0
        for token in tokens:
            if not self.consume(token):
                break
            count += 1
        self.rollback(count)
        return count

    def forced(self) -> list[int]:
        if self._must_end:
            return [self._thinking.end]
        if self._is_thinking or self._may_begin or self._follows is None:
            return []
        return self._follows.forced()


def reader(asked: Mapping[str, Any]) -> Thinking:
    """Return the block that `Thinking.before` wrote."""
    return Thinking(asked["begin"], asked["end"], asked["is_open"], asked["budget"])
