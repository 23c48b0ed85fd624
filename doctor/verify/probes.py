"""Ask the device at hand what no document says, and record its answers.

    python -m doctor.verify.probes recipes/tiny/npu.yaml [key=value ...] [--answers DIR]

Each probe asks the recipe's device, or all ranks of the recipe, one question. The answers are written to a
file for the product and the version of CANN, which recipes follow from then on. Status 0: every question has
an answer, yes or no.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from devices.ascend_limits import answers_file, write_answers
from doctor.verify.npu.latent_questions import LATENT_PROBES
from doctor.verify.npu.launch_questions import LAUNCH_PROBES
from doctor.verify.npu.mask_questions import MASK_PROBES
from doctor.verify.npu.questions import QUESTIONS, Probe
from doctor.verify.npu.rank_questions import of_ranks
from recipes.machine import ANSWERS, Npu, one_line, start
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.reader import load

PROBES = (*QUESTIONS, *LAUNCH_PROBES, *MASK_PROBES, *LATENT_PROBES)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question."""

    name: str
    question: str
    answer: bool
    said: str
    is_right: bool = True  # a no is an answer too


def answer(probe: Probe, machine: Npu) -> Answer:
    """Ask a probe's question; an error of the device counts as no."""
    try:
        found, said = probe.ask(machine)
    except (RuntimeError, ValueError, OSError) as error:
        found, said = False, one_line(error)[:500]
    return Answer(probe.name, probe.question, found, said)


def main(argv: list[str]) -> int:
    """Ask every question of the product, write the answers, and print them as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m doctor.verify.probes",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_recipe(parser)
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="DIR", help="where they are kept")
    options = parser.parse_intermixed_args(with_keys(argv))
    recipe = load(options.recipe, options.overrides, options.profile)
    machine = start(recipe.device)
    found: list[Answer] = []
    if isinstance(machine, Npu):
        found = [
            answer(each, machine) for each in (*PROBES, *of_ranks(recipe)) if each.applies(machine.product)
        ]
        path = answers_file(
            options.answers, machine.product.name, machine.cann, virtual=machine.asked.virtual
        )
        write_answers(path, {each.name: each.answer for each in found})
    print(json.dumps([asdict(each) for each in found], indent=2))
    return 0


if __name__ == "__main__":
    verb.run(main)
