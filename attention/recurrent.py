"""Define attention by the gated delta rule, in plain torch for every device.

A layer keeps one state of fixed size in place of keys and values. Each token lets the state decay, reads what
its key finds there, and writes back the difference between its value and that (arXiv 2412.06464, Gated
DeltaNet). With Kimi Delta Attention (2510.26692) each channel of a key has a decay of its own. Before the
rule, a causal convolution mixes each channel of queries, keys and values with its last positions, the inputs
of which are kept beside the state.

A span is computed in pieces that end at multiples of GRID positions, counted from the request's first token.
A piece of at most SHORT tokens advances token by token; a longer one is computed as a whole, in the chunked
form (2406.06484). However a prompt is cut at multiples of GRID, its pieces are the same, and so are its
states, to the last bit; and so they are wherever a span of at most SHORT tokens is cut.

Legend: T tokens of the step, S spans, n tokens of a piece, J key heads, H value heads, K width of a key, V
  width of a value, C channels of the convolution, W its width, P rows of states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kv_cache.device.transfer import to_device
from kv_cache.states import GRID

SHORT = 8  # tokens of the longest piece that advances token by token; a token and its drafts are one
TILE = 16  # tokens whose decays by channel are computed pair by pair
LEAST_SQUARE = 1e-6  # added to the squared length by which queries and keys are divided

Rows = NDArray[np.int64]
# Queries, keys, values, logarithms of decays, and betas
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One span of the step: its first row in the packed step, its positions, and its rows of states.

    It goes on from the state in row `source`, or from zeros if it starts at position 0, and leaves its state
    in row `target`.
    """

    first_row: int
    start: int
    stop: int
    source: int
    target: int

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.stop - self.start)

    def pieces(self) -> Iterator[slice]:
        """Yield the rows of each piece, which ends at a multiple of GRID positions or with the span."""
        at = self.start
        while at < self.stop:
            end = min(self.stop, at // GRID * GRID + GRID)
            yield slice(self.first_row + at - self.start, self.first_row + end - self.start)
            at = end


@dataclass(frozen=True, slots=True)
class Tails:
    """What a step with drafts reads again, and keeps, beside the states, which no draft changes.

    A state stands behind the last token that was known when it was written. Drafts that were accepted follow
    it: their inputs were kept, and the next step computes them once more. The tokens that are computed are
    those of all spans in turn, of each first what is read again.
    """

    pages: Tensor  # int64 [M], the rows of states whose tails are read
    places: Tensor  # int64 [M], where in these
    order: Tensor  # int64 [M + T]: of the M tokens that are read again and the T of the step, which is where
    own: Tensor  # int64 [T]: where the step's tokens are among these
    drafts: Tensor  # int64 [D]: which of the step's tokens are drafts
    draft_pages: Tensor  # int64 [D], the rows of states in whose tails they are kept
    draft_places: Tensor  # int64 [D], where in these


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """What all layers with a state share in a step.

    Spans of one token that go on from a state are computed together, before the others, which follow one
    after the other.
    """

    tokens: Tensor  # int64, rows of the packed step that are such a token
    sources: Tensor  # int64, the row of states that each of these goes on from
    targets: Tensor  # int64, the row of states that each of these writes
    spans: tuple[StateSpan, ...]
    tails: Tails | None = None  # then all else is about the tokens in `Tails.order`


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What all layers with a state share in a captured step of decodes with drafts, in R rows of W tokens.

    The tokens of a row stand at its end. Before them, what the row reads again, of W - 1 places for accepted
    drafts, is computed once more; its state is left behind its first token, as `Tails` says. Absent tokens
    neither decay a state nor add to it. All indices are int64.
    """

    pages: Tensor  # [R], the rows of states
    order: Tensor  # [R, 2W - 1], which of a row's 2W - 1 kept inputs and tokens are convolved, one by one
    ends: Tensor  # [R, W' - 1], which inputs of a convolution of width W' precede a row's second token
    read_again: Tensor  # [R, W - 1], where in `order` the accepted drafts are
    is_read_again: Tensor  # bool [R, W - 1]
    tokens: Tensor  # [R, W], where in `order` the tokens are, the first one first
    is_token: Tensor  # bool [R, W]
    places: Tensor  # [R, W], which of these each place of a row holds
    drafts: Tensor  # [R, W - 1], which of a row's places hold its drafts


class Recurrence:
    """The convolution and the gated delta rule over rows of states: plan once a step, then call once a layer.

    A layer's states are [P, H, V, K] and its last inputs [P, W - 1, C]. Row 0 belongs to no request: what
    pads a step of fixed size writes there. A device's subclass overrides what it does faster.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def plan(self, starts: Rows, stops: Rows, sources: Rows, targets: Rows) -> StateMetadata:
        """Compute what all layers share in a step of these spans, given in the order of their tokens. [S]

        A span may be given in parts, so as to leave a state behind between them: each part then has its own
        target, and goes on from that of the part before. Otherwise no span reads a row that another writes.
        """
        lens = stops - starts
        first_rows = np.cumsum(lens) - lens
        is_one = (lens == 1) & (starts > 0)
        is_one[1:] &= (sources[1:] != targets[:-1]) | (sources[1:] == 0)
        columns = (first_rows, starts, stops, sources, targets)
        others = zip(*(each[~is_one].tolist() for each in columns))
        tokens, of_ones, to_ones = (
            to_device(each[is_one].astype(np.int64), self.device) for each in (first_rows, sources, targets)
        )
        return StateMetadata(tokens, of_ones, to_ones, tuple(StateSpan(*each) for each in others))

    def plan_static(self, pages: Tensor) -> StateMetadata:
        """Return the plan of a captured step of decodes, whose rows each go on from their own state [S].

        Padding goes on from the null page, which several of its rows may write.
        """
        rows = pages.long()
        return StateMetadata(torch.arange(len(pages), device=pages.device), rows, rows, ())

    def plan_drafts(self, rows: Tensor, width: int, conv_width: int) -> DraftRows:
        """Return the plan of a captured step with drafts: of pages, accepted drafts and tokens [3, R].

        A row has places for `width` tokens. Padding rows have no tokens, and the null page.
        """
        pages, lags, counts = (each[:, None] for each in rows.long())
        place = torch.arange(2 * width - 1, device=rows.device)
        first = width - counts  # place of a row's first token
        behind = width - 1 + first + place - lags  # tokens, as they follow what is read again
        order = torch.where(place < lags, place, behind).clamp_(max=2 * width - 2)
        again, token = place[: width - 1], place[:width]
        ends = lags + 1 + torch.arange(conv_width - 1, device=rows.device)
        return DraftRows(
            pages=pages[:, 0],
            order=order,
            ends=ends,
            read_again=again.expand(len(pages), -1),
            is_read_again=again < lags,
            tokens=lags + token,
            is_token=token < counts,
            places=(token - first).clamp_(min=0),
            drafts=(first + 1 + again).clamp_(max=width - 1),
        )

    def convolve_drafts(self, x: Tensor, weight: Tensor, pasts: Tensor, rows: DraftRows) -> Tensor:
        """Convolve as `convolve` does; x is [R, 2W - 1, C], in the order of `rows`."""
        inputs, count = torch.cat((pasts[rows.pages].to(x.dtype), x), 1), x.shape[1]
        output = mixed([inputs[:, tap : tap + count] for tap in range(len(weight))], weight)
        pasts[rows.pages] = _taken(inputs, rows.ends).to(pasts.dtype)
        return output

    def advance_drafts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        rows: DraftRows,
    ) -> Tensor:
        """Advance states as `advance` does, from [R, 2W - 1, ...]; returns what tokens read, [R, W, H, V]."""
        inputs, state = (query, key, value, decay, beta), states[rows.pages].float()
        for at, present in enumerate(rows.is_read_again.unbind(1)):
            step(by_state(_present(inputs, rows.read_again[:, at], present)), state)
        read = []
        for at, present in enumerate(rows.is_token.unbind(1)):
            read.append(step(by_state(_present(inputs, rows.tokens[:, at], present)), state))
            if not at:
                states[rows.pages] = state.to(states.dtype)
        return _taken(torch.stack(read, 1), rows.places).to(value.dtype)

    def convolve(self, x: Tensor, weight: Tensor, pasts: Tensor, metadata: StateMetadata) -> Tensor:
        """Convolve each channel of x [T, C] with its request's last inputs, and apply SiLU.

        `weight` [W, C] is float32 and begins with the oldest input. The last inputs of each span are written
        to its row of `pasts` [P, W - 1, C].
        """
        output, tokens, num_past = torch.empty_like(x), metadata.tokens, len(weight) - 1
        if len(tokens):
            inputs = torch.cat((pasts[metadata.sources].to(x.dtype), x[tokens, None]), 1)
            output[tokens] = mixed(list(inputs.unbind(1)), weight)
            pasts[metadata.targets] = inputs[:, 1:].to(pasts.dtype)
        for span in metadata.spans:
            past = pasts[span.source].to(x.dtype) if span.start else x.new_zeros(num_past, x.shape[1])
            inputs, count = torch.cat((past, x[span.rows])), span.stop - span.start
            output[span.rows] = mixed([inputs[tap : tap + count] for tap in range(len(weight))], weight)
            pasts[span.target] = inputs[count:].to(pasts.dtype)
        return output

    def advance(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        states: Tensor,
        metadata: StateMetadata,
    ) -> Tensor:
        """Advance the states [P, H, V, K] of all spans, and return what their queries read. [T, H, V]

        Queries and keys are [T, J, K], of any length; value head h has key head h * J // H. The values are
        [T, H, V]. The float32 logarithms of the decays are [T, H], or [T, H, K] if each channel of a key has
        its own, and `beta` is [T, H], from 0 to 1.
        """
        output, inputs = torch.empty_like(value), (query, key, value, decay, beta)
        if len(metadata.tokens):
            self._advance_tokens(inputs, states, metadata, output)
        for span in metadata.spans:
            state = states.new_zeros(states.shape[1:], dtype=torch.float32)
            if span.start:
                state.copy_(states[span.source])
            for rows in span.pieces():
                output[rows] = _piece(tuple(each[rows] for each in inputs), state).to(value.dtype)
            states[span.target] = state.to(states.dtype)
        return output

    def _advance_tokens(
        self, inputs: Inputs, states: Tensor, metadata: StateMetadata, output: Tensor
    ) -> None:
        """Advance the states of spans of one token."""
        state = states[metadata.sources].float()
        read = step(by_state(tuple(each[metadata.tokens] for each in inputs)), state)
        output[metadata.tokens] = read.to(output.dtype)
        states[metadata.targets] = state.to(states.dtype)


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """Return of each row of x [R, n, ...] the entries of `index` [R, m]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


def _present(inputs: Inputs, index: Tensor, present: Tensor) -> Inputs:
    """Return one token of each row [R], without a decay and a beta where it is absent."""
    each = torch.arange(len(index), device=index.device)
    query, key, value, decay, beta = (all_of[each, index] for all_of in inputs)
    absent = ~present[:, None]
    beta = beta.masked_fill(absent, 0.0)
    decay = decay.masked_fill(absent if decay.ndim == 2 else absent[..., None], 0.0)
    return query, key, value, decay, beta


def mixed(inputs: Sequence[Tensor], weight: Tensor) -> Tensor:
    """Return SiLU of the sum of W inputs [n, C], each weighed by its row of [W, C], like the inputs."""
    total = inputs[0].float() * weight[0]
    for each, tap in zip(inputs[1:], weight[1:]):
        total.addcmul_(each, tap)
    return F.silu(total, inplace=True).to(inputs[0].dtype)


def _piece(inputs: Inputs, state: Tensor) -> Tensor:
    """Advance one state [H, V, K] in place by the tokens of a piece; returns what they read [n, H, V]."""
    if len(inputs[0]) > SHORT:
        return block(inputs, state)
    return torch.stack([step(token, state) for token in zip(*by_state(inputs))])


def unit(x: Tensor) -> Tensor:
    """Return float32 vectors of length one, in the direction of x [..., K]."""
    x = x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST_SQUARE)


def scaled(query: Tensor) -> Tensor:
    """Return queries of length one, divided by the root of their width."""
    return unit(query) / math.sqrt(query.shape[-1])


def by_state(inputs: Inputs) -> Inputs:
    """Return the inputs of some tokens as `step` takes them: as factors of states [n, H, V, K]."""
    query, key, value, decay, beta = inputs
    num_shared = value.shape[1] // key.shape[1]
    query, key = (each.repeat_interleave(num_shared, 1)[:, :, None] for each in (scaled(query), unit(key)))
    decay = decay.exp()[:, :, None]
    return query, key, value.float(), decay if decay.ndim == 4 else decay[..., None], beta.float()[..., None]


def step(inputs: Inputs, state: Tensor) -> Tensor:
    """Advance states [..., H, V, K] in place by one token each, and return what the queries read: the rule.

    Queries and keys are [..., H, 1, K], values [..., H, V], decays [..., H, 1, 1 or K], betas [..., H, 1].
    """
    query, key, value, decay, beta = inputs
    state.mul_(decay)
    written = beta * (value - (state * key).sum(-1))
    state.addcmul_(written[..., None], key)
    read: Tensor = (state * query).sum(-1)
    return read


def block(inputs: Inputs, state: Tensor) -> Tensor:
    """Advance one state [H, V, K] in place by n tokens, as `step` token by token; returns [n, H, V]."""
    query, key, value, decay, beta = inputs
    total = decay.cumsum(0)  # decay of all tokens up to each
    parts = scaled(query), unit(key), value.float(), beta.float(), total
    query, key, value, beta, total = (each.transpose(0, 1).contiguous() for each in parts)
    advance = block_by_head if decay.ndim == 2 else block_by_channel
    return advance(query, key, value, beta, total, state).transpose(0, 1)


def block_by_head(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, total: Tensor, state: Tensor
) -> Tensor:
    """Advance one state [H, V, K] by n tokens; the sums of decays are [H, n], all others [J or H, n, ...].

    Value heads that share a key head are multiplied with it at once. What the tokens write solves a
    triangular system: each subtracts what its key finds of those before.
    """
    num_keys, num_shared = len(key), len(value) // len(key)
    both, decayed, last = torch.cat((key, query), 1), total.exp()[..., None], total[:, -1:]
    joined = state.view(num_keys, -1, state.shape[-1])
    reads = (both @ joined.mT).unflatten(-1, (num_shared, -1)).transpose(1, 2).flatten(0, 1)
    of_keys, of_queries = (each * decayed for each in reads.chunk(2, 1))
    products, decays = (both @ key.mT).repeat_interleave(num_shared, 0), between(total)
    found, seen = (each * decays for each in products.chunk(2, 1))
    written = solved(found * beta[..., None], beta[..., None] * (value - of_keys))
    lasting = (written * (last - total).exp()[..., None]).unflatten(0, (num_keys, num_shared))
    state.mul_(last.exp()[..., None])
    joined.baddbmm_(lasting.transpose(2, 3).flatten(1, 2), key)
    read: Tensor = of_queries + seen @ written
    return read


def block_by_channel(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, total: Tensor, state: Tensor
) -> Tensor:
    """Advance one state as `block_by_head` does; the sums of decays are [H, n, K]."""
    decayed, last = total.exp(), total[:, -1:]
    of_keys, of_queries = (torch.cat((key * decayed, query * decayed), 1) @ state.mT).chunk(2, 1)
    found, seen = channel_products(query, key, total)
    written = solved(found * beta[..., None], beta[..., None] * (value - of_keys))
    state.mul_(last.exp()).baddbmm_(written.mT, key * (last - total).exp())
    read: Tensor = of_queries + seen @ written
    return read


def between(total: Tensor) -> Tensor:
    """Return the decay from each token to each not before it, [..., n, n], of sums of logarithms [..., n].

    It is 0 to tokens before.
    """
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()


def channel_products(query: Tensor, key: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of keys, and of queries, with the keys up to them, decayed by channel. [H, n, n]

    All are [H, n, K]. A product of two tokens decays from the earlier to the later one. Between tiles it is
    split where the later tile begins, so that no factor exceeds one; within a tile each pair has its own.
    """
    heads, count, _ = key.shape
    both = torch.stack((key, query))
    products = both.new_zeros(2, heads, count, count)
    for first in range(0, count, TILE):
        tile = slice(first, min(first + TILE, count))
        since = total[:, first : first + 1]
        inner = total[:, tile].transpose(1, 2)
        decays = between(inner).permute(0, 2, 3, 1)  # [H, later, earlier, K]
        keys = decays * key[:, None, tile]
        products[..., tile, tile] = (keys @ both[:, :, tile, :, None]).squeeze(-1)
        if first:
            rows = both[:, :, tile] * (total[:, tile] - since).exp()
            columns = key[:, :first] * (since - total[:, :first]).exp()
            products[..., tile, :first] = rows @ columns.mT
    found, seen = products
    return found, seen


def solved(below: Tensor, right: Tensor) -> Tensor:
    """Return x with x + L x = right [..., n, V], where L is what lies below the diagonal of [..., n, n]."""
    x: Tensor = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    return x
