"""A verb prints what its JSON holds: each figure under its own label, and the gate's verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmark import verbs
from benchmark.options import print_figures
from benchmark.serve import measure
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.benchmark.test_gate_measured import ENGINE, SMALL_VERBS, refused, trace

Result = dict[str, Any]
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w-])")
LAST = "spoilt: 1 figure is wrong"
VERDICT = {"outcome": "refused", "refused": {"spoilt": "1 figure is wrong"}, "passed": []}
REFUSED = f"refused; {LAST}"


def shown(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[Result, Callable[[Result], None]]:
    """A verb's result, and how it is printed."""
    kept: list[tuple[Result, Callable[[Result], None]]] = []

    def keep(result: Result, *, as_json: bool, print_table: Callable[[Result], None]) -> None:
        assert not as_json
        kept.append((result, print_table))

    monkeypatch.setattr(verbs, "show", keep)
    main([*arguments])
    return kept[0]


def printed(print_table: Callable[[Result], None], result: Result) -> str:
    with redirect_stdout(StringIO()) as told:
        print_table(result)
    return told.getvalue()


def numbers_of(value: Any) -> Iterator[float]:
    """Every number, in figures, names and words."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from numbers_of(name.replace("_", " "))
            yield from numbers_of(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from numbers_of(each)
    elif isinstance(value, str):
        yield from (float(each.replace(",", "")) for each in NUMBER.findall(value))
    elif value is not None:
        yield float(value)


def not_in(result: Result, text: str) -> list[str]:
    """The printed numbers that no field of the result has, to the last digit printed."""
    held, wrong = [*numbers_of(result)], []
    for each in NUMBER.findall(text):
        told = float(each.replace(",", ""))
        digits = len(each.partition(".")[2]) if "e" not in each else 9
        if not any(abs(told - value) <= 0.5000001 * 10**-digits for value in held):
            wrong.append(each)
    return wrong


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, Callable[[Result], None]]:
    return shown(monkeypatch, name.split(",")[0], *SMALL_VERBS[name])


@pytest.mark.parametrize(
    "name",
    [
        "host",
        pytest.param("device", marks=pytest.mark.slow),
    ],
)
def test_small_verbs_print_what_they_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, print_table = small(name, monkeypatch)
    assert not refused(result)
    assert {"clocks", "machine", "digests"} <= {*result["verdict"]["passed"]}
    text = printed(print_table, result)
    wrong = not_in(result, text)
    assert not wrong, (wrong, text)
    assert REFUSED in printed(print_table, {**result, "verdict": VERDICT}), "the gate's word is printed"


def test_an_engines_figures_stand_beside_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = ["--trace", trace(tmp_path / "a.jsonl", 0, 0.0)]
    result, print_table = shown(monkeypatch, "offline", *ENGINE, *asked)
    assert not refused(result)
    lines = dict(line.split(maxsplit=1) for line in printed(print_table, result).splitlines() if " " in line)
    for name, value in result.items():
        if isinstance(value, (int, float)):
            assert float(lines[name]) == value, name
        elif name.endswith("_ms"):
            assert lines[name] == ", ".join(f"{part} {each}" for part, each in value.items())
    assert lines["verdict"].startswith(result["verdict"]["outcome"])
    assert REFUSED in printed(print_figures, {**result, "verdict": VERDICT})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Callable[[Result], None]]:
    path = trace(tmp_path_factory.mktemp("served") / "a.jsonl", 0, 0.002)
    goals = ["--goodput", "ttft:5000", "tpot:5000"]
    with pytest.MonkeyPatch.context() as patch, running(Stub(first_s=0.01, gap_s=0.002)) as stub:
        return shown(patch, "serve", "--base-url", stub.url, "--trace", path, *goals)


def test_a_clients_table_has_each_figure_in_its_place(
    served: tuple[Result, Callable[[Result], None]],
) -> None:
    result, print_table = served
    assert not refused(result)
    text = printed(print_table, result)
    lines = text.splitlines()
    for name, label in measure.ROW_LABELS.items():
        if result.get(name) or name in ("completed", "failed"):
            [line] = [each for each in lines if each[:34].rstrip() == label]
            assert line[34:].strip() == f"{result[name]:,}"
    head = next(line for line in lines if line.startswith("ms "))
    columns = head.split()[1:]
    assert columns == ["mean", "median", "std", "p90", "p99"]
    for name, label in measure.TITLES.items():
        [line] = [each for each in lines if each[:34].rstrip() == label]
        figures = [result[f"{column}_{name}_ms"] for column in columns]
        assert line[34:].split() == [f"{figure:,.2f}" for figure in figures]
    client = result["client"]
    assert f"late p99 {client['late_ms']['p99']} ms, event loop p99 {client['lag_ms']['p99']} ms" in text
    metrics = [
        f"{name.replace('_', ' ')} {each}"
        for name, each in result["metrics"].items()
        if not isinstance(each, (list, dict))
    ]
    [line] = [each for each in lines if each.startswith("server: ")]
    assert line == f"server: {', '.join(metrics)}"
    assert printed(print_table, {**result, "verdict": VERDICT}).splitlines()[-1] == REFUSED


def test_a_sweeps_row_has_each_figure_in_its_place(
    served: tuple[Result, Callable[[Result], None]],
) -> None:
    result = {**served[0], "verdict": VERDICT}
    per_s = [f"{result[name]:.3f}" for name in ("request_throughput", "request_goodput")]
    waits = [f"{result[name]:.2f}" for name in ("p99_ttft_ms", "p99_itl_ms")]
    assert measure.sweep_row(2.5, result).split() == ["2.5", *per_s, *waits, "refused,", "spoilt"]
