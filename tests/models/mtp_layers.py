"""Targets whose checkpoints have a layer to predict further tokens, and what it says by published formulas.

It lies behind the layers of DeepSeek and GLM, and beside those of Qwen, whose own layers keep states.

The target's layers add little to a token's embedding, and the layer finds that embedding again: so its
guesses are often right, and what it reads of the target makes some of them wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.families import VARIANTS, Variant, fresh_rope, make, wide
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.sparse_variants import SPARSE_VARIANTS

DENSE, NUM_LAYERS = 1, 3  # layers without experts, and all; the layer that predicts has experts


def target_of(name: str, root: Path, *, is_wide: bool = False, **more: Any) -> tuple[Any, Path]:
    """A checkpoint with such a layer behind its own; wide enough for fused attention, if asked."""
    variant = next(each for each in [*VARIANTS, *SPARSE_VARIANTS] if each.name == name)
    options = {"first_k_dense_replace": DENSE, "num_hidden_layers": NUM_LAYERS}
    variant = replace(variant, options=variant.options | options | more, shard_size="5GB")
    return with_layer(wide(variant) if is_wide else variant, root)


def with_layer(variant: Variant, root: Path) -> tuple[Any, Path]:
    """The model that transformers has of it, whose layer behind its own is `model.further`."""
    model, path = make(variant, root)
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if each.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight *= 0.02
        model.lm_head.weight *= 4
        model.model.embed_tokens.weight *= 3
        layer = type(model.model.layers[-1])(model.config, NUM_LAYERS - 1).eval()
        layer.load_state_dict(model.model.layers[-1].state_dict())
        for each, weight in layer.named_parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += 0.3 * weight.std() * noise
            if each.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                weight *= 12
    model.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    own, prefix = f"model.layers.{NUM_LAYERS - 1}.", f"model.layers.{NUM_LAYERS}."
    model.model.layers[-1], kept = layer, model.model.layers[-1]
    model.save_pretrained(root / "further")
    model.model.layers[-1] = kept
    for each, tensor in load_file(root / "further" / "model.safetensors").items():
        if each.startswith(own):
            tensors[each.replace(own, prefix)] = tensor
    noise = torch.randn(hidden, hidden, generator=generator) * 0.3 / hidden**0.5
    further = {
        "enorm": torch.ones(hidden),
        "hnorm": 1 + 0.2 * torch.randn(hidden, generator=generator),
        "eh_proj": torch.cat((torch.eye(hidden), noise), 1),
        "shared_head.norm": model.model.norm.weight.detach().clone(),
        "shared_head.head": model.lm_head.weight.detach().clone(),
        "embed_tokens": model.model.embed_tokens.weight.detach().clone(),
    }
    tensors |= {f"{prefix}{each}.weight": tensor for each, tensor in further.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    model.further = Further(model, layer, further)
    return model, path


def target_beside(name: str, root: Path, variant: Variant | None = None) -> tuple[Any, Path]:
    """A checkpoint of a model with states that has such a layer under `mtp.`, as Qwen publishes it; the
    model's own last layer is the kind of layer that it is.
    """
    variant = variant or next(each for each in RECURRENT_VARIANTS if each.name == name)
    model, path = make(replace(variant, shard_size="5GB"), root)
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(3)
    outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
    number = model.config.num_hidden_layers - 1
    with torch.no_grad():
        for each, weight in model.named_parameters():
            weight *= 0.05 if each.endswith(outputs) else 1
        model.lm_head.weight *= 4
        layer = type(model.model.layers[-1])(model.config, number).eval()
        layer.load_state_dict(model.model.layers[-1].state_dict())
        for each, weight in layer.named_parameters():
            weight *= 6 if each.endswith(outputs) else 1
    model.save_pretrained(path)
    tensors, own = load_file(path / "model.safetensors"), f"model.layers.{number}."
    model.model.layers[-1], kept = layer, model.model.layers[-1]
    model.save_pretrained(root / "further")
    model.model.layers[-1] = kept
    for each, tensor in load_file(root / "further" / "model.safetensors").items():
        if each.startswith(own):
            tensors[each.replace(own, "mtp.layers.0.")] = tensor
    noise = torch.randn(hidden, hidden, generator=generator) * 0.3 / hidden**0.5
    further = {  # norms are stored less one
        "pre_fc_norm_embedding": 0.1 * torch.randn(hidden, generator=generator),
        "pre_fc_norm_hidden": 0.2 * torch.randn(hidden, generator=generator),
        "fc": torch.cat((torch.eye(hidden), noise), 1),
        "norm": model.model.norm.weight.detach().clone(),
    }
    tensors |= {f"mtp.{each}.weight": tensor for each, tensor in further.items()}
    if variant.family == "qwen3_5_moe_text":
        tensors = _stacked(tensors, "mtp.layers.0.mlp.experts.", model.config.num_experts)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model.further = Further(
        model,
        layer,
        {
            "enorm": 1 + further["pre_fc_norm_embedding"],
            "hnorm": 1 + further["pre_fc_norm_hidden"],
            "eh_proj": further["fc"],
            "shared_head.norm": 1 + further["norm"],
        },
    )
    return model, path


def _stacked(tensors: dict[str, Tensor], block: str, count: int) -> dict[str, Tensor]:
    """The same with the experts of a layer in one tensor each of gate and up, and of down."""

    def of(role: str) -> Tensor:
        return torch.stack([tensors[f"{block}{number}.{role}.weight"] for number in range(count)])

    joined = {"gate_up_proj": torch.cat((of("gate_proj"), of("up_proj")), 1), "down_proj": of("down_proj")}
    others = {name: each for name, each in tensors.items() if not name.startswith(block)}
    return others | {f"{block}{name}": each for name, each in joined.items()}


class Further:
    """That layer over whole sequences, by the formulas of SGLang's deepseek_nextn.py and of vLLM's
    qwen3_next_mtp.py, which are the same; the layer itself is transformers'. With `reads_zeros` it attends to
    a key of zeros before the first, as an operator does that cannot leave it out.
    """

    reads_zeros = False

    def __init__(self, model: Any, layer: Any, tensors: dict[str, Tensor]) -> None:
        self._model, self._layer, self._tensors = model, layer, tensors
        self._read: dict[tuple[int, ...], Tensor] = {}  # features by sequence, since each is asked for often
        self.join: Callable[[Tensor], Tensor] = lambda joined: joined @ tensors["eh_proj"].T

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], known: int, count: int) -> list[Tensor]:
        """The logits of what follows the known tokens, each guess after the other."""
        # The target has not computed the last known token yet
        features = self._features(tuple(tokens))[: known - 1]
        shifted, made = list(tokens[1:known]), []
        for _ in range(count):
            out = self._computed(features, torch.tensor(shifted))
            made.append(self._model.lm_head(out[-1]))
            shifted.append(int(made[-1].argmax()))
            features = torch.cat((features, out[-1:]))
        return made

    def _features(self, tokens: tuple[int, ...]) -> Tensor:
        """The target's hidden states at each token, which no later token changes."""
        if tokens not in self._read:
            fresh_rope(self._model)
            found = self._model.model(torch.tensor([tokens]), use_cache=False)
            self._read[tokens] = found.last_hidden_state[0]
        return self._read[tokens]

    def _computed(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Pairs of a feature and the token after it, at positions 0, 1, ..."""
        model, count = self._model.model, len(tokens)
        joined = torch.cat(
            (self._norm(model.embed_tokens(tokens), "enorm"), self._norm(features, "hnorm")), -1
        )
        x = self.join(joined)[None]
        if self.reads_zeros:  # latent and rope key of a hidden state of zeros are zeros, too
            x, count = torch.cat((torch.zeros_like(x[:, :1]), x), 1), count + 1
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        positions = torch.arange(count)[None]
        angles = model.rotary_emb(x, positions)
        made = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        x = made[0] if isinstance(made, tuple) else made  # a sparse layer also returns what it chose
        return self._norm(x[0, -len(tokens) :], "shared_head.norm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self._model.config.rms_norm_eps
        return self._tensors[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
