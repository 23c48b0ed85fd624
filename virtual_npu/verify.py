"""Check that the device at hand computes what the contract says.

    python -m virtual_npu.verify [--calls 50] [--seed 0] [--product 310P] [--virtual] [--json]

The command draws calls of every operator as the engine makes them on the product, runs them on npu:0, and
compares the results that the engine uses, or the arguments that are filled, with the reference on the CPU.
The exit status is 0 where all are close enough, otherwise 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from virtual_npu.contract import Conditions
from virtual_npu.operators import operator as contract_of
from virtual_npu.sample_calls import FRACTAL_NZ, SampleCall, makers, sample_call
from virtual_npu.simulated_products import A2, PRODUCTS, Product

PACKER = "npu_convert_weight_to_int4pack"
READ_ON_HOST = "seq_len"  # ATB reads the lengths of queries on the host
Runs = Callable[[str, Mapping[str, Any]], Any]  # runs an operator by name on arguments


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """The outcome of one operator's calls; `worst` is the largest distance, relative to what is allowed."""

    operator: str
    num_calls: int
    num_right: int
    worst: float
    first_fault: str | None  # includes the seed that draws the same call

    @property
    def is_right(self) -> bool:
        return self.num_right == self.num_calls


def verify(
    operator: str, runs: Runs, device: torch.device | str, num_calls: int, seed: int, product: Product = A2
) -> OperatorResult:
    """Run an operator's calls one after the other; an error counts as a fault of its call."""
    num_right, worst, fault = 0, 0.0, None
    for each in range(seed, seed + num_calls):
        call = sample_call(operator, each, product)
        try:
            distance = _distance(call, runs, device)
            message = f"{distance:.3g} times as far from the reference as allowed"
        except (RuntimeError, ValueError, AttributeError) as error:
            distance, message = float("inf"), " ".join(str(error).split())[:500]
        if distance <= 1:
            num_right += 1
        elif fault is None:
            fault = f"seed {each}: {message}"
        worst = max(worst, distance)
    return OperatorResult(operator, num_calls, num_right, worst, fault)


def on_device(operator: str, arguments: Mapping[str, Any]) -> Any:
    """Run an operator of torch_npu; its outputs lie on the arguments' device."""
    import torch_npu  # imported here because the import loads CANN

    return getattr(torch_npu, operator)(**arguments)


def _distance(call: SampleCall, runs: Runs, device: torch.device | str) -> float:
    """Return the largest distance of any result, relative to what is allowed; above 1 is a fault."""
    reference = partial(contract_of(call.operator), Conditions(product=call.product))
    expected_arguments = sent(call, "cpu")
    arguments = sent(call, device)
    expected = _looked_at(call, reference(**expected_arguments), expected_arguments)
    found = _looked_at(call, runs(call.operator, arguments), arguments)
    if len(found) != len(expected):
        raise ValueError(f"{len(found)} tensors came back where {len(expected)} were expected")
    return max((_apart(one.cpu(), other, call) for one, other in zip(found, expected)), default=0.0)


def _apart(found: Tensor, expected: Tensor, call: SampleCall) -> float:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"a result is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    if torch.equal(found, expected):
        return 0.0
    near, want = call.near(found.dtype), expected.double()
    gap = (found.double() - want).abs()
    allowed = near if found.dtype == torch.int8 else near * (1 + want.abs())
    return float((gap / allowed).nan_to_num(nan=torch.inf).max()) if near else float("inf")


def _looked_at(call: SampleCall, result: Any, arguments: Mapping[str, Any]) -> list[Tensor]:
    results = [result] if isinstance(result, Tensor) else list(result or ())
    chosen = results if call.results is None else [results[index] for index in call.results]
    if call.in_any_order:
        chosen = [each.sort(-1).values for each in chosen]
    return [*chosen, *(arguments[name] for name in call.written)]


def sent(call: SampleCall, device: torch.device | str) -> dict[str, Any]:
    """Return the call's arguments, copied to a device except those that are read on the host."""
    arguments = dict(call.arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != READ_ON_HOST:
            arguments[name] = value.clone().to(device)
            if name in call.packed:
                arguments[name] = _packed(arguments[name], call.product)
            if name in call.tiled:
                arguments[name] = _tiled(arguments[name])
        elif isinstance(value, list) and isinstance(value[0], Tensor):
            arguments[name] = [each.clone().to(device) for each in value]
            if name == "weight" and value[0].dim() == 3 and value[0].dtype in (torch.int32, torch.int8):
                arguments[name] = [_of_experts(arguments[name][0], call)]
    return arguments


def _of_experts(weight: Tensor, call: SampleCall) -> Tensor:
    """Return weights [E, K, N] of experts, in int8 or as numbers of 4 bits, as the device takes them."""
    if weight.dtype == torch.int32 and call.arguments["x"][0].dtype != torch.int8:
        return torch.stack([_packed(each, call.product) for each in weight])
    if weight.dtype == torch.int8:
        return _tiled(weight)
    low, high = (weight[..., first::2].to(torch.int8) for first in (0, 1))
    return _tiled((low & 15) | (high << 4)).view(torch.int32)


def _tiled(weight: Tensor) -> Tensor:
    """Return a weight in FRACTAL_NZ, which a CPU does not have."""
    if weight.device.type == "cpu":
        return weight
    found: Tensor = on_device("npu_format_cast", {"input": weight, "acl_format": FRACTAL_NZ})
    return found


def _packed(numbers: Tensor, product: Product) -> Tensor:
    """Pack 4-bit numbers by the device that holds them, which also multiplies with them."""
    if numbers.device.type == "cpu":
        made: Tensor = contract_of(PACKER)(Conditions(product=product), numbers)
        return made
    found: Tensor = on_device(PACKER, {"weight": numbers})
    return found


def product_of(chip: str) -> Product | None:
    """Return the product one of whose chips begins the device's name, as in Ascend910B4-1, or None."""
    return next((each for each in PRODUCTS.values() if chip.startswith(each.chips)), None)


def in_words(results: Sequence[OperatorResult]) -> str:
    """Format one line for each operator."""
    lines = [f"{'operator':36}{'calls':>6}{'right':>6}{'worst':>8}"]
    for each in results:
        lines.append(f"{each.operator:36}{each.num_calls:>6}{each.num_right:>6}{each.worst:>8.2f}")
        lines += [f"    {each.first_fault}"] if each.first_fault else []
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Verify every operator; returns 0 where all are right."""
    parser = argparse.ArgumentParser(
        prog="python -m virtual_npu.verify",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=50, metavar="N", help="of each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--product", choices=PRODUCTS, help="default: what the device calls itself")
    parser.add_argument("--virtual", action="store_true", help="on the stand-in, by itself a 910B")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(argv)
    for name, least, most in (("calls", 1, 10_000), ("seed", 0, 2**32 - 1)):
        if not least <= getattr(options, name) <= most:
            parser.error(f"--{name} is {getattr(options, name)}; it must be from {least:,} to {most:,}")
    product = PRODUCTS.get(options.product)
    if options.virtual:
        from virtual_npu.device import start

        product = product or A2
        start(product.chips[0])
    import torch_npu  # imported here because the import loads CANN

    chip = torch_npu.npu.get_device_name(0)
    product = product or product_of(chip)
    if product is None:
        parser.error(f"the device calls itself {chip}, which is no product known here: give --product")
    # A cast without it leaves pages and weights as they are.
    torch_npu.npu.config.allow_internal_format = True
    results = [
        verify(name, on_device, "npu:0", options.calls, options.seed, product) for name in makers(product)
    ]
    if options.json:
        print(json.dumps([asdict(each) | {"is_right": each.is_right} for each in results], indent=2))
    else:
        print(in_words(results))
    return int(not all(each.is_right for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
