"""Are an engine's calls right by the contract, and does a device that computes otherwise show?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from virtual_npu.calls import MAKERS, right_call
from virtual_npu.contract import Conditions
from virtual_npu.operators import operator as contract_of
from virtual_npu.verify import in_words, main, on_device, verify

ROOT = Path(__file__).resolve().parents[2]


def by_reference(operator: str, arguments: Mapping[str, Any]) -> Any:
    return contract_of(operator)(Conditions(), **arguments)


@pytest.mark.npu
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("operator", MAKERS)
def test_a_device_computes_what_the_contract_says(operator: str) -> None:
    verdict = verify(operator, on_device, "npu:0", 2, seed=0)
    assert verdict.is_right, verdict.first_fault


def scaled(operator: str, arguments: Mapping[str, Any]) -> Any:
    """Everything a tenth too large."""
    results = by_reference(operator, arguments)
    return [each * 1.1 for each in ([results] if isinstance(results, torch.Tensor) else results)]


@pytest.mark.parametrize("operator", MAKERS)
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_the_contract_lets_an_engines_calls_through(operator: str, count: int) -> None:
    verdict = verify(operator, by_reference, "cpu", count, seed=0)
    assert verdict.is_right, verdict.first_fault
    assert verdict.worst == 0


@pytest.mark.parametrize("operator", ["npu_rms_norm", "npu_fused_infer_attention_score", "npu_quant_matmul"])
def test_a_wrong_result_shows(operator: str) -> None:
    verdict = verify(operator, scaled, "cpu", 2, seed=5)
    assert verdict.num_right == 0
    assert verdict.worst > 1
    assert "seed 5: " in str(verdict.first_fault)
    assert "times as far" in str(verdict.first_fault)


def test_a_place_that_was_not_written_shows() -> None:
    def forgetful(operator: str, arguments: Mapping[str, Any]) -> Any:
        kept = arguments["value_cache"].clone()
        by_reference(operator, arguments)
        arguments["value_cache"].copy_(kept)

    verdict = verify("npu_scatter_pa_kv_cache", forgetful, "cpu", 2, seed=0)
    assert verdict.num_right == 0


def test_an_error_is_a_fault_of_its_call_alone() -> None:
    def refusing(operator: str, arguments: Mapping[str, Any]) -> Any:
        if arguments["input"].dtype == torch.float16:
            raise RuntimeError("call aclnnSwiGlu failed,\n  error 561002")
        return by_reference(operator, arguments)

    verdict = verify("npu_swiglu", refusing, "cpu", 4, seed=0)
    assert (verdict.num_calls, verdict.num_right) == (4, 2)
    assert verdict.first_fault == "seed 1: call aclnnSwiGlu failed, error 561002"
    assert "561002" in in_words([verdict])


def test_a_shape_of_another_kind_is_a_fault() -> None:
    verdict = verify("npu_swiglu", lambda _, arguments: arguments["input"], "cpu", 1, seed=0)
    assert "a result is torch.bfloat16" in str(verdict.first_fault)


def test_a_seed_draws_one_call() -> None:
    one, same, other = (right_call("npu_rms_norm", seed).arguments["input"] for seed in (4, 4, 6))
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


def test_what_the_engine_calls_is_tried() -> None:
    text = "".join((ROOT / room / "npu.py").read_text() for room in ("attention", "models"))
    called = set(re.findall(r"torch_npu\.(npu_\w+)[.(]", text))
    assert len(called) > 5
    assert called <= set(MAKERS)


@pytest.mark.npu
@pytest.mark.usefixtures("device")
def test_the_command_tells_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual", "--calls", "1", "--seed", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["operator"] for each in told] == list(MAKERS)
    assert all(each["num_right"] == each["num_calls"] == 1 and each["is_right"] for each in told)
