"""What does one layer of the decoder compute?

Legend: T tokens of the step, H query heads, K kv heads, D head dim, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention.reference import Attention, AttentionMetadata
from kv_cache.storage import KVCache
from models.config import DecoderConfig, Form
from models.dtypes import TORCH_DTYPES
from models.ops.int8 import quantize_rows
from models.ops.reference import Ops


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Room for a weight, not yet filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """A linear whose weight is filled as [out, in], then packed for the device.

    By its form the weight is stored in the model's type, in int8 beside a scale, or quantised to that.
    """

    def __init__(
        self,
        fused: Ops,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        form: Form = "plain",
    ) -> None:
        super().__init__()
        self.fused, self.form = fused, form
        stored = torch.int8 if form == "int8" else dtype
        self.weight: nn.Parameter | None = parameter(out_features, in_features, dtype=stored, device=device)
        self.weight_scale: nn.Parameter | None = None
        if form == "int8":
            self.weight_scale = parameter(out_features, 1, dtype=torch.float32, device=device)
        self.bias = parameter(out_features, dtype=dtype, device=device) if bias else None
        self.packed = None

    def pack(self) -> None:
        """To be called once, when the weight is filled; lets go of the unpacked weight."""
        assert self.weight is not None, "a linear is packed once"
        bias = None if self.bias is None else self.bias.data
        if self.form == "plain":
            self.packed = self.fused.pack(self.weight.data, bias)
        elif self.weight_scale is not None:
            self.packed = self.fused.pack_int8(self.weight.data, self.weight_scale.data[:, 0], bias)
        else:
            weight, scale = quantize_rows(self.weight.data)
            self.packed = self.fused.pack_int8(weight, scale[:, 0], bias)
        self.weight = self.weight_scale = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        assert self.packed is not None, "pack the decoder before its first step"
        linear = self.fused.linear if self.form == "plain" else self.fused.linear_int8
        return linear(x, self.packed)


class SelfAttention(nn.Module):
    """Grouped-query attention with one product for queries, keys and values."""

    def __init__(self, config: DecoderConfig, layer: int, fused: Ops, attention: Attention) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.eps = config.rms_eps
        self.fused, self.attention = fused, attention
        dtype, device = TORCH_DTYPES[config.dtype], attention.device
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        hidden, heads = config.hidden_size, config.num_heads * config.head_dim
        form = [config.form(f"model.layers.{layer}.self_attn.{name}") for name in ("q_proj", "o_proj")]
        self.qkv = Linear(fused, hidden, width, config.attention_bias, dtype, device, form[0])
        self.output = Linear(fused, heads, hidden, config.output_bias, dtype, device, form[1])
        self.query_norm = parameter(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None
        self.key_norm = parameter(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, cache: KVCache
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; puts the step's keys and values into the cache first."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query = self.fused.rms_norm(query, self.query_norm, self.eps)
            key = self.fused.rms_norm(key, self.key_norm, self.eps)
        query, key = self.fused.rotary(query, key, cos, sin)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        self.attention.write(key, value, keys, values, metadata)
        attended = self.attention.attend(query, keys, values, metadata, self.layer)
        return self.output(attended.flatten(1))


class MLP(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, config: DecoderConfig, layer: int, fused: Ops, device: torch.device) -> None:
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, TORCH_DTYPES[config.dtype]
        form = [config.form(f"model.layers.{layer}.mlp.{name}") for name in ("gate_proj", "down_proj")]
        self.fused = fused
        self.gate_up = Linear(fused, hidden, 2 * inner, config.mlp_bias, dtype, device, form[0])
        self.down = Linear(fused, inner, hidden, config.mlp_bias, dtype, device, form[1])

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.fused.swiglu(self.gate_up(x)))


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. Each norm takes in the sum that precedes it: a device fuses the two."""

    def __init__(self, config: DecoderConfig, layer: int, fused: Ops, attention: Attention) -> None:
        super().__init__()
        self.fused, self.eps = fused, config.rms_eps
        dtype = TORCH_DTYPES[config.dtype]
        self.input_norm = parameter(config.hidden_size, dtype=dtype, device=attention.device)
        self.attention = SelfAttention(config, layer, fused, attention)
        self.mlp_norm = parameter(config.hidden_size, dtype=dtype, device=attention.device)
        self.mlp = MLP(config, layer, fused, attention.device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
    ) -> tuple[Tensor, Tensor]:
        """(what is still to be added, the sum so far), in and out; the first layer has no sum yet."""
        if residual is None:
            x, residual = self.fused.rms_norm(x, self.input_norm, self.eps), x
        else:
            x, residual = self.fused.add_rms_norm(x, residual, self.input_norm, self.eps)
        x = self.attention(x, cos, sin, metadata, cache)
        x, residual = self.fused.add_rms_norm(x, residual, self.mlp_norm, self.eps)
        return self.mlp(x), residual
