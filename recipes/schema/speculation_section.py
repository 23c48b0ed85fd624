"""Define a recipe's keys for drafts, and refuse combinations that are impossible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from recipes.schema.keys import key
from recipes.schema.recipe_error import RecipeError

DRAFTERS = {"draft": "draft model", "eagle3": "head"}  # what is at draft_path, by kind
GUESSING = ("ngram", "suffix", "draft", "eagle3", "mtp")
# The keys that are read only with some values of another
READ_WHERE: dict[str, dict[str, tuple[object, ...]]] = {
    "draft_path": {"kind": tuple(DRAFTERS)},
    "draft_dtype": {"kind": ("draft",)},
    "draft_quantization": {"kind": ("draft",)},
    "max_tokens": {"kind": GUESSING},
    "adaptive": {"kind": GUESSING},
    "base_tokens": {"kind": GUESSING, "adaptive": ("source",)},
    "min_tokens": {"kind": GUESSING, "adaptive": ("source",)},
    "window": {"kind": GUESSING, "adaptive": ("source",)},
}
# npu_fused_infer_attention_score takes 16 query tokens a decode: these drafts and the token before them.
MOST_ON_NPU = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection:
    """How tokens are drafted and verified several at a time; answers stay the same."""

    kind: Literal["none", "ngram", "suffix", "draft", "eagle3", "mtp"] = key(
        "who guesses the next tokens of a request; ngram: what followed its last tokens when they stood in it"
        " before; suffix: or in any request of the same cache_salt; draft: a smaller model; eagle3: a head"
        " that reads the model's hidden states; mtp: the layer that the model's own checkpoint has to predict"
        " further tokens; answers stay the same",
        default="none",
    )
    draft_path: Path | None = key(
        "directory of the checkpoint of the smaller model, of the same vocabulary as `model.path`, or of the"
        " head, which was trained for it",
        default=None,
    )
    draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "the smaller model's type, as `model.dtype`; auto: as `model.dtype`, or where that is auto as its own"
        " `config.json` says, or its first tensor where that is silent",
        default="auto",
    )
    draft_quantization: Literal["auto", "w8a8"] = key(
        "the smaller model's, as `model.quantization`", default="auto"
    )
    max_tokens: int = key(
        f"the most guesses of a request that one step checks; npu: at most {MOST_ON_NPU}",
        default=4,
        least=1,
        most=64,
    )
    adaptive: Literal["throughput", "source", "fixed"] = key(
        "how many of its guesses a step checks; throughput: those that bring the most tokens for the step's"
        " predicted time, none where that is fastest; source: by the formula of the chapter on dynamic"
        " batching, which knows neither rows nor times; fixed: as many as there are",
        default="throughput",
    )
    base_tokens: int | None = key(
        "guesses that adaptive: source checks while it knows no rate, or one below 0.001; null: max_tokens",
        default=None,
        least=0,
        most=64,
    )
    min_tokens: int | None = key(
        "the fewest guesses that adaptive: source checks; null: 1", default=None, least=0, most=64
    )
    window: int | None = key(
        "shares of right guesses that adaptive: source remembers; null: 100",
        default=None,
        least=1,
        most=2**20,
    )
    accept_threshold: float | None = key(
        "refused: a guess counts if and only if it is the token that is drawn anyway",
        default=None,
        least=0,
        most=1,
    )

    @property
    def most_sampled(self) -> int:
        """The most positions of a request at which one step samples: behind each guess, and the first."""
        return 1 if self.kind == "none" else 1 + self.max_tokens


UNSAID = {each.name: each.default for each in fields(SpeculationSection)}  # values that nobody set


def speculation_contradictions(section: SpeculationSection, device_kind: str) -> Iterator[RecipeError]:
    """Yield errors for values that are each in range, and impossible."""
    if section.accept_threshold is not None:
        yield RecipeError(
            "speculation.accept_threshold",
            "a guess that is accepted for its probability, and not because it is what is drawn, biases"
            " answers towards the guesses",
            "leave it out: a guess counts if and only if it is the token that is drawn anyway",
            value=section.accept_threshold,
        )
    yield from _draft_contradictions(section)
    for name in ("base_tokens", "min_tokens", "window"):
        if (value := getattr(section, name)) is not None and section.adaptive != "source":
            yield RecipeError(
                (f"speculation.{name}", "speculation.adaptive"),
                f"it is read by adaptive: source alone, and adaptive is {section.adaptive}",
                "leave it out, or set speculation.adaptive to source",
                value=value,
            )
    least, base = section.min_tokens or 0, section.base_tokens
    if not least <= (section.max_tokens if base is None else base) <= section.max_tokens:
        yield RecipeError(
            ("speculation.base_tokens", "speculation.min_tokens", "speculation.max_tokens"),
            f"{section.max_tokens if base is None else base} guesses are not from {least} to"
            f" {section.max_tokens}",
            "order them: min_tokens, base_tokens, max_tokens",
            value=base,
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


def _draft_contradictions(section: SpeculationSection) -> Iterator[RecipeError]:
    if section.kind in DRAFTERS and section.draft_path is None:
        yield RecipeError(
            ("speculation.draft_path", "speculation.kind"),
            f"required where speculation.kind is {section.kind}",
            f"name the directory of a {DRAFTERS[section.kind]}'s checkpoint",
        )
    for name, conditions in READ_WHERE.items():
        kinds = conditions["kind"]
        if section.kind not in kinds and (value := getattr(section, name)) != UNSAID[name]:
            yield unread(name, section.kind, value)


def unread(name: str, kind: str, value: object) -> RecipeError:
    """Return the error for a key of drafts that is not read where they are of this kind."""
    kinds = READ_WHERE[name]["kind"]
    where, fix = " or ".join(map(str, kinds)), "leave it out"
    if kinds == GUESSING:
        where, fix = "not none", "set that, or leave this out"
    return RecipeError(
        (f"speculation.{name}", "speculation.kind"),
        f"read only where speculation.kind is {where}, and it is {kind}",
        fix,
        value=value,
    )
