"""What do the server and the process of its engine tell each other?

Typed messages in MessagePack, over a socket that only this user can open: what is not one of them is refused,
and nothing in them can run. Times are durations, since the two need not share a clock.
"""

from __future__ import annotations

import msgspec

from continuous_batching.counters import Counters
from continuous_batching.inspection import Usage
from continuous_batching.request import SamplingParams, TokenLogprobs


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Any of them."""


class Add(Message):
    """A request. Its samples are the streams `stream`, `stream + 1`, ...; it came `age_s` ago."""

    stream: int
    ids: list[str]  # of the samples
    prompt: bytes  # int32
    samples: list[SamplingParams]
    tenant: str
    cache_salt: str
    priority: int
    timeout_s: float | None
    age_s: float


class Finish(Message):
    """End a sample: its text is complete ("stop"), or nobody waits for it any more ("abort")."""

    stream: int
    reason: str


class Look(Message):
    """Ask what lies where."""


class Facts(msgspec.Struct, frozen=True):
    """What an engine is, from when it is ready."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_tokens: int  # that model and cache hold of a request, prompt and answer
    num_slots: int
    num_pages: int
    page_size: int
    page_bytes: int  # in all layers
    num_host_pages: int
    device: str
    parameters: int
    max_batch_tokens: int


class Ready(Message):
    """The engine can serve."""

    facts: Facts


class Refused(Message):
    """A request cannot be served, or, if `retry_after_s` is given, not now."""

    stream: int
    reason: str
    retry_after_s: float | None


class Found(msgspec.Struct, frozen=True, array_like=True):
    """One hypothesis of a beam search."""

    tokens: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str
    logprobs: list[TokenLogprobs]


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """How a sample ended. `num_tokens` are all that it was given, with the one that ended it."""

    stream: int
    reason: str  # stop, length, abort, timeout, error
    error: str | None
    num_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_s: float | None  # from its arrival to its first admission; None: it never was
    prefill_s: float | None  # from there to its first token
    decode_s: float | None  # from there to its end
    hypotheses: list[Found]


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a sample's prompt when its first token is."""

    stream: int
    num_cached_tokens: int  # that were found computed
    prompt_logprobs: list[TokenLogprobs]  # from its second token on, if asked for, with one of its samples


class StepTimes(msgspec.Struct, frozen=True, array_like=True):
    """What a step was."""

    step_s: float
    device_s: float  # of it, spent in the runner
    num_spans: int
    num_tokens: int
    num_prompt_tokens: int  # of them, of prompts


class Stepped(Message):
    """The tokens of one step, and whose they are; `logprobs` is empty or tells of each.

    `begun` has those of which these are the first.
    """

    streams: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
    begun: list[Begun]
    ended: list[Ended]
    times: StepTimes


class Beat(Message):
    """A sign of life, a few times a second."""

    gauges: Usage
    counters: Counters
    held_back: str | None  # what the head of the queue waits for
    shared_pages: int  # as `Recount`'s, and as old as the last recount
    wrong_pages: int


class View(Message):
    """What lies where: the stream and the tokens of each slot, and the holders of each page."""

    slots: list[tuple[int, int, int, int] | None]  # stream, tokens, of them computed, pages
    holders: bytes  # of each page, one byte, at most 255
    cached: bytes  # one byte a page: whether the prefix cache holds it


ToEngine = Add | Finish | Look
FromEngine = Ready | Refused | Stepped | Beat | View

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
