"""Decodes that choose what they read take turns with those that read all."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from attention.sparse import SparseAttention
from benchmark.micro import index
from recipes.schema.recipe_error import RecipeError
from scripts.benchmark import main

SPARSE = ("recipes/bench/deepseek_v3.2_4_layers.yaml", "model.config.num_hidden_layers=1")


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

    monkeypatch.setattr(index, "processor_s", passed_s)
    main(["device", "--index", *SPARSE, "--contexts", "300,420", "--repeats", "2", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert turns == [True, False] * 6
    assert result["chosen"] == 256
    assert [(each["context"], each["times_all"]) for each in result["decodes"]] == [(300, 2.5), (420, 2.5)]
    index.print_table(result)
    assert "| 420 | 2000.0 | 5000.0 | 2.5 |" in capsys.readouterr().out


def test_a_model_without_an_indexer_and_another_device_are_refused() -> None:
    with pytest.raises(RecipeError, match="has no indexer; choose a recipe of DeepSeek"):
        main(["device", "--index", "recipes/tiny/cpu.yaml"])
    with pytest.raises(RecipeError, match="no CPU, whose time is counted"):
        main(["device", "--index", SPARSE[0], "device.kind=npu", "device.threads=null"])
