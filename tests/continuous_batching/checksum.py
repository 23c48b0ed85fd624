"""A model whose answers show any mistake in pages, spans or order, and the oracle for it.

The "key" of a token is a hash of the token, its position and the key before it; the next token is a
checksum over all keys of the request, read back through the page table. A page that was shared wrongly,
overwritten, freed too early or read before it was computed changes every later token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from continuous_batching.batch import LATE, NOT_FINITE, Batch, Candidates, Sampled
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from continuous_batching.slots import SlotPool
from kv_cache.groups import WindowGroup
from kv_cache.pages import Index, PageCopy, PagePool

VOCAB_SIZE = 97
POISON = np.uint64(0xDEADBEEFDEADBEEF)
Free = list[tuple[np.ndarray, np.ndarray]]
_MASK = (1 << 64) - 1


def key(token: int, position: int, previous: int) -> int:
    mixed = (previous ^ (token * 0x9E3779B97F4A7C15) ^ (position * 0xC2B2AE3D27D4EB4F)) & _MASK
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ (mixed >> 32)


def keys_of(tokens: Sequence[int]) -> list[int]:
    """The keys of tokens from the first on."""
    keys: list[int] = []
    for position, token in enumerate(tokens):
        keys.append(key(token, position, keys[-1] if keys else 1))
    return keys


def answer_token(keys: np.ndarray, seed: int) -> int:
    weights = np.arange(1, 2 * len(keys), 2, dtype=np.uint64)
    total = int((keys * weights).sum())
    return ((total ^ (total >> 31)) + seed) % VOCAB_SIZE


def alone(
    prompt: list[int], max_tokens: int, stops: frozenset[int] = frozenset(), seed: int = 0
) -> list[int]:
    """The answer that a request gets with the machine to itself."""
    keys: list[int] = []
    answer: list[int] = []
    tokens = list(prompt)
    while len(answer) < max_tokens:
        for position in range(len(keys), len(tokens)):
            keys.append(key(tokens[position], position, keys[-1] if keys else 1))
        token = answer_token(np.array(keys, dtype=np.uint64), seed)
        answer.append(token)
        tokens.append(token)
        if token in stops:
            break
    return answer


@lru_cache(maxsize=1000)
def _said(prompt: tuple[int, ...], seed: int) -> list[int]:
    return [*prompt, *alone(list(prompt), 55, seed=seed)]


def story(request: Request) -> list[int]:
    """The first tokens that a request has alone, whatever ends it."""
    return _said(tuple(request.prompt.tolist()), request.params.seed or 0)


def outlook(keys: np.ndarray) -> np.ndarray:
    """The log-probability of each next token: few bits, so that sums are exact and some are equal."""
    weights = np.arange(1, 2 * len(keys), 2, dtype=np.uint64)
    total: np.uint64 = (keys * weights).sum()
    mixed = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ total
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return -((mixed >> np.uint64(40)) & np.uint64(255)).astype(np.float64) / 32


def searched(
    prompt: list[int], params: SamplingParams, stops: frozenset[int]
) -> list[tuple[list[int], float, float]]:
    """The answers of a beam search with the machine to itself: tokens, log-probability, score; best first.

    Written after transformers' `_beam_search`, over all continuations of all beams.
    """
    width, penalty = params.beam_width, params.length_penalty
    beams: list[tuple[float, list[int], list[int]]] = [(0.0, [], [])]  # log-probability, answer, keys
    done: list[tuple[list[int], float, float]] = []
    for length in range(1, params.max_tokens + 1):
        every = []
        for at, (total, answer, keys) in enumerate(beams):
            tokens, keys = [*prompt, *answer], list(keys)
            for position in range(len(keys), len(tokens)):
                keys.append(key(tokens[position], position, keys[-1] if keys else 1))
            logprobs = outlook(np.array(keys, dtype=np.uint64))
            every += [(-(total + logprobs[token]), at, token, keys) for token in range(VOCAB_SIZE)]
        best = sorted(every, key=lambda each: each[:3])[: width * (1 + len(stops))]
        over = [token in stops or length == params.max_tokens for _, _, token, _ in best]
        for (minus, at, token, _), ends in list(zip(best, over))[:width]:
            if ends:
                done.append(([*beams[at][1], token], -minus, -minus / length**penalty))
        done = sorted(done, key=lambda each: -each[2])[:width]
        beams = [
            (-minus, [*beams[at][1], token], keys)
            for (minus, at, token, keys), ends in zip(best, over)
            if not ends
        ][:width]
        if not beams:
            break
        limit = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
        if len(done) == width and (
            params.early_stopping is True or beams[0][0] / limit**penalty <= done[-1][2]
        ):
            break
    return done


class TierCopies(Protocol):
    """Makes copies to a tier, off it and from it."""

    def apply(self, copy: PageCopy) -> None: ...


class ChecksumRunner:
    """Runs batches. What a place holds depends on all tokens before it, so no answer is right by chance.

    The pages of windows hold the same; each token is right only if its query finds there what it sees.
    """

    def __init__(
        self,
        slots: SlotPool,
        pool: PagePool,
        host_pool: PagePool | None = None,
        groups: Sequence[WindowGroup] = (),
    ) -> None:
        self.slots, self.pool, self.host_pool, self.groups = slots, pool, host_pool, groups
        size = slots.page_size
        self.host = np.full((host_pool.num_pages if host_pool else 0, size), POISON)
        self.cache = np.full(pool.num_pages * size, POISON)
        self.windows = [np.full(each.pool.num_pages * size, POISON) for each in groups]
        self.window_hosts = [
            np.full((each.host.num_pages if each.host else 0, size), POISON) for each in groups
        ]
        self.last = np.full(slots.num_slots, -1)  # each row's last token, where only a device has it
        self.fail: set[str] = set()  # ids of requests that get no token
        self.failure = NOT_FINITE  # what stands in the place of their tokens
        self.num_steps = 0
        self.tier: TierCopies | None = None
        self.defers = False  # whether a batch is computed when it is waited for, as by a last stage
        self.late = 0.0  # share of the tokens, behind the first, that come late, where no batch is made ahead
        self._random = np.random.default_rng(0)

    def run(self, batch: Batch, free: Free | None = None) -> Sampled:
        self.num_steps += 1
        self._copy(batch.copies, free or self._free())
        inputs = self.slots.inputs(batch)
        token_ids, ends = inputs.token_ids.copy(), np.cumsum(batch.stops - batch.starts)
        token_ids[ends[batch.unknown] - 1] = self.last[batch.slots[batch.unknown]]
        assert len(np.unique(inputs.write_index)) == len(inputs.write_index), "two tokens in one place"
        assert (inputs.write_index >= self.slots.page_size).all(), "wrote to the null page"
        at, size = 0, self.slots.page_size
        written = []
        for row, start, stop in zip(batch.slots.tolist(), batch.starts.tolist(), batch.stops.tolist()):
            assert stop > start, "an empty span"
            positions = np.arange(stop)
            places = self.slots.page_table[row, positions // size].astype(np.int64) * size + positions % size
            previous = int(self.cache[places[start - 1]]) if start else 1
            for position in range(start, stop):
                assert inputs.write_index[at] == places[position]
                assert inputs.positions[at] == position
                previous = key(int(token_ids[at]), position, previous)
                self.cache[places[position]] = previous
                at += 1
            written.append(self.cache[places])
            self._through_windows(row, start, stop, written[-1])
        tokens = [
            self.failure
            if self.slots.requests[row].id in self.fail
            else answer_token(written[span][:target], self.slots.requests[row].params.seed or 0)
            for span, row, target in zip(
                batch.sampled.tolist(), batch.owners.tolist(), batch.targets.tolist()
            )
        ]
        candidates = {
            index: self._candidates(written[span], self.slots.requests[row].params)
            for index, (span, row) in enumerate(zip(batch.sampled.tolist(), batch.owners.tolist()))
            if self.slots.beam_width[row]
        }
        return Sampled(self._some_late(batch, np.array(tokens, dtype=np.int64)), candidates=candidates)

    def _through_windows(self, row: int, start: int, stop: int, keys: np.ndarray) -> None:
        """Write a span's keys to the pages of windows, and find there what its queries see."""
        size = self.slots.page_size
        for cache, group in zip(self.windows, self.groups):
            seen = np.arange(max(0, start - group.window + 1), stop)
            pages = group.table[row, seen // size].astype(np.int64)
            assert pages.all(), f"row {row} lacks pages that its window sees"
            places = pages * size + seen % size
            cache[places[seen >= start]] = keys[start:stop]
            assert np.array_equal(cache[places], keys[seen]), f"a window of row {row} sees other keys"

    def _some_late(self, batch: Batch, tokens: np.ndarray) -> np.ndarray:
        """In a span, all that follow a late token are late."""
        slots, owners = self.slots, batch.owners
        may = (batch.targets > slots.num_prompt[owners]) & (slots.beam_width[owners] == 0) & (tokens >= 0)
        is_late = may & (self._random.random(len(tokens)) < self.late)
        for row in np.unique(owners[is_late]):
            of_row = np.flatnonzero(owners == row)
            is_late[of_row] = np.maximum.accumulate(is_late[of_row])
        return np.where(is_late, LATE, tokens)

    def _candidates(self, keys: np.ndarray, params: SamplingParams) -> Candidates:
        logprobs = outlook(keys).astype(np.float32)
        tokens = np.argsort(-logprobs, kind="stable")[: params.beam_width + 1 + len(params.stop_token_ids)]
        return Candidates(tokens, logprobs[tokens], logprobs[tokens])

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        """The host learns the tokens when it waits for them."""
        if self.defers:
            free = self._free()
            return lambda: self.run(batch, free)
        late, self.late = self.late, 0.0
        sampled = self.run(batch)
        self.late = late
        self.last[batch.owners] = sampled.tokens
        return lambda: sampled

    def resize(self, num_pages: Sequence[int], copies: tuple[PageCopy, ...]) -> None:
        self._copy(copies, self._free())
        self.cache, *self.windows = [
            self._resized(cache, count) for cache, count in zip((self.cache, *self.windows), num_pages)
        ]

    def _resized(self, cache: np.ndarray, num_pages: int) -> np.ndarray:
        resized = np.full(num_pages * self.slots.page_size, POISON)
        kept = min(len(resized), len(cache))
        resized[:kept] = cache[:kept]
        return resized

    def make(self, copies: tuple[PageCopy, ...]) -> None:
        """Copies without a batch."""
        self._copy(copies, self._free())

    @property
    def page_bytes(self) -> list[int]:
        return [8 * self.slots.page_size] * (1 + len(self.groups))

    def read(self, pages: Index, group: int) -> Callable[[], list[bytes]]:
        """Pages of the device, as they are now."""
        contents = [each.tobytes() for each in self.pages_of(group)[0][pages]]
        return lambda: contents

    def write_host(self, pages: Index, contents: Sequence[bytes], group: int) -> None:
        """Pages of the host's pool."""
        for page, content in zip(pages.tolist(), contents):
            self.pages_of(group)[1][page] = np.frombuffer(content, dtype=np.uint64)

    def _free(self) -> Free:
        """For each group, the free pages of the device and of the host."""
        pools = [(self.pool, self.host_pool), *((each.pool, each.host) for each in self.groups)]
        return [
            (pool.free_pages, np.empty(0, int) if host is None else host.free_pages) for pool, host in pools
        ]

    def pages_of(self, group: int) -> tuple[np.ndarray, np.ndarray]:
        """The pages of a group, on the device and on the host."""
        cache, host = self.cache, self.host
        if group:
            cache, host = self.windows[group - 1], self.window_hosts[group - 1]
        return cache.reshape(-1, self.slots.page_size), host

    def _copy_state(self, copy: PageCopy) -> None:
        """Make a copy of a group whose pages are no tokens', of which there is none here."""

    def _copy(self, copies: tuple[PageCopy, ...], free: Free) -> None:
        """Make the copies, then poison what was free then: nobody may count on it any more."""
        for copy in copies:
            if copy.group > len(self.groups):  # the layers of drafts are all in group 0
                self._copy_state(copy)
                continue
            pages, host = self.pages_of(copy.group)
            assert len(np.unique(copy.targets)) == len(copy.targets), "two copies to one page"
            if copy.way.endswith("_tier"):
                assert self.tier is not None, "there is no tier"
                self.tier.apply(copy)
            elif copy.way == "to_host":
                host[copy.targets] = pages[copy.sources]
            elif copy.way == "from_host":
                pages[copy.targets] = host[copy.sources]
            else:
                assert not np.intersect1d(copy.sources, copy.targets).size, "a copy reads what it writes"
                pages[copy.targets] = pages[copy.sources]
        for group, (on_device, on_host) in enumerate(free):
            pages, host = self.pages_of(group)
            host[on_host] = POISON
            pages[on_device[on_device < len(pages)]] = POISON


def serve_at_random(
    engine: Engine, made: list[Request], random: np.random.Generator, check: Callable[[], None]
) -> None:
    """Serve requests that come one by one while some are aborted, with a check after each step.

    Each gets the tokens that it gets alone, as far as it comes, but for searches, which are others' to check.
    """
    waiting, steps = list(made), 0
    while waiting or engine.has_work:
        if waiting and random.random() < 0.5:
            engine.add(waiting.pop(0))
        if random.random() < 0.05:
            engine.abort(str(random.integers(len(made))))
        engine.step()
        check()
        steps += 1
        assert steps < 4_000, "no progress"
    for request in (each for leader in made for each in (leader, *leader.followers)):
        if not request.params.beam_width:
            want, got = alone(request.prompt.tolist(), request.params.max_tokens), request.answer.tolist()
            assert got == (want if request.finish_reason == "length" else want[: len(got)])
