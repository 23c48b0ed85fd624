"""An engine's process that breaks where a test asks it to; else as serving/engine/main.py.

A step raises, or a row's logits are not numbers, if a request's prompt holds one of the tokens below. The
environment's BREAK is a folder: its file `ahead` tells by how many seconds the wall clock is ahead, at every
look, and `broken` is there from when a step raised for ONCE.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ParamSpec
from unittest import mock

import torch

import recipes.assembly.engine
from continuous_batching.batch import Batch
from models.sampling.prompt_outputs import PromptOutputs
from models.step_inputs import StepInputs
from recipes.assembly.engine import BuiltEngine
from serving.engine import main

P = ParamSpec("P")

NAN, ONCE = 777, 778  # tokens that are in no text of the tests


def broken(build: Callable[P, BuiltEngine], folder: Path) -> Callable[P, BuiltEngine]:
    """The same, for an engine that breaks."""

    def build_broken(*args: P.args, **kwargs: P.kwargs) -> BuiltEngine:
        built = build(*args, **kwargs)
        slots, decoder = built.engine.slots, built.runner.decoder
        forward, inputs = decoder.forward, built.runner._inputs
        batches: list[Batch] = []

        def noted(batch: Batch, drafts: torch.Tensor | None, wanted: PromptOutputs | None) -> StepInputs:
            batches.append(batch)
            return inputs(batch, drafts, wanted)

        def poisoned(step: StepInputs) -> torch.Tensor:
            batch = batches.pop()
            prompts = [slots.requests[row].prompt.tolist() for row in batch.slots.tolist()]
            held = {token for prompt in prompts for token in prompt}
            if ONCE in held and not (folder / "broken").exists():
                (folder / "broken").touch()
                raise RuntimeError("this step was to fail")
            hidden = forward(replace(step, read=None))
            ends = (batch.stops - batch.starts).cumsum() - 1
            for end, prompt in zip(ends.tolist(), prompts):
                if NAN in prompt:
                    hidden[end] = torch.nan
            return hidden if step.read is None else hidden[step.read]

        mock.patch.object(built.runner, "_inputs", noted).start()
        mock.patch.object(decoder, "forward", poisoned).start()
        return built

    return build_broken


def set_clock(folder: Path) -> Callable[[], None]:
    """From now on the wall clock is ahead as the folder says; returns what undoes it."""
    file = folder / "ahead"
    true = time.time, time.time_ns
    time.time = lambda: true[0]() + float(file.read_text() or 0)
    time.time_ns = lambda: true[1]() + int(1e9 * float(file.read_text() or 0))

    def undo() -> None:
        time.time, time.time_ns = true

    return undo


if __name__ == "__main__":
    recipes.assembly.engine.build = broken(recipes.assembly.engine.build, Path(os.environ["BREAK"]))
    set_clock(Path(os.environ["BREAK"]))
    sys.exit(main.main(sys.argv[1:]))
