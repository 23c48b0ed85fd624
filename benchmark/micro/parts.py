"""Divide the time of a CPU step into its parts: products, attention, sampling, the host's loop.

A trace is served by an engine in this process, once as a warm-up and once counted. The time of a part
excludes the parts within it, and is processor time of all threads, which other processes on the same cores
hardly change. `device.threads=1` leaves out the time that threads wait for each other.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmark.offline.offline import at_once, load_trace, serve, text_of
from benchmark.options import markdown, recipe_of
from continuous_batching.batch import Batch
from models.layers.linear import Linear
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.recipe_error import RecipeError

LAYERS, HEAD = "products of the layers", "product of the logits"
ATTENTION, WRITING, PLAN = "attention", "keys and values to the cache", "plan of the attention"
SMALL, SAMPLING = "norms, rotary, SwiGLU", "sampling"
DECODER, HOST = "the rest of the decoder", "the host: schedule, inputs, commit"
PARTS = (LAYERS, HEAD, ATTENTION, WRITING, PLAN, SMALL, SAMPLING, DECODER, HOST)
OPS = ("rms_norm", "add_rms_norm", "rotary", "swiglu")
MULTIPLIED = "operations of products"  # counted beside the parts
DECODES, PROMPTS = "steps of decodes only", "steps with prompts"


@dataclass(slots=True)
class PartTimes:
    """Processor time by part, for steps of each kind; a call within a call is not counted twice."""

    clock: Callable[[], float] = time.process_time
    steps: Counter[str] = field(default_factory=Counter)
    spent: dict[str, dict[str, float]] = field(default_factory=lambda: {DECODES: {}, PROMPTS: {}})
    _step: dict[str, float] = field(default_factory=dict)
    _within_s: list[float] = field(default_factory=list)  # the time of the calls within each open call
    _kind: str = ""

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function` so that its own time counts for `part`."""

        def timed(*arguments: Any, **named: Any) -> Any:
            self._within_s.append(0.0)
            begin_s = self.clock()
            try:
                return function(*arguments, **named)
            finally:
                took_s = self.clock() - begin_s
                _add(self._step, part, took_s - self._within_s.pop())
                if self._within_s:
                    self._within_s[-1] += took_s

        return timed

    def of_product(self, part: str, linear: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a linear likewise, and count its operations too."""
        timed = self.of(part, linear)

        def counted(x: torch.Tensor, *more: Any) -> Any:
            y = timed(x, *more)
            outputs = y if isinstance(y, tuple) else (y,)
            _add(self._step, MULTIPLIED, 2 * x.shape[-1] * sum(each.numel() for each in outputs))
            return y

        return counted

    def planned(self, batch: Batch) -> None:
        """Set the kind of the current step by its batch."""
        self._kind = DECODES if bool((batch.stops - batch.starts == 1).all()) else PROMPTS

    def ended(self) -> None:
        """Book a step that has ended; it had no batch where only requests ended."""
        if self._kind:
            self.steps[self._kind] += 1
            for part, spent in self._step.items():
                _add(self.spent[self._kind], part, spent)
        self._kind, self._step = "", {}


def _add(sums: dict[str, float], name: str, amount: float) -> None:
    sums[name] = sums.get(name, 0.0) + amount


def watch(built: BuiltEngine, times: PartTimes) -> None:
    """Time the parts of this engine's steps from now on."""
    runner, engine = built.runner, built.engine
    decoder, attention, sampler = runner.decoder, runner.attention, runner.sampler
    plan, step = times.of(PLAN, attention.plan), times.of(HOST, engine.step)

    def planned(batch: Batch, *arguments: Any) -> Any:
        times.planned(batch)
        return plan(batch, *arguments)

    def stepped(*arguments: Any, **named: Any) -> Any:
        try:
            return step(*arguments, **named)
        finally:
            times.ended()

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (engine, "step", stepped),
        (attention, "plan", planned),
        (attention, "write", times.of(WRITING, attention.write)),
        (attention, "attend", times.of(ATTENTION, attention.attend)),
        (sampler, "start", times.of(SAMPLING, sampler.start)),
        (decoder, "forward", times.of(DECODER, decoder.forward)),
        *((decoder.ops, name, times.of(SMALL, getattr(decoder.ops, name))) for name in OPS),
    ]
    for module in decoder.modules():
        if isinstance(module, Linear):
            part = HEAD if module is decoder.head else LAYERS
            replaced.append((module, "forward", times.of_product(part, module.forward)))
    for owner, name, function in replaced:
        setattr(owner, name, function)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Time the parts of the steps that serve the trace, whose requests all come at once."""
    recipe = recipe_of(options)
    if (kind := recipe.device.kind) != "cpu":
        fix = "choose a recipe of a CPU"
        raise RecipeError("device.kind", "no CPU, whose time is counted", fix, value=kind)
    text = text_of(recipe)
    load_trace(options.trace, text)  # read before the model is built, so that a bad file fails at once
    built, times = build(recipe), PartTimes()
    serve(built.engine, text, at_once(load_trace(options.trace, text)))  # warms up
    built.engine.forget_prefixes()
    watch(built, times)
    serve(built.engine, text, at_once(load_trace(options.trace, text)))
    kinds = {kind: figures(times.steps[kind], spent) for kind, spent in times.spent.items()}
    return {"threads": torch.get_num_threads(), "kinds": kinds}


def figures(num_steps: int, spent: Mapping[str, float]) -> dict[str, object]:
    """Return the number of steps of a kind, the time of each part, and the speed of products."""
    parts_s = {part: spent.get(part, 0.0) for part in PARTS}
    products_s = parts_s[LAYERS] + parts_s[HEAD]
    return {
        "steps": num_steps,
        "processor_s": round(sum(parts_s.values()), 4),
        "parts_s": {part: round(took_s, 4) for part, took_s in parts_s.items()},
        "gflop_per_s": round(spent[MULTIPLIED] / products_s / 1e9, 1) if products_s else None,
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each part: seconds of processor time, and their share of the total."""
    kinds = [result["kinds"][kind] for kind in (DECODES, PROMPTS)]
    total_s = sum(kind["processor_s"] for kind in kinds)
    counts = [f"{kind['steps']} {name}" for kind, name in zip(kinds, (DECODES, PROMPTS))]
    rows: list[Sequence[object]] = []
    for part in PARTS:
        spent_s = [kind["parts_s"][part] for kind in kinds]
        share = sum(spent_s) / total_s if total_s else 0.0
        rows.append((part, *(f"{each:.2f}" for each in spent_s), f"{share:.1%}"))
    rows.append(("all", *(f"{kind['processor_s']:.2f}" for kind in kinds), "100 %"))
    rows.append(("GFLOP/s of the products", *(kind["gflop_per_s"] for kind in kinds), ""))
    print(markdown((f"s of processor time, {result['threads']} threads", *counts, "share"), rows))
