"""Define the operators that route tokens to experts on one device, with their rules and CPU references.

They are npu_moe_gating_top_k_softmax and its second version, npu_moe_init_routing_v2 (rows sorted by expert)
and npu_moe_token_unpermute (the weighted sum for each token). Gating within groups is in `gating`, exchange
between ranks in `dispatch`.

Legend: T tokens, C experts that a token chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, is_dtype, shape
from virtual_npu.operators.matmul import by_rows
from virtual_npu.simulated_products import A2, A3, A5

GATING_IN_GROUPS = "op-plugin npu_moe_gating_top_k"
ON_950 = "vllm-ascend device/device_op.py: A5DeviceAdaptor, for the 950"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_EXPERTS = 2048
LEAST_IN_A_GROUP, GROUP_STEP = 3, 32  # experts of a group, and what they are rounded up to


def _gated_in_groups(call: Call) -> tuple[Tensor, Tensor, Tensor]:
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


def _scores_of_groups(call: Call) -> Iterator[Breach]:
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


def _group_sizes(call: Call) -> Iterator[Breach]:
    count = call["group_count"]
    size = call["x"].shape[-1] // count
    if size < LEAST_IN_A_GROUP or math.ceil(size / GROUP_STEP) * GROUP_STEP * count > MOST_EXPERTS:
        yield "group_count", f"{count} of {size} experts each"


def _kinds(call: Call) -> Iterator[Breach]:
    if call["renorm"] != 0:
        yield "renorm", call["renorm"]
    if call["norm_type"] not in (0, 1):
        yield "norm_type", call["norm_type"]
    for name in ("input_ids", "tid2eid"):
        if call[name] is not None:
            yield name, shape(call[name])


GROUPED = (
    Operator(
        schema="npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., "
        "float eps=9.9999999999999995e-21) -> (Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=f"{GATING_IN_GROUPS}; {ON_950}",
        rules=(
            Rule(
                "scores",
                f"x is a matrix of float32, float16 or bfloat16 for at most {MOST_EXPERTS} experts, and the"
                " bias is of its type",
                GATING_IN_GROUPS,
                "cast them to float32",
                _scores_of_groups,
            ),
            Rule(
                "groups",
                "groups are equal, at least as large as what is summed of each, and hold k experts together",
                GATING_IN_GROUPS,
                "choose fewer experts or more groups",
                _groups,
            ),
            Rule(
                "group-sizes",
                f"a group has {LEAST_IN_A_GROUP} experts or more, without groups too, and all groups have"
                f" {MOST_EXPERTS} at most, each rounded up to a multiple of {GROUP_STEP}",
                GATING_IN_GROUPS,
                "choose experts in plain torch",
                _group_sizes,
            ),
            Rule(
                "kinds",
                "renorm is 0, norm_type 0 (softmax) or 1 (sigmoid); choices by token ids are not checked",
                GATING_IN_GROUPS,
                "divide by the sum of the weights afterwards",
                _kinds,
            ),
        ),
        reference=_gated_in_groups,
    ),
)


GATING = "op-plugin npu_moe_gating_top_k_softmax"
GATING_V2 = "CANN aclnnMoeGatingTopKSoftmaxV2; op-plugin test/test_custom_ops"
ROUTING = "op-plugin npu_moe_init_routing_v2"
COMBINE = "op-plugin npu_moe_token_unpermute"
CALLED = "vllm-ascend ops/fused_moe/token_dispatcher.py"
MOST_CHOSEN = 1024
MOST_COMBINED = 512
LARGEST = 2**24  # most rows made of tokens


def _gated(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [T, C], which do not add up to 1, and experts; of equal scores the first wins."""
    x: Tensor = call["x"]
    weights, experts = x.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    rows, chosen = x.shape[0], call["k"]
    order = torch.arange(rows * chosen, dtype=torch.int32).view(chosen, rows).t().contiguous()
    return weights[:, :chosen].to(x.dtype), experts[:, :chosen].int(), order


def _gated_as_one(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights [T, C] and experts; with `renorm`, the chosen experts' weights add up to 1."""
    x: Tensor = call["x"]
    scores = x.float() if call["renorm"] else x.float().softmax(-1)
    weights, experts = (each[:, : call["k"]] for each in scores.sort(dim=-1, descending=True, stable=True))
    weights = weights.softmax(-1) if call["renorm"] else weights
    return weights.to(x.dtype), experts.int(), x.new_empty(0, dtype=torch.float32)


def _renormed(call: Call) -> Iterator[Breach]:
    if call["renorm"] not in (0, 1):
        yield "renorm", call["renorm"]
    if call["output_softmax"]:
        yield "output_softmax", call["output_softmax"]


def _scores(call: Call) -> Iterator[Breach]:
    x: Tensor = call["x"]
    if x.dtype not in TYPES or x.dim() != 2 or not x.numel():
        yield "x", shape(x)


def _chosen(call: Call) -> Iterator[Breach]:
    if not 1 <= call["k"] <= min(MOST_CHOSEN, call["x"].shape[-1]):
        yield "k", f"{call['k']} of {call['x'].shape[-1]}"
    if call["finished"] is not None:
        yield "finished", shape(call["finished"])


def _routed(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows sorted by expert, the place of each choice, each expert's row count, and int8 scales."""
    x, experts = call["x"], call["expert_idx"]
    numbers, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = numbers.bincount(minlength=call["expert_num"])
    rows = x[order // experts.shape[1]]
    if call["quant_mode"] == 1:
        rows, scales = by_rows(rows.float())
        return rows, places.int(), counts, scales
    return rows, places.int(), counts, torch.full((len(order),), torch.nan)


def _rows(call: Call) -> Iterator[Breach]:
    x, experts = call["x"], call["expert_idx"]
    if x.dtype not in TYPES or x.dim() != 2 or not x.numel() or not x.is_contiguous():
        yield "x", shape(x)
    elif experts.dtype != torch.int32 or experts.dim() != 2 or experts.shape[:1] != x.shape[:1]:
        yield "expert_idx", f"{shape(experts)} for {shape(x)}"
    elif not 1 <= experts.numel() <= LARGEST:
        yield "expert_idx", shape(experts)


def _all_experts(call: Call) -> Iterator[Breach]:
    count = call["expert_num"]
    if not 1 <= count <= 10240:
        yield "expert_num", count
    elif list(call["active_expert_range"]) != [0, count]:
        yield "active_expert_range", call["active_expert_range"]
    elif call["active_num"] not in (-1, call["expert_idx"].numel()):
        yield "active_num", call["active_num"]


def _counted(call: Call) -> Iterator[Breach]:
    for name, wanted in (
        ("expert_tokens_num_type", 1),
        ("expert_tokens_num_flag", True),
        ("drop_pad_mode", 0),
        ("expert_capacity", -1),
        ("row_idx_type", 0),
        ("scale", None),
        ("offset", None),
        ("x_dtype", None),
    ):
        if call[name] != wanted:
            yield name, call[name]
    if call["quant_mode"] not in ((-1,) if call.conditions.product is A5 else (-1, 1)):
        yield "quant_mode", f"{call['quant_mode']} on the {call.conditions.product.name}"


def _known(call: Call) -> Iterator[Breach]:
    experts: Tensor = call["expert_idx"]
    if not 0 <= int(experts.min()) <= int(experts.max()) < call["expert_num"]:
        yield "expert_idx", f"{int(experts.min())} to {int(experts.max())} of {call['expert_num']}"


def _combined(call: Call) -> Tensor:
    rows, weights = call["permuted_tokens"], call["probs"]
    chosen = rows[call["sorted_indices"].long()].float().view(*weights.shape, rows.shape[-1])
    total: Tensor = (chosen * weights.float()[..., None]).sum(1)
    return total.to(rows.dtype)


def _sorted(call: Call) -> Iterator[Breach]:
    rows, places, weights = call["permuted_tokens"], call["sorted_indices"], call["probs"]
    if not is_dtype(rows, (torch.float16, torch.bfloat16), call.conditions) or rows.dim() != 2:
        yield "permuted_tokens", shape(rows)
    elif places.dtype != torch.int32 or places.shape != rows.shape[:1]:
        yield "sorted_indices", f"{shape(places)} for {shape(rows)}"
    elif weights is None or weights.dim() != 2 or weights.numel() != places.numel():
        yield "probs", "None" if weights is None else f"{shape(weights)} for {shape(places)}"
    elif weights.dtype != rows.dtype or weights.shape[1] > MOST_COMBINED:
        yield "probs", f"{shape(weights)} for {shape(rows)}"


def _unpadded(call: Call) -> Iterator[Breach]:
    if call["padded_mode"] or call["restore_shape"] is not None:
        yield ("padded_mode", True) if call["padded_mode"] else ("restore_shape", call["restore_shape"])


def _placed(call: Call) -> Iterator[Breach]:
    places: Tensor = call["sorted_indices"]
    if not torch.equal(places.sort().values, torch.arange(len(places), dtype=torch.int32)):
        yield "sorted_indices", "no order of all rows"


COMBINING = (
    Rule(
        "sorted",
        "rows are a matrix, sorted_indices int32, one a row, and probs [T, C] of the rows' type, with"
        f" C up to {MOST_COMBINED}",
        COMBINE,
        "cast the weights",
        _sorted,
    ),
    Rule(
        "unpadded",
        "padded_mode is off and restore_shape left out: others are not checked here",
        "virtual_npu/operators/mixture.py",
        "leave them out",
        _unpadded,
    ),
    Rule(
        "placed",
        "sorted_indices is an order of all rows",
        CALLED,
        "pass what npu_moe_init_routing_v2 returned",
        _placed,
    ),
)

OPERATORS = (
    *GROUPED,
    Operator(
        schema="npu::npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) "
        "-> (Tensor, Tensor, Tensor)",
        products=(A2, A3),
        source=GATING,
        rules=(
            Rule("scores", "x is a matrix of float32, float16 or bfloat16", GATING, "cast it", _scores),
            Rule(
                "chosen",
                f"k is at most {MOST_CHOSEN} and the number of experts; finished is not checked here",
                GATING,
                "choose fewer",
                _chosen,
            ),
        ),
        reference=_gated,
    ),
    Operator(
        schema="npu::npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, "
        "int? renorm=0, bool? output_softmax=False) -> (Tensor, Tensor, Tensor)",
        products=(A2, A3),
        source=GATING_V2,
        rules=(
            Rule(
                "scores",
                "x is a matrix of float32, float16 or bfloat16",
                GATING_V2,
                "cast it to float32",
                _scores,
            ),
            Rule(
                "chosen",
                f"k is from 1 to the number of experts, {MOST_CHOSEN} at most, and no row is finished",
                GATING_V2,
                "leave finished out",
                _chosen,
            ),
            Rule(
                "renormed",
                "renorm is 0 or 1; all scores, by output_softmax, are not given here",
                GATING_V2,
                "leave output_softmax out",
                _renormed,
            ),
        ),
        reference=_gated_as_one,
    ),
    Operator(
        schema="npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, "
        "Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1, "
        "int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False, "
        "int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0, int? x_dtype=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3, A5),
        source=f"{ROUTING}; {ON_950}",
        rules=(
            Rule(
                "rows",
                "x is a contiguous matrix of a floating type, expert_idx int32 [T, C]",
                ROUTING,
                "cast the experts",
                _rows,
            ),
            Rule(
                "all_experts",
                "active_expert_range is [0, expert_num] and active_num every choice: what is left out is"
                " never written",
                CALLED,
                "pass all experts",
                _all_experts,
            ),
            Rule(
                "counted",
                "experts' rows are counted, none is dropped, and quant_mode is -1, or 1 by row off the 950:"
                " other ways are not checked here",
                "virtual_npu/operators/mixture.py",
                "leave the argument out",
                _counted,
            ),
            Rule("known", "each expert is one of expert_num", ROUTING, "look at the router", _known),
        ),
        reference=_routed,
    ),
    *(
        Operator(
            schema=f"npu::{name}(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
            f"bool padded_mode=False, int[]? restore_shape=None) -> {results}",
            products=(A2, A3, A5),
            source=f"{COMBINE}; {ON_950}",
            rules=COMBINING,
            reference=reference,
        )
        for name, results, reference in (
            ("npu_moe_token_unpermute", "Tensor", _combined),
            # The operator above calls this one where gradients might be requested.
            (
                "_npu_moe_token_unpermute",
                "(Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)",
                lambda call: (_combined(call), call["permuted_tokens"]),
            ),
        )
    ),
)
