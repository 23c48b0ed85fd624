"""Ask the device at hand what no document says, and record its answers.

    python -m doctor.verify.probes recipes/tiny/npu.yaml [key=value ...] [--answers DIR]

Each probe asks the recipe's device, or all ranks of the recipe, one question, of the product with the answers
before it. The answers are written to a file for the product and the version of CANN, which recipes follow
from then on; a question that ended in an error has none. Status 0: every question has an answer, yes or no.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from devices.ascend_limits import answers_file, product, write_answers
from doctor.facts import driver_version
from doctor.verify.npu.latent_questions import LATENT_PROBES
from doctor.verify.npu.launch_questions import LAUNCH_PROBES
from doctor.verify.npu.mask_questions import MASK_PROBES
from doctor.verify.npu.questions import QUESTIONS, Probe, is_refusal
from doctor.verify.npu.rank_questions import of_ranks
from recipes.machine import ANSWERS, Npu, one_line, start
from recipes.schema import verb
from recipes.schema.command_line import add_recipe, with_keys
from recipes.schema.reader import load

# Questions come after those whose answers change their calls: attention to latents after masks, for example.
PROBES = (*QUESTIONS, *LAUNCH_PROBES, *MASK_PROBES, *LATENT_PROBES)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question; None: an error came instead."""

    name: str
    question: str
    answer: bool | None
    said: str
    is_right: bool = True  # a no is an answer too


def answer(probe: Probe, machine: Npu) -> Answer:
    """Ask a probe's question; a call that the device refuses is a no, and any other error of it no answer.

    Raises RuntimeError for an error of the device, after which it may not compute in this process.
    """
    try:
        found, said = probe.ask(machine)
    except RuntimeError as error:
        if not is_refusal(error):
            raise
        found, said = False, one_line(error)[:500]
    except Exception as error:  # noqa: BLE001 - an error in one question is no reason not to ask the others
        return Answer(
            probe.name, probe.question, None, f"{type(error).__name__}: {one_line(error)[:500]}", False
        )
    return Answer(probe.name, probe.question, found, said)


def answers(probes: Iterable[Probe], machine: Npu) -> Iterator[Answer]:
    """Yield the answer to each question that applies, which the machine's product follows from then on.

    After an error of the device nothing is asked any more.
    """
    failed = ""
    for probe in probes:
        if not probe.applies(machine.product):
            continue
        if failed:
            yield Answer(probe.name, probe.question, None, f"not asked after the error of {failed}", False)
            continue
        try:
            given = answer(probe, machine)
        except RuntimeError as error:
            failed = probe.name
            given = Answer(probe.name, probe.question, None, one_line(error)[:500], False)
        if given.answer is not None:
            learned: dict[str, Any] = {probe.name: given.answer}
            machine.product = replace(machine.product, **learned)
        yield given


def kept_answers(path: Path, names: Collection[str]) -> dict[str, bool]:
    """Return the file's answers to these questions, each of which stays until it has a new one.

    Without a no of before, a run that is broken off would let engines call what is wrong here.
    """
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or it is written anew
        return {}
    return {name: said[name] for name in names if isinstance(said, dict) and isinstance(said.get(name), bool)}


def check_folder(folder: Path) -> None:
    """Raise ValueError unless files can be written into the folder, which is made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"answers cannot be written to {folder} ({error.strerror}): correct that, or name another folder"
            " by --answers"
        ) from error


def main(argv: list[str]) -> int:
    """Ask every question of the product, write each answer, and print all as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m doctor.verify.probes",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add_recipe(parser)
    parser.add_argument("--answers", type=Path, default=ANSWERS, metavar="DIR", help="where they are kept")
    options = parser.parse_intermixed_args(with_keys(argv))
    recipe = load(options.recipe, options.overrides, options.profile)
    if recipe.device.kind == "npu":
        check_folder(options.answers)
    machine = start(recipe.device)
    found: list[Answer] = []
    try:
        if isinstance(machine, Npu):
            # An earlier run's answers must not change what is asked now.
            machine.product = product(machine.product.name, machine.chip)
            path = answers_file(
                options.answers, machine.product.name, machine.cann, virtual=machine.asked.virtual
            )
            asked_of = {"torch_npu": machine.release, "chip": machine.chip}
            if not machine.asked.virtual and (driver := driver_version()):
                asked_of["driver"] = driver
            asked = *PROBES, *of_ranks(recipe)
            known = kept_answers(path, [each.name for each in asked])
            for each in answers(asked, machine):
                found.append(each)
                print(f"{each.name}: {each.answer}, {each.said}", file=sys.stderr, flush=True)
                if each.answer is not None:
                    known[each.name] = each.answer
                write_answers(path, known, **asked_of)
    finally:
        print(json.dumps([asdict(each) for each in found], indent=2))
    return int(not all(each.is_right for each in found))


if __name__ == "__main__":
    verb.run(main)
