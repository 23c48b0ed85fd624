"""Which linears stay in the 4 bits in which a checkpoint packs them, and what must hold for it?

W4A16: they are multiplied as `Int4` has them, with inputs in the model's type.
"""

from __future__ import annotations

from dataclasses import replace

from models.config import DecoderConfig, check_fused
from models.packing import IN_A_WORD, Int4, Packing


def kept_int4(config: DecoderConfig) -> DecoderConfig:
    """The decoder whose linears stay packed; raises ValueError for one whose cannot."""
    form = config.stored_form
    if not isinstance(form, Packing) or form.bits != 4:
        stored = "the checkpoint's are not packed" if form is None else f"the checkpoint's are {form}"
        raise ValueError(f"w4a16 keeps weights that are packed in 4 bits, and {stored}")
    if form.has_order:
        raise ValueError("w4a16 takes a group's inputs side by side, and desc_act or actorder moves them")
    if config.mixture is not None or config.latent is not None:
        raise ValueError("w4a16 is of dense models: experts and latents have no products in 4 bits here")
    kept = replace(config, kept_form=form)
    for name, inputs, outputs in kept.linears():
        if isinstance(kept.form(name), Int4) and (inputs % IN_A_WORD or outputs % IN_A_WORD):
            raise ValueError(
                f"w4a16 takes multiples of {IN_A_WORD}, and {name} has {inputs} inputs, {outputs} outputs"
            )
    check_fused(kept)
    return kept


def check_groups(config: DecoderConfig, tensors: int) -> None:
    """Raise ValueError where tensor ranks would divide the inputs of a group among them."""
    if tensors == 1 or config.kept_form is None:
        return
    size = config.kept_form.group_size or IN_A_WORD
    cut = {"o_proj": config.num_heads * config.head_dim, "down_proj": config.intermediate_size}
    for name, inputs in cut.items():
        if inputs // tensors % size:
            raise ValueError(
                f"w4a16 cannot divide the {inputs} inputs of {name} by {tensors}: groups of {size} stay"
                " whole; choose fewer ranks, or leave model.quantization out"
            )


def largest_side(config: DecoderConfig) -> int:
    """The longest side of a product in 4 bits; gate and up are one. A head is mostly not in 4 bits."""
    sides = [side for name, *pair in config.linears() if isinstance(config.form(name), Int4) for side in pair]
    return max(*sides, 2 * config.intermediate_size)
