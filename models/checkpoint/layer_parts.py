"""List the tensors of a layer that are filled from a checkpoint, by their names there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.config import INDEX_KEY_NORM, QUERY_NORM, DecoderConfig
from models.decoder import DecoderLayer, SelfAttention
from models.layers.latent import LatentSelfAttention, UpProjection
from models.layers.linear import Linear
from models.layers.mixture import Mixture
from models.layers.recurrent import RecurrentMixer
from models.modelslim import CACHE_ENDS

SINKS = "sinks"  # attention sinks, one number for each query head


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What is filled of one layer or several, by names in a checkpoint."""

    # Held whole by every rank, except sinks and a cache's scales, which are cut by heads
    whole: dict[str, Tensor | None]
    # Vectors of recurrent layers, cut as `Share` says, with the shape that a checkpoint has of each
    vectors: dict[str, tuple[Tensor, tuple[int, ...]]]
    # Linears of a checkpoint that a linear joins
    joined: list[tuple[str, tuple[str, ...], Linear | UpProjection]]
    orders: dict[str, Tensor | None]  # orders of rows, as in `Destination.order`

    @staticmethod
    def of(layer: DecoderLayer, prefix: str, config: DecoderConfig, number: int = 0) -> LayerParts:
        """List the parts of layer `number` of the config, whose checkpoint names begin with `prefix`."""
        attention, mlp = layer.attention, layer.mlp
        parts = LayerParts({}, {}, [], {})
        whole, joined, orders = parts.whole, parts.joined, parts.orders
        norms = (layer.input_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
        whole |= {f"{prefix}{name}.weight": norm for name, norm in zip(config.norms, norms) if name}
        biases = layer.input_norm_bias, layer.mlp_norm_bias
        whole |= {f"{prefix}{name}.bias": bias for name, bias in zip(config.norms, biases) if name}
        block = f"{prefix}{config.mixer_name(number)}."
        for name, norm in attention.norms().items():
            whole[f"{block}{name}.weight"] = norm
            orders[f"{block}{name}"] = attention.order(name)
        for roles, linear in attention.joined():
            joined.append((block, roles, linear))
            orders |= {f"{block}{name}": attention.order(name) for name in roles}
        if isinstance(attention, RecurrentMixer) and (recurrent := config.recurrent_of(number)) is not None:
            shapes = recurrent.vectors()
            parts.vectors.update(
                (f"{block}{name}", (room, shapes[name])) for name, room in attention.vectors().items()
            )
        if isinstance(attention, LatentSelfAttention):
            whole[f"{prefix}self_attn.{QUERY_NORM}.bias"] = attention.query_norm_bias
            if attention.indexer is not None:
                bias = f"{block}{INDEX_KEY_NORM}.bias"
                whole[bias], orders[bias] = attention.indexer.key_norm_bias, attention.order(INDEX_KEY_NORM)
        if isinstance(attention, SelfAttention):
            whole[f"{prefix}self_attn.{SINKS}"] = attention.sinks
            scales = attention.key_scale, attention.value_scale
            whole |= {f"{prefix}self_attn.{end}": each for end, each in zip(CACHE_ENDS, scales)}
        names = config.mlp_names(number, prefix)
        experts = mlp.mlps() if isinstance(mlp, Mixture) else {"0": mlp}
        for which, expert in experts.items():
            gate, up, down = names[int(which)]
            joined += [("", (gate, up), expert.gate_up), ("", (down,), expert.down)]
        if isinstance(mlp, Mixture):
            block = f"{prefix}{mlp.config.block}."
            whole[f"{block}{mlp.config.router}.weight"] = mlp.router
            whole[f"{block}{mlp.config.router}.bias"] = mlp.router_bias
            correction: Tensor | None = mlp.correction
            if correction is not None and mlp.config.is_correction_row:
                correction = correction[None]
            whole[f"{block}{mlp.config.correction}"] = correction
            whole[f"{block}{mlp.config.shared_block}_gate.weight"] = mlp.shared_gate
            shared = config.shared_names(number, prefix)
            if mlp.shared is not None and shared is not None:
                joined += [("", shared[:2], mlp.shared.gate_up), ("", shared[2:], mlp.shared.down)]
        return parts
