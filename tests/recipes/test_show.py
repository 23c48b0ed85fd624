"""`python -m recipes` as a person meets it."""

from __future__ import annotations

import pytest

from recipes import divisions
from recipes.__main__ import main
from recipes.assembly.families import SUPPORTED
from recipes.schema import verb
from recipes.schema.recipe import ROOT

LLAMA = "recipes/bench/llama_125m.yaml"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_show_prints_each_key_with_its_origin_and_the_sizing(capsys):
    main(
        [
            "show",
            LLAMA,
            "cache.page_size=32",
            "scheduler.fair_tenants=true",
            "scheduler.tenant_weights={a: 2, b: 1}",
        ]
    )
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "cache.page_size 32 command line: cache.page_size=32" in lines
    assert f"cache.num_pages 2048 {LLAMA}:27" in lines
    assert "cache.memory_gib null default" in lines
    weights = "scheduler.tenant_weights={a: 2, b: 1}"
    assert f"scheduler.tenant_weights {{a: 2, b: 1}} command line: {weights}" in lines
    assert "model.config llama, 15 keys recipes/bench/llama_125m.yaml:4" in lines
    assert "model llama, 124.7 M parameters, bfloat16" in lines
    assert "a page 32 tokens, 384.0 KiB over 12 layers" in lines
    assert "longest request 2,048 tokens (the model's positions)" in lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["absent.yaml"], "absent.yaml: no such file or directory\n"),
        (
            [LLAMA, "cache.page_sise=32"],
            "command line: cache.page_sise=32: cache.page_sise: unknown key; did you mean cache.page_size?\n",
        ),
        (
            ["recipes/any/cpu.yaml"],
            "recipes/any/cpu.yaml:3: model.path: required, or model.config in its place"
            "; add model.path=FOLDER, or name the folder in place of the recipe\n",
        ),
        (
            [LLAMA, "model.config.model_type=lama"],
            f"the model's family is 'lama'; supported are {', '.join(SUPPORTED)}\n",
        ),
        (
            [LLAMA, "scheduler.max_request_tokens=4096"],
            "command line: scheduler.max_request_tokens=4096: scheduler.max_request_tokens: 4096 is more than"
            " the 2048 positions of the model; lower it to 2048\n",
        ),
    ],
)
def test_what_cannot_be_used_is_one_line_and_status_2(capsys, arguments, line):
    with pytest.raises(SystemExit) as end:
        verb.run(lambda _: main(["show", *arguments]))
    assert end.value.code == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["model.quantization=w8a8"], "in W8A8; the 310P takes no scale for each token, 910B, 910C do: use"),
        (["cache.page_size=16"], r"cache\.page_size is 16; attention of the 310P takes 128 or 64 with he"),
        (["model.dtype=bfloat16"], "dtype is bfloat16; the 310P computes in float16 or float32: set model"),
        (["device.product=950", "model.quantization=w8a8"], "in W8A8; the 950 takes no scale for each token"),
    ],
)
def test_show_refuses_what_the_operators_of_the_product_do_not_take(capsys, keys, words):
    """As an engine on that product does, after the keys have been printed."""
    recipe = ["show", "recipes/any/310p.yaml", "model.path=recipes/tiny/weights", "device.memory_gib=22"]
    main(recipe)
    capsys.readouterr()
    with pytest.raises(ValueError, match=words):
        main([*recipe, *keys])
    assert "cache.dtype" in capsys.readouterr().out


def test_show_plans_pages_that_no_number_of_ranks_divides(capsys):
    small = ["cache.page_size=8", "device.attention=reference", "device.graphs=0", "device.memory_gib=22"]
    main(["show", "recipes/any/910b.yaml", "model.path=recipes/tiny/weights", *small])
    assert "divided pages" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_has_the_table_that_the_checks_make(capsys: pytest.CaptureFixture[str]) -> None:
    """Else replace the table by what `python -m recipes divisions` prints."""
    main(["divisions"])
    table = capsys.readouterr().out
    assert table in (ROOT / "docs/cluster.md").read_text()
    assert table.count("| yes") > len(divisions.FEATURES), "nothing is refused because of the model itself"
    for feature, settings in divisions.FEATURES.items():
        assert f"| {feature} | " in table, settings


def test_keys_that_replace_a_recipes_are_not_called_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show"])
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE\n")
