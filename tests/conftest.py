"""Hooks and fixtures that hold for all tests.

They order slow files first, fix what torch draws, restore the log's level, check that a test leaves no stream
blocked on the virtual NPU, and end a run with an error where one of its workers crashes.
"""

import atexit
import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.each_of import same_numbers
from tests.thorough import THOROUGH

# The tests' tensors are tiny: a second thread would only wait, and for long on a busy machine
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Triton's kernels run in its interpreter without a GPU, which must be known when Triton is first imported
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says more of the machine's neighbours than of us. The same examples in every run,
# so that a change is judged by what it does; `scripts/test.sh --thorough` looks for new ones.
settings.register_profile("untimed", deadline=None, derandomize=not THOROUGH)
settings.load_profile("untimed")

# Settings to ask only whether a test fails: `pytest --hypothesis-profile=no_shrink`
settings.register_profile(
    "no_shrink",
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
    deadline=None,
    derandomize=not THOROUGH,
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep the garbage collector away from what collection makes: all of it lives until the end of the run.

    Collection makes millions of objects and no garbage; each later pass over them would cost half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # Triton reports what is not freed when the interpreter ends
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: of two workers, none is left alone with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


_CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Remember that a worker crashed, for which the run may name no test, as within its collection."""
    if error is not None:
        node.config.stash[_CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End a run whose worker crashed with an error: the tests that wait for one are left out."""
    if session.config.stash.get(_CRASHED, False):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Ranks are forks of a process that has done their imports, which take each two CPU-seconds."""
    from tests.serving.warm import forked_processes

    with forked_processes():
        yield


@pytest.fixture(autouse=True)
def as_if_alone() -> Iterator[None]:
    """What a test draws, logs and leaves on the virtual NPU does not hang on the tests before it.

    A verb that a test runs in this process sets the level of the log, and a server's writes it to where it
    was told to. A test that leaves a stream blocked or
    another one current is the one that fails, not those after it.
    """
    same_numbers()
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler).__name__ == "Lines":
            root.removeHandler(handler)
    stand_in = sys.modules.get("virtual_npu.device")
    if stand_in is None or not stand_in._started:
        return
    import torch

    left = sum(device.abandon() for device in stand_in._started)
    current, default = torch.npu.current_stream(), torch.npu.default_stream()
    torch.npu.set_stream(default)
    assert not left, f"{left} streams of the virtual NPU still wait for an event that nothing records"
    assert current == default, "the current stream is not that of the tests before"
