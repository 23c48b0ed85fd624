"""Which tokens may come next, where an answer must follow a grammar?

The answer is a function of the tokens of the answer alone: no step advances anything but by the tokens that
were committed. So a request that comes back after a preemption, or whose drafts turned out wrong, has
nothing to restore.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_cache.pages import Index

Mask = NDArray[np.int32]  # [words] a bit for each token, the lowest of a word first: whether it may come
NOTHING: Mask = np.zeros(1, dtype=np.int32)
SLOW_S = 0.01  # of a core, for the masks of one step, or for its guesses


class Matcher(Protocol):
    """Where in its grammar an answer is. What fails is told by `error`, and nothing is raised."""

    @property
    def error(self) -> str:
        """Why it can say nothing more, such as a grammar that grew too complex; empty while it can."""
        ...

    def mask(self) -> Mask | None:
        """The tokens that may come now, None for all; the model's end tokens where the answer may end."""
        ...

    def consume(self, token: int) -> bool:
        """Go on by a token; False, with nothing changed, where it may not come or would end the answer."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        ...

    def num_possible(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first, may follow one another from here; nothing changes."""
        ...

    def forced(self) -> list[int]:
        """Tokens that spell what must come now, as a text would usually be cut into them."""
        ...


class Constraint:
    """The grammar of one request, and where its answer is in it. `start` makes a matcher at the beginning."""

    def __init__(self, start: Callable[[], Matcher]) -> None:
        self._start = start
        self._matcher: Matcher | None = None
        self._num_consumed = 0
        self.error = ""  # why there is no mask any more
        self.making: Making | None = None  # masks that a thread makes, or has made
        self.took_s = 0.0  # of a core, for the masks of its last step
        self._guesses_were_slow = False  # once: they are made in the engine's thread, which all wait for

    @property
    def is_slow(self) -> bool:
        """Whether others should not wait for its masks."""
        return self.took_s > SLOW_S

    def leave(self) -> None:
        """Forget where the answer is, and the memory that this takes, until it is asked for again."""
        self._matcher, self._num_consumed = None, 0

    def masks(self, answer: Index, drafts: Index) -> list[Mask | None]:
        """The tokens that may follow `answer`, then those that may follow each of `drafts`, too.

        None where all may: behind a draft that is impossible or ends the answer, where nothing counts any
        more. Where the grammar fails nothing may come, and `error` says why if that is behind the answer.
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
            self.leave()  # a guess led it there: the answer may go on elsewhere
        elif len(masks) > 1:
            matcher.rollback(len(masks) - 1)
        return masks + [None] * (num_places - len(masks))

    def num_possible(self, answer: Index, drafts: list[int]) -> int:
        """How many of these drafts, from the first, the grammar lets follow the answer.

        None where it is slow, or its guesses were, or a thread is at it.
        """
        if self._is_out_of_reach:
            return 0
        began_s = time.thread_time()
        matcher = self._at(answer)
        count = 0 if matcher is None else matcher.num_possible(drafts)
        self._has_guessed(began_s)
        return count

    def forced(self, answer: Index) -> list[int]:
        """Tokens that spell what must follow the answer; they may be cut otherwise than the model would.

        None where it is slow, or its guesses were, or a thread is at it.
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
            self.leave()

    def _at(self, answer: Index) -> Matcher | None:
        """The matcher behind these tokens; None where there is none any more."""
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
    """The masks behind an answer and each of its drafts, which a thread is to make."""

    constraint: Constraint
    answer: Index
    drafts: Index
    is_begun: bool = False
    is_late: bool = False  # a step has gone on without them
    is_done: bool = False
    failed: Exception | None = None  # a defect, which is raised where the masks are asked for
    _masks: list[Mask | None] = field(default_factory=list)

    def make(self) -> None:
        """Make them."""
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
        """The masks behind the answer and those of these drafts that it was begun with."""
        if self.failed is not None:
            raise self.failed
        count = min(len(drafts), len(self.drafts))
        differs = np.flatnonzero(drafts[:count] != self.drafts[:count])
        return self._masks[: 1 + (int(differs[0]) if len(differs) else count)]
