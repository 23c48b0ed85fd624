"""Bound the requests in the server, and the log-probabilities that they ask for.

A log-probability costs about 130 bytes in the engine and as many in the server until its response has been
sent, so a body of a megabyte could ask for gigabytes: `logprobs: 20` for thousands of prompts. The most that
a request may ask for is reserved before the engine receives it, and released when its response has been sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from borders.refusal import BadRequest
from continuous_batching.request import Request
from recipes.schema.server_section import ServerSection
from serving.answers.answers import AnswerStream
from serving.failures import Overloaded

RETRY_S = 1.0  # the hint to clients where nothing better is known


def prompt_entries(request: Request, num_answers: int) -> int:
    """Return the number of prompt log-probabilities in a response, which each answer repeats."""
    asked = request.params.prompt_logprobs
    return 0 if asked is None else request.num_prompt_tokens * (asked + 1) * num_answers


def answer_entries(request: Request, longest: int) -> int:
    """Return the most log-probabilities of a request's answers; no sequence is longer than `longest`."""
    params, num_samples = request.params, 1 + len(request.followers)
    if params.logprobs is None:
        return 0
    return min(params.max_tokens, longest) * (params.logprobs + 1) * max(num_samples, params.beam_width)


class ServerLimits:
    """Counts what is in the server against its limits; `on_refusal` gets the reason for the metrics."""

    def __init__(self, section: ServerSection, on_refusal: Callable[[str], None]) -> None:
        self._on_refusal = on_refusal
        self._max_requests = section.max_requests
        self._most_in_flight = section.max_logprobs_in_flight
        self._most_of_one = min(section.max_logprobs_per_request, section.max_logprobs_in_flight)
        self.num_logprobs = 0  # number of reserved log-probabilities

    def check_room(self, num_requests: int, num_samples: int) -> None:
        """Raise Overloaded if there is no room for `num_samples` more now.

        Raises BadRequest if there could never be.
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
        """Reserve the log-probabilities of the requests of one response, and return the number for each.

        The requests share the given fields. `longest` is the most tokens of prompt and answer. Raises
        BadRequest for too many in one response, and Overloaded for too many beside those already reserved.
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
        """Release an answer's log-probabilities, which were sent or will never be.

        A second release does nothing.
        """
        self.num_logprobs -= answer.num_reserved_logprobs
        answer.num_reserved_logprobs = 0
        assert self.num_logprobs >= 0, "more is released than was reserved"


def _name_of(fields: Mapping[str, Any]) -> str:
    """Return the field that asks for the log-probabilities of answers."""
    return "top_logprobs" if fields.get("top_logprobs") is not None else "logprobs"
