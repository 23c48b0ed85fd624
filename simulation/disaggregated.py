"""Simulate engines that compute prompts for others, which answer.

As `serving.router` does it: `continuous_batching.routing.routing` chooses who answers, `splitting` whether
another computes the prompt. Who answers takes pages for it then, by the calls that a server makes; they come
over a link, and the request is an ordinary hit. While a layer is computed, those before it are on their way.
Not modelled: that a transfer fails or is late, the end of the link at the engine that answers, and what a
device loses while it sends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from continuous_batching.engine import Engine, Step
from continuous_batching.request import Request, SamplingParams
from continuous_batching.routing.routing import Route, Routing
from continuous_batching.routing.splitting import Split, Splitting, SplitWeights
from continuous_batching.scheduling.scheduler import Scheduler
from simulation.fleet import Fleet, Passing
from simulation.replica import CostModel, Replica
from simulation.run_totals import DONE, RunTotals

TransferS = Callable[[int], float]  # seconds to transfer the keys and values of so many tokens


@dataclass(slots=True)
class Moving:
    """A request whose prompt another engine computes, with the pages that come from there."""

    request: Request
    answers: int  # number of the engine that answers
    prompts: int  # number of the engine that computes the prompt
    num_tokens: int  # tokens whose pages come over the link
    queued_tokens: int  # tokens to be computed by the answering engine once the pages have come
    begun_s: float | None = None  # start of the first step that computed a part of the prompt
    is_whole: bool = False


class DisaggregatedFleet(Fleet):
    """Engines that compute prompts, which come first, and engines that answer, with one RunTotals.

    Each engine of prompts has a link of its own, which sends one prompt after the other. All engines report
    their pages, and the `num_layers` layers are sent one by one. `split` is "cost" or "always": if no prompt
    is computed elsewhere all engines are alike, and a `Fleet` models them.
    """

    def __init__(
        self,
        prompts: Sequence[Scheduler],
        answers: Sequence[Scheduler],
        costs: CostModel,
        transfer_s: TransferS,
        totals: RunTotals,
        *,
        num_layers: int,
        route: Route = "least_loaded",
        split: Split = "cost",
        weights: SplitWeights | None = None,
        overlap: bool = False,
    ) -> None:
        assert split != "never", "then prompts' engines answer, too"
        self._totals, self._own = totals, RunTotals()  # totals of prompts' engines, whose tokens nobody reads
        computing = [
            Replica(each, costs, self._own, overlap=overlap, observe=self._computed) for each in prompts
        ]
        answering = [Replica(each, costs, totals, overlap=overlap) for each in answers]
        count, self._num_prompts = len(prompts) + len(answers), len(prompts)
        super().__init__([*computing, *answering], Routing(count, route, tells=True))
        self._splitting = Splitting(self.routing, split, weights)
        names = [f"prompts-{number}" for number in range(len(prompts))]
        for number in range(count):
            name = names[number] if number < len(names) else ""
            slots = self.replicas[number].engine.slots.num_slots
            self._splitting.is_known(number, name, () if name else names, slots)
        self._transfer_s, self._num_layers = transfer_s, num_layers
        self._free_s = [0.0] * len(prompts)  # time by which each link has sent everything computed so far
        self._moving: dict[str, Moving] = {}  # keyed by the ids of requests whose prompts are being computed
        self._coming: list[tuple[float, int, Moving]] = []
        self._num_come = self.num_split = 0

    def add(self, request: Request, at_s: float) -> None:
        """Route a request to an engine, and its prompt possibly to another."""
        self.advance(at_s)
        for number in range(len(self.replicas)):
            self._see(number, at_s)
            self._tell(number, at_s)
        prompt = self._prompt(request)
        sent = self.routing.send(prompt, at_s, but=self._splitting.not_for_answers)
        assert sent is not None, "all engines are open"
        self.routed.count(request, sent, len(self.replicas))
        place = self._splitting.choose(prompt, sent, at_s).place
        there = None if place is None else place.sent
        self._passing[sent.replica].append(Passing(request, sent, there))
        if there is None or not self._ask(request, sent.replica, there.replica):
            # This engine of prompts answers as well, because no other has a slot
            if sent.replica < self._num_prompts:
                self._totals.came(request)
            self.replicas[sent.replica].add(request)

    def advance(self, until_s: float) -> None:
        """Advance all engines to this time, delivering the pages that have been sent by then."""
        for replica in self.replicas[: self._num_prompts]:
            replica.advance(until_s)
        while self._coming and self._coming[0][0] <= until_s:
            at_s, _, moving = heapq.heappop(self._coming)
            replica = self.replicas[moving.answers]
            replica.advance(at_s)
            replica.engine.pages_arrived(moving.request.id, is_whole=moving.is_whole)
            replica.add(moving.request)
        for replica in self.replicas[self._num_prompts :]:
            replica.advance(until_s)

    def close(self) -> None:
        """Serve all requests to their end, and add up what the prompts' engines did for them."""
        super().close()
        own, totals = self._own, self._totals
        totals.steps, totals.spans = totals.steps + own.steps, totals.spans + own.spans
        totals.busy_s, totals.held_share = totals.busy_s + own.busy_s, totals.held_share + own.held_share
        totals.preemptions += own.preemptions
        totals.copied_pages += own.copied_pages
        # Gaps of the requests that they answered; a prompt for another engine has none
        totals.itl.merge(own.itl)

    def _waiting_before(self, number: int) -> tuple[int, int]:
        there = (*self._moving.values(), *(each for _, _, each in self._coming))
        queued = [each.queued_tokens for each in there if each.answers == number]
        return len(queued), sum(queued)

    def _ask(self, request: Request, answers: int, prompts: int) -> bool:
        """Have a prompt computed elsewhere.

        Returns False if nothing is missing, or there is no room for it.
        """
        engine, computing = self.replicas[answers].engine, self.replicas[prompts]
        try:
            engine.scheduler.check(request)
        except ValueError:
            return False  # the answering engine refuses it
        expected = engine.expect_pages(request)
        if expected is None:
            return False
        arrival, _ = expected
        asked = Request(
            request.id,
            arrival.tokens,
            SamplingParams(max_tokens=1, ignore_eos=True),
            tenant=request.tenant,
            cache_salt=request.cache_salt,
            priority=request.priority,
            arrival_s=computing.clock.now_s,
        )
        self.num_split += 1
        num_tokens = len(arrival.filled) * engine.slots.page_size
        queued = request.num_prompt_tokens - len(arrival.keys) * engine.slots.page_size
        self._moving[request.id] = Moving(request, answers, prompts, num_tokens, queued)
        computing.add(asked)
        if asked.finish_reason is not None:  # the request was refused
            self._send(self._moving.pop(request.id), computing.clock.now_s)
        return True

    def _computed(self, engine: Engine, step: Step) -> None:
        """Process a step of a prompts' engine."""
        for request in engine.slots.requests[step.batch.slots]:
            moving = None if request is None else self._moving.get(request.id)
            if moving is not None and moving.begun_s is None:
                moving.begun_s = step.start_s
        for request in step.finished:
            moving = self._moving.pop(request.id, None)
            if moving is None:
                self._answered(request)
                continue
            begun_s = step.start_s if moving.begun_s is None else moving.begun_s
            moving.is_whole = request.finish_reason in DONE
            # Layers are sent as they are computed, the last one when the step ends
            layer_s, took_s = (step.end_s - begun_s) / self._num_layers, self._transfer_s(moving.num_tokens)
            sent_s = max(begun_s + layer_s, self._free_s[moving.prompts]) + took_s
            self._free_s[moving.prompts] = max(sent_s, step.end_s + took_s / self._num_layers)
            self._send(moving, self._free_s[moving.prompts])

    def _answered(self, request: Request) -> None:
        """Count a whole request that a prompts' engine has answered."""
        totals = self._totals
        totals.ended(request)
        totals.running_s += (request.finish_s or request.arrival_s) - request.arrival_s
        totals.admitted_tokens += request.num_prompt_tokens
        totals.hit_tokens += request.num_cached_tokens

    def _send(self, moving: Moving, there_s: float) -> None:
        self._num_come += 1
        heapq.heappush(self._coming, (there_s, self._num_come, moving))
