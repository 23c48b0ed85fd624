"""Which tensor of a head's checkpoint goes where?

Names are those of SafeAILab/EAGLE. `d2t` holds what is added to a draft token for the target's; `t2d` follows
from it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint.place import Place
from models.checkpoint.weights import fill, rooms_of
from models.drafting.eagle3 import LAYER, Eagle3, Eagle3Config
from models.layers.linear import Linear

EMBEDDING, OFFSETS, FOLLOWS = "embed_tokens.weight", "d2t", "t2d"


def load(head: Eagle3, path: str | Path) -> int:
    """Fill a head from the checkpoint directory `path`, and pack it; return the bytes of the tensors read.

    Raises ValueError as models/checkpoint/weights.py does, and for draft tokens that the target lacks.
    """
    places = _places(head)
    _, num_bytes = fill(Path(path), places, places, lambda name: name == FOLLOWS)
    if head.offsets is not None:
        tokens = torch.arange(len(head.offsets), device=head.offsets.device) + head.offsets
        if not bool(((tokens >= 0) & (tokens < head.config.vocab_size)).all()):
            raise ValueError(
                f"{OFFSETS} in {path} leads out of the model's vocabulary of {head.config.vocab_size};"
                " take the head that was trained for this model"
            )
    head.pack()
    return num_bytes


def _places(head: Eagle3) -> dict[str, Place]:
    config, attention, mlp = head.config, head.self_attention, head.mlp
    assert isinstance(config, Eagle3Config), "an EAGLE-3 head has its own configuration"
    whole: dict[str, Tensor | None] = {
        "norm.weight": head.norm,
        f"{LAYER}input_layernorm.weight": head.input_norm,
        f"{LAYER}hidden_norm.weight": head.hidden_norm,
        f"{LAYER}post_attention_layernorm.weight": head.mlp_norm,
        OFFSETS: head.offsets,
        EMBEDDING: head.embedding,
    }
    places = {
        name: Place(each.data, tuple(each.shape), ()) for name, each in whole.items() if each is not None
    }
    joined: list[tuple[str, tuple[str, ...], Linear]] = [
        ("", ("fc",), head.fc),
        ("", ("lm_head",), head.head),
        (f"{LAYER}self_attn.", ("q_proj", "k_proj", "v_proj"), attention.qkv),
        (f"{LAYER}self_attn.", ("o_proj",), attention.output),
        (f"{LAYER}mlp.", ("gate_proj", "up_proj"), mlp.gate_up),
        (f"{LAYER}mlp.", ("down_proj",), mlp.down),
    ]
    sizes = {name: outputs for name, _, outputs in config.linears()}
    for prefix, names, linear in joined:
        names = tuple(prefix + name for name in names)
        for kind, rooms in rooms_of(linear, [sizes[name] for name in names]):
            places |= {
                f"{name}.{kind}": Place(room, tuple(room.shape), ()) for name, room in zip(names, rooms)
            }
    return places
