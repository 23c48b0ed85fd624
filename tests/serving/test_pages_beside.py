"""Pages move beside what a draft model, a head or an MTP layer keeps, and for adapters named by their files.

Each answer is one engine's that computes everything itself, in float32; drafts are compared with it too, so
that a drafter which got nothing of its own would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from kv_cache.page_keys import page_salt
from models.checkpoint.adapter_files import look_at
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.adapters import PutAdapter
from serving.engine.worker import AdapterLoads
from tests.models import eagle3_heads, mtp_layers
from tests.models.families import VOCABULARY, make
from tests.models.test_adapters import adapted
from tests.models.test_draft_model import OTHER, TARGET
from tests.models.test_eagle3 import LLAMA
from tests.serving.page_pair import HERE, Pair, cache_of
from tests.thorough import first_quick

PAGE, MOST = 16, 3
ROOM = "adapters.most=2", "adapters.rank=8"


def engine(path: Path, *more: str, **keys: Any) -> BuiltEngine:
    asked = {
        "model.path": path, "model.dtype": "float32", "device.compile": "false", "cache.memory_gib": "null",
        "cache.page_size": PAGE, "cache.num_pages": 40, "scheduler.num_slots": 4, "device.threads": 1,
        "scheduler.max_batch_tokens": 40, "scheduler.max_request_tokens": 160,
    }  # fmt: skip
    texts = [f"{name}={value}" for name, value in (asked | keys).items()]
    return build(load(ROOT / "recipes/any/cpu.yaml", [*texts, *more]))


def drafting(kind: str, root: Path) -> tuple[Path, dict[str, Any]]:
    """A target, and the keys of its drafter of this kind."""
    keys: dict[str, Any] = {"speculation.kind": kind, "speculation.max_tokens": MOST}
    keys["speculation.adaptive"] = "fixed"
    if kind == "mtp":
        return mtp_layers.target_of("glm4_moe", root)[1], keys
    if kind == "draft":
        _, path = make(TARGET, root)
        return path, keys | {"speculation.draft_path": make(OTHER, root)[1]}
    model, path = eagle3_heads.target_of(LLAMA, root)
    return path, keys | {"speculation.draft_path": eagle3_heads.head_for(model, root / "head")}


def requests(count: int = 3, seed: int = 3, **more: Any) -> list[Request]:
    random = np.random.default_rng(seed)
    opening = random.integers(1, VOCABULARY, 24)
    return [
        Request(
            f"r{number}",
            np.concatenate([opening, random.integers(1, VOCABULARY, 20 + 9 * number)]).astype(np.int32),
            SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
            prompt_replica=HERE,
            **more,
        )
        for number in range(count)
    ]


def served_alone(built: BuiltEngine, asked: Sequence[Request]) -> list[list[int]]:
    for each in asked:
        built.engine.add(each)
        while built.engine.has_work:
            built.engine.step()
    return [each.answer.tolist() for each in asked]


def pages_of(engine: Engine, asked: Sequence[Request]) -> list[bytes]:
    """What all layers hold of the prompts, those of the drafter last."""
    held, prefix = cache_of(engine), engine.scheduler.prefix
    found = []
    for each in asked:
        keys = engine.scheduler.page_keys(each)[: (len(each.prompt) - 1) // PAGE]
        pages = prefix.find(keys, each.prompt[: len(keys) * PAGE], each.cache_salt)
        assert len(pages) == len(keys)
        found += [held.read_layer(layer, pages)().tobytes() for layer in range(len(held.layers))]
    return found


@pytest.mark.parametrize("kind", first_quick(1, ["eagle3", "draft", "mtp"]))
def test_what_a_drafter_keeps_of_a_prompt_comes_with_its_pages(kind: str, tmp_path: Path) -> None:
    path, keys = drafting(kind, tmp_path)
    plain = engine(path, **keys)
    want = served_alone(plain, requests())
    drafted = plain.engine.scheduler.counters
    pair = Pair(
        built=(engine(path, **keys), engine(path, **keys)), most_part_bytes=1 << 14, window_bytes=1 << 20
    )
    asked = requests()
    for each in asked:  # one after the other, as they were served alone
        pair.serve([each])
    assert [each.answer.tolist() for each in asked] == want
    counters = pair.answers.scheduler.counters
    assert counters.arrived_pages > 0
    assert counters.missed_pages == 0
    assert all(each.num_cached_tokens == (len(each.prompt) - 1) // PAGE * PAGE for each in asked)
    # A drafter without the prompt's keys and features would guess otherwise
    assert counters.draft_tokens == drafted.draft_tokens > 0
    assert counters.accepted_tokens == drafted.accepted_tokens
    assert pages_of(pair.prompts, asked) == pages_of(pair.answers, asked)
    pair.settle()
    pair.close()


@pytest.fixture
def adapters(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A model and three adapters of it."""
    model, path = make(TARGET, tmp_path)
    found = [tmp_path / f"adapter{seed}" for seed in range(3)]
    for seed, folder in enumerate(found):
        adapted(model, folder, seed, r=2 + seed)
    return path, found


def folders(*paths: Path) -> str:
    return f"adapters.folders={{{', '.join(f'a{at}: {path}' for at, path in enumerate(paths))}}}"


def for_adapter(folder: Path, number: int) -> list[Request]:
    salt = page_salt("", look_at(folder, 8).digest)
    return [replace(each, adapter=number, cache_salt=salt) for each in requests(2)]


@pytest.mark.slow
def test_an_adapter_is_the_one_of_the_same_files_whatever_its_place(
    adapters: tuple[Path, list[Path]],
) -> None:
    path, (one, other, third) = adapters
    prompts, answers = engine(path, *ROOM, folders(one, other)), engine(path, *ROOM, folders(third, one))
    pair = Pair(built=(prompts, answers))
    asked = [*for_adapter(one, 2), *requests(2), *for_adapter(third, 1)]
    for number, each in enumerate(asked):
        each.id = str(number)
    got = [pair.serve([each])[0] for each in asked]
    plain = engine(path, *ROOM, folders(third, one))
    assert got == served_alone(plain, [*for_adapter(one, 2), *requests(2), *for_adapter(third, 1)])
    assert len({*map(tuple, got)}) == len(got), "each adapter says something else"
    fetched = [each.num_cached_tokens > 0 for each in asked]
    assert fetched[:4] == [True] * 4
    counters = pair.answers.scheduler.counters
    # The third is not there; of its second prompt, the page that both begin with is found here
    assert counters.missed_pages == sum((len(each.prompt) - 1) // PAGE for each in asked[4:]) - 24 // PAGE
    pair.settle()
    pair.close()


def test_a_place_that_gets_another_adapter_computes_no_more_for_others(
    adapters: tuple[Path, list[Path]],
) -> None:
    path, (one, other, _) = adapters
    prompts, answers = (engine(path, *ROOM, folders(one)) for _ in range(2))
    pair = Pair(built=(prompts, answers))
    (asked, _) = for_adapter(one, 1)
    pair.is_stopped = True
    pair.ask([asked])
    pair.until(lambda: pair.server.asked.qsize() > 0)
    pair.sends.take()  # it waits for its first step
    places, questions = prompts.adapters, prompts.questions
    assert places is not None
    assert questions is not None
    loads = AdapterLoads(questions, pair.sending.leave_adapter)
    loads.begin(PutAdapter(1, str(other), look_at(other, 8).digest))
    done = []
    pair.until(lambda: questions.take() or done.extend(loads.take_done()) or bool(done))
    assert [each.problem for each in done] == [""]
    assert not len(pair.sends)
    assert places.digests == {1: look_at(other, 8).digest}
    pair.is_stopped = False
    pair.until(lambda: not len(pair.fetches) and not pair.answers.has_work)
    assert [asked.answer.tolist()] == served_alone(engine(path, *ROOM, folders(one)), for_adapter(one, 1)[:1])
    assert pair.answers.scheduler.counters.arrived_pages == 0
    pair.settle()
    pair.close()
