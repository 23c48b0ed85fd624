"""Make a small random checkpoint of a family, and compute what transformers says of it."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lazy import transformers
from tests.models.relative_variants import RELATIVES
from tests.models.score_variants import SCORE_VARIANTS
from tests.models.variants import PUBLISHED_LATENT, Variant
from tests.models.variants import VARIANTS as PLAIN_VARIANTS

VOCABULARY = 160
VARIANTS = [*PLAIN_VARIANTS, *SCORE_VARIANTS, *RELATIVES]
__all__ = ["VARIANTS", "Variant"]


# transformers' classes of a family: of its configuration, and of its model
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "internlm3": ("InternLM3Config", "LlamaForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
}
_KEPT: WeakKeyDictionary[Any, dict[tuple[int, ...], Tensor]] = WeakKeyDictionary()
ADD_ONE = ("gemma", "qwen3_next", "qwen3_5")  # how families begin whose norms add one to their weights


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
        "pad_token_id": None,
        "eos_token_id": None,
    }
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[variant.family])
    config = config_class(**options | variant.options, rope_parameters=deepcopy(variant.rope))
    config._attn_implementation = "eager"
    config.eos_token_id = None  # a family's default may lie beyond this vocabulary
    model = model_class(config).eval()
    _fill(model, seed=len(variant.name), norm=0.0 if variant.family.startswith(ADD_ONE) else 1.0)
    model.to(variant.saved_as)
    model.config.dtype = variant.saved_as
    model.save_pretrained(path, max_shard_size=variant.shard_size)
    if variant.family == "kimi_linear":
        _rename_dense(path)
    if variant.old:
        _spell_old(path / "config.json")
    model.float()
    embedding = model.model.embed_tokens
    if hasattr(embedding, "embed_scale"):  # which `.to(dtype)` rounds, as it does a rotary embedding
        embedding.embed_scale.fill_(embedding.scalar_embed_scale)
    return model, path


def wide(variant: Variant, head_dim: int = 64) -> Variant:
    """The same with heads of 64, the smallest that every fused attention takes, or others; latents as they
    are published.
    """
    if "kv_lora_rank" in variant.options:
        return replace(variant, name=f"{variant.name}_wide", options=variant.options | PUBLISHED_LATENT)
    num_pairs = int(head_dim * variant.rope.get("partial_rotary_factor", 1)) // 2
    rope = {
        name: (each * num_pairs)[:num_pairs] if isinstance(each, list) else each
        for name, each in variant.rope.items()
    }
    options = variant.options | {"head_dim": head_dim}
    if rope.get("rope_type") == "longrope":  # transformers checks that its heads share the hidden size
        options |= {"hidden_size": 4 * head_dim}
    return replace(variant, name=f"{variant.name}_wide", options=options, rope=rope)


def _fill(model: Any, seed: int, norm: float) -> None:
    """Weights large enough that attention is sharp and positions matter, and small enough for float32; those
    of norms around `norm`, and around 1 behind a recurrent state, which decays slowly.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(torch.empty(weight.shape).uniform_(-6, -1, generator=generator))
            elif name.endswith(("linear_attn.norm.weight", "o_norm.weight")):
                weight.copy_(noise * 0.3 + 1)
            elif weight.dim() >= 2:  # a linear, or those of all experts
                gain = 2.0 if name.startswith(("lm_head", "model.embed")) else 1.2
                weight.copy_(noise * gain / math.sqrt(weight.shape[-1]))
            else:
                weight.copy_(noise * 0.3 + (norm if name.endswith("norm.weight") else 0))
        for name, correction in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                correction.copy_(torch.randn(correction.shape, generator=generator) * 0.3)


def _rename_dense(path: Path) -> None:
    """Dense MLPs as Kimi-Linear was published; transformers 5.23 saves them under the name of experts."""
    tensors = load_file(path / "model.safetensors")
    dense = re.compile(r"block_sparse_moe\.((gate|up|down)_proj)")
    renamed = {dense.sub(r"mlp.\1", name): each for name, each in tensors.items()}
    save_file(renamed, path / "model.safetensors")


def _spell_old(path: Path) -> None:
    """config.json as it was written before transformers 5."""
    config = json.loads(path.read_text())
    rope, spelling = config.pop("rope_parameters"), "type"
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, spelling = rope["full_attention"], "rope_type"
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {spelling: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


@torch.no_grad()
def expected_logprobs(model: Any, tokens: list[int]) -> Tensor:
    """Transformers' log-probabilities [len(tokens), V] for a request whose prompt is `tokens`, alone."""
    fresh_rope(model)
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.float().log_softmax(-1)


def logprobs_behind(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """Transformers' log-probabilities [len(answer), V] behind each beginning of an answer.

    They are kept as long as the model, whose weights nothing may change: many engines give the same answers.
    """
    kept, tokens = _KEPT.setdefault(model, {}), (*prompt, *answer[:-1])
    if tokens not in kept:
        kept[tokens] = expected_logprobs(model, [*tokens])
    return kept[tokens][len(prompt) - 1 :].clone()


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


def followed(model: Any, prompt: list[int], answer: list[int], num_new: int) -> tuple[list[int], Tensor]:
    """Transformers' best token behind each beginning of an answer, and the log-probabilities [num_new, V].

    An answer of `num_new` tokens is transformers' own greedy one if and only if it is these: the first wrong
    token would differ from them. All are told in one pass, where `generated` makes one for each. Not for a
    rope that turns the same token otherwise once a request is longer.
    """
    assert len(answer) == num_new, f"an answer of {len(answer)} tokens"
    logprobs = expected_logprobs(model, prompt + answer[:-1])[len(prompt) - 1 :]
    return logprobs.argmax(-1).tolist(), logprobs


def fresh_rope(model: Any) -> None:
    """A rotary embedding, if there is one, as it is after loading.

    Transformers' dynamic rope remembers the longest request it has seen, and a model's `.to(dtype)` rounds
    the frequencies, which `from_pretrained(dtype=...)` does not.
    """
    if hasattr(model.model, "rotary_emb"):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
