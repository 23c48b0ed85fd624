"""Keep linears in the 4 bits in which a checkpoint packs them (W4A16), and check what that requires.

They are multiplied in the form `Int4`, with inputs in the model's type.
"""

from __future__ import annotations

import math
from dataclasses import replace

from models.config import DecoderConfig, check_fused
from models.packing import IN_A_WORD, Int4, Packing


def kept_int4(config: DecoderConfig) -> DecoderConfig:
    """Return the decoder with its linears kept packed; raises ValueError if that is impossible."""
    form = config.stored_form
    if not isinstance(form, Packing) or form.bits != 4:
        stored = "the checkpoint's are not packed" if form is None else f"the checkpoint's are {form}"
        raise ValueError(f"w4a16 keeps weights that are packed in 4 bits, and {stored}")
    if form.has_order:
        raise ValueError("w4a16 takes a group's inputs side by side, and desc_act or actorder moves them")
    if config.latent is not None:
        raise ValueError("w4a16 is of models without latents, which have no products in 4 bits here")
    kept = replace(config, kept_form=form)
    for name, inputs, outputs in kept.linears():
        if isinstance(kept.form(name), Int4) and (inputs % IN_A_WORD or outputs % IN_A_WORD):
            raise ValueError(
                f"w4a16 takes multiples of {IN_A_WORD}, and {name} has {inputs} inputs, {outputs} outputs"
            )
    check_fused(kept)
    return kept


def check_groups(config: DecoderConfig, tensors: int, experts: int = 1) -> None:
    """Raise ValueError if tensor ranks would split the inputs of a group among them.

    Experts are spread over `experts` parts of the ranks.
    """
    if config.kept_form is None:
        return
    # A rank reads whole groups from whole words, of which a short group takes a part
    size, mixture = math.lcm(config.kept_form.group_size or 1, IN_A_WORD), config.mixture
    cut = [("o_proj", config.num_heads * config.head_dim, tensors)]
    if config.recurrent is not None:
        cut.append((config.recurrent.output, config.recurrent.widths[2], tensors))
    if config.num_mixtures < config.num_layers:
        cut.append(("down_proj", config.intermediate_size, tensors))
    if mixture is not None:
        cut.append((f"an expert's {mixture.roles[2]}", mixture.inner_size, tensors // experts))
        cut.append((f"{mixture.shared_block}.down_proj", mixture.shared_size, tensors))
    for name, inputs, ranks in cut:
        if ranks > 1 and inputs // ranks % size:
            raise ValueError(
                f"w4a16 cannot divide the {inputs} inputs of {name} by {ranks}: each rank takes a"
                f" multiple of {size}, so that groups and words stay whole; choose fewer ranks, or leave"
                " model.quantization out"
            )


def largest_side(config: DecoderConfig) -> int:
    """Return the longest side of a 4-bit product; gate and up are one. A head is mostly not in 4 bits."""
    sides = [side for name, *pair in config.linears() if isinstance(config.form(name), Int4) for side in pair]
    inner = [2 * config.inner_size(layer) for layer in range(config.num_layers)]
    return max(*sides, *inner, 2 * config.shared_size)


def inputs_of_experts(config: DecoderConfig) -> tuple[int, ...]:
    """Return the input widths of a rank's experts if their products are in 4 bits; otherwise none."""
    mixture = config.mixture
    if mixture is None:
        return ()
    layers = [
        config.mlp_names(layer)[0]
        for layer in range(config.num_layers)
        if config.mixture_of(layer) is not None
    ]
    is_kept = any(isinstance(config.form(name), Int4) for names in layers for name in names)
    return (config.hidden_size, mixture.inner_size) if is_kept else ()
