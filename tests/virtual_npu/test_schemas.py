"""The operators as the real torch_npu registers them, and as they answer on npu:0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.each_of import each_of
from tests.virtual_npu.batches import first_version, paged
from tests.virtual_npu.right_calls import DRAWN, RIGHT, Arguments
from virtual_npu.contract import Conditions, ContractError, Operator
from virtual_npu.operators import OPERATORS, operator

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


@pytest.fixture
def under(device: Any) -> Iterator[Callable[[Conditions], None]]:
    """Put the device under other conditions, until the test ends."""
    before = device.conditions
    yield lambda conditions: device.contract(replace(conditions, capture=device.capture))
    device.contract(before)


def of_the_wheel(each: Operator) -> torch._ops.OpOverload:
    """The operator as torch_npu registers it."""
    space, _, name = each.qualified.partition("::")
    short, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), short), overload or "default")


@each_of("each", OPERATORS)
def test_a_schema_is_the_wheels_own(each: Operator) -> None:
    assert str(of_the_wheel(each)._schema) == str(each.parsed)


def has_meta_kernel(each: Operator) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(each.qualified, "Meta")


def test_only_these_have_no_meta_kernel() -> None:
    """Their outputs are given, or the wheel does not say what they are."""
    ends = (".out", "_workspace", "_format_cast", "_int4pack")
    bare = {each.qualified for each in OPERATORS if not has_meta_kernel(each)}
    assert bare == {
        each.qualified for each in OPERATORS if each.qualified.startswith("atb::") or each.name.endswith(ends)
    }


@pytest.mark.slow
def test_references_return_what_the_wheels_meta_kernels_say() -> None:
    for each in filter(has_meta_kernel, OPERATORS):
        for seed in range(2):
            arguments, conditions = RIGHT[each.name](np.random.default_rng(seed))
            if each.name == "npu_top_k_top_p" and not {"p", "k"} <= set(arguments):
                continue  # the schema lets both be left out, the wheel's meta kernel neither
            said = of_the_wheel(each)(**moved(arguments, "meta"))
            made = each(conditions, **arguments)
            assert [described(one) for one in tensors(said)] == [described(one) for one in tensors(made)]


@each_of("each", [each for each in OPERATORS if each.name in DRAWN])
def test_a_call_on_the_device_comes_to_what_the_reference_makes(
    each: Operator, under: Callable[[Conditions], None]
) -> None:
    """What a verification draws, test_verify.py compares on the device."""
    for seed in range(2):
        arguments, conditions = RIGHT[each.name](np.random.default_rng(seed))
        under(conditions)
        on_device = moved(arguments, "npu")
        results = list(tensors(of_the_wheel(each)(**on_device)))
        wants = list(tensors(each(conditions, **arguments)))
        assert all(one.device == torch.device("npu:0") for one in results)
        if each.name.endswith("workspace"):
            assert [described(one) for one in results] == [described(one) for one in wants]
            continue
        same(results, wants)
        same(
            tensors(list(on_device.values())), tensors(list(arguments.values()))
        )  # what was written in place


def test_a_wrong_call_on_the_device_is_refused_by_name() -> None:
    x = torch.ones(4, 64, dtype=torch.bfloat16, device="npu")
    with pytest.raises(
        ContractError, match=r"npu_rms_norm: gamma is bfloat16 \(32,\) for bfloat16 \(4, 64\)"
    ):
        torch.ops.npu.npu_rms_norm(x, x[0, :32])


def test_attention_is_captured_in_a_task_group_with_its_outputs_given() -> None:
    arguments, _ = paged(np.random.default_rng(0), torch.bfloat16, lens=[(1, 20), (1, 30)])
    there = moved(first_version(arguments) | {"softmax_lse_flag": False}, "npu")
    name = "npu_fused_infer_attention_score"
    attend = getattr(torch.ops.npu, name)
    want = attend(**there)[0]
    out = [torch.empty_like(want), torch.empty(1, device="npu")]
    there["workspace"] = getattr(torch.ops.npu, f"_{name}_get_max_workspace")(**there)

    with pytest.raises(ContractError, match="capture-form"), torch.npu.graph(torch.npu.NPUGraph()):
        attend(**{key: value for key, value in there.items() if key != "workspace"})
    with pytest.raises(ContractError, match="task-group"), torch.npu.graph(torch.npu.NPUGraph()):
        attend.out(**there, out=out)

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.npu.graph_task_group_begin(torch.npu.current_stream())
        attend.out(**there, out=out)
        torch.npu.graph_task_group_end(torch.npu.current_stream())
    graph.replay()
    torch.npu.synchronize()
    assert torch.equal(out[0].cpu(), want.cpu())


def test_a_call_with_lengths_as_a_tensor_has_become_a_list() -> None:
    """torch turns them into one before any kernel sees them; the contract asks for lists where it can."""
    name = "npu_fused_infer_attention_score"
    for seed in range(20):
        arguments, conditions = RIGHT[name](np.random.default_rng(seed))
        if arguments.get("actual_seq_lengths") is not None:
            lengths = torch.tensor(arguments["actual_seq_lengths"])
            with pytest.raises(
                ContractError, match="actual_seq_lengths is a Tensor where the schema has List"
            ):
                operator(name)(conditions, **arguments | {"actual_seq_lengths": lengths})
            return
    raise AssertionError("no call with lengths was drawn")


def moved(arguments: Arguments, device: str) -> Arguments:
    """The arguments on a device, each tensor a copy with its own strides."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            return there if device == "meta" else there.copy_(value)
        return [move(each) for each in value] if isinstance(value, list) else value

    return {name: move(value) for name, value in arguments.items()}


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def described(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def same(ones: Any, others: Any) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
