"""An engine's calls are right by the contract, and a device that computes otherwise is found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from doctor.verify.npu.mask_questions import HEADS
from tests.each_of import each_of
from tests.thorough import cases
from virtual_npu.contract import Conditions
from virtual_npu.operators import operator as contract_of
from virtual_npu.sample_calls import MAKERS, makers, sample_call
from virtual_npu.simulated_products import A1, A2, P310, PRODUCTS, Product
from virtual_npu.verify import PACKER, in_words, main, product_of, verify

ROOT = Path(__file__).resolve().parents[2]


NUM_GROUPED = cases(14, 60)
CASES = [(product, operator) for product in PRODUCTS.values() for operator in makers(product)]


def by_reference(operator: str, arguments: Mapping[str, Any], product: Product = A2) -> Any:
    return contract_of(operator)(Conditions(product=product), **arguments)


def scaled(operator: str, arguments: Mapping[str, Any]) -> Any:
    """Everything a tenth too large."""
    results = by_reference(operator, arguments)
    return [each * 1.1 for each in ([results] if isinstance(results, torch.Tensor) else results)]


@each_of("product, operator", CASES)
def test_the_contract_lets_an_engines_calls_through(product: Product, operator: str) -> None:
    verdict = verify(operator, partial(by_reference, product=product), "cpu", cases(2, 60), 0, product)
    assert verdict.is_right, verdict.first_fault
    assert verdict.worst == 0


@pytest.mark.slow
@each_of("operator", ["npu_rms_norm", "npu_fused_infer_attention_score", "npu_quant_matmul"])
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
    one, same, other = (sample_call("npu_rms_norm", seed).arguments["input"] for seed in (4, 4, 6))
    assert torch.equal(one, same)
    assert one.shape != other.shape or not torch.equal(one, other)


def test_grouped_products_of_int8_with_4_and_with_8_bits_are_drawn() -> None:
    """And those of 4 bits without their bias are found wrong, as by an operator that adds nothing."""
    seen, calls = set[tuple[torch.dtype, bool]](), 0
    for seed in range(NUM_GROUPED):
        call = sample_call("npu_grouped_matmul", seed).arguments
        if call["x"][0].dtype == torch.int8:
            seen.add((call["weight"][0].dtype, call["output_dtype"] == torch.int32))
            calls += call["weight"][0].dtype == torch.int32
    assert seen == {(torch.int8, False), (torch.int8, True), (torch.int32, False)}

    def without_bias(operator: str, arguments: Mapping[str, Any]) -> Any:
        if arguments["x"][0].dtype == torch.int8 and "bias" in arguments:
            arguments = {**arguments, "bias": [0 * arguments["bias"][0]]}
        return by_reference(operator, arguments)

    verdict = verify("npu_grouped_matmul", without_bias, "cpu", NUM_GROUPED, 0)
    assert verdict.num_right == NUM_GROUPED - calls


def test_what_the_engine_calls_is_tried() -> None:
    files = ["attention/npu/fused_attention.py"]
    files += [f"models/ops/npu/{name}.py" for name in ("ops", "int4_ops", "grouped", "dispatch")]
    text = "".join((ROOT / file).read_text() for file in files)
    called = set(re.findall(r"torch_npu\.(npu_\w+)[.(]", text))
    assert len(called) > 5
    # What takes the name of a communicator is tried by the probes of ranks, and packing by its product
    of_ranks = {f"npu_moe_distribute_{name}_v2" for name in ("dispatch", "combine")}
    assert called - set(MAKERS) - {PACKER} == {"npu_mm_all_reduce_base", *of_ranks}
    of_310p = set(
        re.findall(r"torch_npu\.(_npu_\w+)\(", (ROOT / "attention/npu/atb_attention.py").read_text())
    )
    assert len(of_310p) == 3
    assert of_310p <= set(makers(P310))


def test_fewer_key_heads_of_64_are_tried() -> None:
    """With sinks and without, by as many calls as a device is asked: no page of the operator has them."""
    name = "npu_fused_infer_attention_score"
    for operator, heads in ((name, "num_heads"), (f"{name}_v2", "num_query_heads")):
        calls = [sample_call(operator, seed).arguments for seed in range(50)]
        tried = {(each["query"].shape[-1], each[heads] // each["num_key_value_heads"]) for each in calls}
        assert {(64, 2), (64, 4), (64, 7)} <= tried
    assert (14, 2) in HEADS, "a captured step is asked for them, too"


def test_a_product_is_asked_for_what_it_has() -> None:
    assert list(makers(A2)) == list(MAKERS)
    assert not makers(A1)
    for operator in makers(P310):
        floats = {
            each.dtype
            for seed in range(3)
            for each in sample_call(operator, seed, P310).arguments.values()
            if isinstance(each, torch.Tensor) and each.is_floating_point()
        }
        assert floats <= {torch.float16}


def test_a_device_says_which_product_it_is() -> None:
    names = {"Ascend310P3": "310P", "Ascend910B4-1": "910B", "Ascend910_9391": "910C", "Ascend910A": "910"}
    found = {chip: product_of(chip) for chip in names}
    assert {chip: each.name for chip, each in found.items() if each} == names
    assert product_of("Ascend999") is None


@pytest.mark.slow
@pytest.mark.npu
@pytest.mark.usefixtures("device")
def test_the_command_tells_every_operator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--virtual", "--calls", "2", "--seed", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["operator"] for each in told] == list(MAKERS)
    assert all(each["num_right"] == each["num_calls"] == 2 and each["is_right"] for each in told)
