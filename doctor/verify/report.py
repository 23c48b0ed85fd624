"""List the parts of a verification, run them, and pack their outcomes into a report to send back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.assembly import versions
from recipes.schema.recipe import ROOT

TRACE = "trace.jsonl"
PART_S = 1800  # most seconds that a part may take
LATE = 124  # the status of one that takes longer, as that of `timeout`


@dataclass(frozen=True, slots=True)
class VerifyPart:
    """A question, the command that answers it, and whether it counts for the verdict."""

    name: str
    question: str
    command: tuple[str, ...]
    counts: bool = True


@dataclass(frozen=True, slots=True)
class PartOutcome:
    """The outcome of a part; `result` is the JSON that it printed, or None."""

    name: str
    question: str
    status: int
    duration_s: float
    counts: bool
    result: object
    log: str

    @property
    def is_right(self) -> bool:
        return self.status == 0 and not self.refused

    @property
    def refused(self) -> dict[str, str]:
        """The laws that refuse a benchmark, with their reasons; the speed of a stand-in is not judged."""
        match self.result:
            case {"computed_on": {"virtual": True}}:
                return {}
            case {"verdict": {"refused": dict(refused)}}:
                return refused
        return {}


def product_part(recipe: Sequence[str]) -> VerifyPart:
    """Return the part that runs first on an NPU; the other parts run with the overrides that it finds."""
    return VerifyPart("product", "which is it, and what does it need?", ("doctor.verify.product", *recipe))


def needed_overrides(outcome: PartOutcome) -> list[str]:
    """Return the overrides that `product_part` found; none where it failed."""
    match outcome.result:
        case {"overrides": list(overrides)} if outcome.is_right:
            return [str(each) for each in overrides]
    return []


def weights_part(target: Path, ranks: int) -> VerifyPart:
    """Return the part that gives the tiny model, which has two heads, as many as the ranks divide."""
    command = ("recipes.tiny.widened", str(target), "--ranks", str(ranks))
    return VerifyPart("weights", "has the tiny model heads for each rank?", command)


def parts(
    folder: Path,
    recipe: Sequence[str],
    *,
    virtual: bool,
    num_calls: int,
    product: str | None = None,
    ranks: int = 1,
) -> list[VerifyPart]:
    """Return all other parts, in order; `recipe` includes its overrides.

    A stand-in's environment does not count.
    """
    flags = ["--virtual"] * virtual + (["--product", product] if product else [])
    trace = str(folder / TRACE)
    lengths = ["--prompt-tokens", "uniform:16:200", "--output-tokens", "uniform:8:48", "--vocab-size", "1024"]
    load = ["--requests", "8" if virtual else "64", *lengths, "--output", trace]
    runs = ["--runs", "1"] if virtual else []  # the speed of a stand-in means nothing
    bench = ["offline", *recipe, "--trace", trace, "--json", *runs]
    return [
        VerifyPart("environment", "is it fit?", ("scripts.doctor", "--json"), counts=not virtual),
        VerifyPart(
            "operators",
            "do they compute what the contract says?",
            ("virtual_npu.verify", "--json", "--calls", str(num_calls), *flags),
        ),
        VerifyPart(
            "probes",
            "what does it where no source says?",
            ("doctor.verify.probes", *recipe, *(["--answers", str(folder)] if virtual else [])),
        ),
        *(
            [
                VerifyPart(
                    "collectives",
                    "do they bring all ranks the same?",
                    ("doctor.verify.collectives", *recipe),
                )
            ]
            if ranks > 1
            else []
        ),
        VerifyPart("tokens", "are they those of a CPU?", ("doctor.verify.tokens", *recipe)),
        VerifyPart("trace", "what is to be served?", ("scripts.trace", *load)),
        VerifyPart("benchmark", "how fast is the tiny model?", ("scripts.benchmark", *bench)),
    ]


def ended(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; after PART_S, or if this process is interrupted, all of it is killed.

    It leads a session of its own, so that its ranks, which may hang on their devices, are killed with it,
    also where this process is to end or its terminal is gone, except under nohup. What it has printed by then
    is kept.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    heeded = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, _interrupt) for each in heeded}
    try:
        return _ended(command)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _ended(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, log = process.communicate(timeout=PART_S)
            return subprocess.CompletedProcess(command, process.returncode, printed, log)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            printed, log = process.communicate()
            return subprocess.CompletedProcess(command, LATE, printed, f"{log}\nno end after {PART_S} s\n")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run(part: VerifyPart) -> PartOutcome:
    """Run a part's command as a module, and keep what it prints on both streams."""
    start = time.monotonic()
    done = ended([sys.executable, "-m", *part.command])
    try:
        result, log = json.loads(done.stdout), done.stderr
    except ValueError:
        result, log = None, done.stdout + done.stderr
    duration_s = round(time.monotonic() - start, 1)
    return PartOutcome(part.name, part.question, done.returncode, duration_s, part.counts, result, log)


def in_words(outcomes: Sequence[PartOutcome], *, virtual: bool) -> str:
    """Format one line for each part, followed by its faults, or by what was left out or answered."""
    lines = ["VIRTUAL: a stand-in computed this; no figure here is one of an NPU"] if virtual else []
    for each in outcomes:
        verdict = "right" if each.is_right else "WRONG" if each.counts else "not fit"
        lines.append(f"{each.name:14}{verdict:10}{each.duration_s:>8} s   {each.question}")
        lines += [f"    {line}" for line in (_left_out(each) if each.is_right else _reasons(each))]
    return "\n".join(lines)


def is_right(outcomes: Sequence[PartOutcome]) -> bool:
    """Return whether all parts that count are right."""
    return all(each.is_right for each in outcomes if each.counts)


def _reasons(outcome: PartOutcome) -> list[str]:
    """Return the faults that the part reports, or, as after a crash, how it ended."""
    found = [f"{law}: {why}" for law, why in outcome.refused.items()]
    match outcome.result:
        case {"findings": findings}:
            found = [finding["problem"] for finding in findings.values() if finding["is_fatal"]]
        case list(verdicts):
            found = [json.dumps(each) for each in verdicts if not each["is_right"]]
    return found or [f"it ended with status {outcome.status}", *outcome.log.strip().splitlines()[-3:]]


def _left_out(outcome: PartOutcome) -> list[str]:
    """Return what the product lacks and was therefore not checked, and what it answered."""
    match outcome.result:
        case {"chip": chip, "product": product, "overrides": overrides}:
            return [" ".join([f"{chip} is a {product}", *(["with", *overrides] if overrides else [])])]
        case []:
            return ["there is nothing of it on this product"]
        case list(verdicts):
            left_out = [
                f"without {each['name']}: {each['left_out']}" for each in verdicts if "left_out" in each
            ]
            return left_out + [
                f"{each['question']} {'yes' if each['answer'] else 'no'}: {each['said']}"
                for each in verdicts
                if "answer" in each
            ]
    return []


def packed(folder: Path) -> Path:
    """Pack the folder into one file to send."""
    target = folder.with_name(f"{folder.name}.tar.gz")
    with tarfile.open(target, "w:gz") as file:
        file.add(folder, folder.name)
    return target


def write(folder: Path, outcomes: Sequence[PartOutcome], *, virtual: bool) -> tuple[str, Path]:
    """Write the report as text and as JSON into its folder; returns the text and the packed folder."""
    text = in_words(outcomes, virtual=virtual)
    report = {
        "is_right": is_right(outcomes),
        "is_virtual": virtual,
        "machine": versions.describe(),
        "parts": [asdict(each) | {"is_right": each.is_right} for each in outcomes],
    }
    (folder / "report.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return text, packed(folder)
