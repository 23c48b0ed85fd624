"""An answer that follows a grammar gets the same tokens however it is scheduled.

It runs alone and beside others, with chunked prompts, preempted, forked, with drafts, ahead of the device,
where masks come late, and again from a recording.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from continuous_batching.batch import LATE
from continuous_batching.constraints import Constraint, Mask, Matcher
from continuous_batching.counters import Counters
from continuous_batching.engine import Engine
from continuous_batching.recording.format import Committed, Header, read_entries, unpacked
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Replayed, replay
from continuous_batching.request import Request
from continuous_batching.samples.mask_maker import Made, MaskMaker
from continuous_batching.slots import SlotPool
from kv_cache.pages import Index
from models.sampling import token_masks
from models.sampling.sampler import Sampler
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.scheduler import scheduler_from
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from serving.grammars.matching import Grammars
from serving.text.request_fields import parse_request
from serving.text.tokenizer import Text
from tests.thorough import cases

RECIPE = ROOT / "recipes/tiny/cpu.yaml"
PLAIN = ("cache.num_pages=300", "scheduler.num_slots=8", "scheduler.max_batch_tokens=64", "device.threads=1")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["a long name of a kind", "another long name of a kind"]},
        "size": {"type": "integer", "minimum": -20, "maximum": 300},
        "list": {"type": "array", "items": {"type": ["null", "boolean"]}, "maxItems": 2},
    },
    "required": ["name", "kind", "size", "list"],
    "additionalProperties": False,
}
FORMS: list[dict[str, object]] = [
    {"guided_json": SCHEMA},
    {"guided_regex": r"([a-d]{2}|\d{3}){3,6}"},
    {"guided_choice": ["yes, of course", "yes, it is", "no, not at all"]},
    {},
    {"guided_grammar": 'start: "(" start ")" | "x"'},
    {"allowed_token_ids": [*range(300, 340)], "logit_bias": {"301": 9.0}, "bad_words": ["the", " a"]},
]
FEW_PAGES = ("cache.num_pages=18", "cache.page_size=16")
DRAFTS = ("speculation.adaptive=fixed", "speculation.max_tokens=3")
WAYS = {
    "few pages": FEW_PAGES,
    "chunks, overlap": ("scheduler.max_batch_tokens=8", "scheduler.overlap=true"),
    "host tier": (*FEW_PAGES, "cache.host_gib=0.01"),
    "suffix": ("speculation.kind=suffix", "speculation.adaptive=fixed", "speculation.max_tokens=7"),
    "draft": ("speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft", *DRAFTS),
    "ngram, few pages": ("speculation.kind=ngram", "speculation.adaptive=fixed", "cache.num_pages=12"),
    "compiled": ("device.compile=true",),
}
NGRAM = ("speculation.kind=ngram", "speculation.adaptive=fixed", "speculation.max_tokens=5")
# Run where masks come late, too, which replays a recording as the others do
LATE_WAYS = ("few pages", "draft")
SLOW_WAYS = ("host tier", "ngram, few pages", "compiled")


def text_of(built: BuiltEngine) -> Text:
    text = Text.load(ROOT / "recipes/tiny/weights")
    assert text is not None
    return text


def asked(text: Text) -> list[Request]:
    requests = []
    for number in range(10):
        fields = {
            "id": str(number),
            "prompt": "Tell a short story. " * (1 + number % 3) + f"{number}",
            "max_tokens": 90,
            "temperature": (0, 1.0, 1.5)[number % 3],
            "seed": number,
            "n": 1 + 2 * (number % 4 == 3),
            "presence_penalty": 0.5 * (number % 2),
            "top_p": 0.9 if number % 5 == 1 else 1.0,
            **FORMS[number % len(FORMS)],
        }
        requests.append(parse_request(fields, text))
    return requests


def answers(engine: Engine, text: Text) -> dict[str, list[int]]:
    scheduler = engine.scheduler
    grammars = Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids)
    made = asked(text)
    for request in made:
        grammars.constrain(request)
        engine.add(request)
    waiting = [each for leader in made for each in (leader, *leader.followers)]
    everyone = list(waiting)
    while engine.has_work:
        engine.step()
    assert {each.finish_reason for each in everyone} <= {"stop", "length"}, [each.error for each in everyone]
    return {each.id: each.answer.tolist() for each in everyone}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The tokens that each request gets by itself."""
    built = build(load(RECIPE, PLAIN))
    text = text_of(built)
    scheduler = built.engine.scheduler
    grammars = Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids)
    found = {}
    for leader in asked(text):
        grammars.constrain(leader)
        for each in (leader, *leader.followers):
            each.followers = []
            built.engine.add(each)
            while built.engine.has_work:
                built.engine.step()
            found[each.id] = each.answer.tolist()
    return found


@pytest.mark.slow
def test_answers_have_their_form(alone: dict[str, list[int]]) -> None:
    text = Text.load(ROOT / "recipes/tiny/weights")
    assert text is not None
    ended = [0] * len(FORMS)
    for name, tokens in alone.items():
        kind = int(name.partition("#")[0]) % len(FORMS)
        if tokens[-1] in text.eos_token_ids:
            said = text.decode(tokens[:-1])
            if kind == 0:
                jsonschema.validate(json.loads(said), SCHEMA)
            elif kind == 1:
                assert re.fullmatch(str(FORMS[1]["guided_regex"]), said)
            ended[kind] += 1
    assert min(ended[:3]) >= 1


def test_every_bit_of_a_mask_is_a_token() -> None:
    """The last of a word too, which is the sign of a number."""
    may = np.random.default_rng(0).random((3, 96)) < 0.5
    words = np.packbits(may, axis=1, bitorder="little").view(np.int32)
    made = token_masks.grammar_columns([0, 1, 2], [*words])
    bits = torch.from_numpy(made["grammar_bits"]).view(3, -1)
    found = token_masks.unpacked(bits, torch.from_numpy(made["place"]), 100)
    assert np.array_equal(found.numpy(), np.pad(may, ((0, 0), (0, 4))))


def check_schedule(
    way: str, alone: dict[str, list[int]], path: Path, maker: MaskMaker | None = None
) -> Counters:
    """The tokens are those that each gets alone; a replay of the recording takes the same steps."""
    built = build(load(RECIPE, [*PLAIN, *WAYS[way]]))
    if maker is not None:
        make_masks_by(built, maker)
    engine = built.engine
    engine.observer = Recorder(built.facts, RecordingFile(path))
    assert answers(engine, text_of(built)) == alone
    engine.observer.close()
    with path.open("rb") as file:
        entries = list(read_entries(file))
    assert isinstance(entries[0], Header)
    scheduler = scheduler_from(entries[0].facts)
    steps = [event for event in replay(entries, scheduler) if isinstance(event, Replayed)]
    assert len(steps) == engine.scheduler.counters.steps
    assert scheduler.counters == engine.scheduler.counters
    return engine.scheduler.counters


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=pytest.mark.slow if way in SLOW_WAYS else [])
        for way in cases([way for way in WAYS if way not in LATE_WAYS], [*WAYS])
    ],
)
def test_every_schedule_gives_the_same_tokens(way: str, alone: dict[str, list[int]], tmp_path: Path) -> None:
    counters = check_schedule(way, alone, tmp_path / "recording")
    assert counters.preemptions or "pages" not in way
    assert counters.accepted_tokens or "speculation" not in str(WAYS[way])


def test_what_must_come_is_guessed_for_nothing() -> None:
    built = build(load(RECIPE, [*PLAIN, *NGRAM]))
    text = text_of(built)
    fields = {
        "id": "a",
        "prompt": "1+1=",
        "max_tokens": 60,
        "guided_regex": "this can be no other one[ab]",
    }
    request = parse_request(fields, text)
    scheduler = built.engine.scheduler
    Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids).constrain(request)
    built.engine.add(request)
    while built.engine.has_work:
        built.engine.step()
    assert text.decode(request.answer.tolist()[:-1]).startswith("this can be no other one")
    assert scheduler.counters.steps < len(request.answer)


def test_a_matcher_that_fails_ends_its_request_alone() -> None:
    built = build(load(RECIPE, PLAIN))
    text = text_of(built)
    fields = [{"id": name, "prompt": "1+1=", "max_tokens": 8, "temperature": 0} for name in "ab"]
    bad, good = (parse_request(each | {"guided_regex": "[a-z ]*"}, text) for each in fields)
    scheduler = built.engine.scheduler
    grammars = Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids)
    for request in (bad, good):
        grammars.constrain(request)
        built.engine.add(request)
    built.engine.step()
    assert bad.constraint is not None
    bad.constraint.error = "it grew too complex"
    while built.engine.has_work:
        built.engine.step()
    assert (bad.finish_reason, bad.is_at_fault) == ("error", True)
    assert bad.error == "the answer's grammar cannot be followed any further: it grew too complex"
    assert good.finish_reason in ("stop", "length")
    assert good.error is None
    assert np.array_equal(bad.answer, good.answer[: len(bad.answer)])


class OftenLate(MaskMaker):
    """Says of a third of the masks behind first tokens that they are late."""

    def __init__(self) -> None:
        super().__init__(patience_s=60)
        self._random = np.random.default_rng(0)

    def take(self, rows: Index, targets: Index, slots: SlotPool, *, is_alone: bool) -> Made:
        made = super().take(rows, targets, slots, is_alone=is_alone)
        may = np.flatnonzero(slots.constrained[rows] & (targets > slots.num_prompt[rows]))
        for row in np.unique(rows[may][self._random.random(len(may)) < 1 / 3]):
            of_row = np.flatnonzero(rows == row)
            made.late += of_row[self._random.integers(len(of_row)) :].tolist()
        return made


def make_masks_by(built: BuiltEngine, maker: MaskMaker) -> None:
    config = built.config
    built.runner.sampler = Sampler(config.eos_token_ids, config.vocab_size, built.runner.decoder.ops, maker)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["few pages", pytest.param("draft", marks=pytest.mark.slow)])
def test_masks_that_come_late_change_no_token(way: str, alone: dict[str, list[int]], tmp_path: Path) -> None:
    assert check_schedule(way, alone, tmp_path / "recording", OftenLate()).late_masks > 30


class Held:
    """A matcher that makes no mask behind the first tokens until it is let."""

    def __init__(self, matcher: Matcher, gate: threading.Event) -> None:
        self._matcher, self._gate = matcher, gate
        self._num_masks = 0

    def mask(self) -> Mask | None:
        self._num_masks += 1
        assert self._num_masks < 3 or self._gate.wait(300), "nobody let it"
        return self._matcher.mask()

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


@pytest.mark.parametrize("way", [(), NGRAM], ids=["plain", "ngram"])
def test_a_neighbour_goes_on_while_a_mask_takes_long(way: tuple[str, ...], tmp_path: Path) -> None:
    built = build(load(RECIPE, [*PLAIN, *way]))
    engine, text, path = built.engine, text_of(built), tmp_path / "recording"
    engine.observer = Recorder(built.facts, RecordingFile(path))
    fields = {"prompt": "1+1=", "max_tokens": 30, "temperature": 0, "ignore_eos": False}
    forms: dict[str, dict[str, object]] = {
        "held": {"guided_regex": "[a-z ]{20}"},
        "formed": {"guided_regex": "[a-z ]{20}"},
        "free": {},
    }
    held, formed, free = (parse_request({**fields, "id": name} | form, text) for name, form in forms.items())
    scheduler, gate = engine.scheduler, threading.Event()
    grammars = Grammars(lambda: text, scheduler.vocab_size, scheduler.eos_token_ids)
    for request in (held, formed):
        grammars.constrain(request)
    assert held.constraint is not None
    start = held.constraint._start
    held.constraint = Constraint(lambda: Held(start(), gate))
    try:
        for request in (held, formed, free):
            engine.add(request)
        while not (formed.finish_reason and free.finish_reason):
            engine.step()
        assert held.finish_reason is None
    finally:
        gate.set()
    while engine.has_work:
        engine.step()
    assert held.finish_reason == formed.finish_reason
    assert np.array_equal(held.answer, formed.answer)
    engine.observer.close()
    with path.open("rb") as file:
        told = [unpacked(each.tokens) for each in read_entries(file) if isinstance(each, Committed)]
    assert sum(int((each == LATE).sum()) for each in told) >= scheduler.counters.late_masks > 5


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize("way", cases(["parallel.tensor=2"], ["parallel.tensor=2", "parallel.pipeline=2"]))
def test_ranks_and_stages_give_the_same_tokens(way: str, alone: dict[str, list[int]]) -> None:
    built = build(load(RECIPE, [*PLAIN, "scheduler.overlap=true", way]))
    try:
        assert answers(built.engine, text_of(built)) == alone
    finally:
        built.engine.observer.close()  # the other ranks end with it
