"""Define the operator that chooses experts within groups, with the rules of a correct call.

Legend: T tokens, E experts, C experts that a token chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, shape
from virtual_npu.simulated_products import A2, A3

SOURCE = "op-plugin npu_moe_gating_top_k"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_EXPERTS = 2048


def _gated(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [T, C], experts, and all scores [T, E], which are NaN where they are not requested."""
    x: Tensor = call["x"]
    by_sigmoid = call["norm_type"] == 1
    scores = x.float().sigmoid() if by_sigmoid else x.float().softmax(-1)
    ranked = scores if call["bias"] is None else scores + call["bias"].float()
    groups = ranked.view(len(x), call["group_count"], -1)
    worth = groups.sort(dim=-1, descending=True).values[..., : call["group_select_mode"] + 1].sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : call["k_group"]]
    hidden = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    ranked = groups.masked_fill(hidden[..., None], -torch.inf).flatten(1)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : call["k"]]
    weights = scores.gather(1, experts)
    if by_sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + call["eps"])
    weights = weights * call["routed_scaling_factor"]
    returned = scores if call["out_flag"] else torch.full_like(scores, torch.nan)
    return weights.to(x.dtype), experts.int(), returned


def _scores(call: Call) -> Iterator[Breach]:
    x, bias = call["x"], call["bias"]
    if x.dtype not in TYPES or x.dim() != 2 or not x.numel() or x.shape[-1] > MOST_EXPERTS:
        yield "x", shape(x)
    elif bias is not None and (bias.dtype != x.dtype or bias.shape != x.shape[1:]):
        yield "bias", f"{shape(bias)} for {shape(x)}"


def _groups(call: Call) -> Iterator[Breach]:
    count, experts = call["group_count"], call["x"].shape[-1]
    if count < 1 or experts % count:
        yield "group_count", f"{count} of {experts} experts"
    elif not 1 <= call["k_group"] <= count:
        yield "k_group", f"{call['k_group']} of {count}"
    elif call["group_select_mode"] not in (0, 1) or experts // count <= call["group_select_mode"]:
        yield "group_select_mode", f"{call['group_select_mode']} of groups of {experts // count}"
    elif not 1 <= call["k"] <= call["k_group"] * (experts // count):
        yield "k", f"{call['k']} of {call['k_group']} groups of {experts // count}"


def _kinds(call: Call) -> Iterator[Breach]:
    if call["renorm"] != 0:
        yield "renorm", call["renorm"]
    if call["norm_type"] not in (0, 1):
        yield "norm_type", call["norm_type"]
    for name in ("input_ids", "tid2eid"):
        if call[name] is not None:
            yield name, shape(call[name])


OPERATORS = (
    Operator(
        schema="npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., "
        "float eps=9.9999999999999995e-21) -> (Tensor, Tensor, Tensor)",
        products=(A2, A3),
        source=SOURCE,
        rules=(
            Rule(
                "scores",
                f"x is a matrix of float32, float16 or bfloat16 for at most {MOST_EXPERTS} experts, and the"
                " bias is of its type",
                SOURCE,
                "cast them to float32",
                _scores,
            ),
            Rule(
                "groups",
                "groups are equal, at least as large as what is summed of each, and hold k experts together",
                SOURCE,
                "choose fewer experts or more groups",
                _groups,
            ),
            Rule(
                "kinds",
                "renorm is 0, norm_type 0 (softmax) or 1 (sigmoid); choices by token ids are not checked",
                SOURCE,
                "divide by the sum of the weights afterwards",
                _kinds,
            ),
        ),
        reference=_gated,
    ),
)
