"""Small random checkpoints that together use every option a decoder has, and transformers' word on each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 160


@dataclass(frozen=True)
class Variant:
    """One checkpoint. `old` has config.json in the older spelling; `saved_as` is the tensors' dtype."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    old: bool = False
    saved_as: torch.dtype = torch.float32
    shard_size: str = "5GB"


def _yarn(**more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 5e3,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    } | more


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
PUBLISHED_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
HALF = ["full_attention", "sliding_attention", "full_attention"]

VARIANTS = [
    Variant("llama", "llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    Variant(
        "llama_linear_tied",
        "llama",
        {"tie_word_embeddings": True},
        {"rope_type": "linear", "rope_theta": 2e3, "factor": 2.5},
        old=True,
    ),
    Variant(
        "llama_dynamic",
        "llama",
        {"max_position_embeddings": 100},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.5},
        old=True,
    ),
    Variant(
        "llama_dynamic_new",
        "llama",
        {"max_position_embeddings": 64, "head_dim": 32},
        {"rope_type": "dynamic", "rope_theta": 3e3, "factor": 5.5},
    ),
    Variant("llama_llama3", "llama", {"head_dim": 24, "num_attention_heads": 6}, LLAMA3, old=True),
    Variant(
        "llama_biased",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5},
        LLAMA3,
        shard_size="60KB",
    ),
    Variant("mistral_window", "mistral", {"sliding_window": 37}),
    Variant(
        "mistral_yarn",
        "mistral",
        {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 20},
        _yarn(),
        old=True,
        saved_as=torch.float16,
    ),
    Variant(
        "qwen2_window_from",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
        old=True,
    ),
    Variant(
        "qwen2_yarn",
        "qwen2",
        {"tie_word_embeddings": True, "sliding_window": 20},
        _yarn(mscale=0.7, mscale_all_dim=0.4, truncate=False, beta_fast=16.0, beta_slow=2.0),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "qwen2_layer_types",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": HALF},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    Variant("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True, "rms_norm_eps": 1e-4}, old=True),
    Variant(
        "qwen3_layer_types",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": HALF,
        },
        _yarn(attention_factor=1.3),
        shard_size="100KB",
    ),
    Variant(
        "qwen3_dynamic_window",
        "qwen3",
        {
            "head_dim": 24,
            "max_position_embeddings": 128,
            "use_sliding_window": True,
            "sliding_window": 65,
            "max_window_layers": 2,
        },
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        old=True,
        saved_as=torch.bfloat16,
    ),
    Variant(
        "qwen3_moe",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    Variant(
        "qwen3_moe_window",
        "qwen3_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "moe_intermediate_size": 40,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 21,
        },
        _yarn(),
        old=True,
        shard_size="60KB",
    ),
    Variant(
        "qwen3_moe_tied",
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "num_experts": 16,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
        saved_as=torch.bfloat16,
    ),
    Variant("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Variant(
        "mixtral_window",
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 19, "rms_norm_eps": 1e-3},
        old=True,
        saved_as=torch.float16,
    ),
    Variant(
        "mixtral_one",
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 20, "tie_word_embeddings": True},
        shard_size="40KB",
    ),
    Variant(
        "qwen2_moe",
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
        old=True,
    ),
    Variant(
        "qwen2_moe_sparse",
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "num_key_value_heads": 4,
        },
        _yarn(),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "qwen2_moe_dense",
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [0, 2],
            "tie_word_embeddings": True,
        },
        shard_size="60KB",
    ),
    Variant(
        "glm4_moe",
        "glm4_moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    Variant(
        "glm4_moe_groups",
        "glm4_moe",
        {
            "head_dim": 32,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "num_key_value_heads": 1,
            "num_mtp_layers": 0,
        },
        _yarn(partial_rotary_factor=0.25, attention_factor=1.3),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "glm4_moe_whole",
        "glm4_moe",
        {
            "head_dim": 24,
            "use_qk_norm": True,
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_mtp_layers": 0,
        },
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        old=True,
    ),
    Variant(
        "deepseek_v2_lite",
        "deepseek_v2",
        LATENT
        | {"q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2},
        _yarn(mscale=0.707, mscale_all_dim=0.707),
        old=True,
    ),
    Variant(
        "deepseek_v2",
        "deepseek_v2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 1,
        },
        _yarn(mscale=0.7, mscale_all_dim=1.0),
        saved_as=torch.bfloat16,
    ),
    Variant(
        "deepseek_v3",
        "deepseek_v3",
        LATENT
        | {
            "n_routed_experts": 16,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_mtp_layers": 0,
        },
        _yarn(mscale=1.0, mscale_all_dim=1.0),
        shard_size="60KB",
    ),
    Variant(
        "deepseek_v3_one_group",
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_routed_experts": 5,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.6,
            "n_shared_experts": 2,
            "tie_word_embeddings": True,
        },
        old=True,
    ),
]

CLASSES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
}


def make(variant: Variant, root: Path) -> tuple[Any, Path]:
    """The transformers model (eager, float32, holding what was saved) and the checkpoint's directory."""
    path = root / variant.name
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config_class, model_class = CLASSES[variant.family]
    config = config_class(**options | variant.options, rope_parameters=dict(variant.rope))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    _fill(model, seed=len(variant.name))
    model.to(variant.saved_as)
    model.config.dtype = variant.saved_as
    model.save_pretrained(path, max_shard_size=variant.shard_size)
    if variant.old:
        _spell_old(path / "config.json")
    return model.float(), path


def wide(variant: Variant, head_dim: int = 64) -> Variant:
    """The same with heads of 64, the smallest that every fused attention takes, or others; latents as they
    are published.
    """
    if "kv_lora_rank" in variant.options:
        return replace(variant, name=f"{variant.name}_wide", options=variant.options | PUBLISHED_LATENT)
    return replace(variant, name=f"{variant.name}_wide", options=variant.options | {"head_dim": head_dim})


def _fill(model: Any, seed: int) -> None:
    """Weights large enough that attention is sharp and positions matter, and small enough for float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() >= 2:  # a linear, or those of all experts
                gain = 2.0 if name.startswith(("lm_head", "model.embed")) else 1.2
                weight.copy_(noise * gain / math.sqrt(weight.shape[-1]))
            else:
                weight.copy_(noise * 0.3 + (0 if name.endswith("bias") else 1))
        for name, correction in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                correction.copy_(torch.randn(correction.shape, generator=generator) * 0.3)


def _spell_old(path: Path) -> None:
    """config.json as it was written before transformers 5."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


@torch.no_grad()
def expected_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Transformers' log-probabilities [len(tokens), V] for a request whose prompt is `tokens`, alone."""
    fresh_rope(model)
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float().log_softmax(-1)


@torch.no_grad()
def generated(model: Any, prompt: list[int], num_new: int) -> tuple[list[int], Tensor]:
    """Transformers' own greedy tokens for a prompt alone, and the log-probabilities [num_new, V]."""
    fresh_rope(model)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logprobs = torch.cat(output.logits).log_softmax(-1)
    return output.sequences[0, len(prompt) :].tolist(), logprobs


def fresh_rope(model: Any) -> None:
    """A rotary embedding as it is after loading.

    Transformers' dynamic rope remembers the longest request it has seen, and a model's `.to(dtype)` rounds
    the frequencies, which `from_pretrained(dtype=...)` does not.
    """
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
