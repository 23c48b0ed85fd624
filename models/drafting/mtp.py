"""The layer that a checkpoint has to predict one token more (MTP), and the tensors that it holds.

Multi-token prediction: DeepSeek-V3 (arXiv 2412.19437, section 2.2), GLM-4.5, Qwen3-Next and Qwen3.5 after it.
A linear joins the norms of a token's embedding and of what the target made of the position before, one layer
of the target's own kind follows, in Qwen's models one that attends to keys and values, and embedding and head
are the target's; copies of both that a checkpoint may have are not read. As in SGLang's deepseek_nextn.py and
vLLM's qwen3_next_mtp.py, what is read of the target comes after its last norm, and what the layer itself
made, in its place for a further token, after its own. The published code has the pair of token p + 1 and
feature p at position p; here it is at p + 1. Rotary embeddings depend on differences of positions, so the
result is the same.

Legend: T tokens of the step, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attention.recurrent import Recurrence
from attention.reference import Attention
from models.checkpoint.kept_weights import KeptWeights
from models.checkpoint.layer_parts import LayerParts
from models.checkpoint.modelslim import in_described
from models.checkpoint.stacked_experts import in_stacks
from models.checkpoint.stored_parts import in_parts
from models.checkpoint.weights import fill, placed
from models.decoder import Decoder, DecoderLayer, pack, pad_rows
from models.drafting.config import MtpConfig
from models.head import FIRST_KEY, FeaturePages, Head
from models.layers.linear import Linear, parameter
from models.layers.recurrent import RecurrentMixer
from models.ops.reference import Ops
from models.parallel.group import Group
from models.parallel.share import Share
from models.step_inputs import StepInputs


class Mtp(Head):
    """The layer that predicts further tokens. Fill its weights (models/drafting/mtp.py), then `pack` it once.

    The ranks of `group` share it as they share the target's layers.
    """

    def __init__(self, config: MtpConfig, ops: Ops, attention: Attention, group: Group, share: Share) -> None:
        super().__init__(config, ops, attention)
        self.part, self.share = share.part(config), share
        self.taps, self.eps = config.taps, config.rms_eps
        hidden, dtype, device = config.hidden_size, self.dtype, attention.device
        self.embedding_norm = parameter(hidden, dtype=dtype, device=device)
        self.hidden_norm = parameter(hidden, dtype=dtype, device=device)
        form = config.form(config.joining)
        self.joining = Linear(ops, 2 * hidden, hidden, False, dtype, device, form)
        sharing, recurrence = share.of_an_expert[1], Recurrence(attention.device)
        self.layer = DecoderLayer(self.part, 0, config.prefix, ops, attention, group, sharing, recurrence)
        self.norm = parameter(hidden, dtype=dtype, device=device)

    def pack(self) -> None:
        """Pack it, as `Decoder.pack` does."""
        pack(self)

    def attach(self, target: Decoder, features: FeaturePages) -> None:
        """From now on, store the target's features in `features`, and use its embedding, norm and head."""
        super().attach(target, features)
        self._last_norm: Callable[[Tensor], Tensor] = target.last_norm
        self._head_logits: Callable[[Tensor, int], Tensor] = target.head_logits
        self.parts = target.parts

    def fused(self, tapped: Tensor) -> Tensor:
        """Apply the target's last norm: [T, hidden] to [T, hidden]."""
        return self._last_norm(tapped)

    def computed(self, step: StepInputs, features: Tensor) -> Tensor:
        """Return the layer's output [T, hidden], after its norm, which is the next feature."""
        x, cos, sin = self._inputs(step, features)
        x, residual = self.layer(x, None, cos, sin, step)
        return self.ops.rms_norm(x + residual, self.norm, self.eps)[: len(features)]

    def fill(self, step: StepInputs, features: Tensor) -> None:
        """Write what the layer's attention caches, zeros at a position that has none."""
        x, cos, sin = self._inputs(step, features)
        normed = self.layer.normed_input(x)
        mixer = self.layer.attention
        assert not isinstance(mixer, RecurrentMixer), "such a layer keeps keys and values"
        mixer.write(normed, cos, sin, step, pad_rows(step.positions, len(x)) < FIRST_KEY)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V] of the layer's output [R, hidden], for this rank's vocabulary shard."""
        return self._head_logits(pad_rows(hidden, self.ops.padded(len(hidden))), len(hidden))

    def _inputs(self, step: StepInputs, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the layer reads [T, hidden], and the rotary embedding."""
        num_rows = self.ops.padded(len(features))
        token_ids, positions = pad_rows(step.token_ids, num_rows), pad_rows(step.positions, num_rows)
        embedded = self.ops.rms_norm(self._embedded(token_ids), self.embedding_norm, self.eps)
        feature = self.ops.rms_norm(pad_rows(features, num_rows), self.hidden_norm, self.eps)
        cos, sin = self.rope.cos_sin(positions, None, features.dtype)
        return self.joining(torch.cat((embedded, feature), -1)), cos, sin


def load(head: Mtp, path: str | Path, kept: KeptWeights | None = None) -> int:
    """Fill the layer from the target's checkpoint directory `path`, and pack it; return the bytes read.

    Takes, keeps and raises as models/checkpoint/weights.py does.
    """
    num_bytes = 0 if kept is None else kept.take(head)
    if not num_bytes:
        num_bytes = _read_checkpoint(head, path)
        if kept is not None:
            kept.keep(head)
    head.pack()
    return num_bytes


def _read_checkpoint(head: Mtp, path: str | Path) -> int:
    config, path = head.config, Path(path)
    assert isinstance(config, MtpConfig), "the layer has its own configuration"
    prefix, names = config.prefix, config.names
    parts = LayerParts.of(head.layer, prefix, config)
    norms = {
        names.embedding_norm: head.embedding_norm,
        names.hidden_norm: head.hidden_norm,
        names.norm: head.norm,
    }
    parts.whole.update({f"{names.root}{name}.weight": norm for name, norm in norms.items()})
    parts.joined.append(("", (config.joining,), head.joining))
    held = {name: outputs for name, _, outputs in head.part.linears()}
    places = placed(parts, config, held, head.share)
    described = in_described(in_parts(places, config.stored_form, path), config.quantization, path)
    read = in_stacks(described, config, path, (prefix,))
    is_shared = tuple(names.root + name for name in names.shared)

    def is_unread(name: str) -> bool:
        if not name.startswith(names.root) or name.startswith(is_shared):
            return True
        if name.startswith(f"{names.root}layers.") and not name.startswith(prefix):  # a further layer's
            return True
        return head.share.is_others_expert(name, config, 0, prefix)

    _, num_bytes = fill(path, read, read, is_unread)
    return num_bytes
