"""Constrain an answer to a grammar by masks of the tokens that may come next.

The masks are a function of the tokens of the answer alone: a matcher advances only by committed tokens. So a
request that resumes after preemption, or whose drafts were rejected, has no grammar state to restore. The
grammar itself is an implementation of `Matcher`, which lies outside this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index

# [words] one bit for each token, the lowest bit of a word first; a set bit allows the token
Mask = NDArray[np.int32]
NOTHING: Mask = np.zeros(1, dtype=np.int32)
# Limit of CPU time for the masks, or for the drafts, of one step; above it a constraint counts as slow
SLOW_S = 0.01


class Matcher(Protocol):
    """The state of one answer in its grammar. A failure is reported by `error`; no method raises."""

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, such as a grammar that grew too complex; empty while it can."""
        ...

    def mask(self) -> Mask | None:
        """Return the tokens that may come next, or None if all may.

        End tokens are allowed where the answer may end.
        """
        ...

    def consume(self, token: int) -> bool:
        """Advance by a token.

        Returns False, with the state unchanged, if it is not allowed or would end the answer.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        ...

    def num_possible(self, tokens: list[int]) -> int:
        """Return how many of these tokens, from the first, are allowed in sequence from here.

        The state is unchanged.
        """
        ...

    def forced(self) -> list[int]:
        """Return tokens that spell the text that must come next, cut as a tokenizer would usually cut it."""
        ...


class Constraint:
    """The grammar of one request and the state of its answer in it.

    `start` makes a matcher at the beginning.
    """

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self._start = start
        self._matcher: Matcher | None = None
        self._num_consumed = 0
        self.error = ""  # why no mask can be made any more
        self.making: Making | None = None  # the masks that a thread is making, or has made
        self.took_s = 0.0  # CPU time of the masks of its last step
        # Proposing drafts was slow once. They are proposed in the engine's thread, for which every request
        # waits.
        self._guesses_were_slow = False

    @property
    def is_slow(self) -> bool:
        """Whether its masks are slow enough that other requests should not wait for them."""
        return self.took_s > SLOW_S

    def leave(self) -> None:
        """Drop the matcher and the memory that it takes, unless a thread is making masks by it.

        It is rebuilt from the answer when it is next needed.
        """
        if self.making is None or self.making.is_done:
            self._drop()

    def _drop(self) -> None:
        self._matcher, self._num_consumed = None, 0

    def masks(self, answer: Index, drafts: Index) -> list[Mask | None]:
        """Return the mask behind `answer`, then the mask behind each of `drafts`.

        A mask is None where every token is allowed, and behind a draft that is impossible or ends the answer,
        where the sampled token is discarded anyway. If the grammar fails, no token is allowed there, and
        `error` says why if it failed within the answer.
        """
        matcher = self._at(answer)
        num_places = 1 + len(drafts)
        if matcher is None:
            return [NOTHING] * num_places
        masks: list[Mask | None] = [matcher.mask()]
        if self._has_failed(matcher):
            return [NOTHING] * num_places
        if num_places == 1:
            return masks
        for token in drafts.tolist():
            if not matcher.consume(token):
                break
            masks.append(matcher.mask())
            if matcher.error:
                masks[-1] = NOTHING
                break
        if matcher.error:
            # A draft led the matcher into the failure; the answer itself may continue in another way
            self._drop()
        elif len(masks) > 1:
            matcher.rollback(len(masks) - 1)
        return masks + [None] * (num_places - len(masks))

    def num_possible(self, answer: Index, drafts: list[int]) -> int:
        """Return how many of these drafts, from the first, the grammar allows behind the answer.

        Returns 0 if the constraint is slow, if proposing drafts was slow before, or if a thread is making its
        masks.
        """
        if self._is_out_of_reach:
            return 0
        began_s = time.thread_time()
        matcher = self._at(answer)
        count = 0 if matcher is None else matcher.num_possible(drafts)
        self._has_guessed(began_s)
        return count

    def forced(self, answer: Index) -> list[int]:
        """Return tokens that spell what must follow the answer; the model might cut it in another way.

        Returns none if the constraint is slow, if proposing drafts was slow before, or if a thread is making
        its masks.
        """
        if self._is_out_of_reach:
            return []
        began_s = time.thread_time()
        matcher = self._at(answer)
        tokens = [] if matcher is None else matcher.forced()
        self._has_guessed(began_s)
        return tokens

    @property
    def _is_out_of_reach(self) -> bool:
        if self._guesses_were_slow or self.is_slow:
            return True
        return self.making is not None and not self.making.is_done

    def _has_guessed(self, began_s: float) -> None:
        self._guesses_were_slow |= time.thread_time() - began_s > SLOW_S
        if self._matcher is not None and self._matcher.error:
            self._drop()

    def _at(self, answer: Index) -> Matcher | None:
        """Return the matcher advanced to the end of `answer`, or None if the grammar has failed."""
        if self.error:
            return None
        if self._matcher is None or len(answer) < self._num_consumed:
            self._matcher, self._num_consumed = self._start(), 0
        matcher = self._matcher
        for token in answer[self._num_consumed :].tolist():
            if not matcher.consume(token):
                self.error = matcher.error or f"token {token} does not follow it"
                return None
            self._num_consumed += 1
        return None if self._has_failed(matcher) else matcher

    def _has_failed(self, matcher: Matcher) -> bool:
        self.error = matcher.error
        return bool(self.error)


@dataclass(slots=True)
class Making:
    """A task for a thread: the masks behind an answer and behind each of its drafts."""

    constraint: Constraint
    answer: Index
    drafts: Index
    is_begun: bool = False
    is_late: bool = False  # a step has gone on without these masks
    is_done: bool = False
    failed: Exception | None = None  # a programming error, raised again where the masks are asked for
    _masks: list[Mask | None] = field(default_factory=list)

    def make(self) -> None:
        """Compute the masks, and measure the CPU time that they take."""
        began_s = time.thread_time()
        try:
            self._masks = self.constraint.masks(self.answer, self.drafts)
        except Exception as error:
            self.failed = error
            raise
        finally:
            self.constraint.took_s = time.thread_time() - began_s
            self.is_done = True

    def masks_for(self, drafts: Index) -> list[Mask | None]:
        """Return the masks behind the answer and its leading drafts.

        Drafts count as far as they agree with those that the masks were made for.
        """
        if self.failed is not None:
            raise self.failed
        count = min(len(drafts), len(self.drafts))
        differs = np.flatnonzero(drafts[:count] != self.drafts[:count])
        return self._masks[: 1 + (int(differs[0]) if len(differs) else count)]
