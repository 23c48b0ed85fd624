"""Answers end where they end without drafts, though a step may bring a request several tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmark.run_record import Timeline
from continuous_batching.counters import Counters
from continuous_batching.request import Request
from continuous_batching.request import SamplingParams as Params
from continuous_batching.speculation.lengths import Fixed
from continuous_batching.speculation.proposer import Guesses
from continuous_batching.speculation.speculation import Speculation
from kv_cache.pages import Index
from serving.async_llm import AsyncLLM
from serving.llm import LLM, SamplingParams
from serving.metrics.exposition import Exposition
from serving.offline import read_jobs, run_jobs
from serving.terminal_view import frame, parse
from tests.thorough import cases

RECIPE = "recipes/tiny/cpu.yaml"
SMALL = ("scheduler.num_slots=4", "device.threads=1", "device.compile=false", "model.dtype=float32")
NGRAM = (*SMALL, "speculation.kind=ngram", "speculation.max_tokens=8")
DRAFT = (
    *SMALL,
    "speculation.kind=draft",
    "speculation.draft_path=recipes/tiny/draft",
    "speculation.max_tokens=8",
    "speculation.adaptive=fixed",
)
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


@pytest.mark.slow
@pytest.mark.parametrize("settings", cases([NGRAM], [NGRAM, DRAFT]))
def test_a_served_answer_ends_where_it_does_without_drafts_and_what_was_guessed_is_counted_and_shown(
    settings: tuple[str, ...], plain: list[list[tuple[object, ...]]]
) -> None:
    async def use() -> tuple[list[Any], dict[str, dict[str, float]], str]:
        llm = AsyncLLM(RECIPE, *settings, "server.spare_engine=false")
        llm.start()
        try:
            await llm.ready()
            last = []
            for number, params in enumerate(PARAMS):
                last.append([each async for each in llm.generate(PROMPT, params, str(number))][-1])
            while not llm.stats.is_idle:  # the beat after the end tells all
                await asyncio.sleep(0.01)
            exposition = Exposition(llm.stats, "tiny", lambda: None)
            scrape = parse(exposition.text().decode(), 1.0)
            shown = Console(width=100, file=StringIO())
            before = replace(scrape, at_s=0.0, values={})
            shown.print(frame(scrape, before))
            return last, scrape.values, shown.file.getvalue()
        finally:
            await llm.close()

    found, values, shown = asyncio.run(use())
    assert answers(found) == plain
    spans, drafts, right = (
        values[f"vllm:spec_decode_num_{each}_total"][""]
        for each in ("drafts", "draft_tokens", "accepted_tokens")
    )
    places = values["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert 0 < right <= drafts <= 8 * spans
    assert list(places) == [str(place) for place in range(8)]
    assert sum(places.values()) == right
    assert values["cb_speculative_accept_rate"][""] == pytest.approx(right / drafts)
    assert values["cb_speculative_speedup"][""] == pytest.approx(1 + right / spans)
    assert f"{right / drafts:.0%}" in next(line for line in shown.splitlines() if "drafts right" in line)


@pytest.mark.parametrize("settings", cases([NGRAM], [NGRAM, DRAFT]))
def test_each_answer_says_how_much_of_it_was_guessed(settings: tuple[str, ...]) -> None:
    engine = LLM(RECIPE, *settings)
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
