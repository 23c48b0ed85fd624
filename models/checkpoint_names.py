"""Name tensors that checkpoints call otherwise than the decoder does, and those that it does not read."""

from __future__ import annotations

import re

# How checkpoints that read images, too, call the tensors of their text model, and what these are called alone
TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
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
    """Return the name of a tensor as if its text model were alone."""
    for stored, plain in TEXT_NAMES:
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return name


def stored_spellings(name: str) -> list[str]:
    """Return how a linear of a text model may be named within another model."""
    dotted = f"{name}."
    return [
        (stored + dotted.removeprefix(plain)).removesuffix(".")
        for stored, plain in TEXT_NAMES
        if dotted.startswith(plain)
    ]
