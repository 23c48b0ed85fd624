"""Answers end where they end without drafts, though a step may bring a request several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from benchmark.run_record import Timeline
from continuous_batching.counters import Counters
from continuous_batching.request import Request
from continuous_batching.request import SamplingParams as Params
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index
from serving.llm import LLM, SamplingParams
from serving.offline import read_jobs, run_jobs

RECIPE = "recipes/tiny/cpu.yaml"
SMALL = ("scheduler.num_slots=4", "device.threads=1", "device.compile=false", "model.dtype=float32")
NGRAM = (*SMALL, "speculation.kind=ngram", "speculation.max_tokens=8")
PROMPT = "one two three four five six seven one two three four five six seven one two three"
REQUEST = Params(temperature=0, max_tokens=40, ignore_eos=True)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["e ", "7", "es"], logprobs=1),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=["n o"], min_tokens=7),
    SamplingParams(seed=1, max_tokens=37, ignore_eos=True, n=3, stop=["r "], include_stop_str_in_output=True),
    SamplingParams(seed=2, max_tokens=30, ignore_eos=True, best_of=3, n=1),
]


def answers(outputs: Iterable[Any]) -> list[list[tuple[object, ...]]]:
    return [
        [
            (each.text, each.token_ids, each.finish_reason, each.stop_reason, len(each.logprobs or ()))
            for each in output.outputs
        ]
        for output in outputs
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[tuple[object, ...]]]:
    return answers(LLM(RECIPE, *SMALL).generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False))


class Right:
    """Guesses what each request says without drafts, by the order of arrival; it knows all."""

    def __init__(self, llm: LLM, stories: list[list[int]]) -> None:
        self.slots, self.stories = llm.engine.slots, stories

    def guess(self, rows: Index, most: int) -> Guesses:
        tokens, counts = np.zeros((len(rows), most), dtype=np.int32), np.zeros(len(rows), dtype=np.int64)
        for at, row in enumerate(rows.tolist()):
            said = int(self.slots.num_tokens[row] - self.slots.num_prompt[row])
            for story in self.stories:
                known = self.slots.token_ids[row, self.slots.num_prompt[row] :][:said].tolist()
                if story[:said] == known and len(story) > said:
                    counts[at] = len(story[said : said + most])
                    tokens[at, : counts[at]] = story[said : said + most]
        return Guesses(tokens, counts)


def test_answers_end_where_they_do_without_drafts(plain: list[list[tuple[object, ...]]]) -> None:
    """Stop strings, lengths and chosen samples, where nearly every guess is right and far too long."""
    llm = LLM(RECIPE, *SMALL)
    longest = [list(answer[1]) for output in plain for answer in output if isinstance(answer[1], list)]
    proposer = Right(llm, [[*story, *longest[0]] for story in longest])
    llm.engine.scheduler.speculation = Speculation(llm.engine.slots, proposer, Fixed(), 12)
    found = answers(llm.generate([PROMPT] * len(PARAMS), PARAMS, use_tqdm=False))
    assert found == plain
    counters = llm.engine.scheduler.counters
    assert counters.accepted_tokens > 100
    assert counters.sampled_tokens / counters.steps > 4


def test_each_answer_says_how_much_of_it_was_guessed() -> None:
    engine = LLM(RECIPE, *NGRAM)
    lines = [{"id": "a", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}]
    (record,) = run_jobs(engine.engine, engine.text, read_jobs(map(json.dumps, lines), engine.text))
    counters = engine.engine.scheduler.counters
    assert (record["num_drafted"], record["num_accepted"]) == (
        counters.draft_tokens,
        counters.accepted_tokens,
    )
    assert 0 < counters.accepted_tokens <= counters.draft_tokens


def test_each_token_of_a_run_has_its_time() -> None:
    llm = LLM(RECIPE, *NGRAM)
    timeline = Timeline(Counters())
    request = Request("a", llm.text.encode(PROMPT), REQUEST)
    llm.engine.add(request)
    while llm.engine.has_work:
        step = llm.engine.step()
        assert step is not None
        timeline.record(llm.engine, step)
    assert len(timeline.token_times_s["a"]) == len(request.answer) == 40
    assert len(set(timeline.token_times_s["a"])) == len(timeline.steps) < 40
