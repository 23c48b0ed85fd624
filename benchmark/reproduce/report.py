"""Write the report on the results, with the source's claim beside each table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmark.gate.gate import PublishedRow, published
from benchmark.reproduce.case_runs import KEYS, OBJECTIVES, RECIPE, Result, Results
from benchmark.reproduce.experiment import Experiment, figure
from borders.whole_file import whole_file

NAME = "reproduced"  # the report is NAME.md, and its pictures are in the folder NAME
HEAD = """# The sources' experiments, re-run

This page answers: what the sources' experiments come to when the real scheduler runs them, beside each claim.

**SIMULATED, not measured.** The scheduler ran against a virtual clock, and the time of a step is the roofline
of a device that is not here. Trust ratios and orders of magnitude, not the second digit.

Device profile `{device}`: {costs}.

This command gives the same bytes again:

    {command}

The model is LLaMA-7B's shape (`{recipe} {keys}`)
on 8 devices that share each layer, unless a row says otherwise. Lengths of prompts and answers are
log-normal, of 256 tokens each on average unless said otherwise; arrivals are Poisson, and seeds fixed.
"Good" requests have their first token within {ttft:g} ms and a mean TPOT within {tpot:g} ms. The verdict is
the gate's (`python -m scripts.audit`) on the records of all requests; {num_passed} of {num_results} pass. A
claim's row names the laws that it breaks.
"""


def write(folder: Path, command: str, experiments: Sequence[tuple[Experiment, Results]]) -> Path:
    """Write the report and its pictures; returns the report's path."""
    # The import is here because it brings matplotlib: each process that runs cases imports this module too
    from benchmark.reproduce.charts import save

    pictures = folder / NAME
    pictures.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.md"
    results = [result for _, found in experiments for result in found.values()]
    first = results[0]
    parts = [
        HEAD.format(
            device=first["device_profile"],
            costs=first["costs"],
            command=command,
            recipe=RECIPE,
            keys=" ".join(KEYS),
            **OBJECTIVES,
            num_passed=sum(each["verdict"]["outcome"] == "pass" for each in results),
            num_results=len(results),
        )
    ]
    for experiment, found in experiments:
        save(pictures / f"{experiment.name}.png", experiment, found)
        parts.append("\n".join(_section(experiment, found)))
    with whole_file(path) as file:
        file.write("\n".join(parts))
    return path


def plain(result: Result) -> Result:
    """Return a result without the records of its requests."""
    return {name: value for name, value in result.items() if name != "records"}


def _section(experiment: Experiment, results: Results) -> Iterator[str]:
    yield f"## {experiment.title}\n"
    yield f"Claim: {experiment.claim}\n"
    yield from _table(experiment, results)
    yield f"\n![{experiment.title}]({NAME}/{experiment.name}.png)\n"
    for sentence in experiment.findings(results):
        yield f"- {sentence}"
    yield ""


def _table(experiment: Experiment, results: Results) -> Iterator[str]:
    columns = experiment.columns
    yield f"| | {' | '.join(column.heading for column in columns)} | verdict |"
    yield "|---|" + "---:|" * len(columns) + "---|"
    for case in experiment.cases:
        result = results[case.label]
        cells = [f"{figure(result, column.name):,.{column.places}f}" for column in columns]
        yield f"| {case.label} | {' | '.join(cells)} | {verdict(result)} |"
    audited = {row.name: row for row in published()}
    for name in experiment.rows:
        cells = [_claimed(audited[name].result, column.name) for column in columns]
        yield f"| *claimed: {name}* | {' | '.join(cells)} | {_broken(audited[name])} |"


def verdict(result: Result) -> str:
    """Format the outcome, with the laws that refused it."""
    said = result["verdict"]
    return ": ".join([said["outcome"], *([", ".join(said["refused"])] if said["refused"] else [])])


def _claimed(claim: Any, name: str) -> str:
    name = {"mean_batch": "mean_running"}.get(name, name)  # the source names the mean batch so
    for part in name.split("."):
        claim = claim.get(part) if isinstance(claim, dict) else None
    return f"{claim:,g}" if isinstance(claim, (int, float)) else ""


def _broken(row: PublishedRow) -> str:
    return "refused: " + ", ".join(each.law.name for each in row.verdict.of("refused"))
