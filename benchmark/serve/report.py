"""Write one self-contained HTML page that compares benchmark results and is readable on a phone.

The inputs are JSON results of `serve`, `offline` or `vllm bench serve`, or folders of a sweep, of which the
best result that the gate does not refuse is compared. Each result is audited again by the gate, and the page
shows the verdict.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import LogFormatter

from benchmark.gate.gate import audit
from benchmark.gate.result import read_result
from benchmark.gate.table import parts_of, under_ours
from benchmark.options import known_figure, verdict_line
from borders.files import whole_file
from recipes.schema.command_line import keep_apart

mpl.use("Agg")  # draws text, without a display

if TYPE_CHECKING:  # matplotlib 3.10, the last for Python 3.10, does not have it
    from matplotlib.typing import RcKeyType

Result = dict[str, Any]
ROWS = {  # the gate's name of a figure -> its label, and whether more of it is better
    "completed": ("requests answered", None),
    "failed": ("requests failed", False),
    "rejected": ("of these rejected", False),
    "duration_s": ("seconds", None),
    "requests_per_s": ("requests/s", True),
    "request_goodput": ("requests/s within objectives", True),
    "output_tokens_per_s": ("output tokens/s", True),
    "total_tokens_per_s": ("all tokens/s", True),
    **{
        f"{name}_ms.{part}": (f"{name.upper()} {part}, ms", False)
        for name in ("ttft", "tpot", "itl", "e2e")
        for part in ("mean", "p50", "p90", "p99")
    },
    "mean_in_flight": ("requests on their way, mean", None),
    "mean_batch": ("requests in a step, mean", None),
    "mean_page_use": ("pages in use, mean share", None),
    "metrics.mean_kv_usage": ("pages in use, mean share, by the server", None),
    "prefix_hit_rate": ("prompt tokens found cached", True),
    "metrics.prefix_hit_rate": ("prompt tokens found cached, by the server", True),
    "preemptions": ("preemptions", False),
    "metrics.preemptions": ("preemptions, by the server", False),
}
FACTS = ("recipe", "overrides", "profile", "base_url", "model_id", "date", "trace", "request_rate", "loop")
SWEPT = ("requests_per_s", "request_goodput", "output_tokens_per_s", "ttft_ms.p50", "ttft_ms.p99",
         "itl_ms.p50", "itl_ms.p99", "failed")  # fmt: skip

STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 64rem; color: #1c2024; background: #fff;
  font: 16px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #c4cad0; }
th:first-child, td:first-child { text-align: left; }
.figures th, .figures td { overflow-wrap: normal; }
.figures td { white-space: nowrap; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; } figcaption { font-size: .9rem; } svg { width: 100%; height: auto; }
.pass, .better { color: #15803d; } .refused, .worse { color: #b91c1c; }
details { background: #f3f5f7; padding: .5rem 1rem; margin: .5rem 0; border-radius: .4rem; }
"""
CHART_STYLE: dict[RcKeyType, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.linewidth": 0.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelspacing": 0.2,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a file may have any name
}
LEAST_MS = 0.1  # pieces with a shorter gap came in one packet, and 0 has no place on a logarithmic axis
LONGEST_LABEL = 60  # characters of a line's name that fit above a chart
LINE_INCHES = 0.2  # height of a name above a chart
Sweeps = Sequence[tuple[str, Sequence[Result]]]
Chart = tuple[str, str]  # its caption, and its SVG


@dataclass(frozen=True, slots=True)
class Side:
    """One reported result; if it is the best of a sweep, `points` has all results in order of rate."""

    name: str
    result: Result
    points: Sequence[Result] = ()


def read(path: Path) -> Side:
    """Read a result, or a sweep; raises ValueError or OSError for anything else."""
    if path.is_dir():
        points = sorted((_result(each) for each in path.glob("rate-*.json")), key=rate_of)
        if not points:
            raise ValueError(f"{path} holds no rate-*.json; it must be the folder of a sweep")
        has_goodput = known_figure(points[0], "request_goodput") is not None  # vllm writes null without
        good = "request_goodput" if has_goodput else "requests_per_s"
        believed = [each for each in points if not each["verdict"]["refused"]] or points
        best = max(believed, key=lambda each: known_figure(each, good) or 0.0)
        return Side(path.name, best, points)
    return Side(path.stem, _result(path))


def rate_of(result: Mapping[str, Any]) -> float:
    """Return the offered requests a second; inf for all at once, 0 for the trace's own times or none."""
    return math.inf if result.get("request_rate") == "inf" else known_figure(result, "request_rate") or 0.0


def _result(path: Path) -> Result:
    fields = read_result(path)
    try:
        verdict = audit(fields)  # audited again, since the file may have been changed
    except ValueError as error:
        raise ValueError(f"{path} is no result of a benchmark: {error}") from error
    itl_ms = parts_of(fields, "itl_ms")  # the gate ignores it where the gaps were not counted
    return {**({"itl_ms": itl_ms} if itl_ms else {}), **under_ours(fields), "verdict": verdict}


def write(sides: Sequence[Side], path: Path) -> None:
    """Write the page of one side, or of several side by side."""
    title = " against ".join(side.name for side in sides[:2])
    title += f" and {len(sides) - 2} more" if len(sides) > 2 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(page(f"Benchmark: {title}", _parts(sides)))


def _parts(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        verdict = side.result["verdict"]
        yield f"<p>{escape(side.name)}: {marked(verdict_line(verdict), verdict['outcome'])}</p>"
    yield figures_table(sides)
    if any(side.points for side in sides):
        sweeps = [(side.name, side.points) for side in sides]
        yield "<h2>Rates</h2>" + pictures([*curves(sweeps), goodput(sweeps)])
        for side in sides:
            yield from [f"<h3>{escape(side.name)}</h3>", points_table(side.points)] if side.points else []
    for side in sides:
        yield folded(f"{side.name}: what was run, where", facts_table(side.result))


def figures_table(sides: Sequence[Side]) -> str:
    """Return a table of all figures; for two sides, also the ratio of the second to the first."""
    rows = []
    for name, (label, more_is_better) in ROWS.items():
        values = [known_figure(side.result, name) for side in sides]
        if all(value is None for value in values):
            continue
        row = [label, *map(_number, values)]
        if len(sides) == 2:
            row.append(_ratio(values[0], values[1], more_is_better))
        rows.append(row)
    heads = ["", *(side.name for side in sides), *(["times"] if len(sides) == 2 else [])]
    return table(heads, rows, kind="figures")


def points_table(points: Sequence[Result]) -> str:
    """Return a table of a sweep, one rate a row."""
    head = ["offered/s", *(ROWS[name][0] for name in SWEPT), "verdict"]
    rows = []
    for point in points:
        cells = [_number(known_figure(point, name)) for name in SWEPT]
        outcome = point["verdict"]["outcome"]
        rows.append([f"{rate_of(point):g}", *cells, marked(outcome, outcome)])
    return table(head, rows, kind="figures")


def facts_table(result: Result) -> str:
    """Return a table of the facts that give figures their meaning: recipe, machine, server, client."""
    facts = {name: result[name] for name in FACTS if result.get(name) not in (None, [])}
    for group in ("machine", "server", "server_said", "client", "errors"):
        shown = result.get(group)
        if group == "errors" and isinstance(shown, list):
            # vllm writes a text for each request, empty where there was no error
            shown = Counter(str(each) for each in shown if each)
        if isinstance(shown, Mapping):
            facts |= {f"{group}: {name}": value for name, value in shown.items()}
    return table(["", ""], [[name, _text(value)] for name, value in facts.items()])


def _number(value: float | None) -> str:
    """Return a figure with four digits, or all of its whole part."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _ratio(first: float | None, second: float | None, more_is_better: bool | None) -> str:
    if not first or second is None:
        return "-"
    times = second / first
    text = f"{times:.3g}"
    if more_is_better is None or 0.98 < times < 1.02:  # a second run differs as much by noise
        return text
    return marked(text, "better" if (times > 1) == more_is_better else "worse")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart, of the side with this number."""

    side: int
    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    style: str = "-"
    marker: str = ""

    @property
    def label(self) -> str:
        """The name, with a space before an underscore: matplotlib leaves such names out of a legend."""
        name = self.name
        if len(name) > LONGEST_LABEL:  # names of settings may differ at either end
            name = f"{name[: LONGEST_LABEL // 2]}…{name[1 - LONGEST_LABEL // 2 :]}"
        return f" {name}" if name.startswith("_") else name


class PlainLogFormatter(LogFormatter):
    """The ticks that matplotlib labels at a logarithmic axis, as 0.1 and 10,000, not as powers of ten.

    Where the axis is short, ticks between powers of ten have labels, too.
    """

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:,g}" if super().__call__(x, pos) else ""


def svg(lines: Sequence[Line], x_title: str, y_title: str, *, is_log: bool = False) -> str:
    """Draw lines over one pair of axes, for insertion into a page; the vertical axis may be logarithmic."""
    with mpl.rc_context(CHART_STYLE):
        names_inches = LINE_INCHES * len(lines)
        height = 3.0 + names_inches
        drawing, axes = plt.subplots(figsize=(6.4, height))
        try:
            for line in lines:
                colour = f"C{line.side}"  # all lines of a side have one colour
                axes.plot(line.xs, line.ys, line.style, color=colour, marker=line.marker, label=line.label)
            if is_log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(PlainLogFormatter())
                axes.yaxis.set_minor_formatter(PlainLogFormatter(minor_thresholds=(1.5, 0.5)))
            axes.set_xlabel(x_title)
            axes.set_ylabel(y_title)
            # Within the axes names would hide lines, and their width is not the chart's.
            legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
            legend.set_in_layout(False)
            drawing.tight_layout(rect=(0, 0, 1, 1 - names_inches / height))
            out = io.StringIO()
            drawing.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            plt.close(drawing)
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)
    head, mark, rest = text.partition(">")
    return re.sub(r' (width|height)="[^"]*"', "", head) + mark + rest  # the page determines the size


def curves(sweeps: Sweeps) -> Iterator[Chart]:
    """Draw each latency, p50 and p99, over the served rate."""
    for latency in ("ttft", "itl", "e2e"):
        lines = []
        for side, (name, points) in enumerate(sweeps):
            known = _knowing(points, "requests_per_s", f"{latency}_ms.p50", f"{latency}_ms.p99")
            served = [each["requests_per_s"] for each in known]
            for part, style in (("p50", "-"), ("p99", "--")):
                values = [max(LEAST_MS, each[f"{latency}_ms"][part]) for each in known]
                lines += [Line(side, f"{name} {part}", served, values, style, ".")] if known else []
        if lines:
            title = f"{latency.upper()}, ms"
            yield f"{latency.upper()} over throughput", svg(lines, "requests/s served", title, is_log=True)


def _knowing(points: Sequence[Result], *names: str) -> list[Result]:
    """Return the points that have all of these figures."""
    return [each for each in points if all(known_figure(each, name) is not None for name in names)]


def goodput(sweeps: Sweeps) -> Chart:
    """Draw the served rate, and the rate that met the objectives, over the offered rate."""
    lines = []
    for side, (name, points) in enumerate(sweeps):
        known = _knowing(points, "request_rate", "requests_per_s")
        offered = [each["request_rate"] for each in known]
        lines.append(Line(side, f"{name} served", offered, [each["requests_per_s"] for each in known], ":"))
        if len(_knowing(known, "request_goodput")) == len(known):
            good = [each["request_goodput"] for each in known]
            lines.append(Line(side, f"{name} good", offered, good, "-", "."))
    return "Served, and good, over offered", svg(lines, "requests/s offered", "requests/s")


class Markup(str):
    """HTML that was made here, and not read from a file."""

    __slots__ = ()


def page(title: str, parts: Iterable[str]) -> str:
    """Return a whole document; `parts` are HTML."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "facts") -> str:
    """Return a table; cells are text, or Markup. Words are broken in facts alone, which may be long paths."""
    top = "".join(f"<th>{_cell(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(each)}</td>" for each in row) + "</tr>\n" for row in rows)
    inner = f"<thead><tr>{top}</tr></thead><tbody>\n{body}</tbody>"
    return f'<div class="wide"><table class="{kind}">{inner}</table></div>'


def pictures(drawn: Iterable[tuple[str, str]]) -> str:
    """Return captions and SVG, as many side by side as there is room for."""
    figures = (f"<figure>{image}<figcaption>{escape(said)}</figcaption></figure>" for said, image in drawn)
    return '<div class="pictures">' + "\n".join(figures) + "</div>"


def marked(text: str, kind: str) -> Markup:
    """Return text of a kind that the style knows."""
    return Markup(f'<span class="{kind}">{escape(text)}</span>')


def folded(title: str, inner: str) -> str:
    """Return content that is folded until it is opened."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def _cell(text: str) -> str:
    return text if isinstance(text, Markup) else escape(text)


def run(options: argparse.Namespace) -> None:
    """Write the page of the results that the options name."""
    keep_apart(options.output, *options.results)
    write([read(path) for path in options.results], options.output)
    print(options.output)
