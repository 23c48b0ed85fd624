"""Predict the time of a step: first by what a model of the device says, then by what steps took.

The time of a step is taken to be linear in what it computes. Steps that only decode and steps with chunks of
prompts are two kinds with coefficients of their own, because they take other paths: a captured graph or
single launches, bound by memory or by products.

    decodes only:  step_s + token_s * tokens + context_s * context + drafted_s * [has drafts]
    with chunks:   step_s + token_s * tokens + context_s * context + pair_s * pairs

`tokens` are all tokens of the step, drafts included. `context` is the number of tokens in the cache that its
spans read, `pairs` that of pairs of a query and a key. On a CPU the first draft of a step costs more than the
next ones, because attention then takes another path; elsewhere `drafted_s` comes out as 0.

After entries i = 1 ... n with features x_i and times t_i, the coefficients w >= 0 minimise

    sum_i kept^(n - i) * (1 - x_i w / t_i)^2  +  TRUST * |w - w'|^2 * sum_i kept^(n - i) / t_i^2

in which w' are the coefficients so far, those of `StepCosts` at first: a ridge regression of relative errors
that forgets, and keeps what recent steps do not show. The costs that a model of the device states are right
about proportions rather than about absolute times, so the median of the first steps' ratios scales them.
Without such costs everything is taken to cost nothing, so that what has never been tried is tried. The
longer a step took, the less its relative error counts: a compilation, or another process, moves the fit by
little.

The coefficients depend on the observed steps alone, and not on when they are asked for, so that every rank
and every replay that observes the same steps predicts the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from statistics import median, median_low
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Batch
from kv_cache.pages import Index

Floats = NDArray[np.float64]
Features = tuple[float, float, float, float]  # step, tokens, context, and drafted or pairs
Amount = TypeVar("Amount", float, Floats)

_TRUST = 1e-3  # weight of the coefficients so far, as a share of that of the entries
_MEAN_STEP = 0.1  # weight of the latest step in a mean
_PLAIN_STEPS = 8  # steps without drafts of one size, whose median is one entry
# Limit of measured to predicted time. The longer a step took, the less its relative error counts, so that a
# machine that has become much slower would be followed only when its faster steps are forgotten.
_MOST_RATIO = 2.0


class _Kind(NamedTuple):
    """How the times of a kind of steps are fitted."""

    scales: Features  # bring the features to similar magnitudes
    kept: float  # share of the statistics that is kept at each entry
    first_entries: int  # entries of the first fit, before which nothing but the given costs is known
    num_entries: int  # entries of each later fit


# The small difference that drafts make must follow the load at once, while one chunk more says little.
_DECODES = _Kind(scales=(1.0, 1e2, 1e4, 1.0), kept=0.99, first_entries=2, num_entries=1)
_PROMPTS = _Kind(scales=(1.0, 1e2, 1e4, 1e6), kept=0.998, first_entries=4, num_entries=4)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds that a step costs: as such, and for each unit of what it computes."""

    step_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    drafted_s: float = 0.0  # counts in steps that only decode
    pair_s: float = 0.0  # counts in steps with chunks

    def seconds(self, num_tokens: Amount, context: float, num_pairs: Amount | float = 0.0) -> Amount:
        """Predict the time of a step without drafts, or the times of several steps."""
        seconds = self.step_s + self.token_s * num_tokens + self.context_s * context
        return seconds + self.pair_s * num_pairs


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What is known of the costs of steps before any is observed; zeros where nothing is."""

    decodes: Coefficients = Coefficients()
    prompts: Coefficients = Coefficients()


UNKNOWN = StepCosts()


class StepTime:
    """The coefficients of both kinds of steps, fitted online to the steps that the scheduler reports."""

    def __init__(self, costs: StepCosts = UNKNOWN) -> None:
        each = costs.decodes
        self._decodes = _Fit(_DECODES, (each.step_s, each.token_s, each.context_s, each.drafted_s))
        each = costs.prompts
        self._prompts = _Fit(_PROMPTS, (each.step_s, each.token_s, each.context_s, each.pair_s))
        # Decaying mean of the time per token of steps with chunks, which bounds that of one more token
        self.prompt_token_s = 0.0
        # Measured to predicted time of the last step if it had chunks and its prediction was fitted; else 0
        self.prompt_ratio = 0.0
        self._plain_s: list[float] = []
        # Starts of the latest plain steps' last batch; holding the batch itself would slow the next ones
        self._starts: Index | None = None

    @property
    def decodes(self) -> Coefficients:
        """The coefficients of steps that only decode."""
        step_s, token_s, context_s, drafted_s = self._decodes.coefficients
        return Coefficients(step_s, token_s, context_s, drafted_s)

    @property
    def prompts(self) -> Coefficients:
        """The coefficients of steps with chunks of prompts."""
        step_s, token_s, context_s, pair_s = self._prompts.coefficients
        return Coefficients(step_s, token_s, context_s, pair_s=pair_s)

    def observe(self, batch: Batch, took_s: float) -> None:
        """Learn from one step."""
        self.prompt_ratio = 0.0
        if took_s <= 0:
            return
        if batch.num_tokens - batch.num_drafts > batch.num_spans:
            self.prompt_token_s += _MEAN_STEP * (took_s / batch.num_tokens - self.prompt_token_s)
            features = _prompt_features(batch.starts, batch.stops)
            if self._prompts.is_fitted:
                self.prompt_ratio = took_s / max(self._prompts.seconds(features), 1e-9)
            self._prompts.enter(features, took_s)
        elif batch.num_drafts:
            self._close()
            self._decodes.enter((1.0, batch.num_tokens, int(batch.starts.sum()), 1.0), took_s)
        else:
            if self._starts is not None and len(self._starts) != batch.num_spans:
                self._close()
            self._plain_s.append(took_s)
            self._starts = batch.starts
            if len(self._plain_s) == _PLAIN_STEPS:
                self._close()

    def _close(self) -> None:
        """Enter the median of the plain steps so far."""
        if self._starts is not None:
            features = 1.0, len(self._starts), int(self._starts.sum()), 0.0
            self._decodes.enter(features, median(self._plain_s))
        self._plain_s, self._starts = [], None


def _prompt_features(starts: Index, stops: Index) -> Features:
    """Return the features of a step of these spans, some of which are chunks."""
    lens = stops - starts
    return 1.0, int(lens.sum()), int(starts.sum()), int(lens @ (starts + stops)) / 2


class _Fit:
    """The ridge regression of the module's docstring, for one kind of steps."""

    def __init__(self, kind: _Kind, costs_s: Features) -> None:
        self.coefficients = costs_s
        self.is_fitted = False
        self._kind = kind
        self._scales: Floats = np.array(kind.scales)
        self._weights: Floats = np.array(costs_s) * self._scales
        self._products: Floats = np.zeros((4, 4))
        self._sums: Floats = np.zeros(4)
        # Entries since the last fit
        self._features: list[Features] = []
        self._took_s: list[float] = []

    def seconds(self, features: Features) -> float:
        """Return the predicted seconds of one step."""
        return sum(map(mul, features, self.coefficients), 0.0)

    def enter(self, features: Features, took_s: float) -> None:
        """Add an entry, and fit if there are enough of them."""
        if self.is_fitted:
            took_s = min(took_s, _MOST_RATIO * max(self.seconds(features), 1e-9))
        self._features.append(features)
        self._took_s.append(took_s)
        kind = self._kind
        if len(self._features) == (kind.num_entries if self.is_fitted else kind.first_entries):
            self._fit()

    def _fit(self) -> None:
        """Fit the coefficients to the entries since the last fit, and to those before as far as kept."""
        rows, took_s = np.array(self._features) / self._scales, np.array(self._took_s)
        if not self.is_fitted:
            self.is_fitted = True
            self._scale(rows, took_s)
        rows /= took_s[:, None]
        kept = self._kind.kept ** np.arange(len(rows) - 1, -1, -1)
        faded = self._kind.kept ** len(rows)
        self._products = self._products * faded + (rows.T * kept) @ rows
        self._sums = self._sums * faded + kept @ rows
        self._weights = self._solved()
        step_s, token_s, context_s, other_s = (self._weights / self._scales).tolist()
        self.coefficients = step_s, token_s, context_s, other_s
        self._features.clear()
        self._took_s.clear()

    def _scale(self, rows: Floats, took_s: Floats) -> None:
        """Scale the given costs, if there are any, to the first times."""
        given_s = rows @ self._weights
        if given_s.min() > 0:
            self._weights = self._weights * median_low((took_s / given_s).tolist())

    def _solved(self) -> Floats:
        """Solve least squares without negative weights, dropping the most negative one repeatedly."""
        # The features are in 1/s, and trust is scaled with them so that it means the same on any machine.
        trust = _TRUST * max(float(self._products[0, 0]), 1e-12)
        products = self._products + trust * np.eye(4)
        sums = self._sums + trust * self._weights
        kept = np.arange(4)
        weights: Floats = np.zeros(4)
        while len(kept):
            found = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
            least = int(found.argmin())
            if found[least] >= 0:
                weights[kept] = found
                break
            kept = np.delete(kept, least)
        return weights
