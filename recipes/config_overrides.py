"""Replace fields of a checkpoint's config.json, as `model.config_overrides` of a recipe asks.

Only fields that leave the shapes of the weights as they are may be replaced, such as the scaling of rotary
positions that a model's own page advises for long contexts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from borders.refusal import abbreviate
from recipes.schema.recipe_error import RecipeError, nearest

KEY = "model.config_overrides"
CHANGEABLE = frozenset(
    {
        "attn_logit_softcapping", "bos_token_id", "eos_token_id", "final_logit_softcapping",
        "hidden_act", "hidden_activation", "layer_types", "layer_norm_eps", "logit_scale",
        "logits_scaling", "max_position_embeddings", "max_window_layers", "norm_topk_prob",
        "num_experts_per_tok", "original_max_position_embeddings", "pad_token_id",
        "partial_rotary_factor", "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps",
        "rope_interleave", "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta",
        "routed_scaling_factor", "scoring_func", "sliding_window", "sliding_window_pattern",
        "swiglu_limit", "use_sliding_window",
    }
)  # fmt: skip
OF_A_RECIPE = {  # fields that keys of a recipe set
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "quantization_config": "model.quantization",
    "model_max_length": "scheduler.max_request_tokens",
}


def with_overrides(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json with fields replaced, those of its text model where it has one.

    Raises RecipeError for a field that is not known, or that changes the shapes of weights.
    """
    text = hf.get("text_config")
    fields = text if isinstance(text, Mapping) else hf
    for name, value in overrides.items():
        _check(name, value, fields)
    replaced = {**fields, **overrides}
    return {**hf, "text_config": replaced} if fields is text else replaced


def named_overrides(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field that is replaced, with its value and the checkpoint's own."""
    text = hf.get("text_config")
    fields = text if isinstance(text, Mapping) else hf
    for name, value in overrides.items():
        own = abbreviate(fields[name]) if name in fields else "nothing"
        yield f"{name} is {value!r}, where the checkpoint's config.json says {own}"


def _check(name: str, value: object, fields: Mapping[str, Any]) -> None:
    if name in CHANGEABLE:
        return
    if name in OF_A_RECIPE:
        problem, fix = f"{name} is set by a key of its own", f"set {OF_A_RECIPE[name]}"
    elif name in fields:
        problem, fix = f"{name} is what the checkpoint's weights were made with", "leave it out"
    else:
        known = sorted(CHANGEABLE & fields.keys()) or sorted(CHANGEABLE)
        problem = f"{name} is no field that may be replaced"
        fix = f"it may be one of {', '.join(known)}{nearest(name, CHANGEABLE)}"
    raise RecipeError(KEY, problem, fix, value=value)
