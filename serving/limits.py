"""How much may be in the server at once: requests, and the log-probabilities that they ask for?

A log-probability costs about 130 bytes in the engine and as many in the server until its response has been
sent, so a body of a megabyte could ask for gigabytes: `logprobs: 20` of thousands of prompts. What a request
may come to is counted before the engine hears of it, and stays counted until its response has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from continuous_batching.refusal import BadRequest
from continuous_batching.request import Request
from recipes.schema.server_section import ServerSection
from serving.answers.answers import AnswerStream
from serving.failures import Overloaded

RETRY_S = 1.0  # the hint where nothing better is known


def prompt_entries(request: Request, num_answers: int) -> int:
    """How many log-probabilities of the prompt its response has: each answer shows them."""
    asked = request.params.prompt_logprobs
    return 0 if asked is None else request.num_prompt_tokens * (asked + 1) * num_answers


def answer_entries(request: Request, longest: int) -> int:
    """How many log-probabilities the answers to a request come to at most; no sequence exceeds `longest`."""
    params, num_samples = request.params, 1 + len(request.followers)
    if params.logprobs is None:
        return 0
    return min(params.max_tokens, longest) * (params.logprobs + 1) * max(num_samples, params.beam_width)


class ServerLimits:
    """What is in the server, against what may be; `on_refusal` gets the reason for the metrics."""

    def __init__(self, section: ServerSection, on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._max_requests = section.max_requests
        self._most_in_flight = section.max_logprobs_in_flight
        self._most_of_one = min(section.max_logprobs_per_request, section.max_logprobs_in_flight)
        self.num_logprobs = 0  # reserved

    def check_room(self, num_requests: int, num_samples: int) -> None:
        """Raise Overloaded if so many more cannot come in beside those requests, BadRequest if they never
        could.
        """
        limit = self._max_requests
        takes = f"the server takes {limit} (server.max_requests)"
        if num_samples > limit:
            self._on_refusal("refused")
            raise BadRequest(
                "n",
                f"ask for {num_samples} samples; {takes}",
                value=num_samples,
                limit=limit,
                fix="ask for fewer",
                subject="n and best_of",
            )
        if num_requests + num_samples > limit:
            self._on_refusal("queue_full")
            raise Overloaded(
                f"{num_requests} requests are in, and this asks for {num_samples} more; {takes}: try again"
                " later",
                RETRY_S,
            )

    def reserve(self, requests: Sequence[Request], fields: Mapping[str, Any], longest: int) -> list[int]:
        """Count the log-probabilities of the requests of one response, which have these fields in common.

        The result are those of each. `longest` is how many tokens prompt and answer may have. Raises
        BadRequest for too many in one response, Overloaded for too many beside those in flight.
        """
        num_answers = fields.get("n") or 1
        of_prompts = [prompt_entries(each, num_answers) for each in requests]
        of_answers = [answer_entries(each, longest) for each in requests]
        total = sum(of_prompts) + sum(of_answers)
        if total > self._most_of_one:
            self._on_refusal("refused")
            field = "prompt_logprobs" if sum(of_prompts) > sum(of_answers) else _name_of(fields)
            raise BadRequest(
                field,
                f"asks for {total} log-probabilities, of all tokens, prompts and samples; one request may"
                f" ask for {self._most_of_one} (server.max_logprobs_per_request)",
                value=total,
                limit=self._most_of_one,
                fix="set max_tokens, or ask for fewer of each token, or for fewer prompts at a time",
            )
        if total and self.num_logprobs + total > self._most_in_flight:
            self._on_refusal("queue_full")
            raise Overloaded(
                f"{self.num_logprobs} log-probabilities are asked for, and this request asks for {total};"
                f" the server takes {self._most_in_flight} (server.max_logprobs_in_flight): try again later,"
                " or set max_tokens",
                RETRY_S,
            )
        self.num_logprobs += total
        return [prompt + answer for prompt, answer in zip(of_prompts, of_answers)]

    def release(self, answer: AnswerStream) -> None:
        """Its log-probabilities have been sent, or will not be; again is harmless."""
        self.num_logprobs -= answer.num_reserved_logprobs
        answer.num_reserved_logprobs = 0
        assert self.num_logprobs >= 0, "more is released than was reserved"


def _name_of(fields: Mapping[str, Any]) -> str:
    """The field that asks for the log-probabilities of answers, or for that many of them."""
    return "top_logprobs" if fields.get("top_logprobs") is not None else "logprobs"
