"""States advance as in transformers' token by token, to the same bits however spans are cut on the grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attention.cpu.recurrent import CpuRecurrence, compiled_recurrence
from attention.recurrent import SHORT, Recurrence
from kv_cache.states import GRID
from tests.lazy import LazyModule
from tests.thorough import cases, first_quick

QWEN = LazyModule("transformers.models.qwen3_next.modeling_qwen3_next")
KIMI = LazyModule("transformers.models.kimi_linear.modeling_kimi_linear")
Kind = Literal["gated", "kimi"]
WAYS = ("defined", "plain", "compiled")
LENGTH, KEYS, VALUES = 220, 24, 20
# Half of the heads fill the vectors of any processor; what remains of fewer is computed by other instructions
KEY_HEADS, HEADS = 16, 32
NEAR = 5e-6  # error of numbers around 1, in float32


@dataclass
class Drawn:
    """What a layer projects of the tokens of one request; the decays last 2 to 400 tokens."""

    parts: tuple[Tensor, ...]  # queries, keys, values, logarithms of decays, betas

    def of(self, tokens: slice) -> tuple[Tensor, ...]:
        return tuple(each[tokens] for each in self.parts)

    def heads(self, some: slice) -> Drawn:
        shared = HEADS // self.parts[0].shape[1]
        of_keys = slice(some.start // shared, some.stop // shared)
        parts = zip(self.parts, (of_keys, of_keys, some, some, some))
        return Drawn(tuple(each[:, part] for each, part in parts))


def drawn(
    kind: Kind, seed: int = 0, length: int = LENGTH, sizes: tuple[int, ...] = (KEY_HEADS, HEADS, KEYS, VALUES)
) -> Drawn:
    generator, (key_heads, heads, keys, values) = torch.Generator().manual_seed(seed), sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator)

    key_heads, channels = (heads, (keys,)) if kind == "kimi" else (key_heads, ())
    rates = torch.empty(heads, *channels).uniform_(-6, -0.5, generator=generator).exp()
    query, key = normal(key_heads, keys), normal(key_heads, keys)
    decay = -rates * F.softplus(normal(heads, *channels))
    return Drawn((query, key, normal(heads, values), decay, normal(heads).sigmoid()))


def expected(kind: Kind, given: Drawn) -> tuple[Tensor, Tensor]:
    """What transformers' token by token reads [T, H, V], and the state behind the last token [H, V, K]."""
    rule = QWEN.torch_recurrent_gated_delta_rule if kind == "gated" else KIMI.recurrent_kimi_delta_attention
    more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    query, key, value, decay, beta = (each[None] for each in given.parts)
    read, state = rule(query, key, value, g=decay, beta=beta, initial_state=None, **more)
    return read[0], state[0].mT


def rows_of_states(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((count, HEADS, VALUES, KEYS), torch.nan, dtype=dtype)


def one_by_one(way: Recurrence, given: Drawn, cuts: list[int], states: Tensor) -> Tensor:
    """Advance one request, whose states are in row 1, by a step for each span; what its tokens read."""
    read, one = [], np.array([1])
    for start, stop in zip([0, *cuts], [*cuts, len(given.parts[0])]):
        plan = way.plan(np.array([start]), np.array([stop]), one, one)
        read.append(way.advance(*given.of(slice(start, stop)), states, plan))
    return torch.cat(read)


def cuts_at(multiple: int, rng: np.random.Generator, length: int = LENGTH) -> list[int]:
    places = range(multiple, length, multiple)
    return sorted(rng.choice(places, rng.integers(1, len(places) + 1), replace=False).tolist())


@pytest.fixture(params=["gated", "kimi"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def compiled() -> CpuRecurrence:
    found = compiled_recurrence()
    if isinstance(found, str):
        pytest.skip(found)
    return CpuRecurrence(found)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Recurrence:
    if request.param == "compiled":
        return compiled()
    return Recurrence() if request.param == "defined" else CpuRecurrence()


@pytest.mark.parametrize("multiple", first_quick(1, [7, 1, GRID]))
def test_any_spans_advance_as_in_transformers(kind: Kind, way: Recurrence, multiple: int) -> None:
    given, states = drawn(kind), rows_of_states(2)
    cuts = list(range(1, LENGTH)) if multiple == 1 else cuts_at(multiple, np.random.default_rng(multiple))
    read = one_by_one(way, given, cuts, states)
    wanted, state = expected(kind, given)
    torch.testing.assert_close(read, wanted, rtol=0, atol=NEAR)
    torch.testing.assert_close(states[1], state, rtol=0, atol=NEAR)
    assert states[0].isnan().all(), "no span has row 0"


def test_a_state_that_is_lost_is_missed(kind: Kind) -> None:
    """Otherwise these tests would pass without it."""
    given = drawn(kind)
    late = Drawn(given.of(slice(LENGTH - 50, LENGTH)))
    assert (expected(kind, late)[0][-1] - expected(kind, given)[0][-1]).abs().max() > 1000 * NEAR


@pytest.mark.parametrize("opening", [[], [GRID + 6]], ids=["from the start", "behind an answer"])
def test_cuts_on_the_grid_change_no_bit(kind: Kind, way: Recurrence, opening: list[int]) -> None:
    given, whole = drawn(kind), rows_of_states(2)
    read = one_by_one(way, given, opening, whole)
    for seed in range(cases(3, 50)):
        states, cuts = rows_of_states(2), cuts_at(GRID, np.random.default_rng(seed))
        cuts = opening + [each for each in cuts if not opening or each > opening[0]]
        cut = one_by_one(way, given, cuts, states)
        assert torch.equal(cut, read)
        assert torch.equal(states[1], whole[1])


def test_short_spans_may_be_cut_anywhere(kind: Kind, way: Recurrence) -> None:
    """A token and its drafts are computed to the bits that they have one by one."""
    given, whole, cut = drawn(kind), rows_of_states(2), rows_of_states(2)
    opening = [GRID, 2 * GRID + 9]
    read = one_by_one(way, given, [*opening, *range(opening[1] + SHORT, LENGTH, SHORT)], whole)
    others = one_by_one(way, given, [*opening, *range(opening[1] + 1, LENGTH)], cut)
    assert torch.equal(read, others)
    assert torch.equal(whole[1], cut[1])


def test_cuts_anywhere_change_no_bit_token_by_token(kind: Kind) -> None:
    """What `device.batch_invariant` promises: a token is the same in a prompt and as a decode."""
    found = compiled()._compiled
    assert found is not None
    way, given, whole, cut = (
        CpuRecurrence(found, batch_invariant=True),
        drawn(kind),
        *map(rows_of_states, (2, 2)),
    )
    read = one_by_one(way, given, [], whole)
    cuts = cuts_at(1, np.random.default_rng(2))
    assert torch.equal(one_by_one(way, given, cuts, cut), read)
    assert torch.equal(cut[1], whole[1])
    torch.testing.assert_close(read, expected(kind, given)[0], rtol=0, atol=NEAR)


def test_a_span_leaves_states_where_it_is_cut(kind: Kind, way: Recurrence) -> None:
    """Each is that of a request that ends there, and the last one is that of an uncut span."""
    given, whole, states = drawn(kind), rows_of_states(2), rows_of_states(5)
    read = one_by_one(way, given, [], whole)
    ends = [GRID, 3 * GRID, 3 * GRID + 1, LENGTH]  # one part has one token
    sources, targets = np.array([1, 3, 4, 2]), np.array([3, 4, 2, 1])
    plan = way.plan(np.array([0, *ends[:-1]]), np.array(ends), sources, targets)
    cut = way.advance(*given.parts, states, plan)
    before = 3 * GRID
    assert torch.equal(cut[:before], read[:before])
    for end, row in zip(ends, targets):
        alone = rows_of_states(2)
        one_by_one(way, Drawn(given.of(slice(0, end))), [at for at in ends if at < end], alone)
        assert torch.equal(states[row], alone[1])


def test_requests_beside_each_other_get_what_they_get_alone(kind: Kind, way: Recurrence) -> None:
    """Prompts, rests of prompts, drafts and decodes in steps of all, over rows in any order."""
    count, rng = 4, np.random.default_rng(5)
    given = [drawn(kind, seed) for seed in range(count)]
    alone, read_alone = rows_of_states(1 + count), []
    states, read = rows_of_states(1 + 2 * count), [[] for _ in range(count)]
    at, own = np.zeros(count, dtype=np.int64), 1 + rng.permutation(2 * count)[:count]
    spans: list[list[int]] = [[] for _ in range(count)]
    while (at < LENGTH).any():
        some = rng.permutation(np.flatnonzero(at < LENGTH))[: rng.integers(1, count + 1)]
        lens = rng.choice([1, 1, SHORT, GRID, 2 * GRID + 5], len(some))
        stops = np.minimum(at[some] + lens, LENGTH)
        plan = way.plan(at[some], stops, own[some], own[some])
        parts = zip(*(given[each].of(slice(at[each], stop)) for each, stop in zip(some, stops)))
        got = way.advance(*(torch.cat(part) for part in parts), states, plan)
        for each, piece, stop in zip(some, got.split((stops - at[some]).tolist()), stops):
            read[each].append(piece)
            spans[each].append(int(stop))
        at[some] = stops
    for number, each in enumerate(given):
        read_alone = one_by_one(way, each, spans[number][:-1], alone)
        assert torch.equal(torch.cat(read[number]), read_alone)
        assert torch.equal(states[own[number]], alone[1])
    assert states[0].isnan().all()


def test_padding_writes_row_0_alone(kind: Kind, way: Recurrence) -> None:
    """What pads a step of fixed size is a token of row 0 that goes on from what is there."""
    given, states = drawn(kind, length=4), rows_of_states(4)
    states[1:] = torch.randn(states[1:].shape, generator=torch.Generator().manual_seed(1))
    before, rows = states.clone(), np.array([2, 3, 0, 0])
    way.advance(*given.parts, states, way.plan(np.full(4, 9), np.full(4, 10), rows, rows))
    assert torch.equal(states[1], before[1])
    changed = before[2:].clone()
    for row in range(2):
        alone = rows_of_states(2)
        alone[1] = changed[row]
        one = np.array([1])
        way.advance(*given.of(slice(row, row + 1)), alone, way.plan(one, one + 1, one, one))
        assert torch.equal(states[2 + row], alone[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_beside_each_other_share_no_state(kind: Kind, dtype: torch.dtype) -> None:
    """Their state goes nowhere, and threads that left it in one row would read each other's there."""
    way, given, states = compiled(), drawn(kind, length=10), rows_of_states(3, dtype)
    states[1:] = torch.randn(states[1:].shape, generator=torch.Generator().manual_seed(1))
    before, ends = states.clone(), np.array([5, 10])
    drafts = way.plan(ends - 3, ends, np.array([1, 2]), np.array([0, 0]))
    read = way.advance(*given.of(slice(0, 6)), states, drafts)
    assert torch.equal(states.nan_to_num(), before.nan_to_num()), "a draft has changed a row"
    right = Recurrence().advance(*given.of(slice(0, 6)), states, drafts)
    torch.testing.assert_close(read, right, rtol=0, atol=NEAR)


def test_a_decode_goes_on_from_another_row(kind: Kind, way: Recurrence) -> None:
    """As after a prefix was found: what is shared is read and stays as it is."""
    given, states = drawn(kind), rows_of_states(4)
    one_by_one(way, Drawn(given.of(slice(0, 80))), [], states)
    shared = states[1].clone()
    tail = given.of(slice(80, 81))
    twice = tuple(torch.cat((each, each)) for each in tail)
    way.advance(*twice, states, way.plan(np.full(2, 80), np.full(2, 81), np.array([1, 1]), np.array([2, 3])))
    assert torch.equal(states[1], shared)
    assert torch.equal(states[2], states[3])
    one_by_one(way, Drawn(given.of(slice(0, 81))), [80], states)
    assert torch.equal(states[2], states[1])


def test_heads_on_other_ranks_change_no_bit(kind: Kind, way: Recurrence) -> None:
    given, whole = drawn(kind), rows_of_states(2)
    read = one_by_one(way, given, [100, 101], whole)
    for first in (0, HEADS // 2):
        some = slice(first, first + HEADS // 2)
        states = rows_of_states(2)[:, some].contiguous()
        part = one_by_one(way, given.heads(some), [100, 101], states)
        assert torch.equal(part, read[:, some])
        assert torch.equal(states[1], whole[1, some])


def test_wide_heads_on_several_threads_change_no_bit(kind: Kind) -> None:
    """A state has several panels of values here, the last one in part, and keys as wide as a model's."""
    way, threads = compiled(), torch.get_num_threads()
    given = [drawn(kind, seed, 150, (1, 3, 128, 72)) for seed in range(2)]
    inputs = tuple(torch.cat(parts) for parts in zip(*(each.parts for each in given)))
    rows, found = np.array([1, 2]), []
    plan = way.plan(np.zeros(2, dtype=np.int64), np.full(2, 150), rows, rows)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            states = torch.full((3, 3, 72, 128), torch.nan)
            found.append((way.advance(*inputs, states, plan), states[1:]))
    finally:
        torch.set_num_threads(threads)
    (read, states), others = found
    assert torch.equal(read, others[0])
    assert torch.equal(states, others[1])
    for each, of_each, state in zip(given, read.split(150), states):
        wanted, last = expected(kind, each)
        torch.testing.assert_close(of_each, wanted, rtol=0, atol=NEAR)
        torch.testing.assert_close(state, last, rtol=0, atol=NEAR)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_may_be_kept_in_16_bits(kind: Kind, way: Recurrence, dtype: torch.dtype) -> None:
    """They are rounded when a span leaves them, and computed with in float32."""
    given, states = drawn(kind), rows_of_states(2, dtype)
    read = one_by_one(way, given, [GRID, *range(200, LENGTH)], states)
    wanted, state = expected(kind, given)
    far = 40 * torch.finfo(dtype).eps
    torch.testing.assert_close(read, wanted, rtol=0, atol=far)
    torch.testing.assert_close(states[1].float(), state, rtol=0, atol=far)
    assert (read - wanted).abs().max() > NEAR


def test_decays_by_channel_neither_overflow_nor_vanish(way: Recurrence) -> None:
    """Some channels forget at once, where the sum of a block's decays is beyond what float32 has."""
    given = drawn("kimi")
    fast = given.parts[3].clone()
    fast[..., ::3] *= 3000
    given = replace(given, parts=(*given.parts[:3], fast, given.parts[4]))
    states = rows_of_states(2)
    read = one_by_one(way, given, [], states)
    wanted, state = expected("kimi", given)
    torch.testing.assert_close(read, wanted, rtol=0, atol=NEAR)
    torch.testing.assert_close(states[1], state, rtol=0, atol=NEAR)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_are_mixed_with_the_last_positions(way: Recurrence, width: int, dtype: torch.dtype) -> None:
    """As torch's convolution does; however the positions are cut, to the same bits."""
    rng, channels = np.random.default_rng(3), 32  # the same is true of it
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(LENGTH, channels, generator=generator).to(dtype)
    taps = torch.randn(width, channels, generator=generator)
    padded = F.pad(x.float().t(), (width - 1, 0))
    wanted = F.silu(F.conv1d(padded[None], taps.t()[:, None], groups=channels)[0].t())
    first = None
    for cuts in ([], list(range(1, LENGTH)), cuts_at(3, rng), cuts_at(50, rng)):
        pasts, one, mixed = torch.full((2, width - 1, channels), torch.nan, dtype=dtype), np.array([1]), []
        for start, stop in zip([0, *cuts], [*cuts, LENGTH]):
            plan = way.plan(np.array([start]), np.array([stop]), one, one)
            mixed.append(way.convolve(x[start:stop], taps, pasts, plan))
        torch.testing.assert_close(
            torch.cat(mixed).float(), wanted, rtol=0, atol=2e-6 if dtype == torch.float32 else 0.05
        )
        assert torch.equal(pasts[1], x[LENGTH - width + 1 :])
        assert first is None or torch.equal(torch.cat(mixed), first)
        first = torch.cat(mixed)
