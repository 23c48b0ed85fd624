"""Report the router's figures as metrics, and as one JSON object, which the router's page shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from continuous_batching.routing.routing import RoutedPrompt, Routing, Sent
from continuous_batching.routing.splitting import SplitChoice
from serving.api.api_keys import Client
from serving.router.fair_turns import ModelTurns
from serving.router.replicas import FleetReplica
from serving.router.resuming import KnownAnswers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_CHOICES = 20  # choices that are reported, the last one first


class RouteChoice(NamedTuple):
    """Where a request with a prompt went, and the numbers behind the choice.

    Replicas are named by address, since the number of one that has left may belong to another.
    """

    replica: str
    prompt_tokens: int
    hit_tokens: int
    best_hit_tokens: int  # largest hit among the replicas
    queued_tokens: int  # queued tokens of other requests at this replica
    requests: int  # other requests at this replica
    is_again: bool  # it was sent before, to a replica that was lost or refused it
    prompt_at: str | None  # address of another replica that computes the prompt
    cost_here: float | None  # cost of the prompt where it is answered, in prompt tokens
    # Cost where another replica would compute it; null if none can or it is too short to ask.
    cost_there: float | None


class FleetFigures:
    """Counts what was sent where, and why."""

    def __init__(
        self,
        routing: Routing,
        replicas: list[FleetReplica],
        turns: ModelTurns,
        answers: KnownAnswers | None = None,
    ) -> None:
        self._answers = answers or KnownAnswers()
        self._routing = routing
        self._replicas = replicas
        self._turns = turns
        self.num_split = 0
        self.num_resumed = 0
        self.num_again = self.num_refused = self.num_cut_off = self.best_hit_tokens = 0
        self.waited_s = 0.0
        self._choices: deque[RouteChoice] = deque(maxlen=_MOST_CHOICES)

    @property
    def _there(self) -> list[FleetReplica]:
        return [each for each in self._replicas if each.state != "gone"]

    def waited(self, seconds: float) -> None:
        """Record how long a request waited for its turn."""
        self.waited_s += seconds

    def sent(
        self, replica: FleetReplica, sent: Sent, prompt: RoutedPrompt, split: SplitChoice, *, is_again: bool
    ) -> None:
        """Record that a request goes to a replica, and its prompt perhaps to another."""
        place = split.place
        prompt_at = None
        if place is not None:
            self.num_split += 1
            computing = self._replicas[place.sent.replica]
            computing.num_prompts += 1
            prompt_at = computing.url
        replica.num_open += 1
        replica.num_sent += 1
        replica.prompt_tokens += prompt.num_tokens
        replica.hit_tokens += sent.hit_tokens
        self.best_hit_tokens += sent.best_hit_tokens
        self.num_again += is_again
        if prompt.num_tokens:
            number = sent.replica
            queued = int(self._routing.queued_tokens[number]) - sent.queued_tokens
            there = int(self._routing.requests[number]) - 1
            # A session's replica may be the only one considered.
            best = max(sent.best_hit_tokens, sent.hit_tokens)
            self._choices.append(
                RouteChoice(
                    replica.url,
                    prompt.num_tokens,
                    sent.hit_tokens,
                    best,
                    queued,
                    there,
                    is_again,
                    prompt_at,
                    split.cost_here,
                    split.cost_there,
                )
            )

    def refused(self) -> None:
        """Record that no replica took a request."""
        self.num_refused += 1

    def resumed(self) -> None:
        """Record that an answer whose replica was lost goes on at another."""
        self.num_resumed += 1

    def cut_off(self) -> None:
        """Record an answer that was lost after it began, and whose client was told."""
        self.num_cut_off += 1

    def as_json(self, client: Client) -> dict[str, Any]:
        """Return all figures that a client may see as one JSON object.

        Choices tell of the requests of all keys, so that only an operator sees them.
        """
        queued, requests = (
            each.astype(int).tolist() for each in (self._routing.queued_tokens, self._routing.requests)
        )
        return {
            "route": self._routing.route,
            "open": self._turns.num_open,
            "waiting": self._turns.num_waiting,
            "split": self.num_split,
            "waiting_tokens": self._turns.waiting_tokens,
            "sent_again": self.num_again,
            "refused": self.num_refused,
            "cut_off": self.num_cut_off,
            "resumed": self.num_resumed,
            "known_answer_bytes": self._answers.num_bytes,
            "best_hit_tokens": self.best_hit_tokens,
            "known_pages": len(self._routing.held),
            "choices": [each._asdict() for each in reversed(self._choices)] if client.may_operate else [],
            "replicas": [
                {
                    "url": each.url,
                    "state": each.state,
                    "models": each.listed.models,
                    "adapters": each.listed.adapters,
                    "trouble": each.trouble,
                    "drained": each.is_drained,
                    "leaves": each.leaves,
                    "tells_pages": each.reader is not None,
                    "open": each.num_open,
                    "sent": each.num_sent,
                    "prompts": each.num_prompts,
                    "lost": each.num_lost,
                    "queued_tokens": queued[each.number],
                    "requests": requests[each.number],
                    "prompt_tokens": each.prompt_tokens,
                    "hit_tokens": each.hit_tokens,
                }
                for each in self._there
            ],
        }

    def health(self) -> list[dict[str, Any]]:
        """Return the state of each replica, and which models it serves."""
        return [{"url": each.url, "state": each.state, "models": each.listed.models} for each in self._there]

    def as_metrics(self) -> str:
        """Return the figures in Prometheus's text format."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self._totals()
        yield from self._by_replica()

    def _totals(self) -> Iterator[str]:
        for name, kind, text, value in (
            ("open_requests", "gauge", "Requests that replicas are answering", self._turns.num_open),
            ("waiting_requests", "gauge", "Requests that wait for their turn", self._turns.num_waiting),
            (
                "waiting_tokens",
                "gauge",
                "Prompt tokens of the requests that wait",
                self._turns.waiting_tokens,
            ),
            (
                "waited_seconds_total",
                "counter",
                "Seconds that requests have waited for their turn",
                self.waited_s,
            ),
            ("split_total", "counter", "Requests whose prompt another replica computed", self.num_split),
            (
                "sent_again_total",
                "counter",
                "Requests that were sent again, to another replica",
                self.num_again,
            ),
            ("refused_total", "counter", "Requests that no replica took", self.num_refused),
            ("cut_off_total", "counter", "Answers that were lost after they had begun", self.num_cut_off),
            (
                "resumed_total",
                "counter",
                "Answers whose replica was lost and that went on at another",
                self.num_resumed,
            ),
            (
                "known_answer_bytes",
                "gauge",
                "Bytes that are kept of answers, so that they can go on elsewhere",
                self._answers.num_bytes,
            ),
            (
                "best_hit_tokens_total",
                "counter",
                "Prompt tokens expected in the best replica's cache",
                self.best_hit_tokens,
            ),
        ):
            yield from (f"# HELP cb_route_{name} {text}", f"# TYPE cb_route_{name} {kind}")
            yield f"cb_route_{name} {value}"

    def _by_replica(self) -> Iterator[str]:
        there = self._there
        queued, requests, is_open = (
            each[[replica.number for replica in there]].astype(int)
            for each in (self._routing.queued_tokens, self._routing.requests, self._routing.is_open)
        )
        for name, kind, text, values in (
            ("replica_up", "gauge", "1 while the replica gets requests", is_open),
            (
                "replica_requests",
                "gauge",
                "Requests at the replica, as it reports and the router counts",
                requests,
            ),
            ("replica_queued_tokens", "gauge", "Prompt tokens that the replica has to compute", queued),
            (
                "replica_sent_total",
                "counter",
                "Requests that were sent to the replica",
                [each.num_sent for each in there],
            ),
            (
                "replica_prompts_total",
                "counter",
                "Prompts that the replica computed for other replicas",
                [each.num_prompts for each in there],
            ),
            (
                "replica_lost_total",
                "counter",
                "Requests that were lost at the replica",
                [each.num_lost for each in there],
            ),
            (
                "replica_prompt_tokens_total",
                "counter",
                "Prompt tokens that were sent to the replica",
                [each.prompt_tokens for each in there],
            ),
            (
                "replica_hit_tokens_total",
                "counter",
                "Prompt tokens expected in the replica's cache",
                [each.hit_tokens for each in there],
            ),
        ):
            yield from (f"# HELP cb_route_{name} {text}", f"# TYPE cb_route_{name} {kind}")
            for replica, value in zip(there, values):
                yield f'cb_route_{name}{{replica="{replica.url}"}} {value}'
