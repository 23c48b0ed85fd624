"""Check that an engine can compute prompts for others, or have them computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from borders.numbers import PORTS
from recipes.schema.recipe_error import RecipeError

_OWN_PAGES = ("draft", "eagle3", "mtp")  # kinds of speculation that keep keys of their own beside the model's


def page_contradictions(
    pages_at: str | None, prompt_replicas: Sequence[str], *, is_sharing: bool, ranks: int, speculation: str
) -> Iterator[RecipeError]:
    """Yield what contradicts `server.pages_at` and `server.prompt_replicas`."""
    asked = {"server.pages_at": pages_at, "server.prompt_replicas": list(prompt_replicas) or None}
    for name, endpoints in {"server.pages_at": [pages_at], "server.prompt_replicas": prompt_replicas}.items():
        for endpoint in endpoints:
            if endpoint is not None and not _is_address(endpoint):
                yield RecipeError(name, "is no tcp://HOST:PORT", "write it so", value=endpoint)
    if pages_at in prompt_replicas and pages_at is not None:
        yield RecipeError(
            ("server.pages_at", "server.prompt_replicas"),
            "names this engine among those that compute for it",
            "leave it out of one of them",
            value=pages_at,
        )
    for name in [name for name, value in asked.items() if value is not None]:
        if not is_sharing:
            yield RecipeError(
                (name, "cache.prefix_sharing"),
                "pages from elsewhere are found as shared ones are",
                "set cache.prefix_sharing to true, or leave this out",
                value=asked[name],
            )
        if ranks > 1:
            yield RecipeError(
                (name, "parallel"),
                f"pages are exchanged between engines of one rank, and there are {ranks}",
                "leave this out, or set parallel.tensor and parallel.pipeline to 1",
                value=asked[name],
            )
        if speculation in _OWN_PAGES:
            yield RecipeError(
                (name, "speculation.kind"),
                f"what {speculation} has of a prompt beside the model's pages is not exchanged",
                "leave this out, or set speculation.kind to none, ngram or suffix",
                value=asked[name],
            )


def _is_address(endpoint: str) -> bool:
    kind, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    return kind == "tcp" and bool(host) and PORTS.parse(port) is not None
