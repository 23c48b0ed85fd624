"""Print the figures of single steps as Markdown tables; figures that are absent were not measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmark.options import verdict_line

NOT_MEASURED = "not measured"
COLUMNS = {
    "step_ms": "step, ms",
    "tokens_per_s": "tokens/s",
    "share_of_copy_rate": "of the copy rate",
    "share_of_product_rate": "of the product rate",
    "attention_ms": "attention, ms",
    "attention_share_of_copy_rate": "of the copy rate",
}
MIXED_COLUMNS = {
    "step_ms": "step, ms",
    "parts_ms": "its parts apart, ms",
    "over_sum_of_parts": "over their sum",
}

Step = Mapping[str, Any]


def print_table(result: Mapping[str, Any]) -> None:
    """Print the machine, its rates, a row for each load, and the reasons for empty cells."""
    print(" ".join((result["recipe"], *result["overrides"])))
    print("machine:", ", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    rates = ", ".join(f"{name} {value}" for name, value in result["rates"].items())
    print("rates:", rates or NOT_MEASURED)
    mixed = [step for step in result["steps"] if step.get("is_mixed")]
    alone = [step for step in result["steps"] if not step.get("is_mixed")]
    others = {f"{name}_ms": f"attention by {name}, ms" for name in result["candidates"]}
    for steps, columns in ((alone, COLUMNS | others), (mixed, MIXED_COLUMNS)):
        if steps:
            print("", *table(steps, columns), sep="\n")
    reasons = dict.fromkeys(
        str(why) for step in result["steps"] for name, why in step.items() if name.endswith("not_measured")
    )
    if reasons:
        print("", *(f"{NOT_MEASURED}: {why}" for why in reasons), sep="\n")
    if any("step_ms" in step for step in result["steps"]):
        print("", verdict_line(result["verdict"]), sep="\n")


def table(steps: Sequence[Step], columns: Mapping[str, str]) -> Iterator[str]:
    """Yield a row for each step, under the columns' titles."""
    yield f"| load | {' | '.join(columns.values())} |"
    yield f"|---|{'---|' * len(columns)}"
    for step in steps:
        yield f"| {step['load']} | {' | '.join(cell(step.get(name)) for name in columns)} |"


def cell(value: Any) -> str:
    """Format a figure, or several, or the words for a figure that was not measured."""
    if value is None:
        return NOT_MEASURED
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
