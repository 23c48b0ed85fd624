"""Which tensor of a checkpoint goes where in the layer that predicts one token more?

It lies in the target's own checkpoint, beside copies of the target's embedding and head, which it shares.
"""

from __future__ import annotations

from pathlib import Path

from models.checkpoint.layer_parts import LayerParts
from models.checkpoint.stored_parts import in_parts
from models.checkpoint.weights import fill, placed
from models.drafting.mtp import Mtp, MtpConfig

SHARED = ("embed_tokens.", "shared_head.head.")  # shared with the target


def load(head: Mtp, path: str | Path) -> int:
    """Fill the layer from the target's checkpoint directory `path`, and pack it; return the bytes read.

    Raises ValueError as models/checkpoint/weights.py does.
    """
    config, path = head.config, Path(path)
    assert isinstance(config, MtpConfig), "the layer has its own configuration"
    prefix = config.prefix
    parts = LayerParts.of(head.layer, prefix, config)
    norms = {
        f"{prefix}enorm.weight": head.embedding_norm,
        f"{prefix}hnorm.weight": head.hidden_norm,
        f"{prefix}shared_head.norm.weight": head.norm,
    }
    parts.whole.update(norms)
    parts.joined.append(("", (config.joining,), head.joining))
    held = {name: outputs for name, _, outputs in head.part.linears()}
    places = placed(parts, config, held, head.share)
    read = in_parts(places, config.stored_form, path)
    is_shared = tuple(prefix + name for name in SHARED)

    def is_unread(name: str) -> bool:
        if not name.startswith(prefix) or name.startswith(is_shared):
            return True
        return head.share.is_others_expert(name, config, 0, prefix)

    _, num_bytes = fill(path, read, read, is_unread)
    head.pack()
    return num_bytes
