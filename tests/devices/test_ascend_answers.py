"""A product's limits follow what its probes found and what the buffers between its ranks hold."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices.ascend_limits import (
    DISPATCHING,
    answered,
    answers_file,
    buffer_mib,
    most_dispatched,
    product,
    write_answers,
)
from tests.attention.test_attention import shape
from virtual_npu.contract import Conditions, ContractError
from virtual_npu.operators import operator
from virtual_npu.simulated_products import PRODUCTS

B = product("910B", "")


def test_without_answers_a_product_is_as_known_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = answers_file(tmp_path, "910B", "9.0.0", virtual=False)
    with caplog.at_level(logging.INFO):
        assert answered(B, path, virtual=True) is B
        assert not caplog.messages
        assert answered(B, path) is B
    assert caplog.messages == [
        f"device: there are no answers of verify_npu.sh in {path}: limits are those that are documented:"
        " run `bash scripts/verify_npu.sh`"
    ]


def test_answers_of_another_torch_npu_are_followed_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = answers_file(tmp_path, "910B", "9.0.0", virtual=False)
    write_answers(path, {"keeps_nan": False}, torch_npu="2.10.0.post4", chip="Ascend910B1", driver="25.5.1")
    assert not answered(B, path, torch_npu="2.10.0.post4").keeps_nan
    assert not caplog.messages
    assert not answered(B, path, torch_npu="2.13.0").keeps_nan
    assert caplog.messages == [
        f"device: the answers in {path} were asked of torch_npu 2.10.0.post4, and this is 2.13.0: run"
        " `bash scripts/verify_npu.sh` again"
    ]


def test_answers_are_followed_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = answers_file(tmp_path / "new", "910B", "9.0.0", virtual=False)
    write_answers(path, {"keeps_nan": False, "packs_float16": True, "tiles_weights": True})
    with caplog.at_level(logging.INFO):
        found = answered(B, path)
    assert (found.keeps_nan, found.packs_float16, found.tiles_weights) == (False, True, True)
    (line,) = caplog.messages
    assert line == (
        f"device: follows the answers of verify_npu.sh in {path}:"
        " keeps_nan no (was yes); tiles_weights yes (was no)"
    )


def test_an_answer_that_was_asked_otherwise_counts_no_more_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "910B-cann-9.0.0.json"
    path.write_text('{"bares_decodes": true, "keeps_nan": false}')
    with caplog.at_level(logging.WARNING):
        found = answered(B, path)
    assert not found.unmasks_decodes, "decodes have a mask until a captured probe says yes"
    assert not found.keeps_nan
    (line,) = caplog.messages
    assert line.startswith(f"device: the answer bares_decodes in {path} no longer counts, since it was asked")
    assert line.endswith("run `bash scripts/verify_npu.sh` again")


def test_inexact_angles_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = answers_file(tmp_path, "910B", "", virtual=False)
    write_answers(path, {"exact_angles": False})
    assert not answered(B, path).exact_angles
    assert caplog.messages == [
        "device: cosines of large angles are not exact here, which dynamic rope computes"
    ]


def test_a_stand_in_has_answers_of_its_own(tmp_path: Path) -> None:
    names = [answers_file(tmp_path, "950", cann, virtual=True).name for cann in ("8.5", "")]
    assert names == ["virtual-950-cann-8.5.json", "virtual-950-cann-unknown.json"]
    assert answers_file(tmp_path, "950", "8.5", virtual=False).name == "950-cann-8.5.json"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no JSON"),
        ("[]", "holds no answers of yes and no"),
        ('{"keeps_nan": 1}', "holds no answers of yes and no"),
        ('{"head_dims": true}', "answers head_dims, which nothing asks"),
    ],
)
def test_what_is_no_answer_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"x\.json {said}.*: remove it, or run `bash scripts/verify_npu\.sh`"
    ):
        answered(B, path)


def test_float16_is_refused_where_attention_is_wrong_in_it(tmp_path: Path) -> None:
    path = answers_file(tmp_path, "910B", "9.0.0", virtual=False)
    write_answers(path, {"packs_float16": False})
    found, sizes = answered(B, path), {"page_size": 128}
    found.check(shape(dtype=torch.bfloat16, **sizes))
    with pytest.raises(
        ValueError, match=r"wrong in it: set model\.dtype to bfloat16, or set device\.attention"
    ):
        found.check(shape(dtype=torch.float16, **sizes))
    B.check(shape(dtype=torch.float16, **sizes))


PLENTY = 10**6  # MiB


def test_the_communicators_buffers_bound_the_tokens() -> None:
    """By the documents' formulas: bytes of Qwen3-30B's and of DeepSeek-V3's sizes, over so many ranks."""
    assert 98 * 2**20 // (8 * 8 * 2048 * 2) == 392 > most_dispatched("910B", 8, 128, 8, 2048, 200) == 64
    assert most_dispatched("910B", 16, 256, 8, 7168, 200) == 98 * 2**20 // (16 * 8 * 7168 * 2) == 56
    assert most_dispatched("910B", 16, 256, 8, 7168, 4) == 0
    each = 16 * 16 * 14848 + 9 * 14336  # 256 pairs, and 8 rows that come back beside a shared expert's
    assert most_dispatched("910C", 16, 256, 8, 7168, 200) == 100 * 2**20 // each == 26


@pytest.mark.parametrize(
    ("name", "ranks", "experts", "chosen", "hidden", "most"),
    [
        ("910C", 16, 384, 8, 7168, 17),  # Kimi-K2: 18 without the shared expert's row
        ("910C", 16, 160, 8, 5120, 57),  # GLM-4.5: 58 without it
        ("910B", 16, 256, 8, 7168, 56),  # DeepSeek-V3
    ],
)
def test_so_many_tokens_are_sent_and_not_one_more(
    name: str, ranks: int, experts: int, chosen: int, hidden: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert most_dispatched(name, ranks, experts, chosen, hidden, 200) == most
    dispatch = operator("npu_moe_distribute_dispatch_v2")
    conditions = Conditions(product=next(each for each in PRODUCTS.values() if each.name == name))

    def refused(num_tokens: int, **said: Any) -> list[str]:
        ids = torch.arange(chosen, dtype=torch.int32).expand(num_tokens, -1).contiguous()
        call = dispatched(name, ranks, experts, torch.zeros(num_tokens, hidden).bfloat16(), ids) | said
        bound = dispatch.bind(conditions, (), call)
        return [rule.name for rule in dispatch.rules if [*rule.check(bound)]]

    assert refused(most) == []
    assert refused(most + 1) == ["buffers"]
    monkeypatch.setenv("HCCL_BUFFSIZE", "400")
    assert refused(most + 1) == []


def dispatched(name: str, ranks: int, experts: int, x: torch.Tensor, ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a dispatch from the second of so many ranks."""
    call = {"x": x, "expert_ids": ids, "moe_expert_num": experts, "ep_world_size": ranks, "ep_rank_id": 1}
    of_tp = {"group_tp": "all", "tp_world_size": 1} if name == "910C" else {"comm_alg": "fullmesh"}
    return {"group_ep": "all", **call, **of_tp}


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
    ids = torch.arange(chosen, dtype=torch.int32)[None]
    call = dispatched(name, ranks, experts, torch.zeros(1, hidden).bfloat16(), ids)
    dispatch = operator("npu_moe_distribute_dispatch_v2")
    conditions = Conditions(product=next(each for each in PRODUCTS.values() if each.name == name))
    with patch.dict(os.environ, {"HCCL_BUFFSIZE": str(PLENTY)}):
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
