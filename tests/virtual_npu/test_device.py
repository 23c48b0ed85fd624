"""torch finds one NPU in the host's memory, and the operators that it knows run there."""

from __future__ import annotations

import gc

import pytest
import torch

import virtual_npu
from virtual_npu.__main__ import main

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device")]


def test_torch_sees_one_device_of_that_name(device):
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == device.chip
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_memory_is_counted():
    gc.collect()  # what earlier tests left, and what would go while this one counts
    torch.npu.synchronize()
    before, (_, total) = torch.npu.memory_allocated(), torch.npu.mem_get_info()
    # At most 1 MiB with its padding: torch_npu cuts a larger tensor from a free block as it likes, and leaves
    # up to 1 MiB of it uncut where earlier tests left such a block; a smaller tensor's block is always cut.
    held = torch.empty(1 << 19, dtype=torch.uint8, device="npu")
    assert before + held.nbytes <= torch.npu.memory_allocated() <= before + held.nbytes + 512
    assert torch.npu.memory_reserved() >= torch.npu.memory_allocated()
    free, still = torch.npu.mem_get_info()  # the host's memory, of which other processes take and give back
    assert 0 < free <= total == still
    assert torch.npu.max_memory_allocated() >= before + held.nbytes
    del held
    assert torch.npu.memory_allocated() == before


def test_too_much_is_refused_as_torch_refuses_it():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(torch.npu.mem_get_info()[1] + 1, dtype=torch.uint8, device="npu")


def test_a_second_device_is_refused():
    with pytest.raises(ValueError, match="start another process"):
        virtual_npu.start(memory_bytes=1 << 30)
    with pytest.raises(ValueError, match="Ascend910B1"):
        virtual_npu.start("Ascend1")


def test_the_command_takes_one_chip(capsys):
    assert main(["Ascend910B1", "Ascend950"]) == 2
    assert "2 chips are named" in capsys.readouterr().err
