"""Which of a request's samples are its answers?"""

from __future__ import annotations

from continuous_batching.request import Request

MOST_SAMPLES = 128  # each takes a slot: more of one request would crowd out the others


class Samples:
    """The samples of one prompt, of which `num_answers` are wanted.

    If all are, each is an answer when it ends. If fewer are, those with the highest cumulative
    log-probability are, when all have ended; a sample that failed is taken only where no other is left.
    """

    def __init__(self, leader: Request, num_answers: int) -> None:
        self.requests = (leader, *leader.followers)
        self.num_answers = num_answers
        self._ended: list[Request] = []

    def end(self, request: Request) -> list[tuple[int, Request]]:
        """Take note that a sample ended; the answers that are known now, each with its index."""
        if self.num_answers == len(self.requests):
            return [(self.requests.index(request), request)]
        self._ended.append(request)
        if len(self._ended) < len(self.requests):
            return []
        best = sorted(self._ended, key=_rank)
        return list(enumerate(best[: self.num_answers]))


def _rank(request: Request) -> tuple[bool, float, int]:
    return request.finish_reason == "error", -sum(each.logprob for each in request.logprobs), request.number
