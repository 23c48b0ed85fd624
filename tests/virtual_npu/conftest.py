"""The virtual NPU of these tests, started once in their process."""

from __future__ import annotations

import os

import pytest

import virtual_npu
from tests.device_kinds import npu
from virtual_npu import libraries


@pytest.fixture(scope="session")
def device() -> virtual_npu.VirtualDevice:
    """The one of this process, with the memory of the host; the other tests' is the same."""
    if npu() == "real":
        pytest.skip("there is a real NPU, beside which no stand-in starts")
    try:
        libraries.wheel()
    except FileNotFoundError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    return virtual_npu.start()


@pytest.fixture(autouse=True)
def own_release(request: pytest.FixtureRequest) -> None:
    """Each test has the installed release, whichever other one the process has shown to a recipe before."""
    if "device" in request.fixturenames:
        request.getfixturevalue("device")
        virtual_npu.start()
