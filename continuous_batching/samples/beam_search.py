"""Run beam searches over rows of the slot table.

The beams of a request are rows that share pages. They are admitted, advanced, preempted and ended together.

The rules by which candidates survive are those of transformers' `generate(num_beams=...)` for one prompt. A
search ends as its `early_stopping` says: with True, when there are as many hypotheses as beams; with False,
when moreover the best living beam scores no better than the worst of them; with "never", when it cannot do
so, however long it grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from continuous_batching.batch import Candidates, Sampled
from continuous_batching.counters import Counters
from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.request import Hypothesis, Request, SamplingParams, TokenIds, TokenLogprobs
from continuous_batching.samples.stopping import StopConditions, failure
from kv_cache.pages import Index

Floats = NDArray[np.float64]


def choose(
    totals: Floats, tokens: Index, ends: NDArray[np.bool_], width: int
) -> tuple[tuple[Index, Index], tuple[Index, Index]]:
    """Return the candidates that live on and those that become hypotheses, best first.

    Both are given as (beam, candidate) indices.

    For n beams, best first, with c candidates each: `totals` [n, c] are the log-probabilities of whole
    answers, `tokens` [n, c] their last tokens, `ends` [n, c] whether the answer ends there. The `width` best
    that do not end live on. One that ends counts only if it is among the `width` best of all. Ties go to the
    better beam, then to the smaller token.
    """
    beams = np.repeat(np.arange(len(totals)), totals.shape[1])
    order = np.lexsort((tokens.ravel(), beams, -totals.ravel()))
    over = ends.ravel()[order]
    living, ended = order[~over][:width], order[:width][over[:width]]
    return np.divmod(living, totals.shape[1]), np.divmod(ended, totals.shape[1])


def keep(found: Sequence[Hypothesis], width: int) -> list[Hypothesis]:
    """Return the `width` best hypotheses, best first; ties go to the one found first."""
    return sorted(found, key=lambda each: -each.score)[:width]


def score(total: float, num_tokens: int, params: SamplingParams) -> float:
    """Return the score of an answer with this log-probability and length."""
    return float(total / num_tokens**params.length_penalty)


def is_over(hypotheses: Sequence[Hypothesis], best: float, num_tokens: int, params: SamplingParams) -> bool:
    """Whether the search ends, given the length and log-probability of its best living beam."""
    if len(hypotheses) < params.beam_width:
        return False
    if params.early_stopping is True:
        return True
    if params.early_stopping == "never" and params.length_penalty > 0:
        num_tokens = params.max_tokens
    return score(best, num_tokens, params) <= hypotheses[-1].score


def place(rows: Sequence[int], parents: Sequence[int], seats: Sequence[int]) -> list[int]:
    """Assign a row of `seats` to each beam that continues `rows[parent]`, with as few moves as possible.

    The best continuation of a row stays in it; the others go to rows that no beam continues.
    """
    taken = {rows[parent] for parent in parents}
    free = [seat for seat in seats if seat not in taken]
    placed = []
    for parent in parents:
        row = rows[parent]
        placed.append(row if row in taken else free.pop(0))
        taken.discard(row)
    return placed


# The log-probabilities of a beam's tokens as a linked list, the last first: beams share their common prefix
Trail = tuple["Trail", TokenLogprobs] | None


@dataclass(eq=False, slots=True)
class BeamSearch:
    """One request and its beams, which always have equally many tokens.

    The beams are requests, so that each may have a row; only the first, which is the request itself, is known
    outside. While they wait, `beams` are best first and keep their tokens.
    """

    leader: Request
    beams: list[Request]
    stops: Index  # tokens that end a beam
    all_rows: list[int] = field(default_factory=list)  # the leader's row first; empty while the search waits
    rows: list[int] = field(default_factory=list)  # rows of the living beams, best first
    scores: Floats = field(default_factory=lambda: np.zeros(1))  # scores of the living beams
    # Log-probabilities of the living beams, if asked for
    trails: list[Trail] = field(default_factory=lambda: [None])
    hypotheses: list[Hypothesis] = field(default_factory=list)  # best first
    is_over: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether the beams have diverged; until then there is only one, the prompt."""
        return len(self.scores) > 1

    def num_shared(self, page_size: int) -> int:
        """Return the number of full pages that all beams have in common, while none of them has a row."""
        if not self.has_begun:
            return self.leader.num_prompt_tokens // page_size
        tokens = np.stack([beam.tokens for beam in self.beams])
        return int((tokens != tokens[0]).any(axis=0).argmax()) // page_size


class BeamSearches:
    """All beam searches, from the time they are added to their end.

    A search takes its rows all at once; otherwise two searches might wait for each other's. One row computes
    what all beams have in common, and the others then share its pages. A beam computes its last token only
    together with all others: these tokens yield the candidates of which `choose` takes the best. A beam
    that continues another row takes over that row's pages; a row that no beam continues releases its own.
    """

    def __init__(self, lifecycle: SlotLifecycle, stop_conditions: StopConditions, counters: Counters) -> None:
        self._lifecycle = lifecycle
        self._slots = lifecycle.slots
        self._stop_conditions = stop_conditions
        self._counters = counters
        self.by_number: dict[int, BeamSearch] = {}  # keyed by the arrival number of the search's request
        self._search_of: dict[int, BeamSearch] = {}  # keyed by row

    def __contains__(self, row: int) -> bool:
        return row in self._search_of

    def add(self, request: Request) -> int:
        """Add a request that has its number; return how many of the numbers after it its beams take."""
        assert not request.followers, "a search has no samples beside it"
        width = request.params.beam_width
        beams = [request]
        for index in range(1, width):
            beam = Request(
                request.id,
                request.prompt,
                request.params,
                request.tenant,
                request.cache_salt,
                request.priority,
                request.adapter,
                request.arrival_s,
            )
            beam.number, beam.seed, beam.page_keys = request.number + index, request.seed, request.page_keys
            beams.append(beam)
        stops = self._stop_conditions.stop_tokens(request.params)
        self.by_number[request.number] = BeamSearch(request, beams, stops)
        return width - 1

    def extra_pages(self, request: Request, reserved: int) -> int:
        """Return the pages to promise to each other beam of a request that is promised `reserved` tokens."""
        search, size = self.by_number[request.number], self._slots.page_size
        return max(0, -(-reserved // size) - search.num_shared(size))

    def take_rows(self, request: Request, row: int, reserved: int) -> None:
        """Give rows to the other beams of a request that was admitted into `row`."""
        search, slots = self.by_number[request.number], self._slots
        num_shared = search.num_shared(slots.page_size)
        row_of = {request: row}
        if search.has_begun and self._lifecycle.tables.must_stop_to_fork:
            self._lifecycle.matching.most_found[row] = num_shared
        for beam in search.beams:
            if beam is not request:
                row_of[beam] = self._lifecycle.enter_beam(beam, num_shared, reserved)
        search.all_rows = list(row_of.values())
        search.rows = [row_of[beam] for beam in search.beams] if search.has_begun else [row]
        self._search_of |= dict.fromkeys(search.all_rows, search)

    def start_beams(self) -> None:
        """Start the beams of resumed searches once their leader has computed the pages that they share."""
        size, waiting = self._slots.page_size, self._lifecycle.waiting_beams
        for search in self._running():
            leader, *others = search.all_rows
            if not search.has_begun or others[0] not in waiting:
                continue
            if self._slots.num_computed[leader] >= waiting[others[0]] * size:
                for row in others:
                    self._lifecycle.start_beam(leader, row)
                self._lifecycle.matching.most_found.pop(leader, None)
                if self._lifecycle.tables.must_stop_to_fork:  # it stopped here, too
                    self._lifecycle.matching.block_until_looked_up(leader)

    def most_found(self, request: Request) -> int | None:
        """Return the most cached pages from which a waiting request may go on; None: any number.

        The leader of a resumed search must have what the windows of its other beams see when these start, and
        the state that they start from.
        """
        search = self.by_number.get(request.number)
        if search is None or not search.has_begun or not self._lifecycle.tables.must_stop_to_fork:
            return None
        return search.num_shared(self._slots.page_size)

    def wait_for_beams(self, rows: Index, stops: Index) -> Index:
        """Stop leaders of resumed searches where their other beams start, and return the ends of the spans.

        Behind that they would free what the windows of these beams see, take pages that these need, and
        change the state that these start from.
        """
        if not self._lifecycle.tables.must_stop_to_fork:
            return stops
        waiting, stops = self._lifecycle.waiting_beams, stops.copy()
        for search in self._running():
            leader, other = search.all_rows[:2]
            if search.has_begun and other in waiting:
                most = waiting[other] * self._slots.page_size
                stops[rows == leader] = np.minimum(stops[rows == leader], most)
        return stops

    def keep_together(self, rows: Index, starts: Index, stops: Index) -> tuple[Index, Index, Index]:
        """Hold back the last tokens of beams whose search cannot compute all of them in this step."""
        ready = set(rows[stops == self._slots.num_tokens[rows]].tolist())
        early: set[int] = set()
        for search in self._running():
            if not ready.issuperset(search.rows):
                early |= ready.intersection(search.rows)
        stops = stops - np.isin(rows, list(early))
        kept = stops > starts
        return rows[kept], starts[kept], stops[kept]

    def rows_of(self, row: int) -> list[int]:
        """Return all rows of the request in this row, the row of the request itself first."""
        search = self._search_of.get(row)
        return [row] if search is None else search.all_rows

    def advance(self, rows: Index, sampled: Sampled, now_s: float) -> tuple[Index, dict[int, str]]:
        """Advance every search by choosing among its beams' candidates, and book the chosen tokens.

        Returns the indices of those rows [R] that are no beams, and the searches that end, as the row of
        their request with the reason.
        """
        ends: dict[int, str] = {}
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        for search in self._running():
            if search.rows[0] not in index_of:
                continue
            at, leader = [index_of[row] for row in search.rows], search.all_rows[0]
            if (sampled.tokens[at] < 0).any():
                ends[leader] = failure(int(sampled.tokens[at].min()))
                self._slots.num_tokens[search.all_rows] += 1  # the failed token, which `leave` takes back
                continue
            if search.leader.first_token_s is None:
                search.leader.first_token_s = now_s
            self._step(search, [sampled.candidates[index] for index in at], self._tops(sampled, at))
            if search.is_over:
                ends[leader] = search.hypotheses[0].finish_reason
        return np.flatnonzero(~np.isin(rows, list(self._search_of))), ends

    def suspend(self, row: int) -> Request:
        """Free all rows of a search.

        The pages that its beams computed can be found until they are evicted.
        """
        search, slots = self._search_of[row], self._slots
        if search.has_begun:
            search.beams = [slots.requests[each] for each in search.rows]
        first, *others = slots.num_computed[search.all_rows].tolist()
        prompt = search.leader.num_prompt_tokens  # it is computed once for all beams
        self._counters.lost_tokens += first + sum(max(0, each - prompt) for each in others)
        for each in search.all_rows:
            beam = self._lifecycle.leave(each)
            beam.num_preemptions += beam is not search.leader
            del self._search_of[each]
        search.all_rows = []
        return search.leader

    def end(self, request: Request) -> None:
        """Remove a search that has left its rows; if it is complete, its request gets the results."""
        search = self.by_number.pop(request.number)
        for row in search.all_rows:
            del self._search_of[row]
        request.tokens, request.logprobs = request.prompt, []
        if search.is_over:
            request.hypotheses = tuple(search.hypotheses)
            request.tokens = np.concatenate((request.prompt, search.hypotheses[0].tokens))
            request.logprobs = list(search.hypotheses[0].logprobs)

    def _running(self) -> list[BeamSearch]:
        return [search for search in self.by_number.values() if search.all_rows]

    def _tops(self, sampled: Sampled, at: Sequence[int]) -> list[TokenLogprobs] | None:
        """Return the log-probabilities of each beam's next token, if the request asked for them."""
        return [sampled.logprobs[index] for index in at] if at[0] in sampled.logprobs else None

    def _step(
        self, search: BeamSearch, candidates: Sequence[Candidates], tops: Sequence[TokenLogprobs] | None
    ) -> None:
        """Choose among the candidates of the living beams."""
        slots, params = self._slots, search.leader.params
        tokens = np.stack([each.tokens for each in candidates])
        totals = search.scores[:, None] + np.stack([each.scores for each in candidates]).astype(np.float64)
        num_new = int(slots.num_tokens[search.rows[0]]) + 1 - search.leader.num_prompt_tokens
        stopped = np.isin(tokens, search.stops)
        ends = stopped | (num_new == params.max_tokens)
        (parents, columns), (last, last_columns) = choose(totals, tokens, ends, params.beam_width)

        def trail(beam: int, column: int) -> Trail:
            if tops is None:
                return None
            logprob = float(candidates[beam].logprobs[column])
            return search.trails[beam], TokenLogprobs(int(tokens[beam, column]), logprob, tops[beam].top)

        found = [
            Hypothesis(
                np.append(self._answer(search, beam), tokens[beam, column]).astype(np.int32),
                float(totals[beam, column]),
                score(totals[beam, column], num_new, params),
                "stop" if stopped[beam, column] else "length",
                _unrolled(trail(beam, column)),
            )
            for beam, column in zip(last.tolist(), last_columns.tolist())
        ]
        search.hypotheses = keep([*search.hypotheses, *found], params.beam_width)
        if not len(parents) or is_over(search.hypotheses, totals[parents[0], columns[0]], num_new, params):
            search.is_over = True
            return
        search.trails = [trail(*each) for each in zip(parents.tolist(), columns.tolist())]
        search.scores = totals[parents, columns]
        self._go_on(search, parents.tolist(), tokens[parents, columns])

    def _go_on(self, search: BeamSearch, parents: list[int], tokens: Index) -> None:
        """Move each living beam into a row, from the beam that it continues, and book its token."""
        slots, before = self._slots, search.rows
        search.rows = place(before, parents, search.all_rows)
        for row, parent in zip(search.rows, parents):
            if row != before[parent]:
                self._lifecycle.continue_beam(row, before[parent])
        at = slots.num_tokens[search.rows]
        slots.token_ids[search.rows, at] = tokens
        slots.num_tokens[search.rows] = at + 1

    def _answer(self, search: BeamSearch, beam: int) -> TokenIds:
        slots, row = self._slots, search.rows[beam]
        answer: TokenIds = slots.token_ids[row, slots.num_prompt[row] : slots.num_tokens[row]]
        return answer


def _unrolled(trail: Trail) -> tuple[TokenLogprobs, ...]:
    entries = []
    while trail is not None:
        trail, entry = trail
        entries.append(entry)
    return tuple(entries[::-1])
