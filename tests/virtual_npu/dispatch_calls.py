"""Right and wrong calls of what sends tokens to experts, and back; see right_calls and wrong_calls."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.virtual_npu.calls import HALVES, Arguments, pick
from tests.virtual_npu.summed_calls import Ranks
from tests.virtual_npu.wrong import Wrong, cut, put, spoil, strided, to
from virtual_npu.contract import Conditions
from virtual_npu.operators import operator
from virtual_npu.simulated_products import A2, A3


def _group(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Rank 1 of eight ranks, or of two."""
    product, name = pick(rng, A2, A3), pick(rng, "eight", "two")
    size, held, tokens = Ranks.sizes[name], int(rng.integers(1, 5)), int(rng.integers(2, 12))
    number = size * held
    chosen = int(rng.integers(1, min(number, 6) + 1))
    ids = np.stack([rng.permutation(number)[:chosen] for _ in range(tokens)])
    made = {
        "expert_ids": torch.from_numpy(ids.astype(np.int32)),
        "group_ep": name,
        "ep_world_size": size,
        "ep_rank_id": 1,
        "moe_expert_num": number,
    }
    of_tp = pick(rng, {"group_tp": name, "tp_world_size": 1}, {"tp_world_size": 1}, {})
    made |= of_tp if product is A3 else {"comm_alg": "fullmesh"}
    return made, Conditions(product=product, communicators=pick(rng, None, Ranks()))


def dispatch(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Of rows as they are, or to be in int8."""
    made, conditions = _group(rng)
    columns = 1024 if conditions.product is A3 else pick(rng, 32, 96)
    x = torch.randn(len(made["expert_ids"]), columns).to(pick(rng, *HALVES))
    return made | {"x": x, "quant_mode": pick(rng, 0, 2)}, conditions


def combine(rng: np.random.Generator) -> tuple[Arguments, Conditions]:
    """Of what a dispatch returned."""
    sent, conditions = dispatch(rng)
    alone = Conditions(product=conditions.product)  # else rows would come of ranks that bring nothing
    rows, _, notes, _, counts, of_tp, _ = operator("npu_moe_distribute_dispatch_v2")(
        alone, **(sent | {"quant_mode": 0})
    )
    del sent["x"], sent["quant_mode"]
    weights = torch.rand(sent["expert_ids"].shape)
    made = {"expand_x": rows, "assist_info_for_combine": notes, "ep_send_counts": counts}
    made |= {"expert_scales": weights} | ({"tp_send_counts": of_tp} if len(of_tp) else {})
    return sent | made, conditions


def _many(size: int) -> Arguments:
    """More tokens than the buffers of so many ranks hold, each of twelve experts."""
    ids = torch.arange(12, dtype=torch.int32).repeat(256, 1)
    x = torch.zeros(256, 7168, dtype=torch.float16)
    return {"expert_ids": ids, "moe_expert_num": 24 * size, "x": x}


KNOWN = {"product": A2, "communicators": Ranks()}
_SHARED = [
    Wrong("modelled", put(global_bs=64), "global_bs", "is 64"),
    Wrong("beside", put(comm_alg="hierarchy"), "comm_alg", "'hierarchy'"),
    Wrong("beside", put(comm_alg=""), "comm_alg", "''", conditions={"product": A2}),
    Wrong("modelled", lambda call: {"x_active_mask": call["expert_ids"][:, 0] > 0}, "x_active_mask", "bool"),
    Wrong("ranks", put(ep_world_size=9), "ep_world_size", "is 9", conditions={"product": A2}),
    Wrong("ranks", lambda call: {"ep_rank_id": call["ep_world_size"]}, "ep_rank_id", " of "),
    Wrong("ranks", put(group_ep="three"), "group_ep", "'three' of 3 ranks", conditions=KNOWN),
    Wrong("ranks", put(group_ep="none"), "group_ep", "which is no communicator", conditions=KNOWN),
    Wrong("ranks", put(ep_rank_id=0), "ep_rank_id", "0 on rank 1", conditions=KNOWN),
    Wrong("beside", put(tp_world_size=2), "group_tp", "of 2", conditions={"product": A3}),
    Wrong("beside", put(group_tp="two", tp_world_size=1), "group_tp", "'two'", conditions={"product": A2}),
    Wrong("experts", lambda call: {"moe_expert_num": call["moe_expert_num"] + 1}, "moe_expert_num", "over"),
    Wrong("choices", to("expert_ids", Tensor.long), "expert_ids", "int64"),
    Wrong("choices", to("expert_ids", lambda ids: ids.repeat(200, 1)), "expert_ids", "int32"),
]
DISPATCH = [
    *_SHARED,
    Wrong("rows", to("x", Tensor.float), "x", "float32"),
    Wrong("rows", to("x", strided), "x", "float16"),
    Wrong("rows", cut("x"), "x", "for int32"),
    Wrong("rows", to("x", lambda x: x[:, :-8].contiguous()), "x", "float16"),
    Wrong(
        "buffers",
        lambda call: _many(call["ep_world_size"]),
        "expert_ids",
        "256 tokens, which need",
        conditions={"product": A3},
    ),
    Wrong("by_row", put(quant_mode=1), "quant_mode", "is 1"),
    Wrong("by_row", put(expert_scales=torch.ones(2, 2)), "expert_scales", "float32"),
    Wrong("known", to("expert_ids", lambda ids: spoil(ids, (0, 0), -1)), "expert_ids", "-1 to"),
    Wrong("known", to("expert_ids", lambda ids: ids[:, :1].repeat(1, 2)), "expert_ids", "twice"),
]
COMBINE = [
    *_SHARED,
    Wrong(
        "beside",
        put(tp_send_counts=torch.ones(1).int()),
        "tp_send_counts",
        "int32",
        conditions={"product": A2},
    ),
    Wrong("returned", cut("expand_x"), "expand_x", "rows"),
    Wrong("returned", cut("ep_send_counts"), "ep_send_counts", " for "),
    Wrong("weights", to("expert_scales", Tensor.half), "expert_scales", "float16"),
    Wrong("weights", to("expert_scales", strided), "expert_scales", "strided"),
    Wrong(
        "own_notes",
        to("assist_info_for_combine", lambda notes: torch.full_like(notes, -1)),
        "assist_info_for_combine",
        "not what a dispatch",
    ),
]
