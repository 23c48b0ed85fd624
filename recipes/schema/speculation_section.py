"""Which keys does a recipe have for drafts, and which of them cannot be?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from recipes.schema.keys import key
from recipes.schema.recipe_error import RecipeError

MOST_ON_NPU = 15  # with the token before them, a decode's 16 query tokens in npu_fused_infer_attention_score


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection:
    """How tokens are guessed and checked several at a time; answers stay the same."""

    kind: Literal["none", "ngram"] = key(
        "who guesses the next tokens of a request; ngram: what followed its last tokens when they stood in it"
        " before; answers stay the same",
        default="none",
    )
    max_tokens: int = key(
        f"the most guesses of a request that one step checks; npu: at most {MOST_ON_NPU}",
        default=4,
        least=1,
        most=64,
    )
    adaptive: Literal["fixed"] = key(
        "how many of its guesses a step checks; fixed: as many as there are", default="fixed"
    )
    accept_threshold: float | None = key(
        "refused: a guess counts if and only if it is the token that is drawn anyway",
        default=None,
        least=0,
        most=1,
    )


def speculation_contradictions(section: SpeculationSection, device_kind: str) -> Iterator[RecipeError]:
    """Values that are in range, each by itself, and cannot be."""
    if section.accept_threshold is not None:
        yield RecipeError(
            "speculation.accept_threshold",
            "a guess that is accepted for its probability, and not because it is what is drawn, biases"
            " answers towards the guesses",
            "leave it out: a guess counts if and only if it is the token that is drawn anyway",
            value=section.accept_threshold,
        )
    if section.kind != "none" and device_kind == "npu" and section.max_tokens > MOST_ON_NPU:
        yield RecipeError(
            ("speculation.max_tokens", "device.kind"),
            f"{section.max_tokens} guesses and the token before them are {section.max_tokens + 1} query"
            f" tokens, and the fused attention of an npu takes {MOST_ON_NPU + 1} of a decode",
            f"set it to {MOST_ON_NPU} or less",
            value=section.max_tokens,
            limit=MOST_ON_NPU,
        )
