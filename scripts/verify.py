"""Does everything work on this machine's NPU, and how fast? One report to send back.

    bash scripts/verify_npu.sh [--virtual] [--output DIR] [--calls 50]
    python -m scripts.verify recipes/tiny/npu.yaml [key=value ...] [--output DIR] [--calls 50]

Environment, operators against their contract, tokens of the tiny model against the CPU's, a short benchmark:
each in a process of its own, so that a crash of one is a line of the report. Status 0: all is right.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.build import versions
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from scripts import verb

TRACE = "trace.jsonl"
PART_S = 1800  # the longest that a part may take


@dataclass(frozen=True, slots=True)
class Part:
    """What is asked, by which command, and whether the verdict hangs on it."""

    name: str
    question: str
    command: tuple[str, ...]
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a part; `result` is the JSON that it printed, None where it printed none."""

    name: str
    question: str
    status: int
    duration_s: float
    counts: bool
    result: object
    log: str

    @property
    def is_right(self) -> bool:
        return self.status == 0


def parts(
    folder: Path, recipe: Sequence[str], *, virtual: bool, num_calls: int, product: str | None = None
) -> list[Part]:
    """All of them, in order; `recipe` with its overrides. A stand-in's environment counts for nothing."""
    flags = ["--virtual"] * virtual + (["--product", product] if product else [])
    trace = str(folder / TRACE)
    lengths = ["--prompt-tokens", "uniform:16:200", "--output-tokens", "uniform:8:48", "--vocab-size", "1024"]
    load = ["--requests", "8" if virtual else "64", *lengths, "--output", trace]
    bench = ["offline", *recipe, "--trace", trace, "--json"]
    return [
        Part("environment", "is it fit?", ("scripts.doctor", "--json"), counts=not virtual),
        Part(
            "operators",
            "do they compute what the contract says?",
            ("virtual_npu.verify", "--json", "--calls", str(num_calls), *flags),
        ),
        Part("tokens", "are they those of a CPU?", ("doctor.verify.tokens", *recipe)),
        Part("trace", "what is to be served?", ("scripts.trace", *load)),
        Part("benchmark", "how fast is the tiny model?", ("scripts.benchmark", *bench)),
    ]


def run(part: Part) -> Outcome:
    """Run a part's command as a module; what it prints on both streams is kept."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *part.command],
            cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=PART_S, check=False,
        )  # fmt: skip
        status, printed, log = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        status, printed, log = 124, "", f"no end after {late.timeout:.0f} s"
    try:
        result = json.loads(printed)
    except ValueError:
        result, log = None, printed + log
    duration_s = round(time.monotonic() - start, 1)
    return Outcome(part.name, part.question, status, duration_s, part.counts, result, log)


def in_words(outcomes: Sequence[Outcome], *, virtual: bool) -> str:
    """One line a part, and below it why it is not right, or what of it was left out."""
    lines = ["VIRTUAL: a stand-in computed this; no figure here is one of an NPU"] if virtual else []
    for each in outcomes:
        verdict = "right" if each.is_right else "WRONG" if each.counts else "not fit"
        lines.append(f"{each.name:14}{verdict:10}{each.duration_s:>8} s   {each.question}")
        lines += [f"    {line}" for line in (_left_out(each) if each.is_right else _reasons(each))]
    return "\n".join(lines)


def is_right(outcomes: Sequence[Outcome]) -> bool:
    """Whether all parts are that count."""
    return all(each.is_right for each in outcomes if each.counts)


def _reasons(outcome: Outcome) -> list[str]:
    """What the part itself says is wrong; else, as of a crash after its result, how it ended."""
    found: list[str] = []
    match outcome.result:
        case {"findings": findings}:
            found = [finding["problem"] for finding in findings.values() if finding["is_fatal"]]
        case list(verdicts):
            found = [json.dumps(each) for each in verdicts if not each["is_right"]]
    return found or [f"it ended with status {outcome.status}", *outcome.log.strip().splitlines()[-3:]]


def _left_out(outcome: Outcome) -> list[str]:
    """What the product has not, so that nothing was checked."""
    match outcome.result:
        case []:
            return ["there is nothing of it on this product"]
        case list(verdicts):
            return [f"without {each['name']}: {each['left_out']}" for each in verdicts if "left_out" in each]
    return []


def packed(folder: Path) -> Path:
    """The folder as one file to send."""
    target = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(target, "w:gz") as file:
        file.add(folder, folder.name)
    return target


def main(argv: list[str]) -> int:
    """Run all parts, print the verdict, write the report; 0 where all that counts is right."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("recipe", help="of the tiny model: recipes/tiny/npu.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as device.virtual=true")
    parser.add_argument("--output", type=Path, default=ROOT / "out", metavar="DIR")
    parser.add_argument("--calls", type=int, default=50, metavar="N", help="of each operator")
    options = parser.parse_intermixed_args(argv)
    if options.calls < 1:
        raise ValueError(f"--calls is {options.calls}; it must be at least 1")
    recipe = [options.recipe, *options.overrides]
    device = load(options.recipe, options.overrides).device
    kind = "virtual" if device.virtual else device.kind
    folder = options.output.absolute() / f"verify-{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    outcomes = []
    for part in parts(
        folder, recipe, virtual=device.virtual, num_calls=options.calls, product=device.product
    ):
        print(f"{part.name}: {part.question}", file=sys.stderr)
        outcomes.append(run(part))
    text = in_words(outcomes, virtual=device.virtual)
    report = {
        "is_right": is_right(outcomes),
        "is_virtual": device.virtual,
        "machine": versions.describe(),
        "parts": [asdict(each) | {"is_right": each.is_right} for each in outcomes],
    }
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(text)
    print(
        f"\n{'all right' if report['is_right'] else 'NOT RIGHT'}; the report to send back: {packed(folder)}"
    )
    return int(not report["is_right"])


if __name__ == "__main__":
    verb.run(main)
