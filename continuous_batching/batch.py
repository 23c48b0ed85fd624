"""Define the batch of one step, and the records of what the device answered for it.

A batch is a set of spans, at most one for each row of the slot table. The scheduler makes it, the runner
computes it, and the scheduler commits what was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request, TokenLogprobs, Vector
from kv_cache.pages import Index, PageCopy


@dataclass(frozen=True, slots=True)
class StateCut:
    """A position within a span at which its row's recurrent state is left behind in another page."""

    span: int
    position: int
    page: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of one step: span i covers positions `starts[i]` to `stops[i]` - 1 of row `slots[i]`.

    A span is never empty, and a row has at most one. A decode is a span of one token and a chunk of a prompt
    is a longer one; nothing below the scheduler distinguishes them.

    A span that holds drafts yields tokens at several of its last positions: the token that the model samples
    at each of these positions decides whether the draft that follows is accepted.
    """

    slots: Index  # [S] rows of the slot table
    starts: Index  # [S] first position to compute; all before it are in the cache
    stops: Index  # [S] one past the last
    sampled: Index  # [R] spans (indices into the above) that yield tokens, one entry for each token
    owners: Index  # [R] the row that each token is for: its span's own, or one that forks from it
    targets: Index  # [R] the position that each token is for: one past the position that yields it
    copies: tuple[PageCopy, ...] = ()  # page copies to make before the forward pass, one after the other
    # [U] spans whose last token was sampled by the step in flight: the device has it, and the host does not
    # yet
    unknown: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_drafts: int = 0  # number of draft tokens in all spans
    # [S] The draft model computes positions `draft_starts` to `draft_stops` - 1 of each row first. A draft
    # model computes the known tokens that it lacks, then the drafts of the span except the last, each of
    # which it proposes itself. A head computes the known tokens alone, because its keys of drafts do not
    # last. Both arrays are empty without a draft model or head.
    draft_starts: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    draft_stops: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    cuts: tuple[StateCut, ...] = ()  # sorted by span, then by position
    num_tokens: int = field(init=False)  # total over all spans, summed once because it is read often

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", int((self.stops - self.starts).sum()))

    @property
    def num_spans(self) -> int:
        return len(self.slots)

    @property
    def yielding(self) -> Index:
        """The index of each position that yields a token, among all tokens of the batch. [R]"""
        ends = np.cumsum(self.stops - self.starts)
        rows: Index = ends[self.sampled] - 1 + self.targets - self.stops[self.sampled]
        return rows

    @property
    def yields_all(self) -> bool:
        """Whether every token of the batch yields exactly one token, in the order of the batch."""
        return len(self.owners) == self.num_tokens and bool(
            (self.yielding == np.arange(self.num_tokens)).all()
        )

    @property
    def is_draft(self) -> NDArray[np.bool_]:
        """Whether the position in `targets` holds a draft. [R]"""
        guessed: NDArray[np.bool_] = self.targets < self.stops[self.sampled]
        return guessed

    @property
    def drafts_by_span(self) -> Index:
        """Number of drafts at the end of each span. [S]"""
        counts: Index = np.bincount(self.sampled[self.is_draft], minlength=self.num_spans)
        return counts

    @property
    def makes_drafts(self) -> bool:
        """Whether the device proposes this batch's drafts within the step.

        The host does not know them yet.
        """
        return self.num_drafts > 0 and len(self.draft_starts) > 0

    @property
    def is_one_token_each(self) -> bool:
        """Whether every span is one token."""
        return self.num_tokens == len(self.slots)

    @property
    def num_copied_pages(self) -> int:
        return sum(len(each.sources) for each in self.copies)


_NONE: Index = np.empty(0, dtype=np.int64)
NO_BATCH = Batch(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)


NOT_FINITE = -1  # stands in the place of a token id where the model's logits were not finite
# No token was allowed by the request's masks
NONE_LEFT = -2
LATE = -3  # the mask of allowed tokens was not ready in time, so the row is computed once more
SPOILT = -4  # the operator's own processors left logits that were not finite


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely continuations of one beam.

    There are at least `beam_width` of them, and one more for each end token among them.
    """

    tokens: Index  # [C]
    # [C] log-probabilities after the request's changes to the logits, in falling order
    scores: NDArray[np.float32]
    logprobs: NDArray[np.float32]  # [C] log-probabilities before these changes


@dataclass(frozen=True, slots=True)
class Sampled:
    """The device's answer to one batch, aligned with `batch.sampled`."""

    # [R] token ids, or NOT_FINITE, NONE_LEFT, LATE or SPOILT in their place
    tokens: Index
    # The keys of both are indices into `tokens`: of requests that asked, and of beams
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    # Each row that asked has an entry for every prompt token that follows a token of this batch, except
    # those computed by an earlier batch
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # Each row that pools has the sum of the hidden states of those tokens of this batch that count
    pooled: dict[int, Vector] = field(default_factory=dict)
    # Drafts that the device proposed within this step, in the order of `Batch.is_draft`
    drafts: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def take(self, at: Index) -> Sampled:
        """Return the part of the answer for the tokens at the ascending indices `at`."""
        index_of = (
            {old: new for new, old in enumerate(at.tolist())} if self.logprobs or self.candidates else {}
        )
        return Sampled(
            self.tokens[at],
            {index_of[old]: each for old, each in self.logprobs.items() if old in index_of},
            {index_of[old]: each for old, each in self.candidates.items() if old in index_of},
            self.prompt_logprobs,
            self.pooled,
        )


@dataclass(frozen=True, slots=True)
class Booked:
    """The outcome of a committed batch; `sampled` is aligned with `owners`."""

    owners: Index  # [A] rows, each repeated once for every token that it received
    sampled: Sampled  # tokens sampled behind a rejected draft are left out
    finished: list[Request]  # requests that finished with this batch
    copies: tuple[PageCopy, ...] = ()  # page copies to make at once, because no later batch will carry them


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a batch, span after span."""

    token_ids: NDArray[np.int32]  # [T]
    positions: Index  # [T] position of each token in its request
    # [T] in each group: cache address of each token's key and value, page * page_size + offset
    write_indexes: tuple[Index, ...]

    @property
    def write_index(self) -> Index:
        """The cache addresses in group 0. [T]"""
        return self.write_indexes[0]


def ragged_ranges(starts: Index, stops: Index) -> Index:
    """Concatenate the integers of all ranges [starts[i], stops[i])."""
    lens = stops - starts
    ends = np.cumsum(lens)
    total = int(ends[-1]) if len(ends) else 0
    flat = np.arange(total, dtype=np.int64)
    flat += np.repeat(starts - (ends - lens), lens)
    return flat
