"""Define the decoder of a GLM-5, GLM-5.1 or GLM-5.2 checkpoint.

It is DeepSeek-V3.2's with other sizes, and its indexers rotate pairs that lie side by side. Layers of GLM-5.2
may share what the last layer with an indexer chose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.checkpoint.config_fields import ConfigFields
from models.checkpoint.huggingface import integer, refused
from models.config import Choosing, DecoderConfig
from recipes.deepseek.model import V32_FIELDS, sparse_decoder

DEFAULTS: dict[str, float] = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "eos_token_id": 1,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
}
OF_SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
FIELDS = ConfigFields(
    V32_FIELDS.read | {*OF_SHARING},
    irrelevant=V32_FIELDS.irrelevant,
    fixed={**V32_FIELDS.fixed, "indexer_rope_interleave": (True, None)},
    aliases=V32_FIELDS.aliases,
)
KINDS: dict[Any, Choosing] = {"full": "own", "shared": "shared"}  # values of indexer_types
LETTERS: dict[Any, Choosing] = {"F": "own", "S": "shared"}  # letters of an index_topk_pattern


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json."""
    hf = {**DEFAULTS, **hf}
    return sparse_decoder(hf, "glm_moe_dsa", indexes(hf), interleaved=True)


def indexes(hf: Mapping[str, Any]) -> list[Choosing]:
    """Return how each layer chooses: as `indexer_types` says, or else a pattern, or a first layer and a step.

    Without any of these every layer has an indexer of its own.
    """
    num_layers = integer(hf, "num_hidden_layers")
    for key in ("indexer_types", "index_topk_pattern"):
        said = hf.get(key)
        if said is None:
            continue
        known = LETTERS if key == "index_topk_pattern" and isinstance(said, str) else KINDS
        is_right = isinstance(said, (str, list)) and len(said) == num_layers
        if not is_right or not all(isinstance(each, str) and each in known for each in said):
            fix = f"one of {' or '.join(known)} for each of {num_layers} layers"
            raise refused(key, said, fix)
        made = [known[each] for each in said]
        break
    else:
        key, every = "index_skip_topk_offset", integer(hf, "index_topk_freq", 1, least=0) or 1
        offset = integer(hf, "index_skip_topk_offset", 2, least=0)
        made = ["shared" if max(layer - offset + 1, 0) % every else "own" for layer in range(num_layers)]
    if made[0] != "own":
        raise refused(key, hf[key], "no layer before the first one chooses: it must be full")
    return made
