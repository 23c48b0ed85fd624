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
ROPES = ("rope_scaling", "rope_parameters")  # mappings, of which the first counts where both are there
IN_A_ROPE = ("rope_theta", "partial_rotary_factor")  # they count in such a mapping before those beside it
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
    replaced = {**fields, **overrides, **_replaced_rope(fields, overrides)}
    # The whole's field counts where both say it
    outer = {name: value for name, value in overrides.items() if name in hf}
    return {**hf, **outer, "text_config": replaced} if fields is text else replaced


def named_overrides(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field that is replaced, with its value and the checkpoint's own."""
    text = hf.get("text_config")
    fields = text if isinstance(text, Mapping) else hf
    said = {**fields, **{name: hf[name] for name in overrides if hf.get(name) is not None}, **_rope(fields)}
    for name, value in overrides.items():
        own = abbreviate(said[name]) if name in said else "nothing"
        yield f"{name} is {value!r}, where the checkpoint's config.json says {own}"


def _rope(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping that describes the rotary embedding; it is empty where there is none."""
    rope = fields.get(_place(fields))
    return rope if isinstance(rope, Mapping) else {}  # what is no mapping is refused by the model's family


def _place(fields: Mapping[str, Any]) -> str:
    return "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"


def _is_by_layer_type(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(part, Mapping) for part in rope.values())


def _replaced_rope(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's mappings where they are not simply the given or the checkpoint's own.

    transformers 5 writes the base and the rotated share into `rope_parameters`, where they count before those
    beside it: another scaling keeps them there, and another base replaces the one that is there.
    """
    own, given = _rope(fields), _rope(overrides)
    _check_rope(own, given, overrides)
    kept = {name: overrides.get(name, own[name]) for name in IN_A_ROPE if name in own}
    if not any(key in overrides for key in ROPES):
        return {_place(fields): {**own, **kept}} if kept else {}
    if not isinstance(overrides.get(_place(overrides)) or {}, Mapping):
        return {}
    if _is_by_layer_type(own) and "rope_scaling" in overrides:
        return {}  # it scales the layers that see all positions, and leaves the base of each type
    kept = {} if _is_by_layer_type(given) else kept
    return dict.fromkeys(ROPES) | {_place(overrides): {**kept, **given}}


def _check_rope(own: Mapping[str, Any], given: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise RecipeError for fields of a rotary embedding of which one would be ignored."""
    names = [name for name in IN_A_ROPE if name in given and name in overrides]
    problem, fix = "is given twice, beside a rotary embedding and in it", "give one of them"
    if all(key in overrides for key in ROPES):
        names, problem = ["rope_scaling"], "describes the same as rope_parameters, which is given, too"
    elif _is_by_layer_type(own) and "rope_parameters" not in overrides:
        names = [name for name in (*IN_A_ROPE, "rope_local_base_freq") if name in overrides]
        names += [name for name in overrides if name == "rope_scaling" and not given]
        problem = f"is of each type of layer in the checkpoint's rope_parameters ({', '.join(own)})"
        fix = "give rope_parameters as a whole"
    for name in names:
        raise RecipeError(KEY, f"{name} {problem}", fix, value=overrides[name])


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
