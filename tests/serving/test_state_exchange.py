"""Prompts of layers with a recurrent state on one engine, and their answers on another.

The state behind a prompt's last page comes with its pages. Tokens are those of one engine, in float32 with
states that decay slowly, so that one which is missing or stands elsewhere shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from continuous_batching.request import Request, SamplingParams
from kv_cache.states import GRID
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.engine import page_exchange
from tests.models.families import VOCABULARY, make
from tests.models.mtp_layers import target_beside
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.serving.page_pair import HERE, Pair, cache_of
from tests.serving.test_pages_beside import served_alone
from tests.thorough import cases

PAGE = 16
PathOf = Callable[[str], Path]  # the path of a checkpoint, by its name in VARIANTS
VARIANTS = {each.name: each for each in RECURRENT_VARIANTS}


def engine(path: Path, **keys: Any) -> BuiltEngine:
    asked = {
        "model.path": path, "model.dtype": "float32", "device.compile": "false", "cache.memory_gib": "null",
        "cache.page_size": PAGE, "cache.num_pages": 60, "scheduler.num_slots": 4, "device.threads": 1,
        "scheduler.max_batch_tokens": GRID + 4, "scheduler.max_request_tokens": 240,
    }  # fmt: skip
    texts = [f"{name}={value}" for name, value in (asked | keys).items()]
    return build(load(ROOT / "recipes/any/cpu.yaml", texts))


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> PathOf:
    folder = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda name: make(VARIANTS[name], folder)[1])


def pair_of(path: Path, prompts: dict[str, Any] | None = None, **options: Any) -> Pair:
    built = engine(path, **prompts or {}), engine(path)
    return Pair(built=built, most_part_bytes=1 << 14, window_bytes=1 << 20, **options)


def requests(*lengths: int, seed: int = 3, opening: int = 70) -> list[Request]:
    """Prompts that open alike."""
    random = np.random.default_rng(seed)
    first = random.integers(1, VOCABULARY, opening)
    return [
        Request(
            f"r{number}",
            np.concatenate([first, random.integers(1, VOCABULARY, length)])[:length].astype(np.int32),
            SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
            prompt_replica=HERE,
        )
        for number, length in enumerate(lengths)
    ]


def usable(request: Request) -> int:
    """How many tokens precede the last position of a prompt where a state may be kept."""
    return (len(request.prompt) - 1) // GRID * GRID


def states_of(pair: Pair, asked: Sequence[Request]) -> list[list[bytes]]:
    """The states behind the prompts on both engines, layer after layer."""
    found = []
    for each in (pair.prompts, pair.answers):
        states, held = each.scheduler.tables.states, cache_of(each)
        assert states is not None
        of_engine = []
        for request in asked:
            keys = each.scheduler.page_keys(request)[: usable(request) // PAGE]
            (last,) = each.scheduler.prefix.find(keys, request.prompt[: usable(request)], "")[-1:]
            page = states.beside[[last]]
            assert page > 0
            of_engine += [
                held.read_layer(layer, page)().tobytes()
                for layer, made in enumerate(held.layers)
                if made.holds_state
            ]
        found.append(of_engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("qwen3_5", "tcp"),
        pytest.param("kimi_linear", "shared_memory", marks=pytest.mark.slow),
        *cases([], [pytest.param("qwen3_next", "tcp", marks=pytest.mark.slow)]),
    ],
)
def test_the_state_comes_with_the_pages_before_it(name: str, transport: str, path_of: PathOf) -> None:
    """Also where a beginning is here already, where its state was evicted, and for a prompt without any."""
    lengths = 190, 150, 129, 71, 64
    want = served_alone(engine(path_of(name)), requests(*lengths))
    pair = pair_of(path_of(name), transport=transport)
    asked = requests(*lengths)
    assert [pair.serve([each])[0] for each in asked] == want
    counters = pair.answers.scheduler.counters
    assert counters.missed_pages == 0
    assert pair.prompts.scheduler.counters.sent_pages == counters.arrived_pages > 0
    assert [each.num_cached_tokens for each in asked] == [usable(each) for each in asked]
    ours, theirs = states_of(pair, asked[:4])
    assert ours == theirs
    assert len({*ours}) == len(ours) // 4 * 4
    assert all(map(any, ours))
    pair.settle()
    states = pair.answers.scheduler.tables.states
    assert states is not None
    pair.answers.scheduler.tables.evict(states.num_idle, states.number)
    arrived, again = counters.arrived_pages, requests(*lengths)[:1]
    assert pair.serve(again) == want[:1]
    assert counters.arrived_pages == arrived + 1, "the page that the state follows, and the state"
    assert again[0].num_cached_tokens == usable(again[0])
    pair.settle()
    pair.close()


def once_more(built: Sequence[BuiltEngine], **options: Any) -> Pair:
    """The same two engines with nothing in their caches, and another network between them."""
    for each in built:
        each.engine.runner = each.runner
        each.engine.forget_prefixes()
    return Pair(built=(built[0], built[1]), most_part_bytes=1 << 14, window_bytes=1 << 20, **options)


def test_a_state_is_kept_until_there_is_room_to_read_it(
    path_of: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On its lease, which gives way to who runs; then the prompt is computed where it is needed."""
    has_room = False
    monkeypatch.setattr(page_exchange.PageSends, "_may_read", lambda *_: has_room)
    built = engine(path_of("qwen3_5")), engine(path_of("qwen3_5"))
    want = served_alone(built[1], requests(150))
    for gives_way in (False, True):
        pair, has_room = once_more(built), False
        (asked,) = requests(150)
        pair.ask([asked])
        pair.until(lambda pair=pair: pair.prompts.leased_pages("pages-1") is not None)
        scheduler = pair.prompts.scheduler
        states = scheduler.tables.states
        assert states is not None
        scheduler.tables.evict(states.num_idle, states.number)
        if gives_way:
            assert scheduler.lifecycle.held.give_way()
        has_room = True
        pair.until(lambda pair=pair: not len(pair.fetches) and not pair.answers.has_work)
        assert [asked.answer.tolist()] == want
        assert asked.num_cached_tokens == (0 if gives_way else usable(asked))
        pair.settle()
        pair.close()


def test_an_engine_that_goes_during_a_transfer_leaves_nothing_held(
    path_of: PathOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's pages and its state wait to be read when its connection ends, as that of a killed engine.

    The engine of answers computes the prompt itself; that of prompts lets go what it held for another.
    """
    monkeypatch.setattr(page_exchange.PageSends, "_may_read", lambda *_: False)
    built = engine(path_of("qwen3_5")), engine(path_of("qwen3_5"))
    want = served_alone(built[1], requests(150))
    for gone in ("answers", "prompts"):
        pair = once_more(built)
        held, counters = pair.prompts.scheduler.lifecycle.held, pair.answers.scheduler.counters
        missed = counters.missed_pages
        (asked,) = requests(150)
        pair.ask([asked])
        pair.until(lambda pair=pair: pair.prompts.leased_pages("pages-1") is not None)
        assert (len(held.pages) >= usable(asked) // PAGE, len(held.states)) == (True, 1)
        if gone == "prompts":
            pair.is_stopped = True
            pair.server.close()
        else:
            pair.source.close()
            pair.until(lambda pair=pair, held=held: not len(pair.sends) and not len(held.pages))
            assert not len(held.states)
        pair.until(lambda pair=pair: not len(pair.fetches) and not pair.answers.has_work)
        assert [asked.answer.tolist()] == want, gone
        assert asked.num_cached_tokens == 0
        assert counters.missed_pages == missed + usable(asked) // PAGE
        for each in pair.answers, *(() if gone == "prompts" else (pair.prompts,)):
            for group in each.scheduler.tables.groups:
                assert group.num_available == group.pool.num_pages - 1, f"{group.name} leaked"
        pair.close()


def test_a_prompt_for_others_leaves_its_state_for_the_next_turn(path_of: PathOf) -> None:
    pair = pair_of(path_of("qwen3_5"))
    first, second = requests(130, 200, opening=130)
    pair.serve([first])
    pair.settle()
    pair.answers.forget_prefixes()
    computed = pair.prompts.scheduler.counters.computed_tokens
    assert computed == 128
    pair.serve([second])
    assert pair.prompts.scheduler.counters.computed_tokens == computed + 192 - 128
    pair.settle()
    pair.close()


@pytest.mark.slow
def test_a_layer_that_drafts_finds_what_it_keeps_beside_the_state(tmp_path: Path) -> None:
    """It makes the guesses of one engine; the states have room for what drafts leave beside them."""
    keys = {"speculation.kind": "mtp", "speculation.max_tokens": 3, "speculation.adaptive": "fixed"}
    _, path = target_beside("qwen3_next", tmp_path)
    plain = engine(path, **keys)
    want = served_alone(plain, requests(150, 190))
    drafted = plain.engine.scheduler.counters
    built = engine(path, **keys), plain
    pair = once_more(built)
    before = drafted.draft_tokens, drafted.accepted_tokens
    asked = requests(150, 190)
    assert [pair.serve([each])[0] for each in asked] == want
    assert [each.num_cached_tokens for each in asked] == [usable(each) for each in asked]
    assert (drafted.draft_tokens, drafted.accepted_tokens) == tuple(2 * each for each in before)
    assert before[1] > 0
    pair.settle()
    pair.close()
