"""Compare the identities of two engines that are to exchange pages, and parse their addresses."""

from __future__ import annotations

from dataclasses import dataclass

from borders.numbers import PORTS
from kv_cache.exchange.messages import VERSION, Hello


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What must be equal in two engines that exchange pages."""

    model: str  # digest of everything but the tokens that a page's content depends on
    page_size: int
    layout: list[str]  # layout of a page in each layer

    def difference(self, hello: Hello) -> str | None:
        """Describe the first difference to another engine, with both values; None if there is none."""
        pairs = {
            "the version of the messages": (VERSION, hello.version),
            "the model": (self.model, hello.model),
            "cache.page_size": (self.page_size, hello.page_size),
            "the number of layers": (len(self.layout), len(hello.layout)),
        }
        for layer, both in enumerate(zip(self.layout, hello.layout)):
            pairs[f"a page of layer {layer}"] = both
        for name, (here, there) in pairs.items():
            if here != there:
                return f"{name} is {here} at the engine of prompts and {there} at the one of answers"
        return None


def address_of_pages(endpoint: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT; raises ValueError."""
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or PORTS.parse(port) is None:
        raise ValueError(f"{endpoint!r} is no tcp://HOST:PORT")
    return host.strip("[]"), int(port)
