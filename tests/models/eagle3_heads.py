"""Targets with small EAGLE-3 heads, and what such a head says by the published formulas.

The target's layers add little to a token's embedding, and the head finds that embedding again: so its drafts
are often right. What it reads of the target's features makes some of them wrong, and tells whether these are
the right ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from tests.lazy import transformers
from tests.models.families import VOCABULARY, Variant, fresh_rope, make

HIDDEN, HEADS = 48, 4
TIE = 1e-4  # logits that differ by less may be ordered otherwise


def target_of(variant: Variant, root: Path) -> tuple[Any, Path]:
    """A checkpoint of seven layers that add little."""
    options = {"num_hidden_layers": 7, "hidden_size": HIDDEN} | variant.options
    model, path = make(replace(variant, options=options), root)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.02
        model.lm_head.weight *= 4
        model.model.embed_tokens.weight *= 3
    model.save_pretrained(path)
    return model, path


def head_for(
    model: Any,
    path: Path,
    *,
    draft_vocab: int = VOCABULARY,
    gain: float = 0.4,
    sharpness: float = 3.0,
    owns_embedding: bool = False,
    head_dim: int = HIDDEN // HEADS,
    **config: Any,
) -> Path:
    """A head for a target, in a new directory.

    `gain` is how much the features count, `sharpness` how much attention is for one position alone.
    """
    path.mkdir()
    generator = torch.Generator().manual_seed(7)
    inner, wide = 64, HEADS * head_dim

    def noise(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * size / math.sqrt(columns)

    same = torch.zeros(wide, 2 * HIDDEN)
    same[:HIDDEN, :HIDDEN] = torch.eye(HIDDEN)
    back = torch.zeros(HIDDEN, wide)
    back[:, :HIDDEN] = torch.eye(HIDDEN)
    chosen = torch.randperm(VOCABULARY, generator=generator)[:draft_vocab].sort().values
    tensors = {
        "fc.weight": noise(HIDDEN, 3 * HIDDEN, gain),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=generator),
        "midlayer.self_attn.q_proj.weight": sharpness * same + noise(wide, 2 * HIDDEN, 0.2),
        "midlayer.self_attn.k_proj.weight": sharpness * same + noise(wide, 2 * HIDDEN, 0.2),
        "midlayer.self_attn.v_proj.weight": same + noise(wide, 2 * HIDDEN, 0.05),
        "midlayer.self_attn.o_proj.weight": 4 * back + noise(HIDDEN, wide, 0.2),
        "midlayer.post_attention_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.mlp.gate_proj.weight": noise(inner, HIDDEN, 0.7),
        "midlayer.mlp.up_proj.weight": noise(inner, HIDDEN, 0.7),
        "midlayer.mlp.down_proj.weight": noise(HIDDEN, inner, 0.4),
        "norm.weight": model.model.norm.weight.detach().clone(),
        "lm_head.weight": model.lm_head.weight.detach()[chosen].clone(),
        "t2d": torch.isin(torch.arange(VOCABULARY), chosen),
        "d2t": chosen - torch.arange(draft_vocab),
    }
    if draft_vocab == VOCABULARY:
        del tensors["d2t"], tensors["t2d"]
    if owns_embedding:
        table = model.model.embed_tokens.weight.detach()
        tensors["embed_tokens.weight"] = table + 0.05 * torch.randn(table.shape, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "draft_vocab_size": draft_vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    (path / "config.json").write_text(json.dumps(settings | config))
    return path


class Published:
    """A head in plain torch over whole sequences, by the formulas of SafeAILab/EAGLE's cnets.py."""

    def __init__(self, model: Any, path: Path) -> None:
        self._model = model
        self._weights = load_file(path / "model.safetensors")
        self._config = json.loads((path / "config.json").read_text())
        self._read: dict[tuple[int, ...], Tensor] = {}  # features by sequence, since each is asked for often

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], known: int, count: int) -> list[Tensor]:
        """The logits over the target's vocabulary of what follows the known tokens, draft after draft."""
        # The target has not computed the last known token yet
        features = self._features(tuple(tokens))[: known - 1]
        shifted, made = list(tokens[1:known]), []
        for _ in range(count):
            out = self._layer(features, torch.tensor(shifted))
            logits = self._norm(out[-1:], "norm") @ self._weights["lm_head.weight"].T
            made.append(self._in_target(logits[0]))
            shifted.append(int(made[-1].argmax()))
            features = torch.cat((features, out[-1:]))
        return made

    def _features(self, tokens: tuple[int, ...]) -> Tensor:
        """What the head reads of the target at each token, which no later token changes."""
        if tokens not in self._read:
            fresh_rope(self._model)
            found = self._model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
            layers = found.hidden_states
            num_layers = self._model.config.num_hidden_layers
            read = [layers[2][0], layers[num_layers // 2][0], layers[num_layers - 3][0]]
            self._read[tokens] = torch.cat(read, -1) @ self._weights["fc.weight"].T
        return self._read[tokens]

    def _in_target(self, logits: Tensor) -> Tensor:
        offsets = self._weights.get("d2t", torch.zeros(len(logits), dtype=torch.int64))
        whole = torch.full((VOCABULARY,), -torch.inf)
        whole[torch.arange(len(logits)) + offsets] = logits
        return whole

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return self._weights[f"{name}.weight"] * scaled

    def _layer(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Pairs of a feature and the token after it, at positions 0, 1, ..."""
        weights, dim = self._weights, self._config["head_dim"]
        table = weights.get("embed_tokens.weight", self._model.model.embed_tokens.weight)
        normed = self._norm(features, "midlayer.hidden_norm")
        residual = normed if self._config.get("norm_before_residual") else features
        x = torch.cat((self._norm(table[tokens], "midlayer.input_layernorm"), normed), -1)
        query, key, value = (
            (x @ weights[f"midlayer.self_attn.{each}_proj.weight"].T).unflatten(-1, (-1, dim)).transpose(0, 1)
            for each in "qkv"
        )
        angles = torch.arange(len(tokens))[:, None] / self._config["rope_theta"] ** (
            torch.arange(0, dim, 2) / dim
        )
        turned = torch.cat((angles, angles), -1)[None]
        llama = transformers.models.llama.modeling_llama
        query, key = llama.apply_rotary_pos_emb(query[None], key[None], turned.cos(), turned.sin())
        attended = F.scaled_dot_product_attention(query, key, value[None], is_causal=True)[0]
        x = residual + attended.transpose(0, 1).flatten(1) @ weights["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (normed @ weights[f"midlayer.mlp.{each}_proj.weight"].T for each in ("gate", "up"))
        return x + (F.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T


def check_head_drafts(
    published: Published,
    drafts: list[tuple[str, int, list[int]]],
    tokens: dict[str, list[int]],
    tie: float = TIE,
) -> tuple[int, int]:
    """All of a row's drafts are what the published head says after its known tokens; how many there were, and
    how many were right.
    """
    num_right = num_made = num_ties = 0
    for name, known, made in drafts:
        for draft, logits in zip(made, published.drafts(tokens[name], known, len(made))):
            best = int(logits.argmax())
            if draft != best:
                assert logits[best] - logits[draft] < tie, (name, known, made)
                num_ties += 1
                break  # another draft follows from it
            num_made += 1
        right = [one == other for one, other in zip(made, tokens[name][known:])]
        num_right += right.index(False) if False in right else len(right)
    assert num_ties <= num_made // 20
    return num_made, num_right
