"""Read from a config.json which positions each layer attends to.

A layer attends to all earlier positions or to the last of them, its window. Families differ in which keys
say so; what no family computes here, such as attention to later positions, is refused in one place for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from borders.shown import shown
from models.checkpoint.huggingface import Windows, boolean, integer, refused

FULL, SLIDING = "full_attention", "sliding_attention"
_CAUSAL = (
    "such a model, made for embeddings, attends to both sides, and this engine computes causal attention:"
    " use a causal checkpoint, or an engine for bidirectional models"
)


def switched_window(hf: Mapping[str, Any]) -> int | None:
    """Return Qwen's window: `sliding_window` if `use_sliding_window` is true, and otherwise None."""
    if not boolean(hf, "use_sliding_window", False) or hf.get("sliding_window", 4096) is None:
        return None
    return integer(hf, "sliding_window", 4096)


def windows_by_layer_type(hf: Mapping[str, Any]) -> Windows:
    """Return the windows of `layer_types`, or else Qwen2's: sliding from layer `max_window_layers` on."""
    window = switched_window(hf)
    if hf.get("layer_types") is None:
        first = integer(hf, "max_window_layers", 28, least=0)
        return tuple(window if layer >= first else None for layer in range(integer(hf, "num_hidden_layers")))
    return windows_of_types(hf, window, "sliding layers need use_sliding_window: true and sliding_window")


def windows_of_types(hf: Mapping[str, Any], window: int | None, fix: str) -> Windows:
    """Return `window` for each layer that `layer_types` calls sliding; `fix` says what such layers need."""
    types, num_layers = hf["layer_types"], integer(hf, "num_hidden_layers")
    known = (FULL, SLIDING)
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise refused("layer_types", types, f"one of {' or '.join(known)} for each of {num_layers} layers")
    if window is None and SLIDING in types:
        raise refused("layer_types", types, fix)
    return tuple(window if kind == SLIDING else None for kind in types)


def check_attended(hf: Mapping[str, Any], windows: Windows, max_positions: int) -> None:
    """Raise ValueError where config.json asks for other attention than causal attention over `windows`.

    transformers reads `is_causal` for every family, and takes null and 0 for false. A family whose windows do
    not follow `layer_types` ignores it there, or at times applies it to the cache alone; a list that agrees
    with the windows says nothing new, and any other cannot be honoured.
    """
    if (causal := hf.get("is_causal", True)) is not True:
        raise refused("is_causal", causal, _CAUSAL)
    if hf.get("use_bidirectional_attention"):
        raise refused("use_bidirectional_attention", hf["use_bidirectional_attention"], _CAUSAL)
    if hf.get("per_layer_config"):
        raise refused(
            "per_layer_config", hf["per_layer_config"], "all layers have one configuration: remove it"
        )
    types, computed = hf.get("layer_types"), [FULL if window is None else SLIDING for window in windows]
    if types is not None and types != computed:
        fix = f"this family's layers are {shown(computed)} by its other keys: remove it"
        raise refused("layer_types", types, fix)
    # Without layer_types, transformers cuts its cache to such a window in families whose layers attend to all
    # positions, so that its generated tokens differ from its own forward pass. Qwen's files have a window
    # that is switched off.
    has_switch = str(hf.get("model_type")).startswith("qwen")
    for key in ("attention_chunk_size",) if has_switch else ("attention_chunk_size", "sliding_window"):
        window = hf.get(key)
        if types is None and not any(windows) and isinstance(window, int) and window < max_positions:
            raise refused(key, window, "this family's layers attend to all earlier positions: remove it")
