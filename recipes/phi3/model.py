"""Define the decoder of a Phi-3 or Phi-4 checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import decoder_config, integer
from models.config import GATE_UP, QKV, DecoderConfig, layer_specs

DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
NO_BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False, None))
FIELDS = ConfigFields(fixed=NO_BIASES | {"full_attn_mod": (1, None), "interpolate_factor": (1, None)})


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json.

    It is a Llama whose linears are stored joined, with one window for all layers.
    """
    hf = {**DEFAULTS, **hf} | _renamed_ropes(hf)
    window = None if hf.get("sliding_window") is None else integer(hf, "sliding_window")
    windows = (window,) * integer(hf, "num_hidden_layers")
    return decoder_config(hf, "phi3", layers=layer_specs(windows), turned=1.0, stored_joined=(QKV, GATE_UP))


def _renamed_ropes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embeddings of `hf` that files of the first Phi-3 call `su` or `yarn`, as `longrope`.

    A Phi-3 was never stretched by YaRN: whatever they are called, its factors are LongRoPE's two lists.
    """
    keys = ("rope_scaling", "rope_parameters")
    ropes = {key: hf[key] for key in keys if isinstance(hf.get(key), Mapping)}
    return {
        key: {**rope, "rope_type": "longrope"}
        for key, rope in ropes.items()
        if rope.get("rope_type", rope.get("type")) in ("su", "yarn")
    }
