"""An EAGLE-3 head: how it computes its drafts, and which tensors of its checkpoint it holds.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.
Names and formulas are those of SafeAILab/EAGLE, eagle/model/cnets.py, which vLLM and SGLang follow in their
llama_eagle3.py: `fc` makes one feature of three hidden states of the target; one Llama layer attends over the
norms of a token's embedding and of the feature before it, and adds to the feature; what comes out, before the
last norm, is the next feature. The published code has the pair of token p + 1 and feature p at position p;
here it is at p + 1. Rotary embeddings depend on differences of positions, so the result is the same. In a
checkpoint, `d2t` holds what is added to a draft token for the target's token; `t2d` follows from it.

Legend: T tokens of the step, R rows, V draft vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.reference import Attention
from models.checkpoint.destination import Destination
from models.checkpoint.weights import fill, rooms_of
from models.config import LAST_NORM
from models.decoder import SelfAttention, pad_rows
from models.drafting.config import EMBEDDING, LAYER, Eagle3Config
from models.head import FIRST_KEY, Head
from models.layers.linear import Linear, parameter
from models.layers.logit_parts import LogitParts
from models.layers.mlp import MLP
from models.ops.reference import Ops
from models.parallel.group import ALONE, Group
from models.parallel.share import Share
from models.step_inputs import StepInputs

WHOLE = Share()


class Eagle3(Head):
    """An EAGLE-3 head of one layer. models/drafting/eagle.py fills its weights; then `pack` it.

    The ranks of `group` share its layer as they share the target's, and its vocabulary; each has `fc`, its
    embedding and its norms whole.
    """

    def __init__(
        self,
        config: Eagle3Config,
        ops: Ops,
        attention: Attention,
        group: Group = ALONE,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(config, ops, attention)
        self.part = part = config.part(share)
        self.share = share
        self.taps, self.eps = config.taps, config.rms_eps
        self.adds_normed = config.norm_before_residual
        hidden, dtype, device = config.hidden_size, self.dtype, attention.device
        self.fc = Linear(ops, len(self.taps) * hidden, hidden, False, dtype, device)
        self.input_norm = parameter(hidden, dtype=dtype, device=device)
        self.hidden_norm = parameter(hidden, dtype=dtype, device=device)
        self.self_attention = SelfAttention(part, 0, LAYER, ops, attention, group, 2 * hidden)
        self.mlp_norm = parameter(hidden, dtype=dtype, device=device)
        self.mlp = MLP(part, part.mlp_names(0, LAYER)[0], part.intermediate_size, ops, device, group)
        self.norm = parameter(hidden, dtype=dtype, device=device)
        self.head = Linear(ops, hidden, part.draft_vocab_size, False, dtype, device)
        if share.tensors > 1:
            self.parts = LogitParts(group, share.tokens(config.of_drafts), config.draft_vocab_size, ops)
        # What the embeddings of a target whose hidden states are rotated are multiplied with, transposed
        self.rotation: Tensor | None = None
        self.embedding: nn.Parameter | None = None
        if config.owns_embedding:
            self.embedding = parameter(config.vocab_size, hidden, dtype=dtype, device=device)
        if config.draft_vocab_size < config.vocab_size:
            self.offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device)

    def fused(self, tapped: Tensor) -> Tensor:
        """Map three hidden states [T, 3 * hidden] to a feature [T, hidden]."""
        num_tokens = len(tapped)
        joined: Tensor = self.fc(pad_rows(tapped, self.ops.padded(num_tokens)))
        return joined[:num_tokens]

    def computed(self, step: StepInputs, features: Tensor) -> Tensor:
        """Return the layer's output [T, hidden], which is the next feature."""
        x, residual, cos, sin = self._inputs(step, features)
        x = self.self_attention(x, cos, sin, step)
        x, residual = self.ops.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        output: Tensor = self.mlp(x) + residual
        return output[: len(features)]

    def fill(self, step: StepInputs, features: Tensor) -> None:
        """Write the layer's keys and values, zeros at a position that has none."""
        x, _, cos, sin = self._inputs(step, features)
        self.self_attention.write(x, cos, sin, step, pad_rows(step.positions, len(x)) < FIRST_KEY)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [R, V] of hidden states [R, hidden], for this rank's draft vocabulary shard."""
        num_rows = len(hidden)
        hidden = pad_rows(hidden, self.ops.padded(num_rows))
        logits: Tensor = self.head(self.ops.rms_norm(hidden, self.norm, self.eps))
        return logits[:num_rows]

    def _inputs(self, step: StepInputs, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what attention reads [T, 2 * hidden], what the layer adds to, and the rotary embedding."""
        num_rows = self.ops.padded(len(features))
        token_ids, positions = pad_rows(step.token_ids, num_rows), pad_rows(step.positions, num_rows)
        features = pad_rows(features, num_rows)
        if self.embedding is not None:
            embedded = F.embedding(token_ids, self.embedding)
        else:
            embedded = self._embedded(token_ids)
            embedded = embedded if self.rotation is None else F.linear(embedded, self.rotation)
        normed = self.ops.rms_norm(features, self.hidden_norm, self.eps)
        x = torch.cat((self.ops.rms_norm(embedded, self.input_norm, self.eps), normed), -1)
        cos, sin = self.rope.cos_sin(positions, None, features.dtype)
        return x, normed if self.adds_normed else features, cos, sin


OFFSETS, FOLLOWS = "d2t", "t2d"


def load(head: Eagle3, path: str | Path, rotation: Tensor | None = None) -> int:
    """Fill a head from the checkpoint directory `path`, and pack it; return the bytes of the tensors read.

    The head was trained with hidden states of a model whose own are multiplied with `rotation` [hidden,
    hidden], if it is given.
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
    if rotation is not None:
        _turn(head, rotation)
    head.pack()
    return num_bytes


def _turn(head: Eagle3, rotation: Tensor) -> None:
    """Let a head read rotated hidden states and embeddings, by turning both back."""
    weight = head.fc.weight
    assert weight is not None, "a head is turned before it is packed"
    parts = weight.data.float().unflatten(1, (len(head.taps), -1))
    weight.data.copy_((parts @ rotation.to(parts.device)).flatten(1))
    head.rotation = rotation.to(weight.device, weight.dtype)


def _places(head: Eagle3) -> dict[str, Destination]:
    config, share, attention, mlp = head.config, head.share, head.self_attention, head.mlp
    assert isinstance(config, Eagle3Config), "an EAGLE-3 head has its own configuration"
    whole: dict[str, Tensor | None] = {
        f"{LAST_NORM}.weight": head.norm,
        f"{LAYER}input_layernorm.weight": head.input_norm,
        f"{LAYER}hidden_norm.weight": head.hidden_norm,
        f"{LAYER}post_attention_layernorm.weight": head.mlp_norm,
        OFFSETS: head.offsets,
        EMBEDDING: head.embedding,
    }
    places = {
        name: Destination(each.data, tuple(each.shape), ())
        for name, each in whole.items()
        if each is not None
    }
    joined: list[tuple[str, tuple[str, ...], Linear]] = [
        ("", ("fc",), head.fc),
        ("", ("lm_head",), head.head),
        (f"{LAYER}self_attn.", ("q_proj", "k_proj", "v_proj"), attention.qkv),
        (f"{LAYER}self_attn.", ("o_proj",), attention.output),
        (f"{LAYER}mlp.", ("gate_proj", "up_proj"), mlp.gate_up),
        (f"{LAYER}mlp.", ("down_proj",), mlp.down),
    ]
    shapes = {name: (outputs, inputs) for name, inputs, outputs in config.linears()}
    held = {name: outputs for name, _, outputs in head.part.linears()}
    for prefix, names, linear in joined:
        names = tuple(prefix + name for name in names)
        for kind, rooms in rooms_of(linear, [held[name] for name in names]):
            assert kind == "weight", "heads have plain weights, and no biases"
            for name, room in zip(names, rooms):
                slices = () if linear is head.fc else share.slices(f"{name}.{kind}", config.of_drafts)
                places[f"{name}.{kind}"] = Destination(room, shapes[name], slices)
    return places
