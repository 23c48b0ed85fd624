"""Do the lengths and the page table of a fused attention call agree with its tensors?

Rules use the names of the operator's second version.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Rule, shape
from virtual_npu.operators.attention_shapes import DOC, FIELD, order, packed
from virtual_npu.operators.spans import heads_last

MOST_SEQUENCES = 4096


def _lengths(call: Call) -> Iterator[Breach]:
    if packed(call) and not call["actual_seq_qlen"]:
        yield "actual_seq_qlen", call["actual_seq_qlen"]
    if (packed(call) or call["block_table"] is not None) and not call["actual_seq_kvlen"]:
        yield "actual_seq_kvlen", call["actual_seq_kvlen"]


def _query_lens(call: Call) -> Iterator[Breach]:
    lens, query = call["actual_seq_qlen"], call["query"]
    if packed(call):
        if len(lens) > MOST_SEQUENCES:
            yield "actual_seq_qlen", f"a list of {len(lens)}"
        elif lens[0] < 0 or any(after < before for before, after in pairwise(lens)):
            yield "actual_seq_qlen", short(lens)
    elif lens is not None:
        yield from _per_sequence("actual_seq_qlen", lens, call, _heads_last(call, query)[1])


def _query_sum(call: Call) -> Iterator[Breach]:
    tokens = call["query"].shape[0 if order(call) == "TND" else 1]
    if packed(call) and call["actual_seq_qlen"][-1] != tokens:
        yield "actual_seq_qlen", f"{short(call['actual_seq_qlen'])} over {tokens} rows of query"


def _key_lens(call: Call) -> Iterator[Breach]:
    lens, key = call["actual_seq_kvlen"], call["key"]
    if packed(call):
        if len(lens) != len(call["actual_seq_qlen"]):
            yield (
                "actual_seq_kvlen",
                f"a list of {len(lens)} beside {len(call['actual_seq_qlen'])} of queries",
            )
        elif min(lens) < 0:
            yield "actual_seq_kvlen", short(lens)
    elif lens is not None:
        most = None if call["block_table"] is not None else _heads_last(call, key)[1]
        yield from _per_sequence("actual_seq_kvlen", lens, call, most)


def _key_sum(call: Call) -> Iterator[Breach]:
    if packed(call) and call["block_table"] is None:
        lens, tokens = call["actual_seq_kvlen"], call["key"].shape[0 if order(call) == "TND" else 1]
        if any(after < before for before, after in pairwise(lens)) or lens[-1] != tokens:
            yield "actual_seq_kvlen", f"{short(lens)} over {tokens} rows of key"


def _per_sequence(name: str, lens: list[int], call: Call, most: int | None) -> Iterator[Breach]:
    if len(lens) != 1 and len(lens) < call["query"].shape[0]:
        yield name, f"a list of {len(lens)} for {call['query'].shape[0]} sequences"
    elif min(lens) < 0 or (most is not None and max(lens) > most):
        yield name, f"{short(lens)}, in rows of {most}"


def _table(call: Call) -> Iterator[Breach]:
    table = call["block_table"]
    if table is None:
        return
    batch = len(call["actual_seq_qlen"]) if packed(call) else call["query"].shape[0]
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        yield "block_table", f"{shape(table)} for {batch} sequences"


def _heads_last(call: Call, tensor: Tensor) -> torch.Size:
    """The shape of an unpacked query or key as [Q, S, heads, D]."""
    return heads_last(tensor, order(call), 1).shape


def short(lens: list[int]) -> str:
    """A list of lengths, as messages show it."""
    return str(lens) if len(lens) <= 8 else f"{str(lens[:4])[:-1]}, ..., {lens[-1]}]"


LENGTHS = (
    Rule(
        "lengths",
        "TND wants the lengths of queries and keys, and paging those of keys",
        DOC,
        "pass a list with an entry a sequence",
        _lengths,
    ),
    Rule(
        "query-lens",
        "lengths of packed queries add up from one sequence to the next, at most 4096 of them; in other "
        "layouts each is at most the row's",
        DOC,
        "pass the running sum, numpy.cumsum(lens).tolist()",
        _query_lens,
    ),
    Rule(
        "query-sum",
        "the last length is the number of query rows",
        FIELD + ": padding is a sequence of its own",
        "cut the query to its tokens, or add a sequence for the padding",
        _query_sum,
    ),
    Rule(
        "key-lens",
        "there is a length of keys for each sequence, none below 0",
        FIELD + ": else error 561002",
        "pass one length a sequence",
        _key_lens,
    ),
    Rule(
        "key-sum",
        "without a page table the lengths of packed keys add up, and the last is the number of key rows",
        DOC,
        "pass the running sum; per sequence they are with a page table",
        _key_sum,
    ),
    Rule(
        "table",
        "the page table is int32 with a row a sequence",
        DOC,
        "take the rows of this step's sequences, as int32",
        _table,
    ),
)
