"""Check that a recipe's ways to read an answer go together."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.schema.recipe_error import RecipeError


def answer_contradictions(tool_format: str, reasoning: str) -> Iterator[RecipeError]:
    """Yield what contradicts `server.tool_format` or `server.reasoning`.

    Channels hold both reasoning and calls.
    """
    if (tool_format == "harmony") != (reasoning == "harmony"):
        yield RecipeError(
            ("server.tool_format", "server.reasoning"),
            f"calls and thoughts stand on the same channels, and server.reasoning is {reasoning}",
            "set both to harmony, or neither",
            value=tool_format,
        )
