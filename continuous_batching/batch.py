"""What does one step compute, and what came of it?"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from continuous_batching.request import Request, TokenLogprobs, Vector
from kv_cache.pages import Index, PageCopy


@dataclass(frozen=True, slots=True)
class Batch:
    """This step's spans: for span i, positions `starts[i] .. stops[i]-1` of row `slots[i]`.

    A span is never empty, and a row has at most one. A decode is a span of one token, a prompt's
    chunk a longer one; nothing below the scheduler asks which it is.

    A span may yield tokens at several of its last positions: then its last tokens are drafts, and what the
    model chooses at each of these places says whether the draft that follows is what it would have said.
    """

    slots: Index  # [S] rows of the slot table
    starts: Index  # [S] first position to compute; all before it are in the cache
    stops: Index  # [S] one past the last
    sampled: Index  # [R] spans (indices into the above) that yield tokens, one entry for each token
    owners: Index  # [R] the row that each token is for: its span's own, or one that forks from it
    targets: Index  # [R] the position that each token is for: one past the position that yields it
    copies: tuple[PageCopy, ...] = ()  # to be made before the forward pass, one after the other
    # [U] spans whose last token is the one that the device chose last for this row: the host does not know it
    unknown: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_drafts: int = 0  # tokens at the ends of spans that are guesses
    # [S] positions `draft_starts` to `draft_stops` - 1 of each row that the draft model computes first: what
    # it lacks of the known tokens, then the drafts of the span but for the last, which it makes; of a head,
    # whose keys of drafts do not last, the known tokens alone; empty without either
    draft_starts: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    draft_stops: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_tokens: int = field(init=False)  # of all spans; asked for often, so summed once

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", int((self.stops - self.starts).sum()))

    @property
    def num_spans(self) -> int:
        return len(self.slots)

    @property
    def yielding(self) -> Index:
        """Where the positions that yield tokens stand among all tokens of the batch, span after span. [R]"""
        ends = np.cumsum(self.stops - self.starts)
        rows: Index = ends[self.sampled] - 1 + self.targets - self.stops[self.sampled]
        return rows

    @property
    def yields_all(self) -> bool:
        """Whether each token of the batch yields one token, in their order."""
        return len(self.owners) == self.num_tokens and bool(
            (self.yielding == np.arange(self.num_tokens)).all()
        )

    @property
    def is_draft(self) -> NDArray[np.bool_]:
        """Which positions `targets` hold a guess. [R]"""
        guessed: NDArray[np.bool_] = self.targets < self.stops[self.sampled]
        return guessed

    @property
    def drafts_by_span(self) -> Index:
        """How many tokens at the end of each span are guesses. [S]"""
        counts: Index = np.bincount(self.sampled[self.is_draft], minlength=self.num_spans)
        return counts

    @property
    def makes_drafts(self) -> bool:
        """Whether the guesses are made on the device, in this step: the host does not know them yet."""
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


NOT_FINITE = -1  # in place of a token
NONE_LEFT = -2
LATE = -3  # which tokens may come was not known in time: the row is computed once more


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest continuations of one beam: at least `beam_width` and one for each token that ends it."""

    tokens: Index  # [C]
    scores: NDArray[np.float32]  # [C] log-probabilities after the request's changes, falling
    logprobs: NDArray[np.float32]  # [C] before them


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the device answers for one batch, aligned with `batch.sampled`."""

    # [R] token ids; NOT_FINITE where the logits were not, NONE_LEFT where all are forbidden, or LATE
    tokens: Index
    logprobs: dict[int, TokenLogprobs] = field(
        default_factory=dict
    )  # for those that asked, by index into tokens
    candidates: dict[int, Candidates] = field(default_factory=dict)  # for beams, by index into tokens
    # By row, of those that asked: each prompt token that follows one of the batch, but those known before
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # By row, of those that pool: the sum over those of the batch's tokens that count
    pooled: dict[int, Vector] = field(default_factory=dict)
    # The guesses of a batch that makes its own, in the order of `Batch.is_draft`
    drafts: Index = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def take(self, at: Index) -> Sampled:
        """The part for tokens `at`, which rise."""
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
    """What a committed batch brought; `sampled` is aligned with `owners`."""

    owners: Index  # [A] rows, each as often as it got tokens
    sampled: Sampled  # without the tokens that follow wrong drafts
    finished: list[Request]  # requests that ended with it
    copies: tuple[PageCopy, ...] = ()  # to be made now, because nothing is left that another batch would run


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of a batch, span after span."""

    token_ids: NDArray[np.int32]  # [T]
    positions: Index  # [T] in their request
    write_index: Index  # [T] place of each token's key and value in the cache: page * page_size + offset


def ragged_ranges(starts: Index, stops: Index) -> Index:
    """The integers of every range [starts[i], stops[i]), one range after the other."""
    lens = stops - starts
    ends = np.cumsum(lens)
    total = int(ends[-1]) if len(ends) else 0
    flat = np.arange(total, dtype=np.int64)
    flat += np.repeat(starts - (ends - lens), lens)
    return flat
