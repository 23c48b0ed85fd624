"""Pass the reasoning effort to a model, by variables of its chat template if it has any for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from borders.refusal import BadRequest

FIELD = "reasoning_effort"
_LEAST = ("none", "minimal")
_SWITCHES = ("enable_thinking", "thinking")  # Qwen3 and GLM-4.5; DeepSeek-V3.1 and Granite


def variables_for(
    effort: str, variables: Collection[str], given: Mapping[str, Any], *, thinks: bool
) -> dict[str, Any]:
    """Return the variables that tell a template the effort.

    Variables that the request has `given` itself may not be set twice.

    A model that does not reason (`thinks` false) needs no variable for "none". Raises BadRequest where the
    template has no variable for the effort.
    """
    switch = next((each for each in _SWITCHES if each in variables), None)
    settings: dict[str, Any] = {}
    if switch is not None and effort in _LEAST:
        settings = {switch: False}
    elif FIELD in variables:
        settings = {FIELD: effort}
    elif effort != "none" or thinks:
        limit = "none or minimal" if switch else "left out" if thinks else "none"
        raise BadRequest(FIELD, value=effort, limit=f"{limit}: this model's chat template knows no other")
    for name in settings:
        if name in given:
            raise BadRequest(FIELD, f"and chat_template_kwargs both set {name}", fix="give one of them")
    return settings
