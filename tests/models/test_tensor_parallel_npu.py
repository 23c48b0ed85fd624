"""Tensor ranks over HCCL, with NPU operators and captured steps, compute what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from models.parallel.group import ALONE
from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, make, wide
from tests.models.tensor_rank import FIRST_STOPS, NUM_DECODED, NUM_DRAWN, built, first_logits_of
from tests.models.test_tensor_parallel import SIZES, Cases, alone_of, check_collectives, each_of, run_ranks
from tests.virtual_npu.test_hccl import left_behind

pytestmark = [pytest.mark.npu, pytest.mark.slow, stand_in_alone]
MODELS: dict[str, dict[str, Any]] = {
    "llama_biased": {"vocab_size": 509},
    "qwen3_layer_types": {"num_key_value_heads": 1},
    "gemma3_layer_types": {},
    "deepseek_v3": {"moe_intermediate_size": 32},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_key_value_heads": 1},
}

SPREAD = ("deepseek_v3_spread",)  # whole experts over two parts of the ranks
SENT = ("qwen3_moe_sent", "deepseek_v3_sent")  # whole experts on every rank, to which tokens are sent
# Whose prompts have divided rows: beside divided experts, and beside those that rows are sent to
ROWS = {f"{name}_rows": name for name in ("gemma3_layer_types", "deepseek_v3_sent")}
LEAST_DIVIDED = 3  # tokens; decodes of two rows stay whole
INT8 = {"int8": "llama_biased", "int8_sent": "qwen3_moe_sent", "int8_rows": "deepseek_v3_sent"}
# Whose pages two ranks divide: latents, and one key-value head
DIVIDED = {"deepseek_v3_divided": "deepseek_v3", "qwen3_moe_divided": "qwen3_moe"}
CAPTURED = ("llama_biased", "qwen3_layer_types", *SPREAD, *SENT, *DIVIDED, *ROWS)
# Decodes of these are also computed without a capture, which sends the same calls
EAGER, EAGER_INT8 = ("qwen3_moe_sent",), ("int8_sent",)
# What four ranks do as two do not: fewer key heads, or tokens, than ranks, and experts that two divide
AMONG_FOUR = (
    *("qwen3_layer_types_captured", "deepseek_v3_spread_captured", "qwen3_moe_sent"),
    "deepseek_v3_sent_rows_captured",
)
# Whose tokens are chosen, too, which hangs on the head and on where steps are captured
CHOOSE = (*AMONG_FOUR, "llama_biased_captured", "apart", "joined")
Results = dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]


def checkpoints(folder: Path, size: int) -> Cases:
    """In float32, which the stand-in takes; captured; and in int8, which is multiplied beside bfloat16."""
    plain: Cases = {}
    for variant in VARIANTS:
        if variant.name in MODELS:
            options = variant.options | MODELS[variant.name] | {"hidden_size": 64, "intermediate_size": 128}
            changed = wide(replace(variant, options=options, saved_as=torch.float32, shard_size="5GB"))
            plain[variant.name] = {"path": str(make(changed, folder)[1])}
    plain |= {name: plain[name.removesuffix("_spread")] | {"experts": 2} for name in SPREAD}
    dispatches = {"experts": size, "dispatches": True}
    plain |= {name: plain[name.removesuffix("_sent")] | dispatches for name in SENT}
    plain |= {name: plain[of] | {"contexts": 2} for name, of in DIVIDED.items()}
    divided = {"least_divided": LEAST_DIVIDED}
    plain |= {name: plain[of] | divided for name, of in ROWS.items()}
    captured = {f"{name}_captured": plain[name] | {"graphs": True} for name in CAPTURED}
    apart, int8 = plain["qwen3_layer_types"] | {"dtype": "bfloat16"}, {}
    sums = {
        "apart": apart,
        "joined": apart | {"joins": True},
        "biased": plain["llama_biased"] | {"dtype": "bfloat16", "joins": True},
    }
    for name, of in INT8.items():
        case = plain[of] | {"int8_at_load": True, "dtype": "bfloat16"}
        case |= divided if name == "int8_rows" else {}
        int8 |= {name: case} if name in EAGER_INT8 else {}
        int8[f"{name}_captured"] = case | {"graphs": True}
    eager = {name: plain[name] for name in EAGER}
    return {
        name: case | {"chooses": name in CHOOSE} for name, case in (eager | captured | sums | int8).items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """By case, its settings and what each of so many ranks computed."""

    @cache
    def of(size: int) -> Results:
        folder, before = tmp_path_factory.mktemp("checkpoints"), left_behind()
        asked = checkpoints(folder, size)
        if size == 4:
            asked = {name: asked[name] for name in AMONG_FOUR}
        ranks = run_ranks("hccl", size, tmp_path_factory.mktemp("ranks"), asked)
        assert left_behind() <= before
        check_collectives(ranks["collectives"])
        return {name: (case, ranks[name]) for name, case in asked.items()}

    return of


@each_of([*EAGER, *(f"{name}_captured" for name in CAPTURED)], AMONG_FOUR)
def test_ranks_on_npus_compute_what_one_processor_computes(
    size: int, name: str, found: Callable[[int], Results]
) -> None:
    case, ranks = found(size)[name]
    expected, tokens, best = alone_of(case["path"])
    first, *others = (rank["logits"] for rank in ranks)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))
    assert all(torch.equal(first, other) for other in others)
    if case["chooses"]:
        assert [rank["tokens"].tolist() for rank in ranks] == [
            tokens.tolist(),
            *([[]] * NUM_DRAWN for _ in others),
        ]
        assert [rank["greedy"].tolist() for rank in ranks] == [best.tolist()] * size
        assert {rank["gathered"] for rank in ranks} == {0}, "logits were joined for the best tokens"


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_sent_to_experts_where_there_is_one_for_each_rank(
    size: int, found: Callable[[int], Results]
) -> None:
    num_mixtures, num_steps, num_decodes = 2, len(FIRST_STOPS), NUM_DECODED  # decodes are of two rows
    for name in {"qwen3_moe_sent", "int8_sent"} & found(size).keys():
        _, ranks = found(size)[name]
        num_sent = num_mixtures * (num_steps if size == 2 else num_steps - num_decodes)
        for rank in ranks:
            assert rank["launches"]["npu_moe_distribute_dispatch_v2"] == num_sent
            assert rank["launches"]["npu_moe_distribute_combine_v2"] == num_sent
            assert rank["launches"]["npu_moe_init_routing_v2"] == num_mixtures * num_steps - num_sent


def test_captured_steps_send_tokens_as_others_do(found: Callable[[int], Results]) -> None:
    (_, eager), (_, captured) = (found(2)[name] for name in ("qwen3_moe_sent", "qwen3_moe_sent_captured"))
    for one, other in zip(eager, captured):
        assert torch.equal(one["logits"], other["logits"])


def test_products_are_added_up_in_one_launch_where_the_operator_takes_them(
    found: Callable[[int], Results],
) -> None:
    (_, apart), (_, joined), (_, biased) = (found(2)[name] for name in ("apart", "joined", "biased"))
    num_layers, num_steps = 3, len(FIRST_STOPS)
    # Down alone: the output projection has a bias here, and where one would be added is not said
    assert {rank["joined"] for rank in joined} == {num_layers * num_steps}
    assert {rank["joined"] for rank in biased} == {0}
    for one, other in zip(apart, joined):
        assert torch.equal(one["logits"], other["logits"])
        assert torch.equal(one["tokens"], other["tokens"])


@each_of([*EAGER_INT8, *(f"{name}_captured" for name in INT8)], AMONG_FOUR)
def test_ranks_on_npus_are_as_near_in_int8_as_one_is(
    size: int, name: str, found: Callable[[int], Results]
) -> None:
    case, ranks = found(size)[name]
    path = Path(case["path"])
    exact = first_logits_of(built(path, ALONE)[0])
    alone = first_logits_of(built(path, ALONE, "npu", int8_at_load=True, dtype="bfloat16")[0])
    first, *others = (rank["logits"] for rank in ranks)
    assert (first - exact).norm() <= 1.5 * (alone - exact).norm()
    assert all(torch.equal(first, other) for other in others)
    if name.removesuffix("_captured") in found(size):
        eager = found(size)[name.removesuffix("_captured")][1][0]["logits"]
        assert torch.equal(first, eager), "captured steps compute what eager ones do"
