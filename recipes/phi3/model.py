"""Which decoder does a Phi-3 or Phi-4 checkpoint describe?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import GATE_UP, QKV, DecoderConfig
from models.huggingface import decoder_config, integer

DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json. As Llama, its linears stored joined, with one window for all layers."""
    hf = {**DEFAULTS, **hf}
    window = None if hf.get("sliding_window") is None else integer(hf, "sliding_window")
    windows = (window,) * integer(hf, "num_hidden_layers")
    return decoder_config(hf, "phi3", windows=windows, turned=1.0, stored_joined=(QKV, GATE_UP))
