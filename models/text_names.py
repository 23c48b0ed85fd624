"""Name the tensors of a text model that is stored within a model which reads images, too."""

from __future__ import annotations

# How checkpoints that read images, too, call the tensors of their text model, and what these are called alone
TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


def alone(name: str) -> str:
    """Return the name of a tensor as if its text model were alone."""
    for stored, plain in TEXT_NAMES:
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return name


def stored_spellings(name: str) -> list[str]:
    """Return how a linear of a text model may be named within another model."""
    return [
        (stored + f"{name}.".removeprefix(plain)).removesuffix(".")
        for stored, plain in TEXT_NAMES
        if f"{name}.".startswith(plain)
    ]
