"""Every line of a file gets its answer or its error, at its time and with the right text."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from continuous_batching.batch import Batch, Sampled
from continuous_batching.engine import Engine, Step
from continuous_batching.policies.batching import StallFree
from continuous_batching.request import Request, SamplingParams, TokenLogprobs
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PagePool
from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.answers.answers import AnswerDelta, SampleAnswers
from serving.offline import Job, read_jobs, run_jobs
from serving.text.tokenizer import Text, TextOptions
from tests.each_of import each_of

EOS = 2  # the token <|im_end|> of byte_level
STEP_S = 0.5


class Clock:
    """Stands still but for steps and sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept_s.append(seconds)
        self.now_s += seconds


class ScriptRunner:
    """Says, for each request, what its script says; -1 behind its end."""

    def __init__(self, slots: SlotPool, scripts: dict[str, list[int]], clock: Clock) -> None:
        self.slots, self.scripts, self.clock = slots, scripts, clock

    def run(self, batch: Batch) -> Sampled:
        self.clock.now_s += STEP_S
        rows = batch.owners
        sampled = Sampled(np.array([self._next(row) for row in rows], dtype=np.int64))
        for index, row in enumerate(rows):
            if self.slots.requests[row].params.logprobs is not None:
                top = ((int(sampled.tokens[index]), -0.5), (0, -float("inf")))
                sampled.logprobs[index] = TokenLogprobs(top[0][0], -0.5, top)
            if self.slots.requests[row].params.prompt_logprobs is not None:
                prompt = self.slots.requests[row].prompt.tolist()
                told = [TokenLogprobs(token, float("nan"), ((8, -0.25),)) for token in prompt[1:]]
                sampled.prompt_logprobs[int(row)] = told
        return sampled

    def _next(self, row: int) -> int:
        script = self.scripts[self.slots.requests[row].id]
        at = int(self.slots.num_tokens[row] - self.slots.num_prompt[row])
        return script[at] if at < len(script) else -1


def make_engine(
    scripts: dict[str, list[int]], policy: Any = None, num_pages: int = 60
) -> tuple[Engine, Clock]:
    slots = SlotPool(num_slots=4, max_tokens=64, page_size=4)
    clock = Clock()
    scheduler = Scheduler(
        slots,
        PagePool(num_pages),
        policy or StallFree(),
        max_batch_tokens=16,
        vocab_size=10_000,
        eos_token_ids=(EOS,),
    )
    return Engine(scheduler, ScriptRunner(slots, scripts, clock), clock), clock


def serve(
    lines: Iterable[dict[str, Any] | str],
    scripts: dict[str, list[int]],
    text: Text | None,
    observe: Callable[[Step], None] | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    engine, clock = make_engine(scripts, **options)
    written = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    records = list(run_jobs(engine, text, read_jobs(written, text), observe=observe, sleep=clock.sleep))
    assert not engine.has_work
    json.dumps(records, allow_nan=False)
    by_id = {record["id"]: record for record in records}
    assert len(by_id) == len(records)
    return by_id


def line(name: str, **fields: Any) -> dict[str, Any]:
    return {"id": name, "prompt_token_ids": [5, 6, 7], "temperature": 0} | fields


def test_a_record_says_what_was_asked_for(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    answer = text.encode("It is 42, of course.")
    scripts = {"short": answer, "ends": [*answer, EOS]}
    lines = [line("short", max_tokens=2, logprobs=2), line("ends", max_tokens=40, prompt_token_ids=[1] * 9)]
    records = serve(lines, scripts, text)
    assert records["short"] == {
        "id": "short",
        "token_ids": answer[:2],
        "text": text.decode(answer[:2]),
        "finish_reason": "length",
        "logprobs": [
            {"token": token, "logprob": -0.5, "top": [[token, -0.5], [0, -9999.0]]} for token in answer[:2]
        ],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "arrival_s": 0.0,
        "first_token_s": STEP_S,
        "finish_s": 2 * STEP_S,
        "num_drafted": 0,
        "num_accepted": 0,
    }
    ends = records["ends"]
    assert ends["token_ids"] == [*answer, EOS]
    assert ends["text"] == "It is 42, of course."
    assert ends["finish_reason"] == "stop"
    assert "logprobs" not in ends


def test_a_token_that_ends_an_answer_is_no_part_of_its_text(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    answer = text.encode("one two?")
    last = answer[-1]
    for stop in (None, "zzz", "?", "o?"):
        lines = [line("a", max_tokens=20, stop_token_ids=[last], stop=stop)]
        record = serve(lines, {"a": answer}, text)["a"]
        assert record["token_ids"] == answer
        assert record["finish_reason"] == "stop"
        assert record["text"] == text.decode(answer[:-1])


def test_the_first_token_of_a_prompt_has_no_log_probability() -> None:
    record = serve([line("a", max_tokens=1, prompt_logprobs=1)], {"a": [9]}, None)["a"]
    told = [{"token": token, "logprob": -9999.0, "top": [[8, -0.25]]} for token in (6, 7)]
    assert record["prompt_logprobs"] == [None, *told]


ABORTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop": {"stop": "zzz"},
    "n": {"n": 2, "temperature": 1},
    "best_of": {"n": 2, "best_of": 3, "temperature": 1},
    "beams": {"beam_width": 2},
}


@each_of(
    "kind, at_step",
    [*itertools.product(("plain", "stop", "n", "best_of"), (1, 2, 4)), ("beams", 1)],
)
def test_a_job_that_somebody_aborts_has_its_record(texts: dict[str, Text], kind: str, at_step: int) -> None:
    """At step 1 the long one has a part of its prompt, and the last one waits for a slot."""
    text = texts["byte_level"]
    engine, clock = make_engine(defaultdict(lambda: [9] * 40))
    names = ["long", "a", "b", "c", "last", "other"]
    lines = [line("long", max_tokens=8, prompt_token_ids=[5] * 20, **ABORTED[kind])]
    lines += [line(name, max_tokens=8) for name in names[1:]]
    steps: list[Step] = []

    def observe(step: Step) -> None:
        steps.append(step)
        if len(steps) == at_step:
            for name in ("long", "last", "nobody", "last"):
                engine.abort(name)

    jobs = read_jobs(map(json.dumps, lines), text)
    records = list(run_jobs(engine, text, jobs, observe=observe, sleep=clock.sleep))
    assert {each["id"] for each in records} == set(names)
    reasons = {each["id"]: each["finish_reason"] for each in records if not each.get("index")}
    assert reasons["last"] == "abort"
    # The other samples go on, and whole ones are better answers
    assert reasons["long"] == ("length" if kind == "best_of" else "abort")
    assert {reasons[name] for name in ("a", "b", "c", "other")} == {"length"}
    assert not engine.has_work


def test_without_a_tokenizer_answers_are_token_ids() -> None:
    record = serve([line("a", max_tokens=3)], {"a": [9, 8, 7]}, None)["a"]
    assert record["token_ids"] == [9, 8, 7]
    assert record["text"] is None


def test_a_request_that_fails_ends_alone(texts: dict[str, Text]) -> None:
    lines = [line("bad", max_tokens=9, stop="x"), line("good", max_tokens=9)]
    records = serve(lines, {"bad": [9, 9, -1], "good": [9] * 9}, texts["byte_level"])
    assert records["bad"] == {"id": "bad", "error": "the model's logits were not finite"}
    assert records["good"]["token_ids"] == [9] * 9


def test_refused_lines_are_answered_and_the_others_run(texts: dict[str, Text]) -> None:
    lines = [
        "{not json",
        "",
        json.dumps(line("a", max_tokens=1)),
        json.dumps(line("long", max_tokens=100)),
        json.dumps(line("b", max_tokens=1, temprature=1)),
        '{"id": "c", "prompt_token_ids": [1], "temperature": NaN}',
        '{"id": "d", "prompt_token_ids": [20000]}',
        json.dumps(line("e", max_tokens=1)),
    ]
    engine, clock = make_engine({"a": [9], "e": [9]})
    records = list(run_jobs(engine, texts["byte_level"], read_jobs(lines, None), sleep=clock.sleep))
    errors = [(record["id"], record["error"]) for record in records if "error" in record]
    assert errors[0][0] is None
    assert errors[0][1].startswith("line 1: not JSON: Expecting property name")
    assert errors[1] == ("b", 'line 5: unknown field "temprature"; did you mean temperature?')
    assert errors[2] == (None, "line 6: NaN is not JSON")
    assert errors[3][0] == "long"
    assert "you requested 103 tokens" in errors[3][1]
    assert errors[4] == ("d", "prompt holds the token id 20000; the model's go from 0 to 9999")
    assert [record["id"] for record in records if "error" not in record] == ["a", "e"]


def test_an_id_can_be_taken_once() -> None:
    lines = [json.dumps(line("a", max_tokens=1)), json.dumps(line("a", max_tokens=2)), "[" * 100_000]
    jobs = list(read_jobs(lines, None))
    assert isinstance(jobs[0], Job)
    assert [each["id"] for each in jobs[1:] if isinstance(each, dict)] == ["a", None]
    assert [each["error"].partition(";")[0] for each in jobs[1:] if isinstance(each, dict)] == [
        "line 2: the id a is taken by line 1",
        "line 3: the JSON is nested too deeply",
    ]


@pytest.mark.parametrize("names", [("z", "z#1"), ("z#1", "z")])
def test_the_id_of_a_sample_can_be_taken_once(names: tuple[str, str]) -> None:
    asked = [line(name, max_tokens=1, n=1 + (name == "z")) for name in names]
    first, second = read_jobs(map(json.dumps, asked), None)
    assert isinstance(first, Job)
    assert isinstance(second, dict)
    assert second["error"].startswith("line 2: the id z#1 is taken by line 1; choose another (the further")


def test_a_refused_line_takes_no_id() -> None:
    lines = [json.dumps(line("a", max_tokens=0)), json.dumps(line("a", max_tokens=2))]
    first, second = read_jobs(lines, None)
    assert isinstance(first, dict)
    assert isinstance(second, Job)


# ---- time


def test_requests_join_when_they_arrive() -> None:
    lines = [line("late", arrival_s=10, max_tokens=2), line("soon", arrival_s=0.75, max_tokens=2)]
    engine, clock = make_engine({"late": [9, 9], "soon": [9, 9]})
    records = list(run_jobs(engine, None, read_jobs(map(json.dumps, lines), None), sleep=clock.sleep))
    times = [(r["id"], r["arrival_s"], r["first_token_s"], r["finish_s"]) for r in records]
    assert times == [("soon", 0.75, 1.25, 1.75), ("late", 10.0, 10.5, 11.0)]
    assert clock.slept_s == [0.75, 8.25]


def samples_of(num_samples: int, num_answers: int) -> SampleAnswers:
    requests = [Request(str(number), np.arange(3)) for number in range(num_samples)]
    requests[0].followers = requests[1:]
    return SampleAnswers(requests[0], None, TextOptions(), num_answers)


def end(samples: SampleAnswers, index: int, *logprobs: float, reason: str = "stop") -> list[tuple[int, int]]:
    """The answers that are known when a sample ends, each as its index and its sample."""
    entries = [TokenLogprobs(0, value, ()) for value in logprobs]
    return [(each.index, each.sample) for each in samples.push(index, [0] * len(entries), entries, reason)]


def test_all_samples_that_were_asked_for_are_answers_as_they_end() -> None:
    samples = samples_of(2, 2)
    assert end(samples, 1, -9.0) == [(1, 1)]
    assert end(samples, 0, -1.0) == [(0, 0)]


def test_the_best_samples_are_answers_when_all_have_ended() -> None:
    samples = samples_of(4, 2)
    assert end(samples, 3, reason="error") == end(samples, 1, -1.0) == end(samples, 0, -3.0, -3.0) == []
    assert end(samples, 2, -2.0) == [(0, 1), (1, 2)]


def test_a_sample_that_is_likelier_for_each_token_goes_before_a_shorter_one() -> None:
    samples = samples_of(2, 1)
    assert end(samples, 0, -2.0) == []
    assert end(samples, 1, -1.0, -1.0, -1.0, reason="length") == [(0, 1)]


def test_whole_samples_go_before_partial_ones_and_empty_ones() -> None:
    samples = samples_of(5, 4)
    assert samples.end(0, "timeout") == samples.end(1, "abort") == []
    assert end(samples, 2, -0.5, reason="timeout") == end(samples, 3, -9.0, reason="length") == []
    assert end(samples, 4, -8.0) == [(0, 4), (1, 3), (2, 2), (3, 0)]


def test_equal_samples_answer_in_the_order_of_their_numbers() -> None:
    samples = samples_of(3, 2)
    assert end(samples, 1, -1.0) == end(samples, 2, -2.0) == []
    assert end(samples, 0, -1.0) == [(0, 0), (1, 1)]


def test_a_sample_that_ended_takes_no_more_tokens() -> None:
    samples = samples_of(2, 2)
    end(samples, 0, -1.0)
    assert end(samples, 0, -1.0) == samples.end(0, "abort") == []
    assert samples.num_open == 1


def test_every_answer_of_a_search_that_found_nothing_is_empty() -> None:
    request = Request("a", np.arange(3), SamplingParams(beam_width=3, max_tokens=4))
    search = SampleAnswers(request, None, TextOptions(), 2)
    assert search.end(0, "timeout") == [AnswerDelta(at, "", finish_reason="timeout") for at in range(2)]
    assert (search.num_open, search.num_tokens) == (0, 0)


def test_the_best_hypotheses_come_out_best_first() -> None:
    engine = build(load("recipes/tiny/cpu.yaml", ["device.compile=false", "device.threads=1"])).engine
    text = Text.load("recipes/tiny/weights")
    lines = [
        {"id": "three", "prompt": "One day", "beam_width": 5, "n": 3, "max_tokens": 12, "logprobs": 1},
        {"id": "one", "prompt": "348+275=", "beam_width": 4, "max_tokens": 8},
        {"id": "wide", "prompt": "348+275=", "beam_width": 100, "max_tokens": 8},
    ]
    records = list(run_jobs(engine, text, list(read_jobs(map(json.dumps, lines), text))))
    (wide,) = (each for each in records if each["id"] == "wide")
    assert "beam_width is 100; " in wide["error"]
    (one,) = (each for each in records if each["id"] == "one")
    assert one["text"] == "623"
    assert one["finish_reason"] == "stop"
    assert "index" not in one
    assert "logprobs" not in one
    assert one["score"] == pytest.approx(one["cumulative_logprob"] / len(one["token_ids"]))
    three = [each for each in records if each["id"] == "three"]
    assert [each["index"] for each in three] == [0, 1, 2]
    assert sorted((each["score"] for each in three), reverse=True) == [each["score"] for each in three]
    assert len({each["text"] for each in three}) == 3
    for each in three:
        assert sum(line["logprob"] for line in each["logprobs"]) == pytest.approx(each["cumulative_logprob"])
        assert [line["token"] for line in each["logprobs"]] == each["token_ids"]
        assert each["first_token_s"] is not None
