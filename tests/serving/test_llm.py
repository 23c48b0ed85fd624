"""A Python program gets what a file of requests gets, by the names that it knows from vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tqdm import tqdm

from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.llm import LLM, SamplingParams
from serving.offline import read_jobs, run_jobs

RECIPE = "recipes/tiny/cpu.yaml"
SMALL = ("scheduler.num_slots=4", "scheduler.max_batch_tokens=32", "device.threads=1")
PROMPTS = ["348+275=", "One day", "请介绍一下", "What is 5+6?"]
PARAMS = [
    {"temperature": 0, "max_tokens": 8, "logprobs": 2},
    {"n": 3, "seed": 5, "max_tokens": 12, "top_k": 20},
    {"seed": 1, "max_tokens": 20, "stop": ["，", "9"], "include_stop_str_in_output": True},
    {"n": 2, "best_of": 3, "seed": 2, "temperature": 0.7, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(RECIPE, *SMALL)


def test_what_is_none_or_false_asks_for_nothing(llm: LLM) -> None:
    asked = [SamplingParams(max_tokens=2, n=None, logprobs=each) for each in (None, False, 0)]
    answers = [each.outputs[0] for each in llm.generate(["One"] * 3, asked, use_tqdm=False)]
    assert [each.logprobs is None for each in answers] == [True, True, False]
    assert [each.cumulative_logprob is None for each in answers] == [True, True, False]
    assert not llm.engine.has_work


def test_the_tokenizers_own_end_is_no_stop_token_that_was_asked_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.text is not None
    params = {"temperature": 0, "max_tokens": 8}
    (whole,) = llm.generate(["348+275="], SamplingParams(**params), use_tqdm=False)
    second, third = whole.outputs[0].token_ids[1:3]
    monkeypatch.setattr(llm.text, "eos_token_ids", (third,))
    for further, asked, ignores, expected in (
        ((third,), [], False, (third, None)),
        ((third,), [second], False, (second, second)),
        ((), [third], False, (third, None)),
        ((), [third], True, (third, third)),
    ):
        monkeypatch.setattr(llm.text, "further_end_ids", further)
        stops = SamplingParams(**params, stop_token_ids=asked, ignore_eos=ignores)
        (answer,) = llm.generate(["348+275="], stops, use_tqdm=False)
        (found,) = answer.outputs
        assert (found.token_ids[-1], found.stop_reason, found.finish_reason) == (*expected, "stop")


def test_an_end_of_the_model_that_is_not_the_tokenizers_own_is_a_stop_token(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (end,) = llm.engine.scheduler.eos_token_ids
    asked = SamplingParams(temperature=0, max_tokens=16)
    for own, expected in (((end,), None), ((end + 1,), end)):
        monkeypatch.setattr(llm.text, "eos_token_ids", own)
        (answer,) = llm.generate(["348+275="], asked, use_tqdm=False)
        (found,) = answer.outputs
        assert (found.token_ids[-1], found.stop_reason, found.finish_reason) == (end, expected, "stop")


def test_lists_may_be_tuples(llm: LLM) -> None:
    asked = SamplingParams(
        temperature=0, max_tokens=3, stop=("never",), stop_token_ids=(1,), allowed_token_ids=(9,)
    )
    (answer,) = llm.generate(["One"], asked, use_tqdm=False)
    assert answer.outputs[0].token_ids == [9, 9, 9]


def test_answers_are_those_of_a_file(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, [SamplingParams(**each) for each in PARAMS], use_tqdm=False)
    lines = [
        json.dumps(params | {"id": str(index), "prompt": prompt})
        for index, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]
    records = list(run_jobs(build(load(RECIPE, SMALL)).engine, llm.text, read_jobs(lines, llm.text)))
    assert [output.prompt for output in outputs] == PROMPTS
    for index, output in enumerate(outputs):
        expected = [record for record in records if record["id"] == str(index)]
        expected.sort(key=lambda record: record.get("index", 0))
        assert [each.token_ids for each in output.outputs] == [each["token_ids"] for each in expected]
        assert [each.text for each in output.outputs] == [each["text"] for each in expected]
        assert [each.finish_reason for each in output.outputs] == [r["finish_reason"] for r in expected]
        assert [each.index for each in output.outputs] == list(range(PARAMS[index].get("n", 1)))
        assert len(output.prompt_token_ids) == expected[0]["num_prompt_tokens"]
        assert output.finished
    assert outputs[2].outputs[0].text.endswith(str(outputs[2].outputs[0].stop_reason))
    first, told = outputs[0].outputs[0], outputs[3].prompt_logprobs
    assert first.logprobs is not None
    assert [each["logprobs"][0]["logprob"] for each in records if each["id"] == "0"] == [
        first.logprobs[0][first.token_ids[0]].logprob
    ]
    assert first.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(first.logprobs, first.token_ids))
    )
    assert told is not None
    assert told[0] is None
    assert len(told) == len(outputs[3].prompt_token_ids)
    for entry, token in zip(told[1:], outputs[3].prompt_token_ids[1:]):
        assert entry is not None
        best = max(each.logprob for each in entry.values())
        assert (entry[token].rank == 1) == (entry[token].logprob == best)


def test_prompts_come_in_each_form(llm: LLM) -> None:
    assert llm.text is not None
    ids = llm.text.encode(PROMPTS[0])
    forms: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    outputs = llm.generate(forms, greedy, use_tqdm=False)
    assert [output.prompt for output in outputs] == [PROMPTS[0], PROMPTS[0], None]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert {output.outputs[0].text for output in outputs} == {"623"}
    (single,) = llm.generate(PROMPTS[0], greedy, use_tqdm=False)
    assert single.outputs[0].text == "623"
    assert (
        single.outputs[0].logprobs is single.outputs[0].cumulative_logprob is single.prompt_logprobs is None
    )
    assert len({output.request_id for output in [*outputs, single]}) == 4


def test_vllms_names_are_taken_and_a_wrong_one_is_refused() -> None:
    model: Any = {"model": "recipes/tiny/weights", "tensor_parallel_size": 1, "tokenizer": None}
    made = LLM(**model, max_model_len=64, dtype="float32", hf_overrides={"rope_theta": 5000.0})
    assert made.engine.scheduler.slots.max_tokens == 64
    with pytest.raises(ValueError, match=r"trust_remote_code: .*no code of a checkpoint is ever run"):
        LLM(**model, trust_remote_code=True)
    with pytest.raises(ValueError, match="max_model_lenn: unknown key"):
        LLM(**model, max_model_lenn=64)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


def test_a_chat_goes_by_the_models_template(llm: LLM) -> None:
    message = [{"role": "user", "content": "What is 348+275?"}]
    greedy = SamplingParams(temperature=0, max_tokens=20)
    (one,) = llm.chat(message, greedy, use_tqdm=False)
    assert one.outputs[0].text == "348+275=623."
    assert llm.text is not None
    assert one.prompt_token_ids == llm.text.chat(message)
    assert one.prompt is not None
    assert "What is 348+275?" in one.prompt
    outputs = llm.chat([message, [*message, {"role": "assistant", "content": "?"}, *message]], greedy)
    assert outputs[0].outputs == one.outputs
    assert len(outputs) == 2


def test_a_form_of_a_chat_begins_behind_its_thoughts() -> None:
    agent = LLM("recipes/tiny/agent.yaml", *SMALL)
    held = SamplingParams(temperature=0, max_tokens=100, structured_outputs={"choice": ["yes", "no"]})
    (output,) = agent.chat([{"role": "user", "content": "What is 12+30?"}], held, use_tqdm=False)
    assert agent.text is not None
    tokens = output.outputs[0].token_ids
    at = tokens.index(agent.text.think_marks[-1])
    assert at > 2
    assert agent.text.decode(tokens[at + 1 :]) in ("yes", "no")


def test_without_a_longest_answer_it_takes_what_there_is(llm: LLM) -> None:
    tight = LLM(RECIPE, *SMALL, "scheduler.max_request_tokens=40")
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, n=2)
    (output,) = tight.generate(PROMPTS[1], endless, use_tqdm=False)
    longest = 40 - len(output.prompt_token_ids)
    assert [len(each.token_ids) for each in output.outputs] == [longest, longest]


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"min_tokens": 40},
        {"min_tokens": 40, "max_tokens": None},
        {"truncate_prompt_tokens": 1},
        {"beam_width": 2, "seed": None},
    ],
)
def test_an_answer_ends_where_the_context_does(params: dict[str, Any]) -> None:
    tight = LLM(RECIPE, *SMALL, "scheduler.max_request_tokens=40")
    wanted = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, "seed": 1} | params)
    (output,) = tight.generate(PROMPTS[1], wanted, use_tqdm=False)
    longest = 40 - len(output.prompt_token_ids)
    found = [(len(each.token_ids), each.finish_reason) for each in output.outputs]
    assert found == [(longest, "length")] * params.get("n", 1)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", ""], {}, r"prompts\[1\]: prompt is empty"),
        (["a", 7], {}, r'prompts\[1\]: 7 is no prompt; give a string, {"prompt"'),
        (["a", {"text": "a"}], {}, r"prompts\[1\]: {'text': 'a'} is no prompt"),
        (["a", {"prompt_token_ids": [1, 99999]}], {}, r"prompts\[1\]: prompt holds the token id 99999"),
        (["a", "a " * 3000], {}, r"prompts\[1\]: This model's maximum context length is"),
        (["a", "a " * 3000], {"max_tokens": None}, r"prompts\[1\]: This model's maximum context length is"),
        (["a"], {"max_tokens": 2048, "truncate_prompt_tokens": -1}, r"context length is 2048 tokens"),
        (["a"], {"max_tokens": 3000, "min_tokens": 3001}, r"min_tokens is 3001"),
        (["a"], {"temperature": -1}, r"prompts\[0\]: temperature is -1; it must be a number from 0 to 100"),
        (["a"], {"top_k": -2}, r"prompts\[0\]: top_k is -2; it must be an integer from 0 to 2147483647"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(
    llm: LLM, prompts: list[Any], params: dict[str, Any], message: str
) -> None:
    steps = llm.engine.scheduler.counters.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    assert llm.engine.scheduler.counters.steps == steps
    assert not llm.engine.has_work


def test_a_full_queue_is_waited_for() -> None:
    bounded = LLM(RECIPE, *SMALL, "scheduler.max_waiting_requests=2")
    outputs = bounded.generate([PROMPTS[0]] * 20, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["623"] * 20


def test_prompts_wait_for_those_of_the_same_call() -> None:
    hasty = LLM(RECIPE, *SMALL, "scheduler.max_queue_wait_s=0.001", "scheduler.num_slots=1")
    outputs = hasty.generate([PROMPTS[0]] * 5, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == ["623"] * 5


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM) -> None:
    class Impatient(tqdm):
        def update(self, n: float | None = 1) -> None:
            if n:
                raise KeyboardInterrupt

    wanted = [SamplingParams(max_tokens=2 + 8 * index) for index in range(9)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[1]] * 9, wanted, use_tqdm=Impatient)
    assert not llm.engine.has_work


def test_progress_counts_prompts(llm: LLM) -> None:
    seen: list[tuple[int, float]] = []

    class Bar(tqdm):
        def close(self) -> None:
            super().close()
            seen.append((self.total, self.n))

    wanted = [SamplingParams(n=3, max_tokens=4), SamplingParams(n=2, beam_width=3, max_tokens=4)]
    llm.generate(PROMPTS[:2], wanted, use_tqdm=Bar)
    assert seen[0] == (2, 2)
