"""Define the EAGLE-3 head of one Llama layer.

Its config.json is a Llama's with `draft_vocab_size`; see models/drafting/eagle.py for the sources.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from borders.refusal import abbreviate
from models.checkpoint.huggingface import boolean, integer
from models.config import DecoderConfig
from models.drafting.config import EMBEDDING, Eagle3Config, has_int8_cache
from recipes.llama.model import config as llama

LEAST_LAYERS = 7  # the three layers that it reads would otherwise not be in ascending order


def config(
    hf: Mapping[str, Any], target: DecoderConfig, names: Collection[str], num_kept: int
) -> Eagle3Config:
    """Return the head for `target`, whose checkpoint has tensors of these names; raises ValueError.

    The head computes in the target's type, and at the target's positions: published heads name the positions
    that they were trained at, and are used beyond them.
    """
    family, num_layers = hf.get("model_type"), target.num_layers
    if family != "llama":
        raise ValueError(
            f"its configuration has model_type: {abbreviate(family)}; supported are heads of a llama layer"
        )
    if num_layers < LEAST_LAYERS:
        raise ValueError(
            f"the model has {num_layers} layers, and an EAGLE-3 head is for one of {LEAST_LAYERS} or more"
        )
    plain = llama({**hf, "max_position_embeddings": target.max_positions})
    plain = replace(plain, max_positions=target.reach)
    taps = (2, num_layers // 2, num_layers - 3)
    _check(hf, plain, target, taps)
    draft_vocab = plain.vocab_size
    if hf.get("draft_vocab_size") is not None:
        draft_vocab = integer({"vocab_size": hf["draft_vocab_size"]}, "vocab_size")
    if draft_vocab > target.vocab_size:
        raise ValueError(
            f"its configuration has draft_vocab_size: {draft_vocab}; the model's vocabulary has"
            f" {target.vocab_size}"
        )
    values = {each.name: getattr(plain, each.name) for each in fields(plain)}
    values |= {
        "family": "eagle3",
        "dtype": target.dtype,
        "int8_cache": has_int8_cache(target),
        "eos_token_ids": (),
    }
    return Eagle3Config(
        **values,
        taps=taps,
        draft_vocab_size=draft_vocab,
        owns_embedding=EMBEDDING in names,
        norm_before_residual=boolean(hf, "norm_before_residual", False),
        num_kept=num_kept,
    )


def _check(hf: Mapping[str, Any], plain: DecoderConfig, target: DecoderConfig, taps: tuple[int, ...]) -> None:
    """Raise ValueError for a head of another model, or of a kind that is not supported."""
    asked, layers = hf.get("eagle_config") or {}, "eagle_aux_hidden_state_layer_ids"
    hidden = target.hidden_size
    for key, value, wanted, why in (
        ("num_hidden_layers", plain.num_layers, 1, "heads have one layer"),
        ("vocab_size", plain.vocab_size, target.vocab_size, "as the model has"),
        ("hidden_size", plain.hidden_size, hidden, "as the model has"),
        ("target_hidden_size", hf.get("target_hidden_size", hidden), hidden, "as the model has"),
        ("quantization_config", plain.quantization, None, "plain weights alone are read"),
        ("tie_word_embeddings", plain.tie_embeddings, False, "a head has an lm_head of its own"),
        ("attention_bias", plain.attention_bias, False, "heads have no biases"),
        (layers, asked.get(layers, hf.get(layers, list(taps))), list(taps), "those of published heads"),
    ):
        if value != wanted:
            raise ValueError(
                f"its configuration has {key}: {abbreviate(value)}; it must be {abbreviate(wanted)}, {why}:"
                " take the head that was trained for this model"
            )
    if plain.rope.kind == "dynamic":
        raise ValueError("its configuration has dynamic rope, by which no keys can be shared: take another")
