"""Two ways of the same work on a CPU take turns, over all that they say; what cannot be compared is named."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from attention.sparse import SparseAttention
from benchmark.micro import cpu
from models.ops.cpu.products import Products, products
from recipes.assembly.families import model_config
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from scripts.benchmark import main

SPARSE = ("recipes/bench/deepseek_v3.2_4_layers.yaml", "model.config.num_hidden_layers=1")
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

    monkeypatch.setattr(cpu, "processor_s", passed_s)
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
    cpu.print_products(result)
    assert "| 40 |" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused_by_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device, experts, weights in int8, and a machine without a compiler are named."""

    def refused(*given: str) -> str:
        with pytest.raises(RecipeError) as error:
            main(["device", "--kernels", *given])
        return str(error.value)

    assert "no CPU, whose time is counted" in refused("recipes/tiny/npu.yaml", "device.virtual=true")
    monkeypatch.setattr(cpu, "products", lambda: object())  # nothing is multiplied below
    assert "has experts" in refused("recipes/bench/mixtral_500m.yaml")
    assert "has quantized weights" in refused(*TINY, "model.quantization=w8a8")
    monkeypatch.setattr(cpu, "products", lambda: "there is no C++ compiler g++")
    assert "there is no C++ compiler g++" in refused(*TINY)


def test_both_engines_take_turns_at_each_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, chooses, choose = list[bool](), list[bool](), SparseAttention.choose
    monkeypatch.setattr(SparseAttention, "choose", lambda *given: chooses.append(True) or choose(*given))

    def passed_s(turn: Callable[[], object]) -> float:
        """A step that chooses takes 2 s and one that reads all 5 s; the first of each takes a day."""
        chooses.clear()
        turn()
        turns.append(bool(chooses))
        return 86_400.0 if len(turns) % 6 in (1, 2) else 2.0 if chooses else 5.0

    monkeypatch.setattr(cpu, "processor_s", passed_s)
    main(["device", "--index", *SPARSE, "--contexts", "300,420", "--repeats", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert turns == [True, False] * 6
    assert result["chosen"] == 256
    assert [(each["context"], each["times_all"]) for each in result["decodes"]] == [(300, 2.5), (420, 2.5)]
    cpu.print_decodes(result)
    assert "| 420 | 2000.0 | 5000.0 | 2.5 |" in capsys.readouterr().out


def test_a_model_without_an_indexer_and_another_device_are_refused() -> None:
    with pytest.raises(RecipeError, match="has no indexer; choose a recipe of DeepSeek"):
        main(["device", "--index", "recipes/tiny/cpu.yaml"])
    with pytest.raises(RecipeError, match="no CPU, whose time is counted"):
        main(["device", "--index", SPARSE[0], "device.kind=npu", "device.threads=null"])
