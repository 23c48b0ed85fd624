"""The number of tokens that ranks send at once follows the buffers and the rules of the operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices.ascend_limits import DISPATCHING, buffer_mib, most_dispatched
from virtual_npu.contract import Conditions, ContractError
from virtual_npu.operators import operator
from virtual_npu.simulated_products import PRODUCTS

PLENTY = 10**6  # MiB


def test_the_communicators_buffers_bound_the_tokens() -> None:
    """By the documents' formulas: bytes of Qwen3-30B's and of DeepSeek-V3's sizes, over so many ranks."""
    assert 98 * 2**20 // (8 * 8 * 2048 * 2) == 392 > most_dispatched("910B", 8, 128, 8, 2048, 200) == 64
    assert most_dispatched("910B", 16, 256, 8, 7168, 200) == 98 * 2**20 // (16 * 8 * 7168 * 2) == 56
    assert most_dispatched("910B", 16, 256, 8, 7168, 4) == 0
    each = 16 * 16 * 14848 + 8 * 14336  # of 256 pairs, and of 8 rows that come back
    assert most_dispatched("910C", 16, 256, 8, 7168, 200) == 100 * 2**20 // each == 26


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(DISPATCHING),
    ranks=st.sampled_from([2, 3, 8, 9, 16, 24, 32, 768, 800]),
    held=st.sampled_from([1, 2, 16, 200]),
    more=st.booleans(),
    chosen=st.integers(1, 20),
    hidden=st.sampled_from([32, 48, 992, 1024, 7168, 7200, 8192, 8224]),
)
def test_what_the_rules_refuse_is_not_sent(
    name: str, ranks: int, held: int, more: bool, chosen: int, hidden: int
) -> None:
    experts = ranks * held + more
    chosen = min(chosen, experts)
    call = {
        "x": torch.zeros(1, hidden).bfloat16(),
        "expert_ids": torch.arange(chosen, dtype=torch.int32)[None],
        "group_ep": "all",
        "ep_world_size": ranks,
        "ep_rank_id": 1,
        "moe_expert_num": experts,
    }
    call |= {"group_tp": "all", "tp_world_size": 1} if name == "910C" else {"comm_alg": "fullmesh"}
    dispatch = operator("npu_moe_distribute_dispatch_v2")
    conditions = Conditions(product=next(each for each in PRODUCTS.values() if each.name == name))
    if most_dispatched(name, ranks, experts, chosen, hidden, PLENTY):
        dispatch(conditions, **call)
    else:
        with pytest.raises(ContractError):
            dispatch(conditions, **call)


def test_no_other_product_sends_tokens() -> None:
    assert {each.name for each in PRODUCTS.values()} >= set(DISPATCHING)
    for each in ("310P", "910", "950"):
        assert most_dispatched(each, 8, 64, 2, 2048, PLENTY) == 0


def test_the_buffers_have_a_size() -> None:
    assert buffer_mib({}) == 200
    assert buffer_mib({"HCCL_BUFFSIZE": "512"}) == 512
    with pytest.raises(
        ValueError, match=r"HCCL_BUFFSIZE is '-3'; it must be an integer from 1 to 2147483647 MiB: unset it"
    ):
        buffer_mib({"HCCL_BUFFSIZE": "-3"})
