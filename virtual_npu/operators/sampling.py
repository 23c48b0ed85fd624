"""Define the fused top-k and top-p filter, with the rules of a correct call.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3

SOURCE = "op-plugin npu_top_k_top_p"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_K = 1024


def _filter(call: Call) -> Tensor:
    """Return logits with -inf outside the k greatest, and outside the most probable that sum to p."""
    logits: Tensor = call["logits"]
    ordered, places = logits.sort(dim=-1, stable=True)
    if call["k"] is not None:
        least = ordered.gather(1, logits.shape[1] - call["k"].long()[:, None])
        ordered = ordered.masked_fill(ordered < least, -torch.inf)
    if call["p"] is not None:
        below = ordered.float().softmax(-1).cumsum(-1)
        dropped = below <= 1 - call["p"].float()[:, None]
        dropped[:, -1] = False
        ordered = ordered.masked_fill(dropped, -torch.inf)
    return torch.empty_like(ordered).scatter_(1, places, ordered)


def _logits(call: Call) -> Iterator[Breach]:
    if call["logits"].dtype not in TYPES or call["logits"].dim() != 2:
        yield "logits", shape(call["logits"])


def _given(call: Call) -> Iterator[Breach]:
    if call["p"] is None and call["k"] is None:
        yield "p", "None, and k too"


def _columns(call: Call) -> Iterator[Breach]:
    logits: Tensor = call["logits"]
    for name, dtype in (("p", logits.dtype), ("k", torch.int32)):
        if call[name] is not None and (call[name].dtype != dtype or call[name].shape != logits.shape[:1]):
            yield name, f"{shape(call[name])} for {shape(logits)}"


def _k(call: Call) -> Iterator[Breach]:
    k, most = call["k"], min(MOST_K, call["logits"].shape[1])
    if k is not None and len(k) and (int(k.min()) < 1 or int(k.max()) > most):
        yield "k", f"from {int(k.min())} to {int(k.max())}, where {most} is the most"


def _p(call: Call) -> Iterator[Breach]:
    p = call["p"]
    if p is not None and len(p) and not bool(((p >= 0) & (p <= 1)).all()):
        yield "p", f"from {float(p.min())} to {float(p.max())}"


OPERATORS = (
    Operator(
        schema="npu::npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor",
        products=(A2, A3),
        source=SOURCE,
        rules=(
            Rule(
                "logits",
                "logits are float32, float16 or bfloat16 [rows, vocabulary]",
                SOURCE,
                "cast",
                _logits,
            ),
            Rule("given", "p, k or both are given", SOURCE, "leave the call out", _given),
            Rule(
                "columns",
                "p is of the type of logits and k int32, one a row",
                SOURCE,
                "make both with the logits",
                _columns,
            ),
            Rule("k-range", f"k is from 1 to {MOST_K}, and to the vocabulary", SOURCE, "cap k", _k),
            Rule("p-range", "p is from 0 to 1", SOURCE, "clamp p", _p),
        ),
        reference=_filter,
    ),
)
