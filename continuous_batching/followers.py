"""Which requests wait for another to compute their prompt?"""

from __future__ import annotations

from continuous_batching.request import Request


class Followers:
    """Samples of one prompt: the leader computes it, its followers fork from it when it is computed."""

    def __init__(self) -> None:
        self._leader_of: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._leader_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._leader_of

    @property
    def requests(self) -> list[Request]:
        """All that wait here."""
        leaders = {id(leader): leader for leader in self._leader_of.values()}
        return [follower for leader in leaders.values() for follower in leader.followers]

    def add(self, leader: Request) -> None:
        """Let a request's followers wait."""
        self._leader_of.update((follower.id, leader) for follower in leader.followers)

    def end(self, request_id: str) -> Request | None:
        """Take out a follower that gave up; None if it does not wait here."""
        leader = self._leader_of.pop(request_id, None)
        if leader is None:
            return None
        (follower,) = (each for each in leader.followers if each.id == request_id)
        leader.followers.remove(follower)
        return follower

    def release(self, leader: Request) -> list[Request]:
        """The followers of a request, which from now on stand alone."""
        followers, leader.followers = leader.followers, []
        for each in followers:
            del self._leader_of[each.id]
        return followers

    def succeed(self, leader: Request) -> Request | None:
        """The follower that leads the others now that their leader ended, if there are any."""
        followers = self.release(leader)
        if not followers:
            return None
        first = followers[0]
        first.followers = followers[1:]
        self.add(first)
        return first
