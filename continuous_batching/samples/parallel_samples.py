"""Let the samples of one prompt share its computation."""

from __future__ import annotations

import numpy as np

from continuous_batching.paging.slot_lifecycle import SlotLifecycle
from continuous_batching.queueing import WaitingQueue
from continuous_batching.request import Request
from kv_cache.pages import Index


class ParallelSamples:
    """Samples of one prompt: the leader computes it, and its followers fork from it when it is computed.

    The log-probabilities of the prompt are computed once, in a list that they share.
    """

    def __init__(self, lifecycle: SlotLifecycle, waiting: WaitingQueue) -> None:
        self._lifecycle = lifecycle
        self._waiting = waiting
        self.leader_of: dict[str, Request] = {}  # keyed by the id of the waiting sample

    @property
    def requests(self) -> list[Request]:
        """All samples that wait for their leader."""
        leaders = {id(leader): leader for leader in self.leader_of.values()}
        return [follower for leader in leaders.values() for follower in leader.followers]

    def add(self, leader: Request) -> None:
        """Let a request's followers wait for its prompt."""
        self.leader_of.update((follower.id, leader) for follower in leader.followers)

    def end(self, request_id: str) -> Request | None:
        """Remove a follower that has ended; return None if it does not wait here."""
        leader = self.leader_of.pop(request_id, None)
        if leader is None:
            return None
        (follower,) = (each for each in leader.followers if each.id == request_id)
        leader.followers.remove(follower)
        return follower

    def fork(self, rows: Index, sampled: Index) -> tuple[Index, Index]:
        """Let followers of the prompts that this batch completes sample beside their leaders.

        Followers that find no free row are queued as requests of their own. `sampled` are the spans that
        yield a token; returns these and the spans of the forks, and the row that each token is for.
        """
        slots, spans, owners = self._lifecycle.slots, sampled.tolist(), rows[sampled].tolist()
        for span, row in zip(sampled.tolist(), rows[sampled].tolist()):
            for follower in self._release(slots.requests[row]):
                follower.num_scored = follower.num_prompt_tokens - 1  # scored with this batch, by the leader
                if slots.num_free:
                    spans.append(span)
                    owners.append(self._lifecycle.fork(row, follower))
                else:
                    self._waiting.push(follower)
        return np.array(spans, dtype=np.int64), np.array(owners, dtype=np.int64)

    def part(self, leader: Request) -> None:
        """Let the samples that still follow an ended request go on without it.

        The first becomes their leader.
        """
        followers = self._release(leader)
        if followers:
            first = followers[0]
            first.followers, first.num_scored = followers[1:], leader.num_scored
            self.add(first)
            self._waiting.push(first)

    def _release(self, leader: Request) -> list[Request]:
        """Detach the followers of a request."""
        followers, leader.followers = leader.followers, []
        for each in followers:
            each.prompt_logprobs = leader.prompt_logprobs
            del self.leader_of[each.id]
        return followers
