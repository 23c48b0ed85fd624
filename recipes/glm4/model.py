"""Which decoder does a GLM-4 checkpoint describe?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import GATE_UP, NORMS, DecoderConfig
from models.huggingface import boolean, decoder_config, integer

DEFAULTS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
}


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """`hf` is a parsed config.json. Half of each head is turned, in pairs that lie side by side, and what
    attention and MLP made is normed before it is added.
    """
    hf = {**DEFAULTS, **hf}
    return decoder_config(
        hf,
        "glm4",
        windows=(None,) * integer(hf, "num_hidden_layers"),
        attention_bias=boolean(hf, "attention_bias", True),
        turned=0.5,
        interleaved=True,
        norms=(*NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
        stored_joined=(GATE_UP,),
    )
