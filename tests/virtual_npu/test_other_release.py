"""The stand-in takes only the calls of another release of torch_npu, and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import virtual_npu
from devices.ascend_limits import product
from devices.torch_npu_calls import ALL
from devices.torch_npu_releases import releases
from recipes.machine import start
from recipes.schema.recipe_error import RecipeError
from scripts import generate
from tests.device_kinds import section, stand_in_alone
from virtual_npu.other_release import OtherRelease

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("device"), stand_in_alone]


def other(version: str) -> OtherRelease:
    return OtherRelease(version, [call.operator for call in ALL], releases()[version].schemas)


@pytest.fixture(autouse=True)
def own_release() -> Iterator[None]:
    """The installed release again, after each test."""
    yield
    virtual_npu.start()


def test_an_argument_that_a_release_lacks_is_refused() -> None:
    import torch_npu

    virtual_npu.start(release=other("2.9.0"))
    cache = torch.zeros(4, 16, 2, 16, dtype=torch.bfloat16, device="npu:0")
    rows = torch.ones(3, 2, 16, dtype=torch.bfloat16, device="npu:0")
    index = torch.arange(16, 19, dtype=torch.int32, device="npu:0")
    with pytest.raises(TypeError, match=r"torch_npu 2\.9\.0: unexpected keyword argument 'cache_mode'"):
        torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), index, cache_mode="Norm")
    with pytest.raises(TypeError, match=r"npu_swiglu of torch_npu 2\.9\.0: 3 positional arguments"):
        torch_npu.npu_swiglu(rows, -1, 0)
    with pytest.raises(TypeError, match="missing argument 'gamma'"):
        torch_npu.npu_rms_norm(rows)
    assert not hasattr(torch_npu, "npu_moe_gating_top_k_softmax_v2")
    assert not hasattr(torch_npu.npu_swiglu, "out")
    virtual_npu.start()
    torch_npu.npu_scatter_pa_kv_cache(rows, rows, cache, cache.clone(), index, cache_mode="Norm")
    assert cache.flatten(0, 1)[16:19].eq(1).all()
    assert hasattr(torch_npu, "npu_moe_gating_top_k_softmax_v2")


@pytest.mark.parametrize(
    ("release", "chip", "lacks"),
    [
        ("2.9.0", "910B", "the argument cache_mode of npu_scatter_pa_kv_cache (every model)"),
        ("2.9.0", "910B", "npu_moe_gating_top_k_softmax_v2 (answers of scripts/verify_npu.sh)"),
        ("2.7.1", "910B", "npu_mla_prolog_v3"),
        ("2.9.0.post2", "310P", "_npu_paged_attention_splitfuse_v2 (every model)"),
    ],
)
def test_a_release_that_lacks_a_call_is_refused_at_start(
    release: str, chip: Any, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = section("npu", virtual_release=release)
    monkeypatch.setattr("recipes.machine.product", lambda asked, device: product(chip, ""))
    with pytest.raises(RecipeError) as refused:
        start(asked)
    assert lacks in str(refused.value)
    assert "docs/ascend.md names the releases that have them" in str(refused.value)


def test_a_release_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"there is no torch_npu 9\.9 in the table of releases; it has"):
        start(section("npu", virtual_release="9.9"))


@pytest.mark.slow
def test_a_recipe_gives_the_same_tokens_with_the_schemas_of_older_releases(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = set()
    for release in ("2.9.0.post2", "2.10.0.post4"):
        keys = ["device.virtual=true", f"device.virtual_release={release}"]
        generate.main(["recipes/tiny/npu.yaml", *keys, "--prompt", "348+275=", "--max-tokens", "8"])
        answers.add(capsys.readouterr().out)
    assert answers == {"623\n"}
