"""The operator's own logits processors act on the rows that ask for them, and on no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from borders.refusal import BadRequest
from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.offline import read_jobs, run_jobs
from serving.own_processors import KnownProcessors, read_processors
from serving.text.tokenizer import Text
from tests.patience import PATIENCE_S
from tests.serving.server import TINY, Server
from tests.thorough import cases, first_quick

CLASSES = "server.logits_processors=[{}]".format(
    ", ".join(f"'tests.serving.own_classes:{name}'" for name in ("Ban", "Echo", "Fail"))
)
WAYS = {
    "plain": (),
    "ahead": ("scheduler.overlap=true",),
    "preempted": ("cache.page_size=4", "cache.num_pages=10", "scheduler.num_slots=3"),
    "ngram": ("speculation.kind=ngram",),
    "draft": ("speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft"),
}


def answers(*lines: dict[str, Any], options: tuple[str, ...] = ()) -> list[Any]:
    """The records of some requests in one engine, in their order."""
    recipe = load(TINY, [CLASSES, *options])
    engine, text = build(recipe).engine, Text.of(recipe)
    written = [json.dumps({"id": str(at), "max_tokens": 12} | each) for at, each in enumerate(lines)]
    records = list(run_jobs(engine, text, list(read_jobs(written, text)), recipe=recipe))
    return sorted(records, key=lambda record: int(record["id"]))


def own(name: str, **args: Any) -> dict[str, Any]:
    return {"logits_processors": [{"name": name, "args": args}]}


STORY = {"prompt": "One day", "temperature": 0, "ignore_eos": True}
DRAWN = {"prompt": "One day", "temperature": 1.5, "seed": 3, "ignore_eos": True}
SUM = {"prompt": "348+275=", "temperature": 0}


PROMPT = [300, 400, 500]
ECHO = {"prompt_token_ids": PROMPT, "ignore_eos": True, "max_tokens": 30} | own("Echo")


@pytest.fixture(scope="module")
def banned() -> list[int]:
    """The tokens that a story begins with."""
    (record,) = answers(STORY)
    return sorted({*record["token_ids"][:6]})


@pytest.fixture(scope="module")
def biased(banned: list[int]) -> list[Any]:
    """The answers without these tokens by `logit_bias`, which is tested against vLLM's meaning."""
    bias = {"logit_bias": {str(token): -100 for token in banned}}
    return answers(*(each | bias for each in (STORY, DRAWN)), SUM)


@pytest.mark.parametrize("way", first_quick(2, cases([way for way in WAYS if way != "plain"], [*WAYS])))
def test_a_processor_sees_prompt_and_answer_and_acts_as_a_bias_does(
    way: str, banned: list[int], biased: list[Any]
) -> None:
    """Whatever the schedule."""
    asked = [each | own("Ban", tokens=banned) for each in (STORY, DRAWN)]
    *found, first, second = answers(*asked, SUM, ECHO, ECHO | {"temperature": 0}, options=WAYS[way])
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in biased]
    assert not {*banned} & {*found[0]["token_ids"]}
    assert first["token_ids"] == second["token_ids"] == PROMPT * 10
    assert found[-1]["text"] == "623"


def test_they_act_in_turn_and_masks_hold_after_them() -> None:
    both = {"logits_processors": [{"name": "Echo"}, {"name": "Ban", "args": {"tokens": [300]}}]}
    held = own("Echo") | {"allowed_token_ids": [400]}
    records = answers(*({"prompt_token_ids": [300]} | each for each in (both, held)))
    assert all("leave no token that could come next" in record["error"] for record in records)


FAILURES = {
    "raises": "Fail raised ValueError: no luck",
    "nothing": "Fail raised AttributeError: 'NoneType' object has no attribute 'shape'",
    "short": "Fail returned torch.float32 of (1023,) and not torch.float32 of (1024,)",
    "double": "Fail returned torch.float64 of (1024,) and not torch.float32 of (1024,)",
    "leaves nothing": "leave no token that could come next",
    "nan": "the logits were not finite behind the logits processors Fail",
    "inf": "the logits were not finite behind the logits processors Fail",
}


@pytest.mark.parametrize("way", ["plain", "ngram"])
def test_what_fails_ends_its_request_alone(way: str) -> None:
    failing = [STORY | own("Fail", how=how) for how in FAILURES]
    first, *failed, last = answers(STORY, *failing, SUM, options=WAYS[way])
    assert all(said in each["error"] for said, each in zip(FAILURES.values(), failed, strict=True))
    assert first["token_ids"] == answers(STORY)[0]["token_ids"]
    assert last["text"] == "623"


REFUSED = [
    (own("Other"), 'logits_processors[0].name is "Other"; it must be "Ban" or "Echo" or "Fail"'),
    (own("Ban"), "logits_processors[0].args of Ban: TypeError: "),
    (own("Ban", tokens=[5000]), "ValueError: token 5000 is not in the vocabulary"),
    ({"logits_processors": "Ban"}, "logits_processors must be a list of at most 8 processors"),
    ({"logits_processors": [{"name": "Ban"}] * 9}, "logits_processors must be a list of at most 8"),
    ({"logits_processors": [{"name": "Ban", "arg": {}}]}, "logits_processors[0] is"),
    ({"logits_processors": [{"name": "Ban", "args": [3]}]}, "logits_processors[0].args is [3]"),
    (own("Ban", tokens=[1] * 2000), "logits_processors[0].args has"),
    (
        {"logits_processors": [{"name": "Ban\ud800"}]},
        "logits_processors[0].name is not Unicode text: character 3",
    ),
    (own("Ban", x={"\ud800": 1}), "logits_processors[0].args is not Unicode text: character 8"),
    (own("Ban", x=["\udc00"]), "logits_processors[0].args is not Unicode text"),
    (own("Echo") | {"beam_width": 2, "temperature": 0}, "left out beside beam_width"),
]


def test_what_cannot_be_is_refused_by_name() -> None:
    *refused, served = answers(*(SUM | fields for fields, _ in REFUSED), SUM)
    for record, (_, said) in zip(refused, REFUSED, strict=True):
        assert said in record["error"]
    assert served["text"] == "623"


def test_a_field_is_read_as_it_is_written() -> None:
    given = [{"name": "A", "args": {"b": [1]}}, {"name": "C"}]
    assert read_processors("p", given) == (("A", '{"b": [1]}'), ("C", "{}"))
    (job,) = read_jobs([json.dumps({"id": "a", **SUM, "logits_processors": given})], Text.of(load(TINY)))
    with pytest.raises(BadRequest, match=r'\[0\].name is "A"; it must be left out: the recipe has no'):
        KnownProcessors({}, 9).give(job.request)


@pytest.mark.parametrize(
    ("named", "more", "said"),
    [
        ("[Ban]", (), 'server.logits_processors has "Ban"; it must be MODULE:CLASS'),
        ("['no.such:Ban']", (), "no.such:Ban: ModuleNotFoundError: No module named 'no'"),
        ("['json:Ban']", (), "json:Ban: AttributeError: module 'json' has no attribute 'Ban'"),
        ("['json:loads', 'os:loads']", (), "server.logits_processors names loads twice"),
    ],
)
def test_a_recipe_that_names_none_is_refused(named: str, more: tuple[str, ...], said: str) -> None:
    recipe = load(TINY, [f"server.logits_processors={named}", *more])
    with pytest.raises(ValueError, match="server") as told:
        KnownProcessors.of(recipe, 1024)
    assert said in str(told.value)


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    server = Server(TINY, CLASSES).ready()
    yield server
    assert server.close() == 0


def test_a_server_serves_them(served: Server) -> None:
    def post(**fields: Any) -> httpx.Response:
        body = {"prompt": [300, 400], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, **fields}
        return httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)

    echoed = post(**own("Echo"), n=2).json()
    assert [each["token_ids"] for each in echoed["choices"]] == [[300, 400, 300, 400]] * 2
    unknown = post(**own("Other"))
    assert unknown.status_code == 400
    assert unknown.json()["error"]["param"] == "logits_processors"
    half = json.dumps({"prompt": [300], "n": 2, "logits_processors": [{"name": "\ud800"}]})
    json_type = {"content-type": "application/json"}
    told = httpx.post(f"{served.url}/v1/completions", content=half, headers=json_type, timeout=PATIENCE_S)
    assert (told.status_code, told.json()["error"]["param"]) == (400, "logits_processors")
    failed = post(**own("Fail"))
    assert failed.status_code >= 400
    assert "Fail raised ValueError: no luck" in failed.text
    for how, said in (("never", "ValueError: not ?"), ("half a pair", "ValueError: no ?")):
        failed = post(**own("Fail", how=how))
        assert failed.status_code == 400
        assert failed.json()["error"]["message"].endswith(said)
    assert post().status_code == 200
