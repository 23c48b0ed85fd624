"""Which model do the replicas of a router serve?

A router chooses a replica by load and pages, not by the `model` of a request: with replicas of two models, it
would be chance whether a request arrives where its model is. So the router has one model, that of the first
replica that was found ready, and a replica of another one is sent nothing. The name decides, as `/v1/models`
tells it: aliases and adapters may differ, and a server that tells no name is taken as it is.
"""

from __future__ import annotations


class FleetModel:
    """Knows what each replica serves, by its address.

    The router's model stays as long as any of its replicas last served it, even if that one is lost now: one
    that comes back must not find the router taken over. When the last one has left, or serves another model,
    the next that is found ready decides.
    """

    def __init__(self) -> None:
        self.name = ""
        self._served: dict[str, str] = {}

    def refusal(self, url: str, model: str) -> str:
        """Note what a ready replica serves; returns why it gets no requests, "" where it gets some."""
        self._served[url] = model
        if self.name not in self._served.values():
            self.name = ""
        self.name = self.name or model
        if model in ("", self.name):
            return ""
        first = next(each for each, name in self._served.items() if name == self.name)
        return (
            f"it serves the model {model!r}, and this router's is {self.name!r}, which {first} serves: start"
            " it with that model, or give it a router of its own"
        )

    def forget(self, url: str) -> None:
        """A replica has left."""
        self._served.pop(url, None)
