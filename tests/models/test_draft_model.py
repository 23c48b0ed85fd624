"""With a draft model every request gets its own tokens, and every draft the keys that it follows.

The engine runs in float32, over chunked prompts, shared prefixes, samples that fork, preemption with and
without swapping, compaction and a pool that changes its size, and is held to one without drafts whose pages
stay where they are. Drafts are compared with what transformers
says, token for token.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from continuous_batching.speculation.lengths import Fixed, Offers
from kv_cache.pages import Index
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, on_each, settings
from tests.lazy import transformers
from tests.models.families import VOCABULARY, Variant, expected_logprobs, make, wide
from tests.models.test_draft_identity import FORMS, check_logprobs
from tests.models.variants import LLAMA3
from tests.thorough import cases

NUM_REQUESTS, NUM_NEW, LONGEST = cases(10, 60), 24, 70
TARGET = Variant("llama_target", "llama", {"head_dim": 40, "num_key_value_heads": 2}, LLAMA3)
OTHER = Variant(
    "qwen3_draft",
    "qwen3",
    {"head_dim": 24, "num_key_value_heads": 1, "num_attention_heads": 2, "num_hidden_layers": 1},
)
WINDOW = Variant("mistral_target", "mistral", {"sliding_window": 11})


def requests() -> list[Request]:
    random = np.random.default_rng(5)
    opening = random.integers(0, VOCABULARY, 40)
    made = []
    for number in range(NUM_REQUESTS):
        own = random.integers(0, VOCABULARY, int(random.integers(1, 30)))
        prompt = np.concatenate([opening[: 40 if number % 2 else 0], own])
        form = {"seed": number} | FORMS[number % len(FORMS)]
        params = SamplingParams(**{"max_tokens": NUM_NEW, "ignore_eos": True} | form)
        request = Request(str(number), prompt, params)
        if number % 3 == 0 and params.prompt_logprobs is None:
            seeded = replace(params, seed=100 + number)
            request.followers = [Request(f"{number}b", prompt, seeded)]
        made.append(request)
    return made


def serve(engine: Engine, *, resizes: bool = True, most: int = NUM_REQUESTS) -> list[Request]:
    """All of them, or the first few, two joining at each step, while the pool shrinks and grows."""
    waiting, step = requests()[:most], 0
    made = [each for request in waiting for each in (request, *request.followers)]  # who fork, stand alone
    num_pages = engine.scheduler.pool.num_pages
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        engine.step()
        step += 1
        if resizes and step in (9, 14):
            engine.resize(num_pages - 2 if step == 9 else num_pages, "running")
    return made


def tokens_of(made: list[Request]) -> dict[str, list[int]]:
    return {each.id: each.tokens.tolist() for each in made}


class Watched:
    """A runner whose drafts are kept: by request, how many tokens were known, and what was guessed."""

    def __init__(self, engine: Engine) -> None:
        self._runner, self._slots = engine.runner, engine.slots
        self.drafts: list[tuple[str, int, list[int]]] = []
        self.longest_lag = 0  # tokens that one step caught up with
        self.resize = engine.runner.resize
        engine.runner = self

    def run(self, batch: Batch) -> Sampled:
        return self.start(batch)()

    def start(self, batch: Batch) -> Callable[[], Sampled]:
        wait = self._runner.start(batch)
        return lambda: self._seen(batch, wait())

    def _seen(self, batch: Batch, sampled: Sampled) -> Sampled:
        assert len(sampled.drafts) == batch.num_drafts
        counts = batch.drafts_by_span
        lags = np.maximum(np.minimum(batch.starts, batch.draft_stops) - batch.draft_starts, 0)
        self.longest_lag = max(self.longest_lag, int(lags.sum()))
        parts = np.split(sampled.drafts, counts.cumsum())
        for row, stop, count, part in zip(batch.slots, batch.stops, counts, parts):
            if count:
                self.drafts.append((self._slots.requests[row].id, int(stop - count), part.tolist()))
        return sampled


def settings_of(target: Path, kind: Kind, draft: Path | None, most: int, **more: Any) -> list[str]:
    overrides = {
        "model.path": target,
        "model.dtype": "float32",
        "device.compile": "false" if kind == "cpu" else "auto",
        "cache.page_size": 16,
        "cache.num_pages": 15,
        "cache.memory_gib": "null",
        "cache.host_gib": 0.002,
        "cache.compact_every_steps": 3,
        "scheduler.num_slots": 7,
        "scheduler.max_batch_tokens": 96,
        "scheduler.max_request_tokens": LONGEST + NUM_NEW,
    }
    if draft is not None:
        overrides |= {
            "speculation.kind": "draft",
            "speculation.draft_path": draft,
            "speculation.max_tokens": most,
            "speculation.adaptive": "fixed",
        }
    return [*settings(kind), *(f"{key}={value}" for key, value in (overrides | more).items())]


def engine_of(target: Path, kind: Kind, draft: Path | None = None, most: int = 4, **more: Any) -> Engine:
    return build(load(ROOT / "recipes/any/cpu.yaml", settings_of(target, kind, draft, most, **more))).engine


def undisturbed(target: Path, kind: Kind) -> list[Request]:
    """All of them without drafts, in a pool that keeps its size and has room for all."""
    engine = engine_of(target, kind, **{"cache.num_pages": 400})
    made = serve(engine, resizes=False)
    assert engine.scheduler.counters.preemptions == 0
    return made


def check_drafts(watched: Watched, made: list[Request], model: Any) -> int:
    """Until the first wrong one, each is what transformers says; returns how many were right."""
    tokens = {each.id: each.tokens for each in made}
    said = {
        name: expected_logprobs(model, known[:-1].tolist()).argmax(-1).numpy()
        for name, known in tokens.items()
    }
    num_right = 0
    for name, known, drafts in watched.drafts:
        truth = tokens[name][known : known + len(drafts)].tolist()
        truth += [-1] * (len(drafts) - len(truth))
        right = int(np.cumprod([one == other for one, other in zip(drafts, truth)]).sum())
        checked = drafts[: right + 1]
        assert checked == said[name][known - 1 : known - 1 + len(checked)].tolist(), (name, known)
        num_right += right
    return num_right


def noisy(path: Path, share: float) -> Path:
    """The same checkpoint, but for noise."""
    made = path.parent / f"{path.name}_noisy"
    shutil.copytree(path, made)
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path / "model.safetensors")
    noise = {name: torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
    tensors = {name: each + share * each.std() * noise[name] for name, each in tensors.items()}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def check(target: Path, draft: Path, model: Any, kind: Kind, most: int, plain: list[Request]) -> float:
    engine = engine_of(target, kind, draft, most)
    watched = Watched(engine)
    drafted = serve(engine)
    assert tokens_of(drafted) == tokens_of(plain)
    check_logprobs(drafted, plain)
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.swapped_in_pages > 0
    assert counters.compacted_pages > 0
    assert counters.draft_tokens > 2 * NUM_REQUESTS
    assert counters.hit_tokens > 0
    assert check_drafts(watched, drafted, model) >= counters.accepted_tokens
    return counters.accepted_tokens / counters.draft_tokens


def test_a_draft_model_changes_no_token(tmp_path: Path) -> None:
    target, path = make(TARGET, tmp_path)
    plain = undisturbed(path, "cpu")
    near = noisy(path, 0.1)
    model = transformers.LlamaForCausalLM.from_pretrained(near, attn_implementation="eager")
    right = check(path, path, target, "cpu", 20, plain)  # more than a page of 16
    mixed = check(path, near, model, "cpu", 4, plain)
    assert right > mixed + 0.05
    assert mixed > 0.05


@pytest.mark.slow
def test_nor_do_windows(tmp_path: Path) -> None:
    target, path = make(WINDOW, tmp_path)
    check(path, path, target, "cpu", 17, undisturbed(path, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("pair", on_each("fused")[1:])
def test_nor_does_it_on_other_devices(pair: tuple[Kind, str], tmp_path: Path) -> None:
    path = make(wide(TARGET), tmp_path)[1]
    plain = undisturbed(path, pair[0])
    other, draft = make(wide(OTHER, 128), tmp_path)
    check(path, draft, other, pair[0], 3, plain)


TINY_DRAFT, TINY_NEW = ROOT / "recipes/tiny/draft", 48
CPU = settings("cpu")
WITH_DRAFTS = [
    "speculation.kind=draft",
    f"speculation.draft_path={TINY_DRAFT}",
    "speculation.max_tokens=3",
    "speculation.adaptive=fixed",
]


def tiny_requests(engine: Engine, count: int) -> list[Request]:
    """Served to their ends, at temperature 1."""
    random = np.random.default_rng(0)
    made = [
        Request(
            str(number),
            random.integers(300, 900, 6 + number),
            SamplingParams(max_tokens=TINY_NEW, temperature=1.0, seed=number, ignore_eos=True),
        )
        for number in range(count)
    ]
    for request in made:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return made


class Late(Fixed):
    """No drafts for thirty steps."""

    def __init__(self) -> None:
        self._num_steps = 0

    @property
    def is_hopeful(self) -> bool:
        return self._num_steps >= 30

    def choose(self, offers: Offers) -> Index:
        return offers.counts if self.is_hopeful else np.zeros_like(offers.counts)

    def observe(self, batch: Batch, took_s: float, tokens: int) -> None:
        self._num_steps += 1


@pytest.mark.slow
def test_rows_without_drafts_fall_behind_and_catch_up_in_pieces() -> None:
    recipe = ROOT / "recipes/tiny/cpu.yaml"
    limits = ["scheduler.max_batch_tokens=64", "scheduler.max_request_tokens=120"]
    asked = ["scheduler.num_slots=20", *limits, *CPU, "scheduler.overlap=true"]
    plain, drafted = (build(load(recipe, [*asked, *kind])).engine for kind in ([], WITH_DRAFTS))
    assert drafted.scheduler.speculation is not None
    drafted.scheduler.speculation.lengths = Late()
    watched = Watched(drafted)
    made = tiny_requests(drafted, 20)
    assert tokens_of(made) == tokens_of(tiny_requests(plain, 20))
    assert watched.longest_lag > 64, "all rows caught up in one piece"
    draft = transformers.LlamaForCausalLM.from_pretrained(
        TINY_DRAFT, dtype=torch.float32, attn_implementation="eager"
    )
    assert check_drafts(watched, made, draft) >= drafted.scheduler.counters.accepted_tokens > 100
