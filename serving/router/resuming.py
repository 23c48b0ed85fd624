"""Keep the tokens of answers that clients are being sent, so that another replica can continue a lost one.

`KnownAnswer` is one answer as its client has it, and `KnownAnswers` bounds the memory that all of them take.
What replicas tell is checked here: a replica may say wrong things of the answer that it gives, and can only
spoil that one. Where an answer goes on is decided in proxy.py.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import msgspec

from serving.continuation import (
    MOST_KNOWN_BYTES,
    MOST_RESUMED,
    NO_LOGPROBS,
    AnswerBegun,
    Grown,
    SentContinuation,
    encode,
)
from serving.router.upstream import Lost

MOST_ALL_KNOWN_BYTES = 2**28
MOST_LOSSES = 3  # losses after which what has not begun is asked of no other replica, as server.resume
WAIT_S = 30.0  # time for which an answer waits for a replica at which it can go on


class Interrupted(Exception):
    """An answer was lost that can go on at another replica; the cause says how it was lost."""


class KnownAnswers:
    """The answers that are kept, within a bound on their bytes."""

    def __init__(self, most_bytes: int = MOST_ALL_KNOWN_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        self.begun: set[KnownAnswer] = set()  # until they are forgotten

    def take(self, num_bytes: int) -> bool:
        """Reserve memory; returns False where there is none left."""
        if self.num_bytes + num_bytes > self._most_bytes:
            return False
        self.num_bytes += num_bytes
        return True

    def abort(self, group: str, owner: str) -> list[KnownAnswer]:
        """Let an owner's answers with this id go on at no other replica, and return them."""
        found = [each for each in self.begun if each.is_called(group) and each.owner == owner]
        for each in found:
            each.is_aborted = True
        return found


class KnownAnswer:
    """What is known of the answer to one request of `owner` with this `body`, until `forget`.

    `why_not` says why it cannot go on elsewhere; "": it can, as far as is known.
    """

    def __init__(self, answers: KnownAnswers, path: str, body: bytes, owner: str = "") -> None:
        self._answers = answers
        self._path, self._body = path, body
        self.owner = owner
        self._came_s = time.monotonic()
        self._num_bytes = 0
        self._logprobs: list[msgspec.Raw] = []
        self._tokens = array("i")
        self._num_cached_tokens = 0
        self.begun: AnswerBegun | None = None
        self.num_tokens = 0  # tokens that replicas have told of, also after they are kept no more
        self.num_resumed = self._num_interrupted = 0
        self._num_losses = 0  # those of which the request may be the cause
        self.is_sent = False  # its client has a part of it
        self.why_not = ""
        self.waits_until_s: float | None = None  # set while it is to go on elsewhere
        self.is_aborted = False  # its owner has asked to end it: no other replica is asked
        self.is_told_aborted = False  # and it has ended so, at no replica

    @property
    def can_go_on(self) -> bool:
        """Whether another replica could continue it now, or begin it where no token of it is known."""
        return self.begun is not None and not self.why_not

    @property
    def most_losses(self) -> int:
        """Losses after which it is asked of no other replica, while its client has nothing of it."""
        return MOST_LOSSES if self.begun is None else max(MOST_LOSSES, self.begun.most_resumed)

    @property
    def is_stream(self) -> bool:
        """Whether its client is sent its parts as they come."""
        return self.begun is not None and self.begun.is_stream

    @property
    def is_interrupted(self) -> bool:
        """Whether the next replica is to continue it, and not to begin it."""
        return self.waits_until_s is not None

    @property
    def is_continued(self) -> bool:
        """Whether the next replica is sent tokens that it begins behind."""
        return self.is_interrupted and self.num_tokens > 0

    @property
    def may_begin_again(self) -> bool:
        """Whether it may be answered from its beginning as well, since its client has nothing of it."""
        return self.is_continued and not self.is_sent

    def is_called(self, group: str) -> bool:
        """Return whether its client knows it by this id."""
        return self.begun is not None and self.begun.group == group

    def begin(self, begun: AnswerBegun) -> None:
        """Note what it begins with; where it goes on, what it began with still holds."""
        if self.num_tokens:
            return
        self._release()
        self.begun, self.why_not = begun, ""
        self._answers.begun.add(self)
        self._keep(len(begun.prompt_token_ids) + len(self._body))

    def grow(self, grown: Sequence[Grown]) -> None:
        """Note tokens whose bytes the client gets; raises Lost where a replica tells what cannot be."""
        begun = self.begun
        tokens: list[int] = []
        logprobs: list[bytes] = []
        for each in grown:
            tokens += each.tokens
            if each.tokens:  # a sign of life tells no number
                self._num_cached_tokens = each.num_cached_tokens
            if each.logprobs != NO_LOGPROBS:
                logprobs.append(bytes(each.logprobs))  # a copy: what the frame holds beside it is not kept
        if begun is None:
            raise Lost("it told of tokens before it began")
        if self.num_tokens + len(tokens) > begun.max_tokens:
            raise Lost(f"it told of more than {begun.max_tokens} tokens, the most of this answer")
        self.num_tokens += len(tokens)
        if self.why_not:
            return
        num_all = len(begun.prompt_token_ids) // self._tokens.itemsize + self.num_tokens
        if num_all > begun.most_tokens:
            self.give_up(f"it has more than {begun.most_tokens} tokens (server.resume_max_tokens)")
            return
        self._tokens.extend(tokens)
        self._logprobs += map(msgspec.Raw, logprobs)
        self._keep(self._tokens.itemsize * len(tokens) + sum(map(len, logprobs)))

    def goes_on(self) -> bool:
        """Note that a replica has taken it; returns whether it continues what was known."""
        is_continued, self.waits_until_s = self.is_continued, None
        return is_continued

    def interrupt(self, *, is_orderly: bool) -> None:
        """Let the next replica continue it."""
        self._num_losses += not is_orderly
        self._num_interrupted += 1
        self.num_resumed += self.num_tokens > 0
        self.waits_until_s = time.monotonic() + WAIT_S

    def check_resumable(self, *, is_orderly: bool) -> None:
        """Set `why_not` once it was lost as often as it may be; it may be what ends engines.

        Orderly ends do not count, but for a bound on what replicas may say without an end.
        """
        begun, num_lost = self.begun, self._num_losses
        if begun is None or self.why_not:
            return
        if not is_orderly and num_lost >= begun.most_resumed:
            self.give_up(f"it was lost {num_lost} times before (server.resume)")
        elif self._num_interrupted >= MOST_RESUMED:
            self.give_up(f"it went on {MOST_RESUMED} times already")

    def lose(self, *, is_orderly: bool) -> bool:
        """Note a loss that told nothing of it; return whether it is lost too often to begin once more."""
        if self.is_sent:
            self.check_resumable(is_orderly=is_orderly)
        if is_orderly:
            return False
        self._num_losses += 1
        return not self.is_sent and self._num_losses > self.most_losses

    def give_up(self, why: str) -> None:
        """Keep it no longer, so that it cannot go on elsewhere; `why` is told to its client."""
        self.why_not = why
        self._release()

    def be_refused(self, status: int) -> None:
        """Note that what is known of it is refused: it begins again if it may, and ends otherwise."""
        if self.may_begin_again:
            self.begin_again()
        else:
            self.give_up(f"a replica refused with status {status} to continue it")

    def continuation(self) -> bytes:
        """Return what another replica needs to continue it."""
        assert self.begun is not None, "nothing was begun"
        return encode(
            SentContinuation(
                path=self._path,
                body=self._body,
                begun=self.begun,
                known_token_ids=self._tokens.tobytes(),
                logprobs=self._logprobs,
                num_cached_tokens=self._num_cached_tokens,
                num_resumed=self.num_resumed,
                age_s=time.monotonic() - self._came_s,
            )
        )

    def begin_again(self) -> None:
        """Forget everything: its client has nothing of it, and it is answered from its beginning."""
        self._release()
        self.begun, self.num_tokens, self.why_not, self.waits_until_s = None, 0, "", None
        self.num_resumed = 0

    def forget(self) -> None:
        """Keep nothing any more."""
        self._answers.begun.discard(self)
        self._release()

    def _keep(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > MOST_KNOWN_BYTES:
            self.give_up(f"more than {MOST_KNOWN_BYTES} bytes are known of it")
        elif not self._answers.take(num_bytes):
            self.give_up("the router's memory for answers is full")
        else:
            self._num_bytes += num_bytes

    def _release(self) -> None:
        self._answers.num_bytes -= self._num_bytes
        self._num_bytes = 0
        self._tokens, self._logprobs = array("i"), []
