"""The comparison of products covers all linears of the layers, and names what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from benchmark.micro import kernels
from models.ops.cpu.products import Products, products
from recipes.assembly.families import model_config
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from scripts.benchmark import main

TINY = ("recipes/tiny/cpu.yaml", "device.compile=false", "device.threads=1")


@pytest.mark.skipif(not isinstance(products(), Products), reason=str(products()))
def test_every_linear_of_the_layers_is_multiplied_by_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = 0

    def passed_s(turn: Callable[[], None]) -> float:
        """Let oneDNN's turns take 3 s and the others 2 s; the first of each, which is cold, takes a day."""
        nonlocal turns
        turn()
        turns += 1
        return 86_400.0 if turns % 6 in (1, 2) else 3.0 - (turns + 1) % 2

    monkeypatch.setattr(kernels, "processor_s", passed_s)
    main(["device", "--kernels", *TINY, "--rows", "2,40", "--repeats", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    config = model_config(load(TINY[0], TINY[1:], None))
    heads, hidden = config.head_dim * (config.num_heads + config.num_kv_heads), config.hidden_size
    numbers = config.num_layers * hidden * (2 * heads + 3 * config.intermediate_size)
    assert turns == 12
    assert result["linears"] == 4 * config.num_layers
    assert [row["rows"] for row in result["products"]] == [2, 40]
    for row in result["products"]:
        assert row["times_onednn"] == 1.5
        operations = 2 * numbers * row["rows"]
        assert row["own_gflop_per_s"] == pytest.approx(operations / 2e9, abs=0.051)
        assert row["onednn_gflop_per_s"] == pytest.approx(operations / 3e9, abs=0.051)
    kernels.print_table(result)
    assert "| 40 |" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused_by_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, experts, weights in int8, and a machine without a compiler are named."""

    def refused(*given: str) -> str:
        with pytest.raises(RecipeError) as error:
            kernels.measure(load(given[0], given[1:], None), [1], 1)
        return str(error.value)

    assert "is no CPU" in refused("recipes/tiny/npu.yaml", "device.virtual=true")
    monkeypatch.setattr(kernels, "products", lambda: object())  # nothing is multiplied below
    assert "has experts" in refused("recipes/bench/mixtral_500m.yaml")
    assert "has quantized weights" in refused(*TINY, "model.quantization=w8a8")
    monkeypatch.setattr(kernels, "products", lambda: "there is no C++ compiler g++")
    assert "there is no C++ compiler g++" in refused(*TINY)
