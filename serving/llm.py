"""Run a model inside a Python program.

    llm = LLM("recipes/tiny/cpu.yaml")
    for output in llm.generate(["348+275="], SamplingParams(temperature=0)):
        print(output.outputs[0].text)

The names are those of vLLM's offline `LLM`, so that a program for one runs on the other where it uses what
docs/using.md lists. Everything is computed in this process; no server is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from continuous_batching.engine import Engine
from continuous_batching.scheduling.validation import longest_allowed
from recipes.assembly.engine import build_in_sight
from recipes.fitting import fitted, one_of, with_settings
from recipes.schema.reader import load
from serving.adapters import KnownAdapters
from serving.answers.answers import AnswerDelta
from serving.answers.jobs import Job, JobAnswer, JobRun
from serving.grammars.matching import Grammars
from serving.outputs import (
    CompletionOutput,
    GrowingOutput,
    Logprob,
    Prompt,
    RequestOutput,
    VllmSamplingParams,
    fields_of,
)
from serving.own_processors import KnownProcessors
from serving.text.request_fields import NO_DEFAULTS, parse_request, text_options
from serving.text.sampling_defaults import sampling_defaults
from serving.text.tokenizer import Text

SamplingParams = VllmSamplingParams  # the name that programs written for vLLM import
Messages = Sequence[Mapping[str, Any]]
Progress = bool | Callable[..., Any]  # whether to show progress, or what to use in place of tqdm

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]


class LLM:
    """A model that is ready to answer; raises ValueError for a recipe that cannot be used.

    In place of a recipe, `recipe` or `model` names a checkpoint's folder, or ORG/NAME of a downloaded one;
    the recipe that fits it on this machine is then chosen, and logged. `overrides` are written as on the
    command line: "cache.page_size=32", and `settings` are those of vLLM by its own names, such as
    `max_model_len`, as far as docs/recipe_keys.md has them. After an exception within a step of the engine,
    such as KeyboardInterrupt, the object cannot be used any more: make another.
    """

    def __init__(
        self,
        recipe: str | Path | None = None,
        *overrides: str,
        model: str | Path | None = None,
        profile: str | None = None,
        **settings: Any,
    ) -> None:
        overrides = with_settings(overrides, settings)
        asked = load(*fitted(one_of(recipe, model), overrides, profile), profile)
        self._adapters = KnownAdapters(asked.adapters)
        self.text = Text.of(asked)
        self._defaults = sampling_defaults(asked)
        self.engine: Engine = build_in_sight(asked).engine
        scheduler = self.engine.scheduler
        # All prompts of a call come at once and wait for each other, which is no reason to end them. The
        # recipe stays as it is, since further machines compare theirs with it
        scheduler.lift_wait_limit()
        self._grammars = Grammars(lambda: self.text, scheduler.vocab_size, scheduler.eos_token_ids)
        self._processors = KnownProcessors.of(asked, scheduler.vocab_size)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: VllmSamplingParams | Sequence[VllmSamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the outputs in the order of the prompts.

        Raises ValueError, before anything runs, that names the first prompt that cannot be served.
        """
        given = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._serve("prompts", given, fields_of, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: VllmSamplingParams | Sequence[VllmSamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several with the model's own chat template.

        The arguments and the results are otherwise those of `generate`.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        given = [messages] if one else messages
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        form = partial(_conversation, options=options)
        return self._serve("messages", given, form, sampling_params, use_tqdm)

    def _serve(
        self,
        what: str,
        asked: Sequence[object],
        form: Callable[[object], dict[str, Any]],
        sampling_params: VllmSamplingParams | Sequence[VllmSamplingParams] | None,
        use_tqdm: Progress,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, VllmSamplingParams):
            params = [sampling_params or VllmSamplingParams()] * len(asked)
        else:
            params = list(sampling_params)
        if len(params) != len(asked):
            raise ValueError(f"{len(params)} sampling_params are given for {len(asked)} {what}; give as many")
        jobs, texts = [], []
        for index, (each, wanted) in enumerate(zip(asked, params)):
            try:
                prompt = form(each)
                jobs.append(self._job(prompt, wanted, is_given=sampling_params is not None))
            except ValueError as error:
                raise ValueError(f"{what}[{index}]: {error}") from error
            texts.append(prompt.get("prompt"))
        answers = self._run(jobs, use_tqdm)
        return [self._output(job, text, answers[job.request.id]) for job, text in zip(jobs, texts)]

    def _job(self, prompt: dict[str, Any], params: VllmSamplingParams, *, is_given: bool) -> Job:
        scheduler = self.engine.scheduler
        asked = params.asked()
        if not is_given:  # parameters that are given count as a whole, as in vLLM
            asked = {name: value for name, value in asked.items() if name not in self._defaults}
        given = asked | prompt | {"id": str(next(self._ids))}
        most = longest_allowed(scheduler.slots, scheduler.pool)
        request = parse_request(
            given,
            self.text,
            longest=most,
            shorten=True,
            limit=most,
            adapters=self._adapters,
            defaults=NO_DEFAULTS if is_given else self._defaults,
        )
        scheduler.check(request)
        self._grammars.constrain(request)
        self._processors.give(request)
        return Job(request, text_options(given, self.text), params.n or 1, params.shows_logprobs)

    def _run(self, jobs: list[Job], use_tqdm: Progress) -> dict[str, list[AnswerDelta]]:
        """Run jobs to their end, and return the answers to each by its request's id."""
        answers: dict[str, list[AnswerDelta]] = {job.request.id: [] for job in jobs}
        run = JobRun(self.engine, self.text, jobs, patient=True)
        bar = use_tqdm if callable(use_tqdm) else tqdm
        with bar(
            total=len(jobs), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True
        ) as shown:
            try:
                for found in run.answers():
                    assert isinstance(found, JobAnswer), f"{found.reason}, though it was checked"
                    answers[found.job.request.id].append(found.answer)
                    shown.update(found.is_last)
            finally:
                run.abort()  # nothing of an interrupted call may go on in the next one
        return answers

    def _output(self, job: Job, prompt: str | None, answers: list[AnswerDelta]) -> RequestOutput:
        request = job.request
        # Show the prompt that the chat template made.
        if prompt is None and job.options.is_chat and self.text is not None:
            prompt = self.text.decode(request.prompt.tolist(), skip_special_tokens=False)
        output = GrowingOutput(request, self.text, prompt=prompt, with_logprobs=job.show_logprobs)
        output.take(answers)
        return output.output(
            request.prompt_logprobs, finished=True, num_cached_tokens=request.num_cached_tokens
        )


def _conversation(messages: object, options: dict[str, Any]) -> dict[str, Any]:
    return {"messages": messages, **options}
