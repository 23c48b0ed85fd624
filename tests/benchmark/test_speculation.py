"""The speculation benchmark compares the kinds of drafts that it names, beside plain decoding."""

from __future__ import annotations

import json

import pytest

from benchmark.gate.gate import audit
from recipes.schema.recipe import Recipe
from scripts.benchmark import main

TINY = "recipes/tiny/cpu.yaml"


@pytest.mark.slow
def test_every_kind_is_beside_plain_decoding(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--loads", "1,2", "--prompt", "8", "--answer", "6", "--runs", "1"]
    kinds = ["ngram, fixed", "suffix, throughput"]
    main(["speculation", TINY, *sizes, "--kinds", *kinds, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"]["outcome"] == "pass"
    assert {"clocks", "digests"} <= {*result["verdict"]["passed"]}
    rows = result["rows"]
    assert [(row["text"], row["slots"], row["kind"]) for row in rows] == [
        (text, slots, kind)
        for text in ("quoting", "ordinary", "random")
        for slots in (1, 2)
        for kind in ("plain", *kinds)
    ]
    assert all(row["times_plain"] == 1 and row["drafted"] == 0 for row in rows if row["kind"] == "plain")
    assert all(0 <= row["accepted"] <= row["drafted"] for row in rows)
    rows[1]["times_plain"] *= 1.1
    assert audit(result)["refused"] == {"digests": "rows was changed"}


def test_numbers_of_guesses_are_held_to_the_most_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Built(Exception):
        """The recipe has been read."""

    def build(recipe: Recipe) -> None:
        raise Built(recipe.speculation)

    monkeypatch.setattr("recipes.assembly.engine.build", build)
    asked = ["speculation.adaptive=source", "speculation.base_tokens=6", "speculation.kind=ngram"]
    with pytest.raises(Built) as built:
        main(["speculation", TINY, *asked, "--most", "8"])
    assert (built.value.args[0].base_tokens, built.value.args[0].max_tokens) == (6, 8)
    with pytest.raises(ValueError, match="6 guesses are not from 0 to 5"):
        main(["speculation", TINY, *asked, "--most", "5"])
    with pytest.raises(ValueError, match=r"read only where speculation\.kind is not none"):
        main(["speculation", TINY, *asked[:2], "--most", "8"])


EAGER = ["model.dtype=float32", "device.compile=false", "device.threads=1"]
SIZES = ["--loads", "2", "--prompt", "8", "--answer", "12", "--runs", "1"]


@pytest.mark.slow
def test_a_draft_model_that_the_recipe_names_takes_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.offline.speculation.TEXTS", ("quoting",))
    draft = ["speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft"]
    kinds = ["--kinds", "draft, throughput", "draft, fixed"]
    main(["speculation", TINY, *draft, *EAGER, *SIZES, *kinds, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"]["outcome"] == "pass"
    assert result["left_out"] == []
    drafted = [row for row in result["rows"] if row["kind"] == "draft, fixed"]
    assert [row["text"] for row in drafted] == ["quoting"]
    assert 0 < drafted[0]["accepted"] <= drafted[0]["drafted"]


@pytest.mark.slow
def test_a_draft_model_that_is_not_named_is_left_out_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.offline.speculation.TEXTS", ("random",))
    main(["speculation", TINY, *EAGER, *SIZES, "--loads", "1", "--answer", "3"])
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "draft" in line] == [
        "draft: left out, since the recipe names no draft model; add speculation.kind=draft"
        " speculation.draft_path=DIRECTORY",
        "eagle3: left out, since the recipe names no head; add speculation.kind=eagle3"
        " speculation.draft_path=DIRECTORY",
    ]
    with pytest.raises(ValueError, match="--kinds 'draft, fixed': the recipe names no draft model"):
        main(["speculation", TINY, *EAGER, *SIZES, "--kinds", "draft, fixed"])
