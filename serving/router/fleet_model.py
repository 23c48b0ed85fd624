"""Decide which model the replicas of a router serve.

A router chooses a replica by load and pages, not by the `model` of a request: with replicas of two models, it
would be chance whether a request arrives where its model is. So the router has one model, that of the first
replica that became ready, and a replica of another one is sent nothing. Names decide, as `/v1/models` tells
them: it is enough that one of a replica's own names is the router's, and adapters do not count. A server that
tells no name is taken as it is.
"""

from __future__ import annotations


class FleetModel:
    """Knows what each replica served when it was last ready, by its address.

    The router's model stays as long as any of its replicas last served it, even if that one is lost now: one
    that comes back must not find the router taken over. When the last one has left, or serves another model,
    the next that becomes ready decides.
    """

    def __init__(self) -> None:
        self.name = ""
        self._served: dict[str, tuple[str, ...]] = {}

    def refusal(self, url: str, names: tuple[str, ...]) -> str:
        """Return why a replica with these names would get no requests, and "" where it would get some."""
        others = [each for each, served in self._served.items() if self.name in served and each != url]
        if not names or not others or self.name in names:
            return ""
        return (
            f"it serves the model {names[0]!r}, and this router's is {self.name!r}, which {others[0]} last"
            " served: start it with that model, give it a router of its own, or remove the other"
            " (/fleet/remove)"
        )

    def claim(self, url: str, names: tuple[str, ...]) -> str:
        """Note what a replica serves that has answered all it was asked; return as `refusal` does.

        One that tells no names now keeps those that it told before.
        """
        if refusal := self.refusal(url, names):
            return refusal
        if names:
            self._served[url] = names
        if names and not any(self.name in served for served in self._served.values()):
            self.name = names[0]
        return ""

    def forget(self, url: str) -> None:
        """A replica has left."""
        self._served.pop(url, None)
