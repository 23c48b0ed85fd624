"""Define the messages between the server and the process of its engine.

They are typed and encoded as MessagePack, over a socket that only this user can open: anything else is
refused, and nothing in a message can be executed. Times are durations, because the two processes need not
share a clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from borders.refusal import BadRequest
from continuous_batching.counters import Counters
from continuous_batching.inspection import Usage
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from kv_cache.tier.page_tier import TierCounters
from serving.adapters import AdapterPut, PutAdapter
from serving.grammars.matching import GrammarCounters

# What the engine's process reads from its standard input before anything else. BEGIN is followed by a line,
# which is what the engine has learned whose place it takes
HURRY, BEGIN = b"h", b"!"


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The base of all messages."""


class Add(Message, frozen=True):
    """Add a request, which arrived `age_s` ago; its samples are the streams `stream`, `stream + 1`, ..."""

    stream: int
    ids: list[str]  # ids of the samples
    prompt: bytes  # int32
    page_keys: bytes  # keys of the prompt's full pages, 32 bytes each; may be empty
    # Shared by all samples apart from their seeds; may name every token of the vocabulary.
    params: SamplingParams
    seeds: list[int | None]
    tenant: str
    cache_salt: str
    priority: int
    timeout_s: float | None
    age_s: float
    adapter: int = 0  # number of the adapter's place, from 1; 0: none
    prompt_replica: str = ""
    known: bytes = b""  # int32, the beginning of its answer, if another engine has sampled that

    @staticmethod
    def of(stream: int, request: Request, age_s: float) -> Add:
        """Return the message for a request and its samples."""
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
            known=request.known.tobytes(),
        )


class Finish(Message, frozen=True):
    """End a sample: its text is complete ("stop"), or nobody waits for it any more ("abort")."""

    stream: int
    reason: str


class Look(Message, frozen=True):
    """Ask for a View."""


class Pause(Message, frozen=True):
    """The engine does something else than steps, for at most so long."""

    most_s: float


class RecordTrace(Message, frozen=True):
    """Record a trace of the next so many steps; 0: end the one that is being recorded now."""

    num_steps: int


class TraceWritten(Message, frozen=True):
    """A trace ended: its path, or the reason why there is none."""

    path: str
    error: str


class Halt(Message, frozen=True):
    """Begin no step from now on, or go on; what waits and what runs stays."""

    is_on: bool


class Sleep(Message, frozen=True):
    """Give back the memory of all pages, once all requests that came before have ended."""


class WakeUp(Message, frozen=True):
    """Allocate the pages again."""


class ReadWeights(Message, frozen=True):
    """Read and check other weights, of a folder or of a segment of shared memory; use none of them yet."""

    folder: str
    segment: str
    sha256: str  # digest of the segment's bytes


class PutWeights(Message, frozen=True):
    """Use the weights that were read, once all requests that came before have ended; later ones wait."""


class DropWeights(Message, frozen=True):
    """Give up the weights that were read; there is no answer."""


class OrderDone(Message, frozen=True):
    """The answer to each Order, in their turn: it is carried out, or there is a problem.

    A problem leaves everything as it was.
    """

    problem: str
    num_bytes: int = 0  # size of the pages that were given back or allocated


class EngineFacts(msgspec.Struct, frozen=True):
    """The constant facts of an engine that is ready."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int  # most tokens of a request's prompt and answer, which model and cache can hold
    num_slots: int
    num_pages: int
    page_size: int
    page_bytes: int  # bytes of a page over all layers that keep all tokens
    num_host_pages: int
    device: str
    parameters: int
    max_batch_tokens: int
    prefix_sharing: bool
    max_shared_tokens: int | None  # most tokens of a prompt that shares pages; None: any
    expected_step_s: float  # duration that a normal step may reach
    hidden_size: int  # length of an embedding
    further_page_bytes: tuple[int, ...] = ()  # bytes of a page of each window, and of a state
    long_factors: bool = False  # whether "longrope" rotates by its long factors (`needs_long_factors`)
    adapters: tuple[str, ...] = ()  # digests of the recipe's adapters, as this engine has read them


class Starting(Message, frozen=True):
    """What the engine does while it starts; empty: nothing that takes long."""

    doing: str


class Ready(Message, frozen=True):
    """The engine can serve."""

    facts: EngineFacts


class AddAccepted(Message, frozen=True):
    """A request is in the engine's queue; whatever comes of it comes in later messages."""

    stream: int


class AddRefused(Message, frozen=True):
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
        """Return the message for an exception."""
        return AddRefused(
            stream, bad.field, bad.problem, bad.value, bad.limit, bad.fix, bad.place, bad.subject, bad.code
        )

    def error(self) -> BadRequest:
        """Return the exception that the message describes."""
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


class QueueRefused(Message, frozen=True):
    """A request cannot be accepted now."""

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
    """How a sample ended; `num_tokens` counts all its tokens, including the one that ended it."""

    stream: int
    reason: str  # stop, length, abort, timeout, error
    error: str | None
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None  # time from arrival to first admission; None: it was never admitted
    prefill_s: float | None  # time from first admission to first token
    decode_s: float | None  # time from first token to end
    hypotheses: list[BeamHypothesis]
    is_at_fault: bool = False  # it ended in an error because of what it asked for
    num_drafted: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # draft tokens that were accepted


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a sample's prompt once its first token is sampled."""

    stream: int
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    # Entries from the second token on, if asked for; sent with one of the samples.
    prompt_logprobs: list[TokenLogprobs]
    embedding: bytes = b""  # float32, empty unless asked for

    @staticmethod
    def of(stream: int, request: Request, unsent: list[Request]) -> Begun:
        """Return what is known of a request.

        Its leader is in `unsent` until the prompt's log-probabilities are sent.
        """
        prompt_logprobs = unsent.pop().prompt_logprobs if unsent else []
        embedding = request.embedding
        data = b"" if embedding is None else embedding.tobytes()
        return Begun(stream, request.num_cached_tokens, prompt_logprobs, data)


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """The size of a step and the time that it took."""

    step_s: float
    device_s: float  # time spent in the runner
    num_spans: int
    num_tokens: int
    num_prompt_tokens: int  # tokens that belong to prompts


class Stepped(Message, frozen=True):
    """The tokens of one step and their streams; `logprobs` is empty or has an entry for each token.

    `begun` has the streams whose first token is in this step. A stream may have several tokens, in order.
    """

    streams: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    begun: list[Begun]
    ended: list[SampleEnd]
    times: StepTimes

    def ends_at(self) -> dict[int, SampleEnd]:
        """Return the ends of streams that have tokens here, by the index of each stream's last token."""
        if not self.ended:
            return {}
        last = {stream: at for at, stream in enumerate(self.streams)}
        return {last[end.stream]: end for end in self.ended if end.stream in last}


class ExpertTable(msgspec.Struct, frozen=True, array_like=True):
    """The number of tokens that chose each expert since the engine started."""

    counts: list[list[int]]  # indexed by layer and expert; an empty list for a dense layer
    num_chosen: int  # experts that a token chooses
    steps: int


class TierReading(msgspec.Struct, frozen=True, array_like=True):
    """The counters of the page tier since the engine started."""

    counters: TierCounters
    is_well: bool  # the last operation on its store succeeded


class Beat(Message, frozen=True):
    """A sign of life, sent a few times a second."""

    gauges: Usage
    counters: Counters
    held_back: str | None  # what the head of the queue waits for
    shared_pages: int  # pages held by several slots, as of the last recount of holders
    wrong_pages: int
    accepted_at: list[int] = []  # accepted drafts by their position in the span: first, second, ...
    grammars: GrammarCounters = msgspec.field(default_factory=GrammarCounters)
    experts: ExpertTable | None = None  # a new reading, if one was due
    tier: TierReading | None = None  # None without a tier
    learned: str = ""  # what an engine that takes this one's place need not measure again


class View(Message, frozen=True):
    """The stream and the tokens of each slot, and the holders of each page."""

    slots: list[tuple[int, int, int, int] | None]  # stream, tokens, computed tokens, pages
    holders: bytes  # number of holders of each page, one byte each, at most 255
    cached: bytes  # one byte a page: whether the prefix cache holds it


Order = Halt | Sleep | WakeUp | ReadWeights | PutWeights
ToEngine = Add | Finish | Look | PutAdapter | RecordTrace | Order | DropWeights
FromEngine = (
    (Starting | Ready | Pause | Beat | Stepped)
    | (AddAccepted | AddRefused | QueueRefused | View | AdapterPut | TraceWritten | OrderDone)
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode


def encode_whole(message: FromEngine) -> bytes:
    """Encode what an engine says; "?" takes the place of each lone surrogate in its texts.

    A text may be that of an operator's exception about what a client sent, and must not end the engine.
    """
    try:
        return encode(message)
    except UnicodeEncodeError:
        return encode(_whole(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _whole(value: Any) -> Any:
    """Return a value of lists, mappings and texts in which every text can be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, (list, tuple)):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(each) for name, each in value.items()}
    return value


decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
