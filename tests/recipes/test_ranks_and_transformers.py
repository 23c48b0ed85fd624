"""Engines over several ranks give the answers of transformers, whatever they do at the same time.

Prompts that share their beginnings answer greedily beside others that are drawn, masked and aborted, in a
cache that is too small for them, of which pages are preempted, swapped, compacted and resized. Steps overlap,
and drafts are verified.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.families import VARIANTS, Variant, make, wide
from tests.models.sparse_variants import SPARSE_VARIANTS
from tests.serving.warm import completed
from tests.thorough import cases

VOCABULARY = 509  # which no number of ranks divides
NUM_LAYERS = 3  # two stages have one and two of them
NUM_REQUESTS = 14
CROWDED = (
    "scheduler.num_slots=6",
    "scheduler.max_request_tokens=120",
    "scheduler.max_batch_tokens=32",
    "scheduler.queue=priority",
    "scheduler.outrank=true",
    "scheduler.overlap=true",
    "speculation.kind=ngram",
    "cache.compact_every_steps=3",
    "cache.compact_pages_per_step=2",
    "cache.memory_gib=null",
    "model.dtype=float32",
    "server.step_timeout_s=300",
)
SETTINGS = {
    "cpu": (
        "device.compile=false", "device.threads=1",
        "cache.page_size=4", "cache.num_pages=40", "cache.host_gib=0.001",
    ),
    "npu": (
        "device.kind=npu", "device.virtual=true", "device.virtual_fp32=true", "device.graphs=8",
        "device.compile=false", "cache.page_size=16", "cache.num_pages=14", "cache.host_gib=0.005",
    ),
}  # fmt: skip
SETTINGS["npu, eager"] = (*SETTINGS["npu"], "device.graphs=0")
# Whether guesses are worth their time is not asked of stages, which may find at once that they are not
ALL_GUESSES = "speculation.adaptive=fixed"
SPREAD = {
    "TP 2": ("parallel.tensor=2",),
    "TP 4": ("parallel.tensor=4",),  # there are two key-value heads
    "PP 2": ("parallel.pipeline=2", ALL_GUESSES),
    # Which also divide the rows of steps of six tokens and more, within stages and between them
    "TP 2 x PP 2": (
        *("parallel.tensor=2", "parallel.pipeline=2", "parallel.least_divided_tokens=6"),
        ALL_GUESSES,
    ),
}
FEW = [("cpu", "TP 2 x PP 2"), ("npu", "TP 2"), ("npu", "PP 2")]


@dataclass(frozen=True, slots=True)
class Asked:
    """Prompts, how many tokens are to answer each, and what transformers answers."""

    checkpoint: Path
    prompts: list[tuple[list[int], int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    (llama,) = (each for each in VARIANTS if each.name == "llama_biased")
    options = llama.options | {"hidden_size": 64, "intermediate_size": 128}
    variant = replace(llama, options=options, saved_as=torch.float32, shard_size="5GB")
    return asked_of(wide(variant), tmp_path_factory.mktemp("checkpoint"))


def asked_of(variant: Variant, folder: Path) -> Asked:
    """Prompts for such a checkpoint, of three layers."""
    more = {"vocab_size": VOCABULARY, "num_hidden_layers": NUM_LAYERS}
    model, path = make(replace(variant, options=variant.options | more), folder)
    random = np.random.default_rng(17)
    shared = random.integers(0, VOCABULARY, 40).tolist()
    prompts, answers = [], []
    for _ in range(NUM_REQUESTS):
        own = random.integers(0, VOCABULARY, int(random.integers(1, 9))).tolist() * int(random.integers(1, 4))
        prompts.append((shared[: int(random.integers(0, 40))] + own, int(random.integers(8, 40))))
    for prompt, max_tokens in prompts:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        found = model.generate(
            tokens, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
        )
        answers.append(found[0, len(prompt) :].tolist())
    return Asked(path, prompts, answers)


def spread(asked: Asked, folder: Path, *changes: str) -> dict[str, Any]:
    """What an engine in a process of its own says, and what happened to it."""
    job, answers = folder / "job.json", folder / "answers.json"
    changes = (f"model.path={asked.checkpoint}", *CROWDED, *changes)
    what = {"recipe": "recipes/any/cpu.yaml", "changes": changes, "prompts": asked.prompts, "seed": 1}
    job.write_text(json.dumps(what))
    done = completed("tests.recipes.spread_engine", str(job), str(answers))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(answers.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if kind == "cpu" else [pytest.mark.npu])
        for kind, way in cases(FEW, list(product(SETTINGS, SPREAD)))
    ],
)
def test_answers_over_ranks_are_those_of_transformers(
    kind: str, way: str, asked: Asked, tmp_path: Path
) -> None:
    check(asked, tmp_path, kind, way)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "kind"),
    [
        ("v32", "TP 2", "cpu"),
        ("glm_5_pattern", "TP 2 x PP 2", "cpu"),  # each layer of the second stage shares a choice
        pytest.param("glm_5_shared", "PP 2", "npu", marks=pytest.mark.npu),
    ],
)
def test_ranks_choose_alike(name: str, way: str, kind: str, tmp_path: Path) -> None:
    """The second stage begins with a layer that shares the choice of the first."""
    (variant,) = (each for each in SPARSE_VARIANTS if each.name == name)
    variant = replace(variant, saved_as=torch.float32)
    if kind == "npu":
        variant = wide(replace(variant, options=variant.options | {"index_head_dim": 128}))
    check(asked_of(variant, tmp_path), tmp_path, kind, way)


def check(asked: Asked, folder: Path, kind: str, way: str) -> None:
    """Answers are those of transformers, and what is meant to happen has."""
    found = spread(asked, folder, *SETTINGS[kind], *SPREAD[way])
    answers = {int(name): answer for name, answer in found["answers"].items() if name.isdigit()}
    assert len(answers) > NUM_REQUESTS // 2
    assert answers == {number: asked.answers[number] for number in answers}
    happened = found["happened"]
    print(kind, way, happened)
    for name in ("hit_tokens", "draft_tokens", "compacted_pages"):
        assert happened[name] > 0, name
    if "parallel.pipeline=2" not in SPREAD[way]:  # whose batches spread what is wanted
        assert happened["preemptions"] > 0
        assert happened["swapped_in_pages"] > 0
    assert (happened["graphs"] > 0) == (kind == "npu")
