"""On every product the tokens are those of transformers, whatever happens between captured steps.

In float32, which the stand-in can be made to take, greedy tokens are exactly transformers' own, and drawn
ones a CPU's. In the type that the product takes on hardware, what it computes is held against transformers in
float32 with the same weights. A setting that a product lacks is refused, and the refusal is checked too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from models.layers.dtypes import TORCH_DTYPES
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, VOCABULARY, expected_logprobs, generated, make, wide
from tests.models.product_runs import (
    HAPPENED,
    LONGEST,
    NUM_NEW,
    OWN_TYPE,
    AskedRequest,
    Outcome,
    Run,
    Way,
    request_of,
    serve,
)
from tests.patience import PATIENCE_S
from tests.serving.warm import completed
from tests.thorough import cases

# A test waits for the process that runs all of its product, for as long as a busy machine takes
pytestmark = [pytest.mark.slow, pytest.mark.npu, stand_in_alone, pytest.mark.timeout(3600)]

NUM_GREEDY, NUM_DRAWN = 5, 3
OPENING = 70  # tokens with which every other prompt opens: a full page of any product
LEAST_MARGIN = 1e-3  # margin of a greedy token over the next: no rounding in float32 turns it
ROUNDED = 2.0  # how far from float32, in parts of how far transformers' own rounding is

# Heads of 64 and of 128; q/k norm (qwen3), biases (qwen2, biased), windows, one key head, every kind of rope
DENSE = {
    "llama": 64,
    "llama_dynamic": 64,
    "llama_biased": 128,
    "mistral_window": 64,
    "mistral_yarn": 128,
    "qwen2_yarn": 64,
    "qwen2_layer_types": 128,
    "qwen3": 128,
    "qwen3_layer_types": 64,
    "gemma3_layer_types": 128,
    "internlm3_biased": 64,
}
MIXTURES = {"qwen3_moe_window": 64, "mixtral": 64, "qwen2_moe": 128, "glm4_moe": 64, "gpt_oss_half": 64}
LATENTS = {"deepseek_v2": 64, "deepseek_v3": 64}  # whose head_dim says nothing
HEAD_DIMS = DENSE | MIXTURES | LATENTS | {"gemma2": 64}
WITH_WINDOWS = ("mistral_window", "qwen2_layer_types", "qwen3_layer_types", "gemma3_layer_types")
NO_WINDOW = r"layer \d of the model has a sliding window of \d+; attention of the 310P has none"
NO_LATENTS = "the model has latent attention, whose operators the {} lacks, and 910B, 910C have"
NO_CAP = "attn_logit_softcapping is 2; attention of the {} has no cap of scores"
NO_INT8 = "the model is in W8A8; the {} takes no scale for each token, 910B, 910C do"


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a product, a checkpoint and a way; `more` replaces keys, `refused` is how it is refused."""

    product: str
    name: str
    way: Way = "eager"
    more: tuple[tuple[str, str], ...] = ()
    refused: str | None = None

    def __str__(self) -> str:
        return "-".join([self.product, self.name, self.way, *(value for _, value in self.more)])


PLAIN = (("device.attention", "reference"),)  # all that the first 910 has
INT8 = (("model.quantization", "w8a8"), ("model.dtype", "float16"))
WAYS: dict[str, tuple[Way, ...]] = {
    "310P": get_args(Way),
    "910B": get_args(Way),
    "910C": ("eager", "disturbed"),  # its contract is the 910B's
    "950": ("eager", "disturbed", "own_type"),
}
TAKEN = {
    "310P": (*(name for name in DENSE if name not in WITH_WINDOWS), "mixtral"),
    "910B": (*DENSE, *MIXTURES, *LATENTS),
    "910C": (*DENSE, "deepseek_v3"),
    "950": (*DENSE, *MIXTURES),
}
DYNAMIC = "llama_dynamic"  # which turns a token by how many there are when it comes: one pass tells no answer
EVERY_CELL = [
    *(
        Cell(product, name, way)
        for product, names in TAKEN.items()
        for name in names
        for way in WAYS[product]
        if way != "own_type" or (name != DYNAMIC and (product == "910B" or name in DENSE))
    ),
    *(Cell("910", name, "eager", PLAIN) for name in ("llama_dynamic", *WITH_WINDOWS, "mixtral")),
    *(Cell("950", name, "eager", PLAIN) for name in ("deepseek_v3", "gemma2")),
]
# Each kind of attention and of experts on a product that has operators of its own for it. A disturbed run has
# eager steps, which hold prompts, and captured ones
FEW_CELLS = [
    *(Cell("910B", name, "disturbed") for name in ("llama_dynamic", "gpt_oss_half", "deepseek_v3")),
    *(Cell("910B", "deepseek_v3", way) for way in ("eager", "own_type")),
    *(Cell("310P", "llama_biased", way) for way in ("eager", "disturbed", "own_type")),
    Cell("310P", "mixtral", "disturbed"),
    *(Cell("950", "qwen3_layer_types", way) for way in ("disturbed", "own_type")),
    Cell("950", "mixtral", "disturbed"),
    Cell("910", "gemma3_layer_types", "eager", PLAIN),
]
MATRIX = cases(FEW_CELLS, EVERY_CELL)
REFUSED = [
    *(Cell("310P", name, refused=NO_WINDOW) for name in WITH_WINDOWS),
    *(Cell(product, "llama", more=INT8, refused=NO_INT8.format(product)) for product in ("310P", "950")),
    Cell("910", "llama", "eager", PLAIN + INT8, NO_INT8.format("910")),
    Cell("910", "llama", "captured", refused="device.product is 910, for which there is no fused attention"),
    Cell("910", "llama", "captured", PLAIN, "cannot be captured"),
    Cell("310P", "gpt_oss_half", refused="the model has attention sinks; attention of the 310P takes none"),
    *(Cell(each, "gemma2", refused=NO_CAP.format(each)) for each in ("310P", "910B", "950")),
    *(Cell(each, "deepseek_v3", refused=NO_LATENTS.format(each)) for each in ("310P", "950")),
]


def each_of(cells: list[Cell]) -> Any:
    """Parametrised by these."""
    return pytest.mark.parametrize("cell", cells, ids=str)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is asked of a checkpoint, and what transformers and a CPU answer."""

    model: Any
    requests: list[AskedRequest]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """The model that transformers has of a checkpoint, and its folder, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    variants = {variant.name: variant for variant in VARIANTS}
    return cache(lambda name: make(wide(variants[name], HEAD_DIMS[name]), folder))


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[[str], tuple[Any, Path]]) -> Callable[[str], Expected]:
    """What is right for a checkpoint, by its name."""

    @cache
    def of(name: str) -> Expected:
        model, path = checkpoint(name)
        random = np.random.default_rng(len(name))
        greedy, drawn = greedily(model, random), by_chance(path, random)
        # One after the other, so that each step has both
        pairs = [*zip(greedy, drawn), *((each,) for each in greedy[len(drawn) :])]
        requests, answers = zip(*(each for pair in pairs for each in pair))
        return Expected(model, list(requests), list(answers))

    return of


def prompts(random: np.random.Generator) -> Iterator[list[int]]:
    """Of 1 to LONGEST tokens; every other opens alike."""
    opening = random.integers(0, VOCABULARY, OPENING).tolist()
    for number in count():
        length = int(random.integers(1, LONGEST + 1))
        alike = opening[: length - 1] if number % 2 else []
        yield alike + random.integers(0, VOCABULARY, length - len(alike)).tolist()


Answered = tuple[AskedRequest, list[int]]


def greedily(model: Any, random: np.random.Generator) -> list[Answered]:
    """Prompts with transformers' own greedy tokens, none of which another comes near."""
    found: list[Answered] = []
    for prompt in prompts(random):
        tokens, logprobs = generated(model, prompt, NUM_NEW)
        best = logprobs.topk(2).values
        if bool((best[:, 0] - best[:, 1] > LEAST_MARGIN).all()):
            found.append((AskedRequest(prompt=prompt, seed=None), tokens))
        if len(found) == NUM_GREEDY:
            return found
    raise AssertionError("prompts have no end")


def by_chance(path: Path, random: np.random.Generator) -> list[Answered]:
    """Prompts with the tokens that a CPU draws, which small changes of the logits do not turn."""
    own = ["device.threads=1", "device.compile=false", "device.attention=reference", "cache.memory_gib=null"]
    keys = [f"model.path={path}", "model.dtype=float32", "cache.num_pages=2000", *own]
    engine = build(load(ROOT / "recipes/any/cpu.yaml", keys)).engine
    asked = [
        AskedRequest(prompt=each, seed=at) for at, each in enumerate(islice(prompts(random), 2 * NUM_DRAWN))
    ]
    answers = []
    for size in (0, LEAST_MARGIN, LEAST_MARGIN):
        requests = [request_of(number, each) for number, each in enumerate(asked)]
        for request in requests if size else []:
            bias = dict(enumerate(random.uniform(-size, size, VOCABULARY).tolist()))
            request.params = replace(request.params, logit_bias=bias)
        serve(engine, requests)
        answers.append([request.answer.tolist() for request in requests])
    same = [(each, ways[0]) for each, *ways in zip(asked, *answers) if ways[0] == ways[1] == ways[2]]
    assert len(same) >= NUM_DRAWN
    return same[:NUM_DRAWN]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest,
    checkpoint: Callable[[str], tuple[Any, Path]],
    expected: Callable[[str], Expected],
) -> Callable[[str], dict[Cell, Outcome]]:
    """What came of a product's cells, of all that were selected: one process runs them."""
    items = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["cell"] for item in items]

    @cache
    def of(product: str) -> dict[Cell, Outcome]:
        cells = [cell for cell in selected if cell.product == product]
        runs = [
            Run(
                path=str(checkpoint(cell.name)[1]),
                way=cell.way,
                more=dict(cell.more),
                requests=[] if cell.refused else expected(cell.name).requests,
            )
            for cell in cells
        ]
        given = json.dumps({"product": product, "runs": runs})
        done = completed("tests.models.product_runs", given=given, limit_s=PATIENCE_S * len(runs))
        assert done.returncode == 0, done.stderr[-4000:]
        return dict(zip(cells, json.loads(done.stdout.splitlines()[-1]), strict=True))

    return of


@pytest.fixture
def outcome(cell: Cell, outcomes: Callable[[str], dict[Cell, Outcome]]) -> Outcome:
    found = outcomes(cell.product)[cell]
    assert bool(found["refused"]) == bool(cell.refused), found["refused"]
    if not cell.refused:
        assert happened_as_asked(cell.way, found["happened"]), found["happened"]
    return found


def happened_as_asked(way: Way, happened: str) -> bool:
    """Whether captured steps were replayed, and between two of them all that disturbs a way."""
    between = all(re.search(f"r.*{letter}.*r", happened) for letter in HAPPENED[way])
    return between and ("r" in happened) == ("r" in HAPPENED[way])


@each_of([cell for cell in MATRIX if cell.way != "own_type"])
def test_in_float32_tokens_are_those_of_transformers(
    cell: Cell, outcome: Outcome, expected: Callable[[str], Expected]
) -> None:
    assert outcome["answers"] == expected(cell.name).answers


@each_of([cell for cell in MATRIX if cell.way == "own_type"])
def test_in_the_type_of_the_product_they_are_those_of_float32_up_to_its_rounding(
    cell: Cell, outcome: Outcome, expected: Callable[[str], Expected]
) -> None:
    """The bound is transformers' own distance in the same type, from float32 with the same weights.

    Both round after each operation, but at other places, so that the two distances are alike and no more:
    within ROUNDED of each other over all tokens, and for the furthest token.
    """
    case = expected(cell.name)
    dtype = TORCH_DTYPES[OWN_TYPE.get(cell.product, "bfloat16")]
    rounded = like(case.model).to(dtype)
    exact = like(rounded).float()
    ours, theirs, behind = [], [], []
    for asked, answer, said in zip(case.requests, outcome["answers"], outcome["logprobs"]):
        wanted, own = (forced(model, asked["prompt"], answer) for model in (exact, rounded))
        chosen = torch.tensor(answer)[:, None]
        ours.append(torch.tensor(said) - wanted.gather(1, chosen)[:, 0])
        theirs.append((own - wanted).gather(1, chosen)[:, 0])
        if asked["seed"] is None:
            behind.append(wanted.max(-1).values - wanted.gather(1, chosen)[:, 0])
    far, allowed = torch.cat(ours).abs(), torch.cat(theirs).abs()
    assert far.square().mean().sqrt() <= ROUNDED * allowed.square().mean().sqrt()
    if cell.name in DENSE:  # one rounding may choose other experts for a token of a mixture
        assert far.max() <= ROUNDED * allowed.max()
    assert torch.cat(behind).max() <= 2 * ROUNDED * allowed.max(), "a token that float32 would not choose"


@each_of(REFUSED)
def test_what_a_product_has_not_is_refused(cell: Cell, outcome: Outcome) -> None:
    assert re.search(str(cell.refused), str(outcome["refused"]))
    assert "\n" not in str(outcome["refused"])


def like(model: Any) -> Any:
    """Another of the same weights, in float32; torch warns of a deep copy once torch_npu is there."""
    made = type(model)(model.config).eval()
    made.load_state_dict(model.state_dict())
    return made


@torch.no_grad()
def forced(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Transformers' log-probabilities [len(answer), V] where its answer is this one."""
    return expected_logprobs(model, prompt + answer[:-1])[len(prompt) - 1 :]
