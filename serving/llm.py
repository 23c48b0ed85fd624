"""How does a Python program ask a model?

    llm = LLM("recipes/tiny/cpu.yaml")
    for output in llm.generate(["348+275="], SamplingParams(temperature=0)):
        print(output.outputs[0].text)

The names are those of vLLM's offline `LLM`, so that a program for the one runs on the other. All is computed
in this process; a server is not needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from continuous_batching.engine import Engine
from continuous_batching.request import Request
from continuous_batching.scheduling.validation import longest_allowed
from recipes.build.engine import build
from recipes.schema.reader import load
from serving.answers.jobs import Job, Outcome, Refused, Run
from serving.answers.outputs import (
    CompletionOutput,
    Logprob,
    Prompt,
    RequestOutput,
    SamplingParams,
    fields_of,
    logprobs_of,
)
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text

Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., Any]  # whether, or by what in place of tqdm

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


class LLM:
    """A model that is ready to answer; raises ValueError for a recipe that cannot be.

    `overrides` are as on the command line: "cache.page_size=32". After an exception from within a step of the
    engine, such as Ctrl-C's, it cannot go on: make another.
    """

    def __init__(self, recipe: str | Path, *overrides: str, profile: str | None = None) -> None:
        asked = load(recipe, overrides, profile)
        self.text = Text.load(asked.model.path) if asked.model.path else None
        self.engine: Engine = build(asked)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Go on with each prompt; the outputs are in their order.

        Raises ValueError, before anything runs, that names the first prompt that cannot be served.
        """
        given = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._serve("prompts", given, fields_of, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's own chat template; else as `generate`."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        given = [messages] if one else messages
        return self._serve("messages", given, _conversation, sampling_params, use_tqdm)

    def _serve(
        self,
        what: str,
        asked: Sequence[object],
        form: Callable[[object], dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: Progress,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(asked)
        else:
            params = list(sampling_params)
        if len(params) != len(asked):
            raise ValueError(f"{len(params)} sampling_params are given for {len(asked)} {what}; give as many")
        jobs, texts = [], []
        for index, (each, wanted) in enumerate(zip(asked, params)):
            try:
                prompt = form(each)
                jobs.append(self._job(prompt, wanted))
            except ValueError as error:
                raise ValueError(f"{what}[{index}]: {error}") from error
            texts.append(prompt.get("prompt"))
        outcomes = self._run(jobs, use_tqdm)
        return [self._output(job, text, outcomes[job.request.id]) for job, text in zip(jobs, texts)]

    def _job(self, prompt: dict[str, Any], params: SamplingParams) -> Job:
        scheduler, given = self.engine.scheduler, params.asked() | prompt | {"id": str(next(self._ids))}
        longest = longest_allowed(scheduler.slots, scheduler.pool)
        if params.max_tokens is None:
            given["max_tokens"] = longest
        request = parse_request(given, self.text)
        if params.max_tokens is None:
            for each in (request, *request.followers):
                rest = max(1, longest - request.num_prompt_tokens)  # too long a prompt is refused below
                each.params = replace(each.params, max_tokens=rest)
        scheduler.check(request)
        return Job(request, text_options(given), params.n, params.logprobs is not None)

    def _run(self, jobs: list[Job], use_tqdm: Progress) -> dict[str, list[Outcome]]:
        """The answers to each job, by its id."""
        outcomes: dict[str, list[Outcome]] = {job.request.id: [] for job in jobs}
        run = Run(self.engine, self.text, jobs, patient=True)
        bar = use_tqdm if callable(use_tqdm) else tqdm
        with bar(
            total=len(jobs), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as shown:
            try:
                for outcome in run.outcomes():
                    assert not isinstance(outcome, Refused), f"{outcome.reason}, though it was checked"
                    outcomes[outcome.job.request.id].append(outcome)
                    shown.update(outcome.is_last)
            finally:
                run.abort()  # nothing of an interrupted call goes on in the next
        return outcomes

    def _output(self, job: Job, prompt: str | None, outcomes: list[Outcome]) -> RequestOutput:
        request: Request = job.request
        token_ids, asked = request.prompt.tolist(), request.params.prompt_logprobs is not None
        if prompt is None and job.options.start and self.text is not None:
            prompt = self.text.decode(token_ids, skip_special_tokens=False)  # what the chat template made
        told = [logprobs_of(each, self.text) for each in request.prompt_logprobs]
        return RequestOutput(
            request_id=request.id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            prompt_logprobs=[None, *told] if asked else None,
            outputs=[self._completion(each) for each in sorted(outcomes, key=lambda each: each.index)],
            finished=True,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _completion(self, outcome: Outcome) -> CompletionOutput:
        logprobs, found = outcome.logprobs, outcome.found
        total = None if logprobs is None else sum(each.logprob for each in logprobs)
        return CompletionOutput(
            index=outcome.index,
            text=outcome.text or "",
            token_ids=outcome.tokens,
            cumulative_logprob=total if found is None else found.cumulative_logprob,
            logprobs=None if logprobs is None else [logprobs_of(each, self.text) for each in logprobs],
            finish_reason=outcome.finish_reason,
            stop_reason=outcome.stop_reason,
        )


def _conversation(messages: object) -> dict[str, Any]:
    return {"messages": messages}
