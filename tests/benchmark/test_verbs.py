"""Each verb is declared once: its help, its parser and the manual's list are those of one table."""

from __future__ import annotations

import inspect
import re

import pytest

from benchmark.verbs import BENCHMARKS, SIMULATIONS, Verb, function, listed
from recipes.schema.recipe import ROOT
from scripts.benchmark import main


@pytest.mark.parametrize("verb", [*BENCHMARKS, *SIMULATIONS], ids=lambda verb: f"{verb.name}-{verb.mode}")
def test_a_verb_names_functions_that_are_there(verb: Verb) -> None:
    assert list(inspect.signature(function(verb.run)).parameters) == ["options"]
    if verb.table:
        assert list(inspect.signature(function(verb.table)).parameters) == ["result"]
    flags = [each.flag for each in verb.options]
    assert len({*flags}) == len(flags)


def test_the_manual_has_the_table() -> None:
    assert listed() in (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")


def test_the_manuals_name_no_verb_or_mode_that_is_not_there() -> None:
    known = {
        each.name: {other.mode for other in BENCHMARKS if other.name == each.name} for each in BENCHMARKS
    }
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*/README.md")]:
        for name in re.findall(r"scripts\.benchmark ([a-z][\w-]*)", path.read_text(encoding="utf-8")):
            assert name in known, f"{path.name} names scripts.benchmark {name}"


def test_help_names_every_way_of_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], [each.help for each in BENCHMARKS]),
        (["device", "--help"], ["--launches", "--decode", "(default: 20)"]),
        (["serve", "--overload", "--help"], ["samples at once: server.max_requests"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert not [each for each in words if each not in text]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        ([], "name a VERB"),
        (["serve", "--fleet", "--overload", "recipes/tiny/cpu.yaml"], "arguments: --overload"),
        (["device", "--launches", "recipes/tiny/cpu.yaml", "--repeats", "2"], "arguments: --repeats 2"),
    ],
)
def test_a_way_takes_its_own_options_alone(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
