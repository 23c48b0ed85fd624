"""Every number on a command line has a least and a most, which one line names when it is exceeded."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from recipes.schema.numbers import MOST_COUNT, real, whole, wholes
from recipes.schema.recipe import ROOT
from tests.each_of import each_of

RECIPE = "recipes/tiny/cpu.yaml"
SERVED = ["--base-url", "http://127.0.0.1:9", "--trace", "none"]
ABSURD = ("1e20", "1e-300", "-1", "nan", "9" * 5000, "\u0669", "")
# Each verb with the options of numbers that it has; all are refused before anything is read or begun
OPTIONS = {
    "generate": ([RECIPE, "--prompt", "a"], ["--max-tokens"]),
    "serve": ([RECIPE], ["--port"]),
    "demo": ([], ["--requests", "--rate"]),
    "top": (["http://127.0.0.1:9"], ["--every"]),
    "verify": ([RECIPE], ["--calls"]),
    "reproduce": (["--output", "none"], ["--jobs"]),
    "trace": (
        ["--output", "none"],
        ["--requests", "--rate", "--think-s", "--vocab-size", "--seed", "--arrivals=gamma:{}",
         "--arrivals=ramp:{}", "--arrivals=closed:{}", "--prompt-tokens", "--output-tokens", "--turns",
         "--system-prompts={}:9", "--priorities={}=1", "--tenants=a={}"],
    ),
    "simulate": ([RECIPE, "--trace", "none"], ["--tp", "--pp", "--dp", "--split=1:{}"]),
    "simulate routes": ([RECIPE, "--trace", "none"], ["--tp", "--dp"]),
    "simulate splits": ([RECIPE, "--trace", "none"], ["--tp", "--split=1:{}"]),
    "simulate search": (
        [RECIPE, "--trace", "none", "--ttft-ms", "9", "--itl-ms", "9"],
        ["--ttft-ms", "--itl-ms", "--percent", "--tp", "--dp", "--chunk", "--slots"],
    ),
    "benchmark serve": (
        SERVED,
        ["--num-prompts", "--max-concurrency", "--num-warmups", "--seed", "--request-timeout-s",
         "--ready-check-timeout-sec", "--request-rate", "--goodput=ttft:{}"],
    ),
    "benchmark sweep": ([*SERVED, "--result-dir", "none"], ["--request-rates"]),
    "benchmark offline": ([RECIPE, "--trace", "none"], ["--runs"]),
    "benchmark host": ([], ["--slots", "--page-sizes", "--chunk", "--steps"]),
    "benchmark device": ([RECIPE], ["--repeats"]),
}  # fmt: skip
# What is a number for some options: a length or a time of 0 is one, and no one's answer changes with it
ALLOWED = {("trace", "--think-s", "1e-300")}
ALLOWED |= {("benchmark serve", option, "1e-300") for option in ("--ready-check-timeout-sec",)}
ALLOWED |= {("trace", "--priorities={}=1", "-1")}


@each_of("verb, option", [(verb, option) for verb, (_, options) in OPTIONS.items() for option in options])
def test_an_absurd_number_is_refused_in_one_line_that_names_the_option(
    verb: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is nothing to read
    script, *sub_verb = verb.split()
    required, _ = OPTIONS[verb]
    for value in ABSURD:
        if (verb, option, value) in ALLOWED:
            continue
        given = option.format(value) if "{}" in option else f"{option}={value}"
        with pytest.raises(SystemExit):
            import_module(f"scripts.{script}").main([*sub_verb, *required, given])
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {option.partition('=')[0]}: " in line, f"{value[:20]}: {line}"


PLAIN = ("int", "float")


def numbers_without_bounds() -> Iterator[str]:
    """Options that argparse reads as any int or float."""
    for path in sorted(
        each for room in ("scripts", "benchmark", "recipes") for each in (ROOT / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "type" and ast.unparse(node.value) in PLAIN:
                yield f"{path.relative_to(ROOT)}:{node.value.lineno}"


def test_every_number_has_bounds() -> None:
    assert list(numbers_without_bounds()) == []


def test_a_number_within_its_bounds_is_taken() -> None:
    assert [whole(0, 9)(each) for each in ("0", "9")] == [0, 9]
    assert whole(-5, 5)("-5") == -5
    assert wholes(1, MOST_COUNT)("1,1000000") == [1, 10**6]
    assert [real(0.5, 9)(each) for each in ("0.5", "9")] == [0.5, 9.0]
    assert real(1, 9, endless=True)("inf") == float("inf")
    for read, text, words in (
        (whole(1, 1000), "1001", "'1001' must be an integer from 1 to 1000"),
        (wholes(1, 9), "1,,2", "'' must be an integer from 1 to 9"),
        (real(1, 9), "inf", "'inf' must be a number from 1 to 9"),
        (real(1, 9, endless=True), "x", "'x' must be a number from 1 to 9, or inf"),
    ):
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            read(text)
        assert str(caught.value) == words


@pytest.mark.parametrize("name", ["101", "a.foo", "a"])
def test_a_picture_has_a_kind(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        import_module("scripts.demo").main(["--output", f"{tmp_path}/{name}"])
    assert "is no name of a picture; it must end in .png, .svg, .pdf" in capsys.readouterr().err
