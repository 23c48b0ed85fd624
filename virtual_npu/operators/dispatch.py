"""Define the two exchanges of expert parallelism, with their schemas, rules and CPU references.

npu_moe_distribute_dispatch_v2 sends each token to the ranks that hold its experts, and
npu_moe_distribute_combine_v2 returns the weighted sum of the results. They are used in pairs. Of what
dispatch returns, the caller may read only the rows, the scales of int8 rows, and the number of rows of each
expert; the rest is passed to combine unread. The result has room for as many rows as could arrive, and the
rows beyond the counted ones are undefined.

Legend: N ranks, B tokens of each, C experts that a token chooses, H columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from virtual_npu.contract import Breach, Call, Operator, Rule, Summing, is_dtype, shape
from virtual_npu.operators.matmul import by_rows
from virtual_npu.simulated_products import A2, A3

DISPATCH = "op-plugin npu_moe_distribute_dispatch_v2"
COMBINE = "op-plugin npu_moe_distribute_combine_v2"
CANN = "CANN aclnnMoeDistributeDispatchV2, aclnnMoeDistributeCombineV2"
CALLED = "vllm-ascend ops/fused_moe/token_dispatcher.py"
HERE = "virtual_npu/operators/dispatch.py"
HALVES = (torch.float16, torch.bfloat16)
NOTE = 128  # numbers of the opaque part for each row: rank, token and choice; the rest is unused
MOST_TOKENS = 256


class Limits(NamedTuple):
    """A product's limits: ranks, least and most columns, chosen experts, experts, and experts of a rank."""

    ranks: frozenset[int]
    least_columns: int
    most_columns: int
    most_chosen: int
    most_experts: int
    most_held: int


LIMITS = {
    A2: Limits(frozenset({*range(2, 9), 16, 32, 64, 128, 256}), 32, 7168, 16, 512, 24),
    A3: Limits(frozenset(range(2, 769)), 1024, 8192, 12, 1024, 1024),
}
# Arguments that are not modelled, with the values that leave them unused.
LEFT_OUT = {
    **dict.fromkeys(("scales", "x_active_mask", "elastic_info", "performance_info")),
    **dict.fromkeys(("shared_expert_x", "ori_x", "const_expert_alpha_1", "const_expert_alpha_2")),
    **dict.fromkeys(("const_expert_v", "y_dtype", "x_dtype", "scales_dtype")),
    "tp_rank_id": 0,
    "expert_shard_type": 0,
    "shared_expert_rank_num": 0,
    "shared_expert_num": 1,
    "global_bs": 0,
    "comm_quant_mode": 0,
    "expert_token_nums_type": 1,
    "zero_expert_num": 0,
    "copy_expert_num": 0,
    "const_expert_num": 0,
}


def _of_all(call: Call, own: Tensor, operation: Summing) -> Tensor:
    """Gather [...] of each rank as [N, ...]; the others' parts stay 0 where this process is the only rank."""
    every = own.new_zeros(call["ep_world_size"], *own.shape)
    every[call["ep_rank_id"]] = own
    communicators = call.conditions.communicators
    return every if communicators is None else communicators.add_up(call["group_ep"], every, operation)


def _num_held(call: Call) -> int:
    return int(call["moe_expert_num"] // call["ep_world_size"])


def _dispatched(call: Call) -> tuple[Tensor, ...]:
    """Return the seven results of a dispatch.

    They are the rows, sorted by expert, then by rank and token; the scales of int8 rows; the notes; the
    number of rows of each expert; the same number by expert and rank; and two results that hold nothing here.
    """
    x, experts, held = call["x"], call["expert_ids"], _num_held(call)
    rows, scales = (x, x.new_zeros(len(x))) if call["quant_mode"] == 0 else by_rows(x.float())
    # float16 represents int8 exactly.
    rows = _of_all(call, rows.half() if rows.dtype == torch.int8 else rows, "dispatch")
    scales = _of_all(call, scales.float(), "dispatch")
    local = _of_all(call, experts.float(), "dispatch").long() - held * call["ep_rank_id"]
    if call.conditions.communicators is None:  # the other ranks' parts are missing
        local[torch.arange(len(local)) != call["ep_rank_id"]] = -1
    notes = ((local >= 0) & (local < held)).nonzero()
    expert = local[tuple(notes.t())]
    notes, expert = notes[expert.argsort(stable=True)], expert.sort(stable=True).values
    room = experts.numel() // experts.shape[1] * call["ep_world_size"] * min(held, experts.shape[1])
    dtype = torch.int8 if call["quant_mode"] else x.dtype
    empty = torch.nan if dtype.is_floating_point else 127
    sent = torch.full((room, x.shape[1]), empty, dtype=dtype)
    sent[: len(notes)] = rows[notes[:, 0], notes[:, 1]].to(dtype)
    sent_scales = torch.full((room,), torch.nan)
    sent_scales[: len(notes)] = scales[notes[:, 0], notes[:, 1]]
    opaque = torch.full((max(experts.numel(), room * NOTE),), -1, dtype=torch.int32)
    opaque[: room * NOTE].view(room, NOTE)[: len(notes), :3] = notes.int()
    arrived = (expert * call["ep_world_size"] + notes[:, 0]).bincount(minlength=held * call["ep_world_size"])
    of_tp = torch.zeros(call["tp_world_size"], dtype=torch.int32)
    return sent, sent_scales, opaque, expert.bincount(minlength=held), arrived.int(), of_tp, torch.empty(0)


def _combined(call: Call) -> Tensor:
    """Return the weighted sum of the experts' results for each token, computed in float32, [B, H]."""
    rows, weights = call["expand_x"], call["expert_scales"]
    count = int(call["ep_send_counts"].sum())
    rank, token, choice = call["assist_info_for_combine"][: count * NOTE].view(count, NOTE)[:, :3].long().t()
    made = rows.new_zeros(call["ep_world_size"], *weights.shape, rows.shape[1])
    made[rank, token, choice] = rows[:count]
    communicators = call.conditions.communicators
    if communicators is not None:
        made = communicators.add_up(call["group_ep"], made, "combine")
    total: Tensor = (made[call["ep_rank_id"]].float() * weights[..., None]).sum(1)
    return total.to(rows.dtype)


def _modelled(call: Call) -> Iterator[Breach]:
    for name, wanted in LEFT_OUT.items():
        if name in call.arguments and call[name] != wanted:
            yield name, shape(call[name]) if isinstance(call[name], Tensor) else call[name]


def _ranks(call: Call) -> Iterator[Breach]:
    size, communicators = call["ep_world_size"], call.conditions.communicators
    if size not in LIMITS[call.conditions.product].ranks:
        yield "ep_world_size", size
    elif not 0 <= call["ep_rank_id"] < size:
        yield "ep_rank_id", f"{call['ep_rank_id']} of {size}"
    elif communicators is not None:
        found = communicators.size(call["group_ep"])
        if found != size:
            name = repr(call["group_ep"])
            yield "group_ep", f"{name} of {found} ranks" if found else f"{name}, which is no communicator"
        elif communicators.rank(call["group_ep"]) != call["ep_rank_id"]:
            yield "ep_rank_id", f"{call['ep_rank_id']} on rank {communicators.rank(call['group_ep'])}"


def _beside(call: Call) -> Iterator[Breach]:
    is_a3, of_tp = call.conditions.product is A3, (call["group_tp"], call["tp_world_size"])
    if of_tp not in {("", 0), *(((call["group_ep"], 1), ("", 1)) if is_a3 else ())}:
        yield "group_tp", f"{call['group_tp']!r} of {call['tp_world_size']}"
    elif call["comm_alg"] != ("" if is_a3 else "fullmesh"):
        yield "comm_alg", repr(call["comm_alg"])
    elif not is_a3 and call["tp_send_counts"] is not None:
        yield "tp_send_counts", shape(call["tp_send_counts"])


def _experts(call: Call) -> Iterator[Breach]:
    number, size, limits = call["moe_expert_num"], call["ep_world_size"], LIMITS[call.conditions.product]
    if not 1 <= number <= limits.most_experts or number % size or number // size > limits.most_held:
        yield "moe_expert_num", f"{number} over {size} ranks"


def _choices(call: Call) -> Iterator[Breach]:
    ids, most = call["expert_ids"], LIMITS[call.conditions.product].most_chosen
    is_matrix = ids.dtype == torch.int32 and ids.dim() == 2 and ids.is_contiguous()
    if not is_matrix or not 1 <= len(ids) <= MOST_TOKENS or not 1 <= ids.shape[1] <= most:
        yield "expert_ids", shape(ids)


def _rows(call: Call) -> Iterator[Breach]:
    x, limits = call["x"], LIMITS[call.conditions.product]
    if not is_dtype(x, HALVES, call.conditions) or x.dim() != 2 or not x.is_contiguous():
        yield "x", shape(x)
    elif len(x) != len(call["expert_ids"]):
        yield "x", f"{shape(x)} for {shape(call['expert_ids'])}"
    elif x.shape[1] % 32 or not limits.least_columns <= x.shape[1] <= limits.most_columns:
        yield "x", shape(x)


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step


def _buffers(call: Call) -> Iterator[Breach]:
    """Compare one half of the communicator's buffers with the worst case, by the operators' tilings."""
    (num_tokens, chosen), held, size = call["expert_ids"].shape, _num_held(call), call["ep_world_size"]
    row = 2 * call["x"].shape[1]
    if call.conditions.product is A3:
        arriving = _aligned(_aligned(row, 32) + 64, 512) * held * size
        returning = _aligned(row, 512) * (chosen + call["shared_expert_num"])
        needed = num_tokens * (arriving + returning)
    else:
        needed = num_tokens * size * min(held, chosen) * row + (2 << 20)
    room_mib = int(os.environ.get("HCCL_BUFFSIZE", "200"))
    if 2 * needed > room_mib << 20:
        yield "expert_ids", f"{num_tokens} tokens, which need {2 * needed:,} bytes of {room_mib} MiB"


def _by_row(call: Call) -> Iterator[Breach]:
    if call["quant_mode"] not in (0, 2):
        yield "quant_mode", call["quant_mode"]
    elif call["expert_scales"] is not None:
        yield "expert_scales", shape(call["expert_scales"])


def _known(call: Call) -> Iterator[Breach]:
    ids: Tensor = call["expert_ids"]
    if not 0 <= int(ids.min()) <= int(ids.max()) < call["moe_expert_num"]:
        yield "expert_ids", f"{int(ids.min())} to {int(ids.max())} of {call['moe_expert_num']}"
    elif (ids.sort(1).values.diff(dim=1) == 0).any():
        yield "expert_ids", "an expert twice in a row"


def _returned(call: Call) -> Iterator[Breach]:
    rows, ids, held = call["expand_x"], call["expert_ids"], _num_held(call)
    room = len(ids) * call["ep_world_size"] * min(held, ids.shape[1])
    if not is_dtype(rows, HALVES, call.conditions) or rows.dim() != 2 or len(rows) != room:
        yield "expand_x", f"{shape(rows)} for {room} rows"
    for name, count in (
        ("assist_info_for_combine", max(ids.numel(), room * NOTE)),
        ("ep_send_counts", held * call["ep_world_size"]),
    ):
        if call[name].dtype != torch.int32 or call[name].shape != (count,):
            yield name, f"{shape(call[name])} for {count}"


def _weights(call: Call) -> Iterator[Breach]:
    weights: Tensor = call["expert_scales"]
    if weights.dtype != torch.float32 or weights.shape != call["expert_ids"].shape:
        yield "expert_scales", shape(weights)
    elif not weights.is_contiguous():
        yield "expert_scales", f"strided {tuple(weights.stride())}"


def _own_notes(call: Call) -> Iterator[Breach]:
    count = int(call["ep_send_counts"].sum())
    notes = call["assist_info_for_combine"][: count * NOTE].view(-1, NOTE)[:, :3]
    most = torch.tensor([call["ep_world_size"], *call["expert_ids"].shape])
    if count > len(call["expand_x"]) or (notes < 0).any() or (notes >= most).any():
        yield "assist_info_for_combine", "not what a dispatch of these tokens returned"


def _shared(source: str) -> tuple[Rule, ...]:
    return (
        Rule(
            "modelled",
            "shared or constant experts inside, masks, levels of communication and numbers of tokens that"
            " differ are not checked here",
            HERE,
            "leave the argument out",
            _modelled,
        ),
        Rule(
            "ranks",
            "ep_world_size is that of the communicator group_ep, of 2 to 8, 16, 32, 64, 128 or 256 ranks, or"
            " up to 768 on the A3, and ep_rank_id this one's",
            source,
            "pass what get_hccl_comm_name says of a group of all of these ranks",
            _ranks,
        ),
        Rule(
            "beside",
            "on the A2, comm_alg is fullmesh, for which variables of the environment choose otherwise, and"
            " nothing is said of tp; on the A3, comm_alg is left out, and tp_world_size at most 1",
            CANN,
            "pass them by product",
            _beside,
        ),
        Rule(
            "experts",
            "there are at most 512, 24 of them on a rank, or 1024 on the A3, and equally many on each",
            CANN,
            "use fewer ranks",
            _experts,
        ),
        Rule(
            "choices",
            f"expert_ids is a contiguous int32 [B, C], B up to {MOST_TOKENS} and C to 16, or 12 on the A3",
            source,
            "send a prompt's rows in another way",
            _choices,
        ),
    )


GROUP = (
    "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *, ",
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, '
    "int shared_expert_num=1, int shared_expert_rank_num=0, ",
    "int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0",
)

OPERATORS = (
    Operator(
        schema=f"npu::npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, {GROUP[0]}"
        "Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
        f"Tensor? elastic_info=None, Tensor? performance_info=None, {GROUP[1]}"
        "int quant_mode=0, int global_bs=0, "
        f'int expert_token_nums_type=1, str comm_alg="", {GROUP[2]}, int? y_dtype=None, int? x_dtype=None, '
        "int? scales_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        products=(A2, A3),
        source=DISPATCH,
        rules=(
            *_shared(DISPATCH),
            Rule(
                "rows",
                "x is a contiguous [B, H] of float16 or bfloat16, H a multiple of 32 up to 7168, or from 1024"
                " to 8192 on the A3",
                DISPATCH,
                "add up what all ranks made",
                _rows,
            ),
            Rule(
                "buffers",
                "HCCL_BUFFSIZE, 200 MiB unless it is set, holds twice what all tokens take on one rank;"
                " on the A3 also what comes back, of shared_expert_num experts more than are chosen",
                CANN,
                "send fewer tokens, or set HCCL_BUFFSIZE on every rank",
                _buffers,
            ),
            Rule(
                "by_row",
                "quant_mode is 0, or 2 by row, and no expert_scales are sent: others are not checked here",
                HERE,
                "pass 0 or 2, and the weights to the combine",
                _by_row,
            ),
            Rule(
                "known",
                "a row's experts differ, and each is one of moe_expert_num",
                DISPATCH,
                "look at the router",
                _known,
            ),
        ),
        reference=_dispatched,
    ),
    Operator(
        schema="npu::npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, "
        f"Tensor assist_info_for_combine, Tensor ep_send_counts, Tensor expert_scales, {GROUP[0]}"
        "Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
        "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
        "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
        f"Tensor? performance_info=None, {GROUP[1]}int global_bs=0, int comm_quant_mode=0, "
        f'str comm_alg="", {GROUP[2]}) -> Tensor',
        products=(A2, A3),
        source=COMBINE,
        rules=(
            *_shared(COMBINE),
            Rule(
                "returned",
                "rows, notes and counts have the sizes with which the dispatch of these tokens returned them",
                COMBINE,
                "pass on what it returned",
                _returned,
            ),
            Rule("weights", "expert_scales is a contiguous float32 [B, C]", COMBINE, "cast it", _weights),
            Rule(
                "own_notes",
                "the notes are those of a dispatch of as many tokens",
                COMBINE,
                "dispatch and combine in pairs",
                _own_notes,
            ),
        ),
        reference=_combined,
    ),
)
