"""Define the operators that advance states by the gated delta rule, token by token and in chunks.

Both take queries and keys whose length the caller has made one. The recurrent operator reads the state of a
sequence where its last accepted token lies and writes the state after each token to that token's own block;
the chunked one returns the last state of each sequence alone, in bfloat16.

Legend: T tokens, B sequences, N key heads, H value heads, K width of a key, V width of a value, P blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.simulated_products import A2, A3

RECURRENT = "op-plugin torch_npu.npu_recurrent_gated_delta_rule"
CHUNK = "op-plugin torch_npu.npu_chunk_gated_delta_rule"
MOST_TOKENS, MOST_HEADS, MOST_WIDTH = 8, 256, 256
CHUNK_HEADS, CHUNK_WIDTH = 64, 128
Sizes = Mapping[str, tuple[int, ...]]


def _advanced(call: Call, at: int, state: Tensor) -> Tensor:
    """Advance a float32 state [H, V, K] in place by token `at`; returns what its query reads. [H, V]"""
    num_shared = call["value"].shape[1] // call["key"].shape[1]
    query, key = (
        call[each][at].float().repeat_interleave(num_shared, 0)[:, None] for each in ("query", "key")
    )
    if call["g"] is not None:
        state *= call["g"][at].exp()[:, None, None]
    beta = 1.0 if call["beta"] is None else call["beta"][at].float()[:, None]
    written = beta * (call["value"][at].float() - (state * key).sum(-1))
    state += written[..., None] * key
    read: Tensor = (state * query).sum(-1) * (1.0 if call["scale"] is None else call["scale"])
    return read


def _recurrent(call: Call) -> Tensor:
    """Advance the states in place, and return what the queries read. [T, H, V]"""
    state, indices = call["state"], call["ssm_state_indices"].tolist()
    lens, accepted = call["actual_seq_lengths"].tolist(), call["num_accepted_tokens"]
    output, first = torch.empty_like(call["value"]), 0
    for length, taken in zip(lens, [1] * len(lens) if accepted is None else accepted.tolist()):
        current = state[indices[first + taken - 1]].float()
        for at in range(first, first + length):
            output[at] = _advanced(call, at, current).to(output.dtype)
            state[indices[at]] = current.to(state.dtype)
        first += length
    return output


def _chunked(call: Call) -> tuple[Tensor, Tensor]:
    """Return what the queries read [T, H, V], and the state behind each sequence. [B, H, V, K]"""
    output, states, first = torch.empty_like(call["value"]), call["initial_state"].clone(), 0
    for number, length in enumerate(call["actual_seq_lengths"].tolist()):
        current = states[number].float()
        for at in range(first, first + length):
            output[at] = _advanced(call, at, current).to(output.dtype)
        states[number] = current.to(states.dtype)
        first += length
    return output, states


def _given(*names: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        yield from ((name, None) for name in names if call[name] is None)

    return Rule("given", f"{', '.join(names)} are given", RECURRENT, "pass all of them", check)


def _types(state: str, source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        for name in ("query", "key", "value", "beta", state):
            if not is_dtype(call[name], (torch.bfloat16,), call.conditions):
                yield name, shape(call[name])
        if call["g"] is not None and call["g"].dtype != torch.float32:
            yield "g", shape(call["g"])
        for name in ("actual_seq_lengths", "ssm_state_indices", "num_accepted_tokens"):
            if call[name] is not None and call[name].dtype != torch.int32:
                yield name, shape(call[name])

    demands = (
        "queries, keys, values, betas and states are bfloat16, decays float32, and lengths and indices int32"
    )
    return Rule("dtype", demands, source, "keep states in bfloat16, or advance them by plain products", check)


def _sizes(state: str, source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        for name, axes in (("query", 3), ("key", 3), ("value", 3), (state, 4), ("actual_seq_lengths", 1)):
            if call[name].ndim != axes:
                yield name, shape(call[name])
                return
        tokens, heads, width = call["value"].shape
        batch, key_width = len(call["actual_seq_lengths"]), call["key"].shape[2]
        wanted: Sizes = {
            "query": tuple(call["key"].shape),
            "key": (tokens, call["key"].shape[1], key_width),
            "beta": (tokens, heads),
            state: (batch if state == "initial_state" else len(call[state]), heads, width, key_width),
            "g": (tokens, heads),
            "ssm_state_indices": (tokens,),
            "num_accepted_tokens": (batch,),
        }
        for name, sizes in wanted.items():
            if call[name] is not None and call[name].shape != sizes:
                yield name, f"{shape(call[name])} for {tokens} tokens of {heads} heads"

    demands = (
        "queries and keys are [T, N, K], values [T, H, V], states [P, H, V, K], decays and betas [T, H],"
        " and there is an index for each token and a length for each sequence"
    )
    return Rule("axes", demands, source, "flatten sequences and their tokens into one axis", check)


def _contiguous(state: str, source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        for name in ("query", "key", "value", "beta", "g", state):
            if call[name] is not None and not call[name].is_contiguous():
                yield name, f"strided {tuple(call[name].stride())} over {shape(call[name])}"

    demands = "tensors are contiguous: blocks of states are addressed by their own size"
    return Rule("contiguous", demands, source, "call contiguous() first", check)


def _heads(most_heads: int, most_width: int, source: str) -> Rule:
    exact = most_width == CHUNK_WIDTH

    def check(call: Call) -> Iterator[Breach]:
        num_keys, num_values = call["key"].shape[1], call["value"].shape[1]
        if not 1 <= num_keys <= num_values <= most_heads or num_values % num_keys:
            yield "value", f"one of {num_values} heads over {num_keys} heads of keys"
        for name in ("key", "value"):
            width = call[name].shape[2]
            if not 1 <= width <= most_width or (exact and width != most_width):
                yield name, f"one of width {width}"

    widths = f"keys and values are {most_width} wide" if exact else f"at most {most_width} wide"
    demands = f"there are at most {most_heads} heads, a multiple of those of keys, and {widths}"
    return Rule("heads", demands, source, "advance states of other sizes by plain products", check)


def _by_channel(call: Call) -> Iterator[Breach]:
    if call["gk"] is not None:
        yield "gk", shape(call["gk"])


def _blocks(call: Call) -> Iterator[Breach]:
    if len(call["state"]) < len(call["value"]):
        yield "state", f"{len(call['state'])} blocks for {len(call['value'])} tokens"


def _lengths(least: int, most: int | None, source: str) -> Rule:
    def check(call: Call) -> Iterator[Breach]:
        lens = call["actual_seq_lengths"].tolist()
        outside = [each for each in lens if each < least or (most is not None and each > most)]
        if outside:
            yield "actual_seq_lengths", f"one with {outside[0]}"
        elif sum(lens) != len(call["value"]):
            yield "actual_seq_lengths", f"one with {sum(lens)} of {len(call['value'])} tokens"

    range_ = f"from {least} to {most}" if most else f"at least {least}"
    demands = f"lengths, not their sums, are {range_} and add up to the tokens"
    return Rule("lengths", demands, source, "cut longer sequences, and leave empty ones out", check)


def _indices(call: Call) -> Iterator[Breach]:
    indices, count = call["ssm_state_indices"], len(call["state"])
    outside = indices[(indices < 0) | (indices >= count)]
    if len(outside):
        yield "ssm_state_indices", f"one with block {int(outside[0])} of {count}"


def _accepted(call: Call) -> Iterator[Breach]:
    accepted, lens = call["num_accepted_tokens"], call["actual_seq_lengths"]
    if accepted is not None and bool(((accepted < 1) | (accepted > lens)).any()):
        yield "num_accepted_tokens", f"{accepted.tolist()} for lengths {lens.tolist()}"


OPERATORS = (
    Operator(
        schema="npu::npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state,"
        " *, Tensor? beta=None, float? scale=None, Tensor? actual_seq_lengths=None,"
        " Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None)"
        " -> Tensor",
        products=(A2, A3),
        source=RECURRENT,
        first=(
            _given("beta", "scale", "actual_seq_lengths", "ssm_state_indices"),
            Rule(
                "channels",
                "gk is None: decays by channel are not supported at present",
                RECURRENT,
                "advance such states by plain products",
                _by_channel,
            ),
            _types("state", RECURRENT),
            _sizes("state", RECURRENT),
            _heads(MOST_HEADS, MOST_WIDTH, RECURRENT),
            Rule(
                "blocks",
                "there are at least as many blocks of states as tokens",
                RECURRENT,
                "call it for fewer tokens",
                _blocks,
            ),
            _contiguous("state", RECURRENT),
        ),
        rules=(
            _lengths(1, MOST_TOKENS, RECURRENT),
            Rule("indices", "each index is a block of states", RECURRENT, "pass rows of the pool", _indices),
            Rule(
                "accepted",
                "from 1 to all tokens of a sequence are accepted",
                RECURRENT,
                "count the token that was sampled last",
                _accepted,
            ),
        ),
        reference=_recurrent,
    ),
    Operator(
        schema="npu::npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None,"
        " Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None)"
        " -> (Tensor, Tensor)",
        products=(A2, A3),
        source=CHUNK,
        first=(
            Rule(
                "given",
                "beta, initial_state and actual_seq_lengths are given: what the kernel does without them is"
                " not checked here",
                CHUNK,
                "pass ones, zeros, and one length",
                _given("beta", "initial_state", "actual_seq_lengths").check,
            ),
            _types("initial_state", CHUNK),
            _sizes("initial_state", CHUNK),
            _heads(CHUNK_HEADS, CHUNK_WIDTH, CHUNK),
            _contiguous("initial_state", CHUNK),
        ),
        rules=(_lengths(1, None, CHUNK),),
        reference=_chunked,
    ),
)
