"""Name tensors that checkpoints call otherwise than the decoder does, and those that it does not read."""

from __future__ import annotations

import re
from collections.abc import Collection

# How checkpoints that read images, too, call the tensors of their text model, and what these are called alone
TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
# How tensors of a decoder begin that was saved without its head, as models for embeddings are
BODY = ("embed_tokens.", "layers.", "norm.", "rotary_emb.")
# A decoder that is called model within a model that is itself called model, with the head beside it: as
# transformers reads them, the first model. is taken away
WITHIN = ("model.model.", "model.lm_head.")
# What wraps a model for training and then stands within its tensors' names, with whose it is and what to save
WRAPPERS = {
    "module": ("DataParallel or DeepSpeed", "model.module.save_pretrained"),
    "_orig_mod": ("torch.compile", "model._orig_mod.save_pretrained"),
    "_fsdp_wrapped_module": ("FSDP", "the full state dict by accelerate's save_model"),
    "_checkpoint_wrapped_module": ("activation checkpointing", "the model from before it was wrapped"),
    "base_model": ("PEFT", "model.merge_and_unload().save_pretrained"),
}
# How the tensors of towers for images, and of what leads from them to the text model, are named
TOWERS = (
    "vision_tower.",
    "vision_model.",
    "multi_modal_projector.",
    "mm_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.mm_projector.",
    "model.visual.",
)
# How ERNIE's and Qwen's layers that predict further tokens are named, which lie beside their own and are no
# part of the decoder; Qwen's may draft for it (models/drafting/mtp.py)
BESIDE = "mtp."
PREDICTION = ("model.mtp_", BESIDE)
# Tensors that change nothing here: buffers of older checkpoints, which follow from config.json, and the
# rotations of index queries and keys, which cancel in the products of both unless keys are rounded to int8
HARMLESS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|model\.layers\.\d+\.self_attn\.indexer\.[qk]_rot(\.weight)?"
)


def alone(name: str) -> str:
    """Return the name of a tensor as if its text model were alone, and saved with its head."""
    if name.startswith(BODY):
        return f"model.{name}"
    if name.startswith(WITHIN):
        return name.removeprefix("model.")
    for stored, plain in TEXT_NAMES:
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return name


def wrapped_in(names: Collection[str]) -> tuple[str, str] | None:
    """Return the prefix that stands before a model's own names in all tensors' names, and what to save.

    A wrapper's name may also stand further within. Returns None for names without one.
    """
    for name in sorted(names):
        for at, part in enumerate(parts := name.split(".")):
            if part in WRAPPERS:
                whose, fix = WRAPPERS[part]
                return f"{'.'.join(parts[: at + 1])}. of {whose}", fix
    ends = ("embed_tokens.weight", "lm_head.weight")
    found = [name.removesuffix(end) for end in ends for name in names if name.endswith(end)]
    prefix = min(found, key=len, default="").removesuffix("model.")
    if prefix and all(name.startswith(prefix) for name in names):
        return f"{prefix} of a model that holds this one", "the model within by save_pretrained"
    return None


def stored_spellings(name: str) -> list[str]:
    """Return how a linear of a text model may be named within another model."""
    dotted = f"{name}."
    return [
        (stored + dotted.removeprefix(plain)).removesuffix(".")
        for stored, plain in TEXT_NAMES
        if dotted.startswith(plain)
    ]
