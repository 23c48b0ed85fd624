"""Every row gets the token that its own parameters and its own random number give it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from continuous_batching.batch import LATE, NONE_LEFT, NOT_FINITE, SPOILT, Sampled
from continuous_batching.constraints import Constraint
from continuous_batching.own_processors import OwnProcessors
from continuous_batching.request import Request, SamplingParams, packed_ids
from continuous_batching.samples.mask_maker import Made, MaskMaker
from continuous_batching.slots import SlotPool
from devices.cpp_sources import KINDS
from devices.shapes import AttentionShape
from kv_cache.device.transfer import all_to_device
from kv_cache.page_keys import TokenIds
from kv_cache.pages import Index
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.rowwise import rowwise
from models.ops.drawing import limits_of
from models.ops.reference import Ops
from models.sampling import sampler as sampler_module
from models.sampling.known_tokens import KnownTokens
from models.sampling.sampler import Sampler, uniforms
from tests.device_kinds import Kind, Way, on_each, operators
from tests.each_of import each_of
from tests.pairs import pairs
from tests.thorough import first_quick

V = 48
EOS = 7
LIMITS = pairs(
    *([1, 40, 300, 4999, 5000], [1e-6, 0.3, 0.8, 0.999, 1.0], [0.0, 0.001, 0.5], [0.0, 0.3, 2.0, 20.0]),
    list(KINDS),
)


@dataclass
class Row:
    """One request with an answer so far, and the logits of its next token."""

    logits: Tensor
    params: SamplingParams
    prompt: tuple[int, ...] = (1, 2, 3)
    answer: tuple[int, ...] = ()
    seed: int = 0


def sample(
    rows: list[Row],
    order: list[int] | None = None,
    vocab_size: int = V,
    device: tuple[Ops, torch.device] | None = None,
    logits: Tensor | None = None,
) -> Sampled:
    """Run the sampler over rows that stand in the slot table in any order, by default as a CPU does."""
    slots = SlotPool(num_slots=len(rows) + 3, max_tokens=64, page_size=4)
    taken = []
    for number, row in enumerate(rows):
        request = Request(str(number), np.array(row.prompt), row.params)
        request.number = number
        request.seed = row.seed
        request.tokens = np.array(row.prompt + row.answer, dtype=np.int32)
        taken.append(slots.take(request))
    order = list(range(len(rows))) if order is None else order
    if logits is None:
        logits = torch.stack([rows[index].logits for index in order])
    at = np.array([taken[index] for index in order])
    ops, place = device or (compiled(), torch.device("cpu"))
    return Sampler((EOS,), vocab_size, ops).run(logits.to(place), at, slots.num_tokens[at], slots)


@cache
def compiled() -> Ops:
    """The operators of a CPU, compiled where there is a compiler."""
    found = rowwise()
    return Ops() if isinstance(found, str) else CpuOps(rowwise=found)


def token(row: Row) -> int:
    return int(sample([row]).tokens[0])


def some_logits(seed: int = 0, size: int = V, scale: float = 2.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


# ---- chance


def test_uniforms_are_even_and_independent_along_counters_and_seeds() -> None:
    seeds, counters = np.arange(512, dtype=np.uint64), np.arange(512)
    table = uniforms(np.repeat(seeds, 512), np.tile(counters, 512)).reshape(512, 512).astype(np.float64)
    assert 0 <= table.min() < 1e-4
    assert 1 - 1e-4 < table.max() < 1
    counts = np.histogram(table, bins=64, range=(0, 1))[0]
    expected = table.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120  # chi-square of 63: p = 1e-5
    for pair in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1])):
        assert abs(np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1]) < 0.01


def test_a_seed_below_2_64_and_a_repeat_give_the_same_number() -> None:
    seeds = np.array([0, 1, 2**63 - 1, 2**64 - 1], dtype=np.uint64)
    first = uniforms(seeds, np.array([5, 5, 5, 5]))
    assert (first == uniforms(seeds, np.array([5, 5, 5, 5]))).all()
    assert len(set(first.tolist())) == 4


# ---- distributions, exactly: over an even grid of u each token is drawn as often as it is probable


def frequencies(logits: Tensor, params: SamplingParams, monkeypatch: pytest.MonkeyPatch, n: int) -> Tensor:
    grid = ((np.arange(n) + 0.5) / n).astype(np.float32)
    monkeypatch.setattr(sampler_module, "uniforms", lambda seeds, counters: grid)
    drawn = sample([Row(logits, params)] * n, vocab_size=len(logits)).tokens
    return torch.from_numpy(np.bincount(drawn, minlength=len(logits)) / n)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    {"top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
]


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("size", first_quick(1, [V, 53, 1024]))
def test_filters_keep_what_hugging_face_keeps(
    fields: dict[str, float], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.generation import logits_process as theirs

    params, logits = SamplingParams(**fields), some_logits(size=size)
    scores = theirs.TemperatureLogitsWarper(float(params.temperature))(None, logits[None])
    if params.top_k:
        scores = theirs.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = theirs.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p:
        scores = theirs.MinPLogitsWarper(params.min_p)(None, scores)
    n = 4096
    difference = frequencies(logits, params, monkeypatch, n) - scores[0].double().softmax(0)
    assert difference.abs().max() <= 1.01 / n + 1e-5


def test_equals_at_a_threshold_all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5] + [-9.0] * (V - 5))
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.3)):
        assert frequencies(logits, params, monkeypatch, 300)[1:4].tolist() == pytest.approx(
            [1 / 3] * 3, abs=0.01
        )


def shares_kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The running sum [V] of each token's share of what the limits keep, in float64."""
    weights = (logits.double() - logits.max()).exp()
    falling = weights.sort(descending=True).values[:top_k]
    before = falling.cumsum(0) - falling
    least = max(float(falling[before < top_p * falling.sum()].min()), min_p)
    kept = torch.where(weights >= least, weights, 0.0)
    return kept.cumsum(0) / kept.sum()


@pytest.mark.parametrize("is_plain", [True, False])
@each_of("top_k, top_p, min_p, scale, dtype", LIMITS)
def test_draws_are_of_what_their_limits_keep(
    top_k: int, top_p: float, min_p: float, scale: float, dtype: torch.dtype, is_plain: bool
) -> None:
    size, n = 5000, 64
    row = some_logits(round(scale * 10), size, scale).to(dtype)
    row[:40] = -math.inf
    limits = limits_of(np.full(n, top_k), np.full(n, top_p, np.float32), np.full(n, min_p, np.float32), size)
    limits |= {"uniform": ((np.arange(n) + 0.5) / n).astype(np.float32), "sharpness": np.ones(n, np.float32)}
    sent = all_to_device(limits, torch.device("cpu"))
    ops = Ops() if is_plain else compiled()
    drawn = ops.draw(row.repeat(n, 1), row.argmax().repeat(n), torch.full((n,), -9), sent)
    assert (drawn >= 40).all()
    # What lies on a limit may be kept or not, by a rounding
    nudged = [shares_kept(row, top_k, top_p * (1 + by), min_p * (1 - by)) for by in (-1e-5, 1e-5)]
    uniform = torch.from_numpy(limits["uniform"]).double()
    assert (torch.minimum(*nudged)[drawn - 1] - 1e-5 <= uniform).all()
    assert (uniform <= torch.maximum(*nudged)[drawn] + 1e-5).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.99, 0.5]), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_a_token_of_no_weight_is_never_drawn(seed: int, top_p: float, num_rows: int) -> None:
    logits = some_logits(seed % 997, 1000, 12.0)
    logits[torch.rand(1000, generator=torch.Generator().manual_seed(seed)) < 0.9] = -math.inf
    if not logits.isfinite().any():
        return
    params = SamplingParams(top_p=top_p, seed=seed)
    rows = [Row(logits, params, answer=(1,) * (i % 50), seed=seed + i) for i in range(num_rows)]
    assert logits[torch.from_numpy(sample(rows, vocab_size=1000).tokens)].isfinite().all()


@pytest.mark.parametrize("edge", [0.0, 1 - 2**-24])
def test_the_ends_of_chance_are_tokens(edge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampler_module, "uniforms", lambda seeds, counters: np.full(len(seeds), edge, np.float32)
    )
    logits = torch.full((V,), -math.inf)
    logits[[9, 20, 33]] = torch.tensor([0.0, 3.0, -4.0])
    assert token(Row(logits, SamplingParams())) == (9 if edge == 0 else 33)


# ---- penalties, bias, min_tokens


def test_penalties_follow_their_definitions() -> None:
    """Read the edited logits through the choice between two tokens, which tips where they are equal."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, prompt, answer = some_logits(5), (3, 4, 4, 9), (4, 11, 11, 30)
    params = SamplingParams(
        max_tokens=50,
        repetition_penalty=1.7,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={3: 2.0, 11: -3.0, 40: 1.5},
    )
    expected = logits.clone()
    for changed, bias in params.logit_bias.items():
        expected[changed] += bias
    seen = torch.tensor([prompt + answer])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, expected[None])[0]
    for index in set(answer):
        expected[index] -= 0.5 - 0.25 * answer.count(index)
    assert (edited(Row(logits, params, prompt, answer)) - expected).abs().max() < 1e-6


def test_known_tokens_are_those_of_a_new_count() -> None:
    """Answers grow by some tokens in each step, drafts come and go, and rows change their requests."""
    rng = np.random.default_rng(3)
    slots, known = SlotPool(num_slots=4, max_tokens=400, page_size=4), KnownTokens()
    for step in range(300):
        if step % 40 < 4:  # the next request of the row
            row = step % 40
            if slots.requests[row] is not None:
                slots.release(row)
            request = Request(str(step), rng.integers(0, 30, rng.integers(1, 20)), SamplingParams())
            request.number = step
            assert slots.take(request) == row
        at = rng.permutation(np.flatnonzero([each is not None for each in slots.requests]))
        more = rng.integers(0, 3, len(at))
        for row, count in zip(at.tolist(), more.tolist()):
            first = slots.num_tokens[row]
            slots.token_ids[row, first : first + 8] = rng.integers(0, 200, 8)
            slots.num_tokens[row] += count
        targets = slots.num_tokens[at] + rng.integers(0, 3, len(at)) * rng.integers(0, 2)
        owners, tokens, occurrences = known.pairs(at, targets, slots)
        for index, (row, target) in enumerate(zip(at.tolist(), targets.tolist())):
            found = dict(zip(tokens[owners == index].tolist(), occurrences[owners == index].tolist()))
            answer = Counter(slots.token_ids[row, slots.num_prompt[row] : target].tolist())
            assert found == {token: answer[token] for token in slots.token_ids[row, :target].tolist()}
            assert (owners == index).sum() == len(found)


def test_known_tokens_of_rows_that_have_ended_are_dropped() -> None:
    slots, known = SlotPool(num_slots=4, max_tokens=9, page_size=4), KnownTokens()
    for number in range(12):
        request = Request(str(number), np.arange(3), SamplingParams())
        request.number = number
        row = np.array([slots.take(request)])
        known.pairs(row, slots.num_tokens[row], slots)
        if number != 2:  # all others end at once, in rows that come and go
            slots.release(int(row[0]))
        assert len(known._of_row) <= len(slots.busy) + 1


def edited(row: Row) -> Tensor:
    from models.sampling.logit_processors import apply_changes, gather_changes

    slots = SlotPool(num_slots=2, max_tokens=64, page_size=4)
    request = Request("a", np.array(row.prompt), row.params)
    request.tokens = np.array(row.prompt + row.answer, dtype=np.int32)
    at = np.array([slots.take(request)])
    scores = row.logits[None].clone()
    host = gather_changes(at, slots.num_tokens[at], slots, KnownTokens(), (EOS,), V)
    apply_changes(scores, {name: torch.from_numpy(array) for name, array in host.items()})
    return scores[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"logit_bias": {17: 50.0}},
        {"presence_penalty": 1.0, "repetition_penalty": 1.1, "logit_bias": {3: -1.0}},
    ],
    ids=str,
)
def test_greedy_is_after_the_edits_and_so_is_drawing(
    fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = some_logits(8)
    best = int(logits.argmax())
    row = Row(logits, SamplingParams(temperature=0, **fields), (best, 3), (best, best, 5))
    assert token(row) == int(edited(row).argmax())

    n = 2048
    grid = ((np.arange(n) + 0.5) / n).astype(np.float32)
    monkeypatch.setattr(sampler_module, "uniforms", lambda seeds, counters: grid)
    row = Row(logits, SamplingParams(**fields), row.prompt, row.answer)
    share = np.bincount(sample([row] * n).tokens, minlength=V) / n
    assert np.abs(share - edited(row).double().softmax(0).numpy()).max() <= 1.01 / n + 1e-5


def test_stop_tokens_may_not_come_before_min_tokens() -> None:
    logits = torch.full((V,), -5.0)
    logits[[EOS, 20, 30]] = torch.tensor([9.0, 8.0, 7.0])
    fields = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (20, 10_000)}
    cases = [((), False, 30), ((1,), False, 30), ((1, 1), False, EOS), ((), True, EOS), ((1, 1), True, EOS)]
    for answer, ignore_eos, expected in cases:
        row = Row(logits, SamplingParams(**fields, ignore_eos=ignore_eos), answer=answer)
        assert token(row) == expected, (answer, ignore_eos)
    logits[EOS] = -6.0
    assert token(Row(logits, SamplingParams(**fields, ignore_eos=True))) == 30


# ---- rows and their neighbours


def mixed_rows(num_rows: int = 24) -> list[Row]:
    kinds = [
        {},
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 5},
        {"top_p": 0.9},
        {"top_k": 30, "top_p": 0.6, "logprobs": 3},
        {"min_p": 0.2},
        {"temperature": 0, "repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "frequency_penalty": 0.3},
        {"temperature": 0, "logprobs": 0},
        {"logit_bias": {4: 3.0}, "min_tokens": 3},
        {"top_k": 1, "temperature": 3.0},
    ]
    return [
        Row(some_logits(100 + i), SamplingParams(**kinds[i % len(kinds)]), (1, 2, i), (5,) * (i % 6), seed=i)
        for i in range(num_rows)
    ]


@given(st.permutations(range(24)), st.integers(1, 24))
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours_or_its_place(order: list[int], count: int) -> None:
    rows = mixed_rows()
    alone = [sample([row]) for row in rows]
    result = sample(rows, order[:count])
    for place, index in enumerate(order[:count]):
        assert result.tokens[place] == alone[index].tokens[0], rows[index].params
        assert result.logprobs.get(place) == alone[index].logprobs.get(0)


def test_one_row_of_a_large_vocabulary_draws_as_in_a_batch() -> None:
    size = 50_000
    rows = [
        Row(some_logits(i, size, 0.5), SamplingParams(top_p=p), seed=i) for i in range(8) for p in (1, 0.9)
    ]
    together = sample(rows, vocab_size=size).tokens
    assert [int(sample([row], vocab_size=size).tokens[0]) for row in rows] == together.tolist()


def test_the_seed_and_the_position_choose_and_nothing_else() -> None:
    logits, params = torch.zeros(V), SamplingParams()
    by_seed = sample([Row(logits, params, seed=seed) for seed in range(40)]).tokens
    by_position = sample([Row(logits, params, answer=(1,) * n) for n in range(40)]).tokens
    assert len(set(by_seed.tolist())) > 15
    assert len(set(by_position.tolist())) > 15
    longer_prompt = Row(logits, params, prompt=(1, 2, 3, 4), answer=())
    assert token(longer_prompt) == by_position[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    rows = mixed_rows()
    expected = sample(rows)
    for index in range(len(rows)):
        spoiled = list(rows)
        logits = rows[index].logits.clone()
        logits[13] = bad
        spoiled[index] = Row(logits, rows[index].params, rows[index].prompt, rows[index].answer, index)
        result = sample(spoiled)
        assert result.tokens[index] == -1
        assert index not in result.logprobs
        others = np.arange(len(rows)) != index
        assert (result.tokens[others] == expected.tokens[others]).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_fails_its_row_where_its_token_is_forbidden_too(
    temperature: float,
) -> None:
    logits = some_logits()
    logits[13] = math.nan
    params = SamplingParams(temperature=temperature, min_tokens=1, stop_token_ids=(13,), logprobs=2)
    result = sample([Row(logits, params), Row(some_logits(), params)])
    assert result.tokens[0] == -1
    assert result.tokens[1] >= 0
    assert [*result.logprobs] == [1]


def test_a_row_with_no_possible_token_fails() -> None:
    assert token(Row(torch.full((V,), -math.inf), SamplingParams(temperature=0))) == -1
    assert token(Row(torch.full((V,), -math.inf), SamplingParams())) == -1
    everything = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(V)))
    assert token(Row(some_logits(), everything)) == NONE_LEFT


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = some_logits(2, scale=30.0)
    assert token(Row(logits, SamplingParams(temperature=temperature))) == int(logits.argmax())


# ---- log-probabilities, dtypes


def test_logprobs_are_of_the_models_distribution() -> None:
    logits = some_logits(4)
    expected = logits.double().log_softmax(0)
    params = SamplingParams(
        temperature=0.5, top_k=3, logprobs=5, logit_bias={40: 100.0}, repetition_penalty=2.0
    )
    result = sample([Row(logits, params)])
    found = result.logprobs[0]
    assert found.token == result.tokens[0] == 40
    assert found.logprob == pytest.approx(float(expected[40]), abs=1e-5)
    assert [index for index, _ in found.top] == expected.topk(5).indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


def test_the_greedy_token_is_the_best_of_the_top() -> None:
    logits = torch.zeros(V)
    logits[[5, 9, 33]] = 2.0
    found = sample([Row(logits, SamplingParams(temperature=0, logprobs=2))]).logprobs[0]
    assert found.top[0] == (found.token, found.logprob)
    assert [index for index, _ in found.top] == [5, 9]
    assert sample([Row(logits, SamplingParams(logprobs=0))]).logprobs[0].top == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_callers_logits_stay_as_they_are(dtype: torch.dtype) -> None:
    rows = mixed_rows(11)
    for row in rows:
        row.logits = row.logits.to(dtype)
    logits = torch.stack([row.logits for row in rows]).T.contiguous().T  # not contiguous either
    before = logits.clone()
    tokens = sample(rows, logits=logits).tokens
    assert torch.equal(logits, before)
    assert tokens.dtype == np.int64
    assert ((tokens >= 0) & (tokens < V)).all()


class OneAllowed(MaskMaker):
    """Allows token 5 alone to the rows that follow a grammar, or has no mask in time."""

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late

    def take(self, rows: Index, targets: Index, slots: SlotPool, *, is_alone: bool) -> Made:
        found = np.flatnonzero(slots.constrained[rows]).tolist()
        return (
            Made(late=found) if self._is_late else Made(found, [np.array([1 << 5, 0], np.int32)] * len(found))
        )


def test_what_a_late_mask_may_forbid_spoils_no_row() -> None:
    """Only rows with processors are spoilt by them, and only the model's own logits fail without a mask."""

    def leaving(number: float, at: int) -> OwnProcessors:
        def change(prompt: TokenIds, answer: TokenIds, logits: Tensor) -> Tensor:
            logits[at] = number
            return logits

        return OwnProcessors([("Leave", change)])

    own = [
        (leaving(math.nan, 3), 0),
        (leaving(math.inf, 3), 1),
        (leaving(math.nan, 5), 1),
        (leaving(1, 3), 0),
    ]
    slots, rows = SlotPool(num_slots=6, max_tokens=64, page_size=4), some_logits()[None].repeat(6, 1)
    for number, (processors, temperature) in enumerate(own):
        params = SamplingParams(temperature=temperature, processors=(("Leave", "{}"),))
        request = Request(str(number), np.array([1, 2]), params)
        request.number, request.processors, request.seed = number, processors, 0
        request.constraint = Constraint(lambda: pytest.fail("its masks are made elsewhere"))
        assert slots.take(request) == number
    rows[3, 7] = math.nan
    for number, params in enumerate(
        (SamplingParams(temperature=0, repetition_penalty=0.5), SamplingParams(temperature=0)), 4
    ):
        (request := Request(str(number), np.array([1, 2]), params)).number = number
        slots.take(request)
    rows[4, 1] = 3e38  # its penalty makes this infinite
    at = np.arange(6)
    for is_late, expected in (
        (False, [5, 5, SPOILT, NOT_FINITE, NONE_LEFT]),
        (True, [LATE, LATE, LATE, NOT_FINITE, NONE_LEFT]),
    ):
        sampler = Sampler((EOS,), V, compiled(), OneAllowed(is_late=is_late))
        *found, last = sampler.run(rows, at, slots.num_tokens[at], slots).tokens.tolist()
        assert found == expected
        assert last == int(rows[5].argmax())


def test_a_greedy_batch_sends_nothing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "all_to_device", lambda *_: pytest.fail("sent parameters"))
    rows = [Row(some_logits(i), SamplingParams(temperature=0)) for i in range(5)]
    assert sample(rows).tokens.tolist() == [int(row.logits.argmax()) for row in rows]


@pytest.mark.parametrize("pair", on_each("fused"))
def test_each_device_draws_what_the_cpu_draws(pair: tuple[Kind, Way]) -> None:
    shape = AttentionShape(4, 2, 64, 128, 1.0, torch.float32, (None,))
    found_operators, attention = operators(*pair, shape)
    asked = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=9, temperature=0.6),
        SamplingParams(top_k=9, top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(top_p=0.9, min_p=0.1, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, logit_bias={7: 50.0}),
        SamplingParams(top_p=0.5, logprobs=2),
        SamplingParams(
            allowed_token_ids=packed_ids(range(300, 340)), bad_words=((320,),), logit_bias={301: 4.0}, seed=3
        ),
    ]
    rows = [Row(some_logits(at, 1024), asked[at % 10], seed=at) for at in range(50)]
    rows[4].logits[3] = math.nan
    rows[12].logits[:] = -math.inf
    for some in (rows, rows[2:3], [each for each in rows if each.params.top_p == 0.7], rows[:1] + rows[3:5]):
        expected = sample(some, vocab_size=1024)
        for ops in (found_operators, Ops()):
            found = sample(some, vocab_size=1024, device=(ops, attention.device))
            assert found.tokens.tolist() == expected.tokens.tolist()
    assert (expected.tokens < 0).sum() == 1
