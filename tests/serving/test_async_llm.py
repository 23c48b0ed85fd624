"""Many callers in an event loop each get what they would get alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from borders.refusal import BadRequest
from continuous_batching.request import Request, TokenLogprobs
from continuous_batching.request import SamplingParams as EngineParams
from serving.answers.answers import AnswerStream
from serving.async_llm import AsyncLLM
from serving.engine.messages import Add, Finish, SampleEnd, ToEngine
from serving.failures import EngineEnded
from serving.llm import LLM, RequestOutput, SamplingParams
from serving.text.tokenizer import TextOptions
from tests.patience import PATIENCE_S

RECIPE, SMALL = "recipes/tiny/cpu.yaml", ("scheduler.num_slots=4", "device.threads=1")
PROMPTS = ["348+275=", "One day", "请介绍一下"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1),
    SamplingParams(n=3, seed=5, max_tokens=12, top_k=-1),
    SamplingParams(seed=1, max_tokens=20, stop=["，", "9"], include_stop_str_in_output=True),
]
Value = TypeVar("Value")


async def with_llm(use: Callable[[AsyncLLM], Awaitable[Value]]) -> Value:
    """What `use` makes of an engine that is ready."""
    llm = AsyncLLM(RECIPE, *SMALL, "server.spare_engine=false")
    llm.start()
    try:
        await llm.ready()
        return await use(llm)
    finally:
        await llm.close()


async def outputs_of(llm: AsyncLLM, index: int) -> list[RequestOutput]:
    return [each async for each in llm.generate(PROMPTS[index], PARAMS[index], str(index))]


def test_answers_grow_to_those_of_a_program_by_itself_and_are_found_by_their_ids() -> None:
    async def use(llm: AsyncLLM) -> list[list[RequestOutput]]:
        grown = await asyncio.gather(*(outputs_of(llm, index) for index in range(len(PROMPTS))))
        with pytest.raises(BadRequest, match="top_p"):
            await outputs_of_one(llm, SamplingParams(top_p=2))
        stream = llm.generate("One day", SamplingParams(max_tokens=1500, ignore_eos=True), "long")
        assert (await anext(stream)).finished is False
        await stream.aclose()
        while llm.num_requests:  # its slot comes back when the engine has heard of it
            await asyncio.sleep(0.01)
        await found_by_id_while_open(llm)
        return grown

    grown = asyncio.run(with_llm(use))
    alone = LLM(RECIPE, *SMALL).generate(PROMPTS, PARAMS, use_tqdm=False)
    for outputs, whole in zip(grown, alone):
        last = outputs[-1]
        assert last.finished
        assert last.outputs == whole.outputs
        assert (last.prompt, last.prompt_token_ids) == (whole.prompt, whole.prompt_token_ids)
        assert last.prompt_logprobs == whole.prompt_logprobs
        for before, after in itertools.pairwise(outputs):
            assert not before.finished
            for each, grew in zip(before.outputs, after.outputs):
                assert grew.text.startswith(each.text)
                assert grew.token_ids[: len(each.token_ids)] == each.token_ids


def test_an_answer_that_fails_is_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not read before is yielded, and then the failure raised."""
    llm = AsyncLLM(RECIPE, *SMALL)
    request = Request("a", np.array([301]), EngineParams(max_tokens=9))
    answer = AnswerStream(request, llm.text, TextOptions(), num_answers=1, max_unread_tokens=1000)

    async def ask(*_: Any, **__: Any) -> list[AnswerStream]:
        return [answer]

    async def work() -> None:
        stream = llm.generate("a", SamplingParams(max_tokens=9), "a")
        answer.take(0, 302, None, None)
        answer.fail(EngineEnded("the engine ended"))
        output = await anext(stream)
        assert (output.finished, output.outputs[0].token_ids) == (False, [302])
        with pytest.raises(EngineEnded):
            await anext(stream)

    monkeypatch.setattr(llm, "ask", ask)
    asyncio.run(work())


def test_each_caller_of_a_lost_engine_has_an_exception_of_its_own() -> None:
    """One that all raise would get the frames of all in its traceback."""

    async def lose() -> list[BaseException]:
        llm = AsyncLLM(RECIPE, *SMALL)
        answers = []
        for stream in range(3):
            request = Request(str(stream), np.array([301]), EngineParams(max_tokens=9))
            answers.append(AnswerStream(request, llm.text, TextOptions(), num_answers=1, max_unread_tokens=9))
            llm._streams[stream] = answers[-1], 0
        llm._lose_engine("it was killed")
        found = await asyncio.gather(*(each.next() for each in answers), return_exceptions=True)
        return [each for each in found if isinstance(each, EngineEnded)]

    failures = asyncio.run(lose())
    assert len({id(each) for each in failures}) == 3
    assert {str(each) for each in failures} == {"it was killed; send the request again"}


def test_a_trace_without_a_folder_is_refused() -> None:
    async def begin() -> None:
        AsyncLLM(RECIPE, *SMALL).start_profile(3)

    with pytest.raises(BadRequest, match=r"names no folder for traces: set server\.profile$"):
        asyncio.run(begin())


def test_log_probabilities_of_an_answer_that_grows_are_converted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what was yielded stays as it was."""
    llm, tokens = AsyncLLM(RECIPE, *SMALL), [*range(300, 330)]
    assert llm.text is not None
    params = EngineParams(max_tokens=len(tokens), logprobs=1, prompt_logprobs=1)
    request = Request("a", np.array([301, 302, 303]), params)
    answer = AnswerStream(request, llm.text, TextOptions(), num_answers=1, max_unread_tokens=1000)
    entries = [TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in tokens]
    answer.prompt_logprobs = entries[2:4]
    decode, decoded = llm.text.decode, list[int]()

    async def ask(*_: Any, **__: Any) -> list[AnswerStream]:
        return [answer]

    def counted(token_ids: Iterable[int], **options: Any) -> str:
        ids = [*token_ids]
        decoded.extend(ids)
        return decode(ids, **options)

    monkeypatch.setattr(llm, "ask", ask)
    monkeypatch.setattr(llm.text, "decode", counted)

    async def work() -> list[RequestOutput]:
        asked, outputs = SamplingParams(logprobs=1, prompt_logprobs=1), list[RequestOutput]()
        stream = llm.generate("a", asked, "a")
        for at, (token, entry) in enumerate(zip(tokens, entries), 1):
            end = SampleEnd(0, "length", None, at, 0, 0, 0.0, 0.0, 0.0, []) if at == len(tokens) else None
            answer.take(0, token, entry, end)
            outputs.append(await anext(stream))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return outputs

    outputs = asyncio.run(work())
    assert decoded == [300, 302, 303, *tokens[1:]]
    for number, output in enumerate(outputs, 1):
        (one,) = output.outputs
        assert one.token_ids == tokens[:number]
        assert one.logprobs is not None
        assert [[*each] for each in one.logprobs] == [[token] for token in tokens[:number]]
        assert one.cumulative_logprob == -0.5 * number
        assert output.prompt_logprobs is not None
        assert [each and [*each] for each in output.prompt_logprobs] == [None, [302], [303]]


def test_parameters_of_a_program_count_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's longest answer is for requests that leave it out."""
    llm, found = AsyncLLM(RECIPE, *SMALL), list[int]()
    llm.sampling_defaults = {"max_tokens": 9}
    facts: Any = SimpleNamespace(max_tokens=40, max_shared_tokens=None, prefix_sharing=False)

    def send(answers: list[AnswerStream]) -> None:
        found.append(answers[0].request.params.max_tokens)
        raise EngineEnded("the engine ended")

    monkeypatch.setattr(llm, "check_ready", lambda: None)
    monkeypatch.setattr(llm, "_send_all", send)
    monkeypatch.setattr(llm.engine, "facts", facts)

    async def ask() -> None:
        with pytest.raises(EngineEnded):
            await outputs_of_one(llm, SamplingParams(max_tokens=None))
        with pytest.raises(EngineEnded):
            await llm.ask([{"id": "a", "prompt": "1+1="}], fill=True)
        with pytest.raises(EngineEnded):
            await outputs_of_one(llm, SamplingParams(max_tokens=1000))
        with pytest.raises(EngineEnded):
            await outputs_of_one(llm, SamplingParams(max_tokens=1000, truncate_prompt_tokens=-1))

    asyncio.run(ask())
    assert found[0] > 30
    assert found[1:] == [9, found[0], 1000]  # the engine refuses the last one


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ({"prompt_token_ids": np.array([1, 2])}, {}, "prompt_token_ids is .*array.*a list of token ids"),
        ({"prompt_token_ids": 5}, {}, "prompt_token_ids is 5; it must be a list of token ids"),
        ({"prompt": 5}, {}, "prompt is 5; it must be a string"),
        ("One", {"stop_token_ids": np.array([1, 2])}, "stop_token_ids is .*array.*a list of token ids"),
    ],
)
def test_a_wrong_type_is_refused_by_name(
    prompt: Any, params: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = AsyncLLM(RECIPE, *SMALL)
    facts: Any = SimpleNamespace(max_tokens=40, max_shared_tokens=None, prefix_sharing=False)
    monkeypatch.setattr(llm, "check_ready", lambda: None)
    monkeypatch.setattr(llm.engine, "facts", facts)

    async def ask() -> None:
        with pytest.raises(BadRequest, match=message):
            await anext(llm.generate(prompt, SamplingParams(**params), "a"))

    asyncio.run(ask())


@pytest.mark.slow
def test_a_request_that_cannot_be_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its places and log-probabilities are free again, and the prompt before it is ended."""
    asked = {"prompt": "One day", "max_tokens": 500, "ignore_eos": True, "n": 3, "logprobs": 2}

    async def use(llm: AsyncLLM) -> None:
        sent = list[ToEngine]()

        def send(message: ToEngine) -> None:
            sent.append(message)
            if len(sent) == 2:
                raise ZeroDivisionError
            given(message)

        given = llm.engine.send
        monkeypatch.setattr(llm.engine, "send", send)
        with pytest.raises(ZeroDivisionError):
            await llm.ask([asked | {"id": "a"}, asked | {"id": "b"}])
        assert [type(each) for each in sent] == [Add, Add, Finish, Finish, Finish]
        assert (llm.limits.num_logprobs, llm.num_requests) == (0, 3)
        await asyncio.wait_for(llm.engine.until(lambda: not llm.num_requests), PATIENCE_S)
        (last,) = await llm.ask([asked | {"id": "c", "max_tokens": 1}])
        while await last.next():
            pass
        llm.limits.release(last)

    asyncio.run(with_llm(use))


async def outputs_of_one(llm: AsyncLLM, params: SamplingParams) -> list[RequestOutput]:
    return [each async for each in llm.generate("1+1=", params, "one")]


async def found_by_id_while_open(llm: AsyncLLM) -> None:
    """A request is found by the id that was told."""
    asked = {"prompt": "One day", "max_tokens": 500, "ignore_eos": True}
    parts = await llm.ask([asked | {"id": f"cmpl-a-{index}"} for index in range(2)], group="cmpl-a")
    (other,) = await llm.ask([asked | {"id": "cmpl-b"}])
    assert (llm.find("cmpl-a"), llm.find("cmpl-b")) == (parts, [other])
    for wrong in ("cmpl", "cmpl-a-1", "cmpl-b-0", "a", ""):
        assert not llm.find(wrong), wrong
    llm.abort(parts[0])
    assert llm.find("cmpl-a") == parts[1:]
    llm.abort(parts[1])
    assert not llm.find("cmpl-a"), "the engine may not have heard of it yet"
    llm.abort(other)
    while llm.num_requests:
        await asyncio.sleep(0.01)
