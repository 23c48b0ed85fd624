"""Check that a device gives the tiny model the same tokens as the CPU does.

    python -m doctor.verify.tokens recipes/tiny/npu.yaml [key=value ...]

Held-out sums are answered by the recipe's device and by the CPU, in the recipe's dtype and, where the product
has int8, in W8A8. Status 0: nearly all answers are the same, and the log-probabilities of their tokens are
close.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from recipes.assembly.engine import build
from recipes.machine import Npu, start
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.reader import load
from recipes.tiny.corpus import held_out_sums
from serving.offline import Record, read_jobs, run_jobs
from serving.text.tokenizer import Text

CPU = ("recipes/tiny/cpu.yaml", ["device.threads=1"])
NUM_SUMS = 32
LEAST_SAME = 0.9  # share of the answers: rounding may flip a near tie
MOST_APART = 0.02  # distance of log-probabilities, relative to 1 plus their size


@dataclass(frozen=True, slots=True)
class Comparison:
    """One way of computing on both devices; the mean is over tokens before an answer's first difference."""

    name: str
    num_answers: int
    num_same: int
    num_right: int
    num_right_on_cpu: int
    mean_apart: float

    @property
    def is_right(self) -> bool:
        return self.num_same >= LEAST_SAME * self.num_answers and self.mean_apart <= MOST_APART


def answers(recipe: str, overrides: Sequence[str], profile: str | None = None) -> dict[str, Record]:
    """Return the records of the held-out sums, by their prompts."""
    read = load(recipe, overrides, profile)
    assert read.model.path is not None, "the tiny model has weights"
    text = Text.load(read.model.path)
    lines = [
        json.dumps(
            {"id": f"{a}+{b}=", "prompt": f"{a}+{b}=", "max_tokens": 6, "temperature": 0, "logprobs": 0}
        )
        for a, b in held_out_sums(NUM_SUMS)
    ]
    with closing(build(read).engine) as engine:  # its ranks end before those of the next one begin
        return {record["id"]: record for record in run_jobs(engine, text, list(read_jobs(lines, text)))}


def compare(name: str, ours: dict[str, Record], cpus: dict[str, Record]) -> Comparison:
    """Compare the device's answers with the CPU's."""
    apart, num_same, num_right, num_right_on_cpu = [], 0, 0, 0
    for a, b in held_out_sums(NUM_SUMS):
        one, other = ours[f"{a}+{b}="], cpus[f"{a}+{b}="]
        num_same += one["token_ids"] == other["token_ids"]
        num_right += one["text"] == str(a + b)
        num_right_on_cpu += other["text"] == str(a + b)
        for mine, theirs in zip(one["logprobs"], other["logprobs"]):
            if mine["token"] != theirs["token"]:
                break
            apart.append(abs(mine["logprob"] - theirs["logprob"]) / (1 + abs(theirs["logprob"])))
    return Comparison(name, len(ours), num_same, num_right, num_right_on_cpu, sum(apart) / max(1, len(apart)))


def main(argv: list[str]) -> int:
    """Print the comparisons as JSON; returns 0 where every way that the product supports is right."""
    parser = argparse.ArgumentParser(
        prog="python -m doctor.verify.tokens",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_recipe(parser)
    options = parser.parse_intermixed_args(with_keys(argv))
    recipe = load(options.recipe, options.overrides, options.profile)
    machine = start(recipe.device)
    found: list[dict[str, Any]] = []
    for name, scheme in ((recipe.model.dtype, "auto"), ("W8A8", "w8a8")):
        if scheme == "w8a8" and isinstance(machine, Npu) and not machine.product.has_int8:
            reason = f"the {machine.product.name} multiplies no int8 with a scale for each token"
            found.append({"name": name, "left_out": reason, "is_right": True})
            continue
        how = [f"model.quantization={scheme}"]
        ours = answers(options.recipe, [*options.overrides, *how], options.profile)
        cpus = answers(CPU[0], [*CPU[1], f"model.dtype={recipe.model.dtype}", *how])
        one = compare(name, ours, cpus)
        found.append(asdict(one) | {"is_right": one.is_right})
    print(json.dumps(found, indent=2))
    return int(not all(each["is_right"] for each in found))


if __name__ == "__main__":
    verb.run(main)
