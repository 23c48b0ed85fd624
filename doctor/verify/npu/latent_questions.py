"""Ask a device whether latent attention returns right sums, and its fused prolog is right and faster.

Legend: T tokens of the step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.latent import LatentAttention
from attention.reference import StaticDecodes
from continuous_batching.batch import Batch
from devices.ascend_limits import LATENT, LATENT_ROPE, PROLOG_HIDDEN, AscendProduct
from devices.int8 import quantize_rows
from doctor.verify.npu.questions import NEAR, Found, Probe, captured, furthest, rows_apart, time_us
from kv_cache.device.storage import KVCache, LayerPages
from models.config import DecoderConfig
from models.layers.latent import LatentSelfAttention
from models.parallel.group import ALONE
from models.quantization import Quantization
from models.step_inputs import StepInputs
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import decoder_config
from recipes.machine import Npu

PAGE, ROWS = 128, 32
NEAR_JOINED = 3 * NEAR  # Several products are rounded between, in int8 to another level where one is near.
DEEPSEEK: dict[str, Any] = {  # one of sixteen ranks' share of DeepSeek-V3's attention
    "model_type": "deepseek_v3",
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 128,
    "hidden_size": 7168,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "routed_scaling_factor": 1.0,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "scoring_func": "sigmoid",
}


class OneLayer:
    """Latent attention of one layer over empty pages, with or without the fused prolog.

    Its weights are drawn from one seed, so that both ways have the same.
    """

    def __init__(self, machine: Npu, config: DecoderConfig, *, joins: bool) -> None:
        from attention.npu.latent_attention import FusedLatentAttention
        from models.ops.npu.ops import NpuOps

        product = replace(machine.product, joins_latents=joins)
        self.config, self.device = config, machine.device
        self.attention = FusedLatentAttention(shape_of(PAGE, config), machine.device, product)
        self.layer = LatentSelfAttention(config, 0, "model.layers.0.", NpuOps(product), self.attention, ALONE)
        self._fill()
        self.layer.pack()
        self.cache = KVCache([LayerPages(self.attention.new_planes)], PAGE, [1 + ROWS])

    def _fill(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for names, linear in self.layer.joined():
            assert linear.weight is not None, "it is filled once"
            rows = torch.randn(linear.weight.shape, generator=generator) / linear.weight.shape[1] ** 0.5
            order = self.layer.order(names[0])
            rows = rows if order is None else rows[order]
            if linear.weight_scale is not None:
                rows, scale = quantize_rows(rows)
                linear.weight_scale.data.copy_(scale)
            linear.weight.data.copy_(rows)
            linear.pack()
        for norm in self.layer.norms().values():
            assert norm is not None, "queries are compressed"
            norm.data.copy_(1 + torch.randn(norm.shape, generator=generator) / 4)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, StepInputs]:
        """Return the inputs of a step of decodes: one token for each row, at position 0."""
        rows = np.arange(ROWS)
        nothing = np.empty(0, np.int64)
        batch = Batch(rows, np.zeros(ROWS, np.int64), np.ones(ROWS, np.int64), nothing, nothing, nothing)
        metadata = self.attention.plan(batch, 1 + rows.astype(np.int32)[:, None], (1 + rows) * PAGE)
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(ROWS, self.config.hidden_size, generator=generator)
        angles = torch.arange(ROWS)[:, None] * torch.logspace(0, -3, LATENT_ROPE // 2).repeat(2)
        x, cos, sin = (each.bfloat16().to(self.device) for each in (x, angles.cos(), angles.sin()))
        positions = torch.zeros(ROWS, dtype=torch.int64, device=self.device)
        return x, cos, sin, StepInputs(positions, positions, metadata, self.cache)

    def found(self, output: Tensor) -> list[Tensor]:
        """Return the output and the rows written to both caches, in float32 on the host."""
        return [each.cpu().float() for each in (output, *(plane[1:, 0] for plane in self.cache.of(0)))]


def joins_latents(machine: Npu) -> Found:
    """Ask whether the fused prolog is right for decodes and faster, with weights in bfloat16 and in int8.

    It is compared with the launches that it replaces, and in a graph with itself outside of one.
    """
    said: list[str] = []
    is_yes = True
    hidden = PROLOG_HIDDEN[0] if machine.asked.virtual else DEEPSEEK["hidden_size"]
    plain = decoder_config(DEEPSEEK | {"hidden_size": hidden})
    for name, quantization in (("bfloat16", None), ("int8", Quantization(ignore=()))):
        found, words = _asked(machine, replace(plain, quantization=quantization))
        is_yes, said = is_yes and found, [*said, f"{name}: {words}"]
    return is_yes, "; ".join(said)


def _asked(machine: Npu, config: DecoderConfig) -> Found:
    ways = [OneLayer(machine, config, joins=joins) for joins in (False, True)]
    calls = [partial(way.layer, *way.inputs()) for way in ways]
    theirs, joined = (way.found(call()) for way, call in zip(ways, calls))
    if (far := max(map(rows_apart, joined, theirs))) > NEAR_JOINED:
        return False, f"{far:.2g} from what is computed apart"
    if not _is_same_in_a_graph(ways[1]):
        return False, "a graph makes other queries"
    if machine.asked.virtual:
        return machine.product.joins_latents, "right, and as it was: a stand-in has no times"
    apart_us, joined_us = (time_us(machine, call) for call in calls)
    return joined_us < apart_us, f"{joined_us:.0f} us against {apart_us:.0f} us"


def _is_same_in_a_graph(way: OneLayer) -> bool:
    x, cos, sin, step = way.inputs()
    npu = torch.get_device_module("npu")
    prolog, graph = way.layer.prolog, npu.NPUGraph()
    assert prolog is not None, "it joins"
    rows, scale = way.layer.rows(x)
    latents, rope_keys = way.cache.of(0)
    call = partial(
        way.attention.write_joined, rows, scale, prolog, cos, sin, latents, rope_keys, step.metadata
    )
    wanted = call()
    with captured(graph):
        found = call()
    graph.replay()
    pairs = zip(found, wanted)
    return all(torch.equal(one, other) for one, other in pairs if one is not None and other is not None)


def sums_latents(machine: Npu) -> Found:
    """Ask whether attention to latents returns right outputs and sums of exponents for rows of many heads.

    They are compared with plain torch on the host, in float32 over the same pages; a row has one key, and
    another is at a page's end. In a graph, a replay has other lengths than the capture. Drafts have a mask
    where decodes have none, so that both are asked for then.
    """
    from attention.npu.latent_attention import FusedLatentAttention

    npu, page = torch.get_device_module("npu"), PAGE // 8  # Each of eight ranks holds an eighth of a page.
    config = replace(decoder_config(DEEPSEEK), num_heads=16 if machine.asked.virtual else 64)
    shape, stops = shape_of(page, config), np.array([300, 1, 2 * page, 77])
    plain = LatentAttention(replace(shape, dtype=torch.float32))
    rows, pages = np.arange(len(stops)), -(-int(stops.max()) // page)
    table = 1 + np.arange(len(stops) * pages, dtype=np.int32).reshape(len(stops), pages)
    widths = LATENT, LATENT_ROPE
    planes = [torch.randn(1 + table.size, page, 1, width).to(shape.dtype) for width in widths]
    query = torch.randn(len(stops), shape.num_heads, sum(widths)).to(shape.dtype) / sum(widths) ** 0.25
    batch = Batch(rows, stops - 1, stops, *(np.empty(0, np.int64),) * 3)
    unwritten = np.zeros(len(stops), np.int64)
    latents, rope_keys = planes
    metadata = plain.plan(batch, table, unwritten)
    wanted = plain.attend_with_sums(query.float(), latents.float(), rope_keys.float(), metadata, 0)
    query, latents, rope_keys = (each.to(machine.device) for each in (query, latents, rope_keys))
    places = torch.zeros(len(stops), dtype=torch.int32, device=machine.device)
    decodes = StaticDecodes(places, torch.from_numpy(table).to(machine.device), places)
    found = []
    for unmasks in {False, machine.product.unmasks_decodes}:
        product = replace(machine.product, unmasks_decodes=unmasks)
        fused = FusedLatentAttention(shape, machine.device, product)
        found.append(
            fused.attend_with_sums(query, latents, rope_keys, fused.plan(batch, table, unwritten), 0)
        )
        static, graph = fused.plan_static(decodes), npu.NPUGraph()
        with captured(graph):
            replayed = fused.attend_with_sums(query, latents, rope_keys, static, 0)
        fused.replay(graph, [static], stops.tolist())
        found.append(replayed)
    far = max(rows_apart(output, wanted[0]) for output, _ in found)
    far_sums = max(furthest((sums.cpu().float() - wanted[1]).abs()) for _, sums in found)
    return max(far, far_sums) <= NEAR, f"{far:.2g} from float32, and logarithms of sums {far_sums:.2g}"


def _has_latents(product: AscendProduct) -> bool:
    return product.has_latents


LATENT_PROBES = (
    Probe(
        "sums_latents",
        "are the sums of exponents that attention to latents returns right, also in a graph?",
        _has_latents,
        sums_latents,
    ),
    Probe(
        "joins_latents",
        "is one launch of all before latent attention right and faster?",
        _has_latents,
        joins_latents,
    ),
)
