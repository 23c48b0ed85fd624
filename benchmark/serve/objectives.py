"""Compute how much of a run was good: answers and tokens that came in time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.serve.client import ClientAnswer
from recipes.schema.numbers import real

NAMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Objectives:
    """The most milliseconds of each latency, by name; `itl` bounds every gap of an answer."""

    most_ms: Mapping[str, float]

    def met(self, answer: ClientAnswer) -> bool:
        """Return whether an answer was whole and met all objectives."""
        if answer.error is not None:
            return False
        times_s = answer.piece_times_s
        spent_ms = {"ttft": times_s[0] - answer.sent_s, "e2el": times_s[-1] - answer.sent_s}
        if answer.output_tokens > 1:
            spent_ms["tpot"] = (times_s[-1] - times_s[0]) / (answer.output_tokens - 1)
        if len(times_s) > 1:
            spent_ms["itl"] = float(np.diff(times_s).max())
        return all(1e3 * spent_ms.get(name, 0.0) <= most for name, most in self.most_ms.items())

    def fluidity(self, answers: Sequence[ClientAnswer]) -> float | None:
        """Return the share of all requested tokens that met their own deadline.

        The deadline is `ttft` plus `tpot` (or `itl`) for each token before. Tokens of failed answers met
        none. Returns None where an objective is missing, or where only the server knows how many tokens a
        failed answer should have had.
        """
        between_ms = self.most_ms.get("tpot", self.most_ms.get("itl"))
        if "ttft" not in self.most_ms or between_ms is None or not answers:
            return None
        good = total = 0
        for answer in answers:
            asked = answer.ask.max_tokens if answer.error is not None else answer.output_tokens
            if asked is None:
                return None
            total += asked
            if answer.error is None:
                times_ms = 1e3 * (token_times_s(answer) - answer.sent_s)
                deadlines_ms = self.most_ms["ttft"] + between_ms * np.arange(len(times_ms))
                good += int((times_ms <= deadlines_ms).sum())
        return good / total


def token_times_s(answer: ClientAnswer) -> np.ndarray:
    """Return when each token came; tokens that no piece counts are taken to have come last."""
    times_s = np.array(answer.piece_times_s)
    if answer.piece_tokens is not None:
        return np.repeat(times_s, answer.piece_tokens)
    behind = max(0, answer.output_tokens - len(times_s))
    return np.append(times_s, np.full(behind, times_s[-1]))[: answer.output_tokens]


def objective(text: str) -> tuple[str, float]:
    """Parse `NAME:MILLISECONDS`."""
    name, _, value = text.partition(":")
    if name in NAMES and value:
        return name, real(1e-6, 1e9)(value)
    raise argparse.ArgumentTypeError(f"{text!r} is no objective; write {', '.join(NAMES)} and :MILLISECONDS")
