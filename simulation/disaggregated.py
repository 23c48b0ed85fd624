"""What if some engines compute the prompts, and other engines the answers?

A prompt's engine yields its first token. Its keys and values then go over the link to an answer's engine,
where the request waits for a slot and pages like any newcomer, and is not computed again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from continuous_batching.batch import Batch
from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request
from continuous_batching.routing import Route, Routing
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from simulation.fleet import Fleet
from simulation.replica import Replica
from simulation.run_totals import DONE, Answered, RunTotals, StepCounter
from simulation.runner import CostModel
from simulation.serve import in_order

TransferS = Callable[[int], float]  # seconds for the keys and values of so many tokens


@dataclass(frozen=True, slots=True)
class Resumed:
    """The costs of an answers' engine: of a span sent over the link, it computes only the last token."""

    costs: CostModel

    def step_s(self, batch: Batch, slots: SlotPool) -> float:
        """Seconds of a step."""
        came = batch.starts < slots.num_prompt[batch.slots]
        if came.any():
            starts = np.where(came, np.maximum(batch.starts, batch.stops - 1), batch.starts)
            batch = replace(batch, starts=starts)
        return self.costs.step_s(batch, slots)


class _PrefillCounter(StepCounter):
    """Counts only answers of one token: all others end in the engine of their answers."""

    def __init__(self, engine: Engine, totals: RunTotals, asked: dict[str, Request]) -> None:
        super().__init__(engine, totals)
        self._asked = asked

    def ended(self, request: Request) -> None:
        if self._asked[request.id].params.max_tokens == 1:
            super().ended(request)


class _DecodeCounter(StepCounter):
    """Counts a request by what both of its engines did."""

    def __init__(self, engine: Engine, totals: RunTotals, begun: dict[str, Answered]) -> None:
        super().__init__(engine, totals)
        self._begun = begun

    def ended(self, request: Request) -> None:
        first = self._begun.pop(request.id)
        if request.finish_reason not in DONE:
            self.totals.cut_short += 1
        else:
            assert request.finish_s is not None, "an answered request has its times"
            tokens = 1 + len(request.answer)
            reason = str(request.finish_reason)
            self.totals.answered(
                replace(first, finish_s=request.finish_s, output_tokens=tokens, finish_reason=reason)
            )

    def since_s(self, number: int) -> float:
        known_s = super().since_s(number)
        if not np.isnan(known_s):
            return known_s
        slots = self.engine.slots
        row = int(np.flatnonzero(slots.number == number)[0])
        return self._begun[slots.requests[row].id].first_token_s


class DisaggregatedFleet:
    """Prompts' engines, a link and answers' engines; what they do goes to one RunTotals.

    Answers' schedulers must take a whole context in a step: give them a budget of tokens that is large.
    """

    def __init__(
        self,
        prompts: list[Scheduler],
        answers: list[Scheduler],
        costs: CostModel,
        transfer_s: TransferS,
        totals: RunTotals,
        *,
        route: Route = "least_loaded",
        answer_costs: CostModel | None = None,
    ) -> None:
        self._totals = totals
        self._transfer_s = transfer_s
        self._asked: dict[str, Request] = {}
        self._begun: dict[str, Answered] = {}
        self._coming: list[tuple[float, int, Request]] = []
        self._num_sent = 0
        self._prompts = Fleet([self._prompt(each, costs) for each in prompts], Routing(len(prompts), route))
        resumed = Resumed(answer_costs or costs)
        self._answers = Fleet([self._answer(each, resumed) for each in answers], Routing(len(answers), route))

    def serve(self, trace: Iterable[Request]) -> None:
        """Serve requests, in order of arrival, to the end."""
        for request in in_order(trace):
            self._prompts.advance(request.arrival_s)
            self._deliver(request.arrival_s)
            self._asked[request.id] = request
            prompt = Request(
                request.id,
                request.prompt,
                replace(request.params, max_tokens=1),
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                priority=request.priority,
                arrival_s=request.arrival_s,
                timeout_s=request.timeout_s,
            )
            self._prompts.add(prompt, request.arrival_s)
            if prompt.finish_reason is not None:
                del self._asked[request.id]  # the engine refused it
        self._prompts.close()
        self._deliver(float("inf"))
        self._answers.close()

    def _prompt(self, scheduler: Scheduler, costs: CostModel) -> Replica:
        replica = Replica(scheduler, costs, self._totals, observe=self._send)
        replica.counter = _PrefillCounter(replica.engine, self._totals, self._asked)
        return replica

    def _answer(self, scheduler: Scheduler, costs: CostModel) -> Replica:
        replica = Replica(scheduler, costs, self._totals, is_counting_arrivals=False)
        replica.counter = _DecodeCounter(replica.engine, self._totals, self._begun)
        return replica

    def _send(self, engine: Engine, step: Step) -> None:
        for prompt in step.finished:
            asked = self._asked.pop(prompt.id)
            if prompt.finish_reason not in DONE or asked.params.max_tokens == 1:
                continue
            assert prompt.first_token_s is not None, "an answered request has its times"
            took_s = self._transfer_s(prompt.num_prompt_tokens)
            there_s = prompt.first_token_s + took_s
            left_s = None if asked.timeout_s is None else asked.arrival_s + asked.timeout_s - there_s
            self._totals.waiting_s += took_s
            self._begun[prompt.id] = Answered(
                prompt.id,
                prompt.arrival_s,
                prompt.first_token_s,
                prompt.first_token_s,
                prompt.num_prompt_tokens,
                asked.params.max_tokens,
                1,
                "length",
            )
            rest = Request(
                prompt.id,
                prompt.tokens,
                replace(asked.params, max_tokens=asked.params.max_tokens - 1),
                tenant=asked.tenant,
                cache_salt=f"{asked.cache_salt} from {prompt.id}",  # pages that were sent are not shared
                priority=asked.priority,
                arrival_s=there_s,
                timeout_s=left_s,  # if none is left, the request ends before the next step
            )
            self._num_sent += 1
            heapq.heappush(self._coming, (rest.arrival_s, self._num_sent, rest))

    def _deliver(self, until_s: float) -> None:
        while self._coming and self._coming[0][0] <= until_s:
            at_s, _, rest = heapq.heappop(self._coming)
            self._answers.add(rest, at_s)
