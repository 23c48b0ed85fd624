"""Define a request, its sampling parameters and its results.

borders/field_table.py declares the fields from which these parameters come, with their bounds and defaults;
`SamplingParams` holds every value to those bounds, and checks which values exclude each other. `Request`
carries the prompt, the tokens known so far and the state that outlives a slot, so that a request can leave
its slot and resume.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from borders.field_table import FIELDS, default
from borders.refusal import BadRequest
from continuous_batching.constraints import Constraint
from continuous_batching.own_processors import OwnProcessors

TokenIds = NDArray[np.int32]
TokenSequence = tuple[int, ...]
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends, by the names of the OpenAI API.

    Raises BadRequest for a value out of its range.
    """

    max_tokens: int = default("max_tokens")
    min_tokens: int = default("min_tokens")
    temperature: float = default("temperature")
    top_k: int = default("top_k")  # 0: off
    top_p: float = default("top_p")
    min_p: float = default("min_p")
    repetition_penalty: float = default("repetition_penalty")
    presence_penalty: float = default("presence_penalty")
    frequency_penalty: float = default("frequency_penalty")
    seed: int | None = None  # None: the engine draws one
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: bytes | None = None  # int32 ids, encoded by `packed_ids`; None allows all
    bad_words: tuple[TokenSequence, ...] = ()  # sequences of token ids that the answer never contains
    # (name, arguments as JSON) of the operator's logits processors
    processors: tuple[tuple[str, str], ...] = ()
    # The grammar that the answer follows, encoded by serving/grammars; None: none
    grammar: str | None = None
    # None: off; n: log-probabilities of the chosen token and of the n best
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    # Return an embedding of the prompt, from its last token or the mean of all; None: off
    pooling: Literal["last", "mean"] | None = None
    # Instead of the embedding, return how likely each of these tokens comes next
    label_token_ids: TokenSequence = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = default("ignore_eos")
    # 0: off; otherwise the answers come from a search with so many beams and are not sampled
    beam_width: int = default("beam_width")
    # A hypothesis scores its log-probability / tokens**length_penalty
    length_penalty: float = default("length_penalty")
    # It has the meaning of transformers' generate
    early_stopping: bool | Literal["never"] = default("early_stopping")
    # Drafts that one step verifies; None: the number in the recipe; 0: none
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if (value := getattr(self, name)) is not None:
                kind.check(name, value)
        most, least = self.max_tokens, self.min_tokens
        _check("min_tokens", least, least <= most, f"from 0 to max_tokens ({most})")
        self._check_masks()
        self._check_beams()
        self._check_pooling()
        if self.grammar is not None:
            _check("ignore_eos", self.ignore_eos, not self.ignore_eos, _ENDS_BY_GRAMMAR)

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens are forbidden, at this position or always."""
        return self.allowed_token_ids is not None or bool(self.bad_words) or self.grammar is not None

    def _check_masks(self) -> None:
        allowed, words = self.allowed_token_ids, self.bad_words
        _check("allowed_token_ids", [], allowed != b"", "a list of at least one token id")
        _check("bad_words", len(words), len(words) <= _MOST_BAD_WORDS, f"at most {_MOST_BAD_WORDS} spellings")
        _check("bad_words", words, all(words), "words of at least one token each")
        total = sum(map(len, words))
        _check(
            "bad_words", total, total <= _MOST_BAD_TOKENS, f"of at most {_MOST_BAD_TOKENS} tokens together"
        )

    def _check_beams(self) -> None:
        width, penalty, early = self.beam_width, self.length_penalty, self.early_stopping
        _check("beam_width", width, width != 1, "0 (off) or at least 2")
        if not width:
            _check("length_penalty", penalty, penalty == 1, "left out without beam_width")
            _check("early_stopping", early, early is False, "left out without beam_width")
            return
        _check("temperature", self.temperature, self.temperature in (0, 1), _NOT_DRAWN)
        for name in ("top_k", "top_p", "min_p", "seed"):
            value = getattr(self, name)
            _check(name, value, value == FIELDS[name].default, _NOT_DRAWN)
        _check("stop", self.stop, not self.stop, "left out beside beam_width; stop_token_ids end a beam")
        _check("logits_processors", self.processors, not self.processors, "left out beside beam_width")
        if self.grammar is not None:
            raise BadRequest("beam_width", _NO_BEAMS, value=width, fix="leave one of them out")
        asked = self.prompt_logprobs
        _check("prompt_logprobs", asked, asked is None, "left out beside beam_width; ask without it")

    def _check_pooling(self) -> None:
        pooling = self.pooling
        labels = len(self.label_token_ids)
        _check("label_token_ids", labels, not labels or pooling == "last", 'left out without pooling: "last"')
        if pooling is not None:
            _check("max_tokens", self.max_tokens, self.max_tokens == 1, "1 beside pooling")
            asked = self.prompt_logprobs
            _check("prompt_logprobs", asked, asked is None, "left out beside pooling")
            _check("beam_width", self.beam_width, not self.beam_width, "left out beside pooling")


# The fields whose values are attributes of SamplingParams as they were read
_KINDS = {each.attribute: each.kind for each in FIELDS.values() if each.attribute}
_MOST_BAD_WORDS = 256  # each is compared with the end of the answer in every step
_MOST_BAD_TOKENS = 4096
_ENDS_BY_GRAMMAR = "left out beside structured output, whose grammar says where the answer ends"
_NO_BEAMS = "searches for answers of any form; structured output is drawn token by token"
_NOT_DRAWN = "left out beside beam_width: beams are searched, not drawn"


def packed_ids(ids: Iterable[int]) -> bytes:
    """Encode token ids as SamplingParams holds them, sorted and unique.

    Thousands of them then cost a step nothing.
    """
    return np.unique(np.fromiter(ids, dtype=np.int32)).tobytes()


def _check(name: str, value: object, holds: bool, allowed: str, *, place: str = "") -> None:
    if not holds:
        raise BadRequest(name, value=value, limit=allowed, place=place)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the distribution before temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer found by a beam search."""

    tokens: TokenIds  # tokens of the answer, including the one that ended it
    # Sum over the tokens' log-probabilities, after the request's changes
    cumulative_logprob: float
    score: float  # cumulative_logprob / len(tokens)**length_penalty
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...]  # one entry for each token, if asked for


@dataclass(eq=False, slots=True)
class Request:
    """One request from its arrival to its end.

    While it occupies a slot, the slot's row holds the current tokens; `tokens` is brought up to date when it
    leaves the slot (finished, preempted, aborted).

    `prompt` is any sequence of token ids; requests with different `cache_salt` share no cached prefix;
    `arrival_s`, `admitted_s`, `first_token_s` and `finish_s` are on the engine's clock.
    """

    id: str
    prompt: TokenIds
    params: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    cache_salt: str = ""
    priority: int = default("priority")  # larger goes first
    # Number of its LoRA adapter on the device, from 1; `cache_salt` keeps its cached pages apart
    adapter: int = 0
    arrival_s: float = default("arrival_s")
    # Time after its arrival at which it ends wherever it is; None: never
    timeout_s: float | None = None
    prompt_replica: str = ""  # address of an engine that may compute its prompt, if any
    # The pages of its prompt stay held when it ends, until `Engine.release_pages`
    leases_pages: bool = False
    # The beginning of its answer, which another engine has sampled: it goes on behind these tokens as if it
    # had been preempted there, because sampling depends on the seed and the position alone
    known: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    # Set if params.processors names any; each sample has its own
    processors: OwnProcessors | None = None
    # Set if params.grammar is set; each sample has its own
    constraint: Constraint | None = None

    # Requests for the same prompt, which fork from this one when the prompt is computed
    followers: list[Request] = field(default_factory=list)

    number: int = -1  # order of arrival, assigned by the scheduler
    # Seed of its sampling: params.seed, or one drawn by the scheduler
    seed: int | None = None
    tokens: TokenIds = field(init=False)  # the prompt, then the answer so far
    page_keys: list[bytes] = field(default_factory=list)  # keys of its full pages in the prefix cache
    num_cached_tokens: int = 0  # prompt tokens found in the cache when it was first admitted
    num_preemptions: int = 0
    awaits_pages: bool = False  # it waits for a lookup in the tier below
    # Number of its drafts that had been verified when it last left its slot
    num_drafted: int = 0
    num_accepted: int = 0  # number of these drafts that were accepted
    # One entry for each prompt token but the first, if asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Number of prompt positions scored or pooled when it last left its slot
    num_scored: int = 0
    # Sum of its prompt's hidden states so far, or the log-probabilities of its labels
    pooled: Vector | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Results of a finished beam search, best first; `tokens` holds the best
    hypotheses: tuple[Hypothesis, ...] = ()
    admitted_s: float | None = None  # time of its first admission
    first_token_s: float | None = None
    finish_s: float | None = None
    finish_reason: str | None = None  # stop, length, abort, timeout, error
    error: str | None = None  # the reason, if finish_reason is "error"
    is_at_fault: bool = False  # the error is due to what it asked for, not to the model

    def __post_init__(self) -> None:
        self.prompt = np.asarray(self.prompt, dtype=np.int32)
        self.known = np.asarray(self.known, dtype=np.int32)
        self.tokens = np.concatenate((self.prompt, self.known)) if len(self.known) else self.prompt

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def answer(self) -> TokenIds:
        """The tokens of the answer, as of the last time that the request left its slot."""
        return self.tokens[len(self.prompt) :]

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens were still to be scored or pooled when the request last left its slot."""
        asks = self.params.prompt_logprobs is not None or self.params.pooling == "mean"
        return asks and self.num_scored < len(self.prompt) - 1

    @property
    def first_pooled(self) -> int:
        """The first prompt position that its embedding still lacked when it last left its slot."""
        return self.num_scored if self.params.pooling == "mean" else len(self.prompt) - 1

    @property
    def embedding(self) -> Vector | None:
        """The mean of the pooled hidden states, or the log-probabilities of its labels.

        It is None until the prompt is computed.
        """
        if self.pooled is None or self.first_token_s is None:
            return None
        num_pooled = len(self.prompt) if self.params.pooling == "mean" else 1
        return self.pooled / np.float32(num_pooled)

    @property
    def num_findable(self) -> int:
        """How many of its leading tokens need not be computed if they are found in the cache."""
        return self.num_scored if self.is_scoring else len(self.tokens) - 1

    def come_back(self, tokens: TokenIds, num_computed: int) -> None:
        """Take over the tokens of the row that the request leaves."""
        self.tokens = tokens
        del self.logprobs[len(self.answer) - len(self.known) :]
        self.num_scored = max(self.num_scored, min(num_computed, len(self.prompt) - 1))
        if self.constraint is not None:
            self.constraint.leave()
