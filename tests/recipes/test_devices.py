"""A machine that is not here is refused in one line; the host tier takes device memory on a CPU only."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from devices.host_limits import host_memory_bytes
from recipes.machine import start
from recipes.schema.recipe import DeviceSection
from recipes.schema.recipe_error import RecipeError
from tests.recipes.test_sizing import made, refusal, sized
from tests.serving.warm import completed


def on(kind: str, **cache: object):
    return replace(made(**cache), device=DeviceSection(kind=kind))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_here_is_refused():
    with pytest.raises(RecipeError, match=r"device\.kind: torch .* finds no CUDA device; .* to cpu$"):
        start(DeviceSection(kind="cuda"))


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_an_npu_that_is_not_here_is_refused_in_one_line():
    done = completed("recipes", "show", "recipes/tiny/cpu.yaml", "device.kind=npu")  # which has no stand-in
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "device.kind: no NPU can be used here (No module named 'torch_npu'); correct that, or set" in line


def test_the_host_tier_is_no_part_of_a_device_with_its_own_memory():
    alone, tiered = sized(on("npu")), sized(on("npu", host_gib=1))
    assert tiered.num_host_pages > 1000
    assert tiered.total_bytes == alone.total_bytes
    assert sized(made(host_gib=1)).total_bytes == alone.total_bytes + tiered.host_bytes


def test_a_host_tier_beyond_the_host_is_refused_with_the_most_that_fits():
    text = refusal(on("npu", host_gib=2.0**20))
    assert text.startswith("cache.host_gib: 1048576.0 is more than the ")
    assert float(text.rpartition(" ")[2]) * 2**30 <= host_memory_bytes()
