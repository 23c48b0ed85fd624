"""Define the configurations of heads that draft: an EAGLE-3 head, and a checkpoint's own prediction layer.

models/drafting/eagle.py and models/drafting/mtp.py compute them. Nothing here imports torch: a plan of the
memory counts a head, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from models.config import DecoderConfig, HeadConfig, LayerSpec
from models.parallel.share import Share

# An EAGLE-3 head's names as they are read: its layer, and the embedding that it may have of its own. The file
# calls that one as a decoder without a head does.
LAYER, EMBEDDING = "midlayer.", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The configuration of the layer of an EAGLE-3 head."""

    draft_vocab_size: int
    owns_embedding: bool
    norm_before_residual: bool  # whether the layer adds to the normed feature

    def part(self, share: Share) -> Eagle3Config:
        """Return what a rank computes of the layer and of the draft vocabulary; `fc` is whole on each.

        Raises ValueError if the ranks cannot share it.
        """
        part = replace(share, experts=1, contexts=1).part(self)
        assert isinstance(part, Eagle3Config), "a part is of the same kind"
        return replace(
            part, vocab_size=self.vocab_size, draft_vocab_size=-(-self.draft_vocab_size // share.tensors)
        )

    @property
    def of_drafts(self) -> Eagle3Config:
        """The same with the draft vocabulary in place of the target's, as `Share` cuts a head."""
        return replace(self, vocab_size=self.draft_vocab_size)

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "fc", len(self.taps) * hidden, hidden
        yield f"{LAYER}self_attn.q_proj", 2 * hidden, heads
        yield f"{LAYER}self_attn.k_proj", 2 * hidden, kv_heads
        yield f"{LAYER}self_attn.v_proj", 2 * hidden, kv_heads
        yield f"{LAYER}self_attn.o_proj", heads, hidden
        yield f"{LAYER}mlp.gate_proj", hidden, inner
        yield f"{LAYER}mlp.up_proj", hidden, inner
        yield f"{LAYER}mlp.down_proj", inner, hidden
        yield "lm_head", hidden, self.draft_vocab_size

    @property
    def num_parameters(self) -> int:
        """Number of weights of the head, without those that it shares with the target."""
        norms = 4 * self.hidden_size
        embedding = self.owns_embedding * self.vocab_size * self.hidden_size
        return norms + embedding + sum(inputs * outputs for _, inputs, outputs in self.linears())


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """The names in a checkpoint of the layer that predicts further tokens, all of which begin with `root`."""

    root: str
    layer: str  # how attention and MLP begin
    joining: str
    embedding_norm: str
    hidden_norm: str
    norm: str  # the norm behind the layer
    shared: tuple[str, ...]  # how copies of the target's tensors begin


def names_behind(number: int) -> MtpNames:
    """Return the names of DeepSeek and GLM for layer `number` of the checkpoint."""
    return MtpNames(
        root=f"model.layers.{number}.",
        layer="",
        joining="eh_proj",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        norm="shared_head.norm",
        shared=("embed_tokens.", "shared_head.head."),
    )


def names_beside(block: str) -> MtpNames:
    """Return the names of Qwen3-Next and Qwen3.5 for the first layer of this block of the checkpoint."""
    return MtpNames(
        root=block,
        layer="layers.0.",
        joining="fc",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        norm="norm",
        shared=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(HeadConfig):
    """The configuration of a layer of the target's checkpoint, behind or beside the target's own."""

    names: MtpNames

    @property
    def prefix(self) -> str:
        """How the names of its attention and its MLP begin."""
        return self.names.root + self.names.layer

    @property
    def joining(self) -> str:
        """The linear that joins embedding and feature."""
        return self.names.root + self.names.joining

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Yield the checkpoint name, inputs and outputs of every linear; the head is the target's."""
        for name, inputs, outputs in DecoderConfig.linears(self):
            yield name.replace("model.layers.0.", self.prefix), inputs, outputs
        yield self.joining, 2 * self.hidden_size, self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of weights of the layer, without those that it shares with the target."""
        layer: int = DecoderConfig.num_parameters.fget(self)  # type: ignore[attr-defined]  # a property
        return layer + 2 * self.hidden_size * (1 + self.hidden_size) - self.vocab_size * self.hidden_size


def has_int8_cache(target: DecoderConfig) -> bool:
    """Whether a head's keys and values are int8: it has no scales for channels, if its target has these."""
    return target.int8_cache and target.scales_in_pages


def mtp_config(target: DecoderConfig, num_kept: int) -> MtpConfig:
    """Return the configuration of the first of these layers of `target`; raises ValueError if it has none."""
    if not target.num_unread_layers:
        raise ValueError(
            "the number of prediction layers in the model's configuration (num_nextn_predict_layers or"
            " mtp_num_hidden_layers) is 0, so its checkpoint has no layer that predicts further tokens"
        )
    values = {each.name: getattr(target, each.name) for each in fields(target)}
    mixture = target.mixture and replace(target.mixture, placement=())
    # Such a layer keeps keys and values, also where the model's last layer keeps a state
    mixers = [each.mixer for each in target.layers if each.mixer != "recurrent"]
    layer = LayerSpec(
        mixers[-1] if mixers else "attention",
        mlp="dense" if mixture is None else "experts",
        index=None if target.layers[-1].index is None else "own",
    )
    block = target.unread_block
    names = names_beside(block) if block else names_behind(target.num_layers)
    values |= {"family": "mtp", "layers": (layer,), "mixture": mixture, "recurrent": None}
    values |= {"tie_embeddings": True, "eos_token_ids": (), "num_unread_layers": 0, "window_groups": ()}
    values["int8_cache"] = has_int8_cache(target)
    return MtpConfig(**values, taps=(target.num_layers,), num_kept=num_kept, names=names)
