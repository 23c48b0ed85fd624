"""Run a table of small cases as one test, which names every case that fails.

`pytest.mark.parametrize` makes a test of each case, with its own place in each worker's collection, its own
report and a round of fixtures; that is right where a case takes longer than these, about 2 ms, or needs
fixtures of its own. All cases of `each_of` share the fixtures of their test.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_MOST_SHOWN = 10


def each_of(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the decorated test once for each case, with the case as the arguments of these names.

    It is written as `pytest.mark.parametrize` is. Every case is run whatever the others do, with what torch
    draws begun anew. Where some cases skip and others do not, those that skip are failures, since nobody
    would see them.
    """
    parameters = [name.strip() for name in names.split(",")]
    table = tuple(cases)
    assert table, "there is no case"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed: list[tuple[str, BaseException]] = []
            for case in table:
                values = [case] if len(parameters) == 1 else [*case]
                same_numbers()
                try:
                    test(**fixtures, **dict(zip(parameters, values, strict=True)))
                # Every case is run, and what each of them raises is told at the end
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - told below
                    said = ", ".join(f"{name}={value!r:.80}" for name, value in zip(parameters, values))
                    failed.append((said, error))
            if len(failed) == len(table) and all(isinstance(e, pytest.skip.Exception) for _, e in failed):
                raise failed[0][1]
            if failed:
                lines = [f"{said}: {type(error).__name__}: {error}" for said, error in failed[:_MOST_SHOWN]]
                told = "\n".join([f"{len(failed)} of {len(table)} cases fail", *lines])
                raise AssertionError(told) from failed[0][1]

        signature = inspect.signature(test)
        kept = [each for each in signature.parameters.values() if each.name not in parameters]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # pytest reads it
        return run

    return decorate


def same_numbers() -> None:
    """Let torch draw what it draws at the beginning of every test, if a test file has imported it.

    `torch.manual_seed` notes the stack for each kind of device that is not there, which takes 0.3 ms.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    if hasattr(torch, "npu"):
        torch.npu.manual_seed_all(0)
