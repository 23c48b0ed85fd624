"""How is a function compiled once for all sizes of a batch, and called at little cost?

torch.compile finds out at each call whether its code still fits, which takes 19 us; here the caller says
beforehand what may vary, and a call takes 5. A decoder makes some 70 calls a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

# Per function, never process-wide: other users of torch's compiler keep their own settings.
OPTIONS: dict[str, Any] = {
    "assert_indirect_indexing": False,  # the scheduler owns the addresses
    "cpp.enable_floating_point_contract_flag": "fast",  # multiply and add in one instruction
    "size_asserts": False,
    "alignment_asserts": False,
    "compile_threads": 1,  # no pool of compiling processes, each with a torch of its own
}
# What ends a compilation where there is no compiler, or no Python headers
NO_COMPILER = ("InvalidCxxCompiler", "CppCompileError")

Dimensions = tuple[int, ...] | None


class Compiled:
    """`function` of tensors, compiled when it is first called.

    `dynamic` says for each argument which dimensions may vary; None is for one that is no tensor, whose
    every value is compiled for. All other dimensions are constants, because with every dimension symbolic
    the code is half as fast. A new dtype, constant dimension or stride compiles anew.

    Dimensions that vary must be at least 2, for the code may take a 1 as a constant; where the first
    argument's first such dimension is 1, the function itself is called.
    """

    def __init__(self, function: Callable[..., Any], dynamic: tuple[Dimensions, ...]) -> None:
        self._function = function
        self._dynamic = dynamic
        self._calls: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @property
    def num_graphs(self) -> int:
        """How many variants have been compiled."""
        return len(self._calls)

    def __call__(self, *args: Any) -> Any:
        if args[0].shape[self._dynamic[0][0]] == 1:
            return self._function(*args)
        kind: list[Any] = []
        for each, dimensions in zip(args, self._dynamic, strict=True):
            if dimensions is None:
                kind.append(each)
            elif dimensions == (0,):
                kind += (each.dtype, each.shape[1:], each.stride())
            elif dimensions:
                kind += (each.dtype, each.is_contiguous())
        call = self._calls.get(tuple(kind))
        if call is None:
            call = self._calls[tuple(kind)] = self._compile(args)
        return call(*[each for each in args if isinstance(each, Tensor)])

    def _compile(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))
        stand_ins = [
            each if dimensions is None else _stand_in(mode, each, dimensions)
            for each, dimensions in zip(args, self._dynamic, strict=True)
        ]
        tensors = [each for each in stand_ins if isinstance(each, Tensor)]

        def of_tensors(*given: Tensor) -> Any:
            rest = iter(given)
            return self._function(*[next(rest) if isinstance(each, Tensor) else each for each in args])

        with mode:
            graph = make_fx(of_tensors)(*tensors)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of parts of its own
                from torch._inductor.compile_fx import compile_fx  # here: it takes seconds

                call = compile_fx(graph, tensors, config_patches=OPTIONS)
        except Exception as error:
            if any(word in f"{type(error).__name__} {error}" for word in NO_COMPILER):
                raise ValueError(
                    f"device.compile is true, but {self._function.__name__} cannot be compiled "
                    f"({str(error).splitlines()[0]}); install g++ and Python's headers, "
                    "or set device.compile=false"
                ) from error
            raise
        for stand_in, dimensions in zip(stand_ins, self._dynamic):
            fixed = [d for d in dimensions or () if _is_fixed(stand_in.shape[d])]
            assert not fixed, f"{self._function.__name__} makes constants of dimensions {fixed}"
        return call


def _stand_in(mode: FakeTensorMode, tensor: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    sizes = [DimDynamic.DYNAMIC if d in dimensions else DimDynamic.STATIC for d in range(tensor.ndim)]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _is_fixed(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) or size.node.maybe_as_int() is not None
