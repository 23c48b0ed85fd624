"""Configurations as their makers published them, without what a family takes where a file says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.quantization import Quantization
from recipes.assembly.families import decoder_config
from recipes.assembly.int8_checkpoint import ROUTERS, UP_PROJECTIONS

LLAMA2_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
QWEN2_5_7B = {
    "eos_token_id": 151645, "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rope_theta": 1000000.0, "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}  # fmt: skip
QWEN3_8B = {
    "eos_token_id": 151645, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
    "max_position_embeddings": 40960, "model_type": "qwen3", "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1000000, "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}  # fmt: skip
LLAMA2_13B = LLAMA2_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40,
    "num_key_value_heads": 40,
}  # fmt: skip
LLAMA3_3_70B = {
    "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_size": 8192,
    "intermediate_size": 28672, "max_position_embeddings": 131072, "model_type": "llama",
    "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
QWEN2_5_32B = QWEN2_5_7B | {
    "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
QWEN2_5_32B_AWQ = QWEN2_5_32B | {
    "torch_dtype": "float16", "quantization_config": {"bits": 4, "quant_method": "awq"},
}  # fmt: skip
QWEN3_30B_A3B = {
    "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
QWEN3_30B_A3B_GPTQ = QWEN3_30B_A3B | {"quantization_config": {"bits": 4, "quant_method": "gptq"}}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_attention_heads": 64, "num_hidden_layers": 94,
}  # fmt: skip
MIXTRAL_8X7B = {
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 8, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
    "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "num_key_value_heads": 16, "q_lora_rank": None, "rope_scaling": {"mscale": 0.707,
    "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
    "torch_dtype": "bfloat16", "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3 = {
    "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8",
    "weight_block_size": [128, 128]}, "rope_scaling": {"mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn"}, "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}  # fmt: skip
GLM_4_5_AIR = {
    "attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 128,
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rope_theta": 1000000, "torch_dtype": "bfloat16", "vocab_size": 151552,
}  # fmt: skip
GPT_OSS_20B = {
    "eos_token_id": 200002, "head_dim": 64, "hidden_size": 2880, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"}, "vocab_size": 201088,
}  # fmt: skip
GLM_4_7_FLASH = {
    "eos_token_id": [154820, 154827, 154829], "hidden_size": 2048, "intermediate_size": 10240,
    "max_position_embeddings": 202752, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536,
    "norm_topk_prob": True, "num_attention_heads": 20, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "rope_theta": 1000000, "torch_dtype": "bfloat16", "vocab_size": 154880,
}  # fmt: skip
SEED_OSS_36B = {
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 524288,
    "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rope_theta": 10000000.0, "torch_dtype": "bfloat16", "vocab_size": 155136,
}  # fmt: skip
HY3 = {
    "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13312, "max_position_embeddings": 131072,
    "model_type": "hy_v3", "moe_intermediate_size": 1536, "num_attention_heads": 64, "num_experts": 192,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16", "vocab_size": 120832,
}  # fmt: skip
ERNIE_4_5_21B_A3B = {
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "ernie4_5_moe", "moe_intermediate_size": 1536, "num_attention_heads": 20,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "torch_dtype": "bfloat16", "vocab_size": 103424,
}  # fmt: skip
MISTRAL_SMALL_3_2 = {
    "model_type": "mistral3", "text_config": {"head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072}, "torch_dtype": "bfloat16",
}  # fmt: skip
MINIMAX_M2 = {
    "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
    "model_type": "minimax_m2", "num_attention_heads": 48, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "quantization_config": {"quant_method": "fp8",
    "weight_block_size": [128, 128]}, "rotary_dim": 64, "torch_dtype": "bfloat16", "vocab_size": 200064,
}  # fmt: skip
HUNYUAN_A13B = {
    "eos_token_id": 127960, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 3072,
    "max_position_embeddings": 32768, "model_type": "hunyuan_v1_moe", "moe_intermediate_size": [3072] *
    32, "moe_topk": [8] * 32, "num_attention_heads": 32, "num_experts": 64, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rope_scaling": {"alpha": 1000.0, "type": "dynamic"},
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 128167,
}  # fmt: skip
OLMO_3_7B = {
    "eos_token_id": 100257, "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
    "rope_scaling": {"attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192,
    "rope_type": "yarn"}, "torch_dtype": "bfloat16", "vocab_size": 100278,
}  # fmt: skip
MINISTRAL_3_8B = {
    "dtype": "bfloat16", "model_type": "mistral3", "text_config": {"head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
    "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "vocab_size": 131072},
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128}
IGNORED = ("lm_head", ROUTERS, UP_PROJECTIONS)  # scripts.quantize leaves these as they are
DEEPSEEK_W8A8 = DEEPSEEK_V3 | {"quantization_config": Quantization(IGNORED).in_json()}
DEEPSEEK_V3_2 = {name: value for name, value in DEEPSEEK_V3.items() if name != "quantization_config"} | {
    "model_type": "deepseek_v32",
}  # fmt: skip
GLM_5_1 = {
    "eos_token_id": [154820, 154827], "hidden_size": 6144, "intermediate_size": 12288,
    "max_position_embeddings": 202752, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "rope_parameters": {"rope_theta": 1000000}, "dtype": "bfloat16",
    "vocab_size": 154880,
}  # fmt: skip
KIMI_K2_5 = {
    "model_type": "kimi_k25", "text_config": {"eos_token_id": 163585, "first_k_dense_replace": 1,
    "hidden_size": 7168, "intermediate_size": 18432, "max_position_embeddings": 262144,
    "model_type": "kimi_k2", "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_hidden_layers": 61, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
    "rope_scaling": {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    "type": "yarn"}, "routed_scaling_factor": 2.827, "topk_group": 1, "torch_dtype": "bfloat16",
    "vocab_size": 163840},
}  # fmt: skip
# What msModelSlim's published exports quantise: types of attention, of index queries and of routed experts
DESCRIBED = {
    "DeepSeek-V3.2-W8A8": ("W8A8", "FLOAT", "W8A8_DYNAMIC"),
    "GLM-5.1-W8A8": ("W8A8", "W8A8", "W8A8_DYNAMIC"),
    "GLM-5.1-W4A8": ("W8A8_DYNAMIC", "W8A8_DYNAMIC", "W4A8_DYNAMIC"),
    "Kimi-K2.5-W4A8": ("W8A8", "", "W4A8_DYNAMIC"),
}
# Shapes of the text models
QWEN3_NEXT_80B = {
    "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 16, "vocab_size": 151936, "dtype": "bfloat16", "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_5_9B = {
    "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "vocab_size": 248320, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_5_27B = QWEN3_5_9B | {
    "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}  # fmt: skip
QWEN3_5_35B_A3B = {
    "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
    "num_attention_heads": 16, "vocab_size": 248320, "dtype": "bfloat16",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7b-hf": LLAMA2_7B,
    "MiniMax-M2": MINIMAX_M2,
    "Hunyuan-A13B-Instruct": HUNYUAN_A13B,
    "Olmo-3-7B-Instruct": OLMO_3_7B,
    "Ministral-3-8B-Instruct-2512-BF16": MINISTRAL_3_8B,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "Seed-OSS-36B-Instruct": SEED_OSS_36B,
    "Hy3": HY3,
    "ERNIE-4.5-21B-A3B-PT": ERNIE_4_5_21B_A3B,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL_SMALL_3_2,
    "Qwen2.5-7B-Instruct": QWEN2_5_7B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B,
    "Qwen3.5-9B": QWEN3_5_9B,
    "Qwen3.5-27B": QWEN3_5_27B,
    "Qwen3.6-27B": QWEN3_5_27B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "Llama-2-13b-hf": LLAMA2_13B,
    "Llama-3.3-70B-Instruct": LLAMA3_3_70B,
    "Qwen2.5-32B-Instruct": QWEN2_5_32B,
    "Qwen2.5-32B-Instruct-AWQ": QWEN2_5_32B_AWQ,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-30B-A3B-GPTQ-Int4": QWEN3_30B_A3B_GPTQ,
    "Qwen3-235B-A22B": QWEN3_235B_A22B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gpt-oss-120b": GPT_OSS_120B,
    "Mixtral-8x7B-Instruct-v0.1": MIXTRAL_8X7B,
    "GLM-4.5-Air": GLM_4_5_AIR,
    "DeepSeek-V2-Lite-Chat": DEEPSEEK_V2_LITE,
    "DeepSeek-V3-W8A8": DEEPSEEK_W8A8,
    "DeepSeek-R1-W8A8": DEEPSEEK_W8A8,
    "DeepSeek-V3.1-W8A8": DEEPSEEK_W8A8,
    "DeepSeek-V3.2-W8A8": DEEPSEEK_V3_2,
    "GLM-5.1-W8A8": GLM_5_1,
    "GLM-5.1-W4A8": GLM_5_1,
    "Kimi-K2.5-W4A8": KIMI_K2_5,
}


def write(root: Path) -> None:
    """Directories with a config.json each, and no weights."""
    for name, config in MODELS.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(config))
        if name in DESCRIBED:
            types = {f"{linear}.weight": type_of(linear, *DESCRIBED[name]) for linear in linears(config)}
            (root / name / "quant_model_description.json").write_text(json.dumps(types))


def linears(config: dict[str, Any]) -> list[str]:
    """The linears of such a model."""
    return [name for name, *_ in decoder_config(config).linears()]


def type_of(linear: str, attention: str, index_queries: str, experts: str) -> str:
    """The type of a linear as published: keys and weights of an index, and what is multiplied out, are not
    quantised, and MLPs are by token.
    """
    name = linear.rpartition(".")[2]
    if name in ("wk", "weights_proj", "kv_b_proj", "lm_head"):
        return "FLOAT"
    if name == "wq_b":
        return index_queries
    if ".self_attn." in linear:
        return attention
    return experts if ".experts." in linear else "W8A8_DYNAMIC"
