"""What do the server and the process of its engine send each other?

Typed messages in MessagePack, over a socket that only this user can open: anything else is refused, and
nothing in a message can be executed. Times are durations, because the two need not share a clock.
"""

from __future__ import annotations

import msgspec

from continuous_batching.counters import Counters
from continuous_batching.inspection import Usage
from continuous_batching.refusal import BadRequest
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from kv_cache.tier.health import TierCounters
from serving.grammars.matching import GrammarCounters

HURRY, BEGIN = b"h", b"!"  # what the engine's process reads from its standard input before all else


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all messages."""


class Add(Message):
    """A request. Its samples are the streams `stream`, `stream + 1`, ...; it arrived `age_s` ago."""

    stream: int
    ids: list[str]  # of the samples
    prompt: bytes  # int32
    page_keys: bytes  # of the prompt's full pages, 32 bytes each; may be empty
    params: SamplingParams  # of all samples but for their seeds: they may name every token of the vocabulary
    seeds: list[int | None]
    tenant: str
    cache_salt: str
    priority: int
    timeout_s: float | None
    age_s: float
    adapter: int = 0  # its place, from 1
    prompt_replica: str = ""

    @staticmethod
    def of(stream: int, request: Request, age_s: float) -> Add:
        """The message for a request and its samples."""
        samples = [request, *request.followers]
        return Add(
            stream=stream,
            ids=[each.id for each in samples],
            prompt=request.prompt.tobytes(),
            page_keys=b"".join(request.page_keys),
            params=request.params,
            seeds=[each.params.seed for each in samples],
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_s=request.timeout_s,
            age_s=age_s,
            adapter=request.adapter,
            prompt_replica=request.prompt_replica,
        )


class PutAdapter(Message):
    """Let a place hold an adapter, by whose number no request goes; the files must still have this digest."""

    number: int
    folder: str
    digest: str


class AdapterPut(Message):
    """The place holds it now; or why not, and then no request may have the number."""

    number: int
    digest: str
    problem: str


class Finish(Message):
    """End a sample: its text is complete ("stop"), or nobody waits for it any more ("abort")."""

    stream: int
    reason: str


class Look(Message):
    """Ask for a View."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What does not change about an engine that is ready."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int  # of prompt and answer of a request, which model and cache can hold
    num_slots: int
    num_pages: int
    page_size: int
    page_bytes: int  # in all layers
    num_host_pages: int
    device: str
    parameters: int
    max_batch_tokens: int
    prefix_sharing: bool
    max_shared_tokens: int | None  # of a prompt; longer prompts share no pages
    expected_step_s: float  # a step may well take so long
    hidden_size: int  # numbers of an embedding


class Ready(Message):
    """The engine can serve."""

    facts: EngineFacts


class AddRefused(Message):
    """A request cannot be served as it is; the fields are those of `BadRequest`."""

    stream: int
    field: str | None
    problem: str
    value: int | float | str | None
    limit: int | float | str | None
    fix: str
    place: str
    subject: str
    code: str | None

    @staticmethod
    def of(stream: int, bad: BadRequest) -> AddRefused:
        """The message for an exception."""
        return AddRefused(
            stream, bad.field, bad.problem, bad.value, bad.limit, bad.fix, bad.place, bad.subject, bad.code
        )

    def error(self) -> BadRequest:
        """The exception again."""
        return BadRequest(
            self.field,
            self.problem,
            value=self.value,
            limit=self.limit,
            fix=self.fix,
            place=self.place,
            subject=self.subject,
            code=self.code,
        )


class QueueRefused(Message):
    """A request cannot be taken now."""

    stream: int
    reason: str
    retry_after_s: float


class BeamHypothesis(msgspec.Struct, frozen=True, array_like=True):
    """One hypothesis of a beam search."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str
    logprobs: list[TokenLogprobs]


class SampleEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a sample ended. `num_tokens` counts all its tokens, with the one that ended it."""

    stream: int
    reason: str  # stop, length, abort, timeout, error
    error: str | None
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None  # from its arrival to its first admission; None: it was never admitted
    prefill_s: float | None  # from there to its first token
    decode_s: float | None  # from there to its end
    hypotheses: list[BeamHypothesis]
    is_at_fault: bool = False  # it failed by what it asked for
    num_drafted: int = 0  # guesses of its tokens that were checked
    num_accepted: int = 0  # of these, what the model said too


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a sample's prompt when its first token is."""

    stream: int
    num_cached_tokens: int  # found computed
    prompt_logprobs: list[TokenLogprobs]  # from the second token on, if asked for, with one of its samples
    embedding: bytes = b""  # float32, if asked for

    @staticmethod
    def of(stream: int, request: Request, unsent: list[Request]) -> Begun:
        """What is known of a request; with `unsent`, its leader is in there until its log-probabilities are
        sent.
        """
        prompt_logprobs = unsent.pop().prompt_logprobs if unsent else []
        embedding = request.embedding
        data = b"" if embedding is None else embedding.tobytes()
        return Begun(stream, request.num_cached_tokens, prompt_logprobs, data)


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """How large a step was and how long it took."""

    step_s: float
    device_s: float  # of which in the runner
    num_spans: int
    num_tokens: int
    num_prompt_tokens: int  # of these, of prompts


class Stepped(Message):
    """The tokens of one step and their streams; `logprobs` is empty or has an entry for each token.

    `begun` has the streams whose first token is among these. A stream may have several tokens, one after the
    other.
    """

    streams: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    begun: list[Begun]
    ended: list[SampleEnd]
    times: StepTimes

    def ends_at(self) -> dict[int, SampleEnd]:
        """The ends of streams that have tokens here, by the index of their last one."""
        last = {stream: at for at, stream in enumerate(self.streams)}
        return {last[end.stream]: end for end in self.ended if end.stream in last}


class ExpertTable(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens chose each expert since the engine began."""

    counts: list[list[int]]  # by layer, none for a dense one
    num_chosen: int  # experts of a token
    steps: int


class TierReading(msgspec.Struct, frozen=True, array_like=True):
    """What has come of the tier of pages since the engine began."""

    counters: TierCounters
    is_well: bool  # its store did what it was asked for last


class Beat(Message):
    """A sign of life, a few times a second."""

    gauges: Usage
    counters: Counters
    held_back: str | None  # what the head of the queue waits for
    shared_pages: int  # as of the last recount of the pages' holders
    wrong_pages: int
    accepted_at: list[int] = []  # drafts that were right, by their place in their span: first, second, ...
    grammars: GrammarCounters = msgspec.field(default_factory=GrammarCounters)
    experts: ExpertTable | None = None  # a new reading
    tier: TierReading | None = None  # where there is one


class View(Message):
    """The stream and the tokens of each slot, and the holders of each page."""

    slots: list[tuple[int, int, int, int] | None]  # stream, tokens, computed tokens, pages
    holders: bytes  # of each page, one byte, at most 255
    cached: bytes  # one byte a page: whether the prefix cache holds it


ToEngine = Add | Finish | Look | PutAdapter
FromEngine = Ready | AddRefused | QueueRefused | Stepped | Beat | View | AdapterPut

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
