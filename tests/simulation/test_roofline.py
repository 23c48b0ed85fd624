"""A simulated step of experts and latents takes what it must read and multiply, and little more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from continuous_batching.batch import Batch
from continuous_batching.slots import SlotPool
from devices.rates import DeviceRates
from kv_cache.pages import PageCopy
from models.config import DecoderConfig
from models.cost import NORMED, REDUCTIONS, Counts, attention_operations, attention_products
from models.quantization import Quantization
from recipes.assembly.families import decoder_config
from simulation.roofline import Roofline
from tests.recipes import published

BARE = replace(DeviceRates.load("ascend910b"), host_us=0, graph_us=0, kernel_us=0, launch_us=0)
MODELS = {name: getattr(published, name) for name in ("MIXTRAL_8X7B", "QWEN3_30B_A3B", "DEEPSEEK_V2_LITE")}


def config_of(name: str) -> DecoderConfig:
    return decoder_config(MODELS[name])


def step_s(config: DecoderConfig, num_tokens: int, tensor: int = 1) -> float:
    return Roofline(config, BARE, tensor, graphs=4096).time_s(num_tokens, num_tokens, num_tokens, 0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_one_token_reads_its_own_experts(name: str) -> None:
    config = config_of(name)
    reads_s = config.step_weight_bytes / BARE.bytes_per_s
    assert reads_s < step_s(config, 1) < 1.25 * reads_s


@pytest.mark.parametrize("name", MODELS)
def test_many_tokens_read_all_experts(name: str) -> None:
    config = config_of(name)
    assert step_s(config, 512) > 0.95 * config.weight_bytes / BARE.bytes_per_s


@pytest.mark.parametrize("name", MODELS)
def test_devices_that_share_experts_each_read_a_part(name: str) -> None:
    config = config_of(name)
    alone_s, shared_s = step_s(config, 1), step_s(config, 1, tensor=2)
    assert alone_s / 2 < shared_s < alone_s


def test_every_linear_of_attention_counts_once() -> None:
    for hf in (published.QWEN3_8B, published.DEEPSEEK_V2_LITE, published.DEEPSEEK_V3):
        config = decoder_config(hf)
        counted = sum(each.inputs * each.outputs for each in attention_products(config, 0))
        whole = sum(inputs * outputs for _, inputs, outputs in config.mixer_linears(0))
        assert counted == whole


def test_latents_are_absorbed_by_decodes_and_expanded_by_prompts() -> None:
    config = config_of("DEEPSEEK_V2_LITE")
    assert attention_operations(config, 4000, 4000) == 2 * (2 * 512 + 64) * 4000
    pairs = 4000 * 4001 / 2
    assert attention_operations(config, 4000, pairs) == 2 * (192 + 128) * pairs + 2 * 512 * 256 * 4000
    dense: Any = decoder_config(published.QWEN3_8B)
    assert attention_operations(dense, 10, 10) == 4 * 128 * 10


def test_a_choice_is_read_by_each_token_of_a_span_and_scored_by_all() -> None:
    """Each query behind the first 2,048 tokens gathers its own; the indexers score all of the span's past."""
    config = decoder_config(published.DEEPSEEK_V3_2)
    device = DeviceRates.load("ascend910b")
    starts, stops = np.array([0, 0, 1000, 3000]), np.array([2048, 700, 5000, 3001])
    batch = Batch(np.arange(4), starts, stops, np.arange(4), np.arange(4), stops)
    costs = Roofline(config, device)
    read = [
        sum(min(place + 1, 2048) for place in range(start, stop))
        for start, stop in zip(starts.tolist(), stops.tolist())
    ]
    context, pairs = costs.seen(batch, int((stops - starts).sum()))
    assert pairs == 61 * sum(read)
    assert context == 61 * (2048 + 700 + sum(read[2:]))
    for num_tokens, ways in ((255, 1), (256, 16)):  # the devices divide the rows of longer steps
        operations, moved = Counts(config, 16).indexers(num_tokens, 61 * 8001, 61 * 10)
        assert operations == 2 * 64 * 128 * 61 * 10 / ways
        assert moved == 256 * 61 * 8001
    short = Batch(*(each[:2] for each in (batch.slots, starts, stops, *[np.arange(4)] * 2, stops)))
    plain = replace(config, layers=tuple(replace(each, index=None) for each in config.layers))
    assert Roofline(config, device).seen(short, 2748)[1] == Roofline(plain, device).seen(short, 2748)[1]


def test_large_steps_divide_their_rows_and_captured_ones_never() -> None:
    """Rows in 16 bits move the same bytes between devices, and in int8 a quarter less for what reads int8."""
    config, tensor, num_tokens = decoder_config(published.QWEN3_8B), 8, 2048
    whole, divided = (Roofline(config, BARE, tensor, 4096, least_divided=each) for each in (0, 1024))
    prompt = num_tokens, 1, 1, 0, 0
    hidden = num_tokens * config.hidden_size * config.dtype_bytes
    saved_s = config.num_layers * NORMED * (1 - 1 / tensor) * hidden / BARE.bytes_per_s
    assert whole.time_s(*prompt) - divided.time_s(*prompt) == pytest.approx(saved_s)
    few, decodes = (1023, 1, 1, 0, 0), (num_tokens, num_tokens, num_tokens, 0, 0)
    assert divided.time_s(*few) == whole.time_s(*few)
    assert divided.time_s(*decodes) == whole.time_s(*decodes), "all of it is captured"
    int8 = Counts(replace(config, quantization=Quantization(ignore=())), tensor, least_divided=1024)
    latency_s = BARE.all_reduce_s(0, tensor)
    sums_s, narrow_s = (int8.sums_s(BARE, num_tokens, divides=each) for each in (False, True))
    num_sums = REDUCTIONS * config.num_layers
    assert narrow_s - num_sums * latency_s == pytest.approx(0.75 * (sums_s - num_sums * latency_s))


def test_devices_that_divide_the_cache_read_a_part_of_it_and_send_queries_and_outputs() -> None:
    config, rows, context, tensor = decoder_config(published.DEEPSEEK_V3), 64, 8192, 16
    slots = np.arange(rows)
    ends = np.full(rows, context)
    decodes = Batch(slots, ends - 1, ends, slots, slots, ends)
    table = SlotPool(rows, context, 256)
    alone, divided = (
        Roofline(config, BARE, tensor, 4096, contexts=each).step_s(decodes, table) for each in (1, tensor)
    )
    read_s = config.num_layers * rows * context * 576 * 2 / BARE.bytes_per_s
    sent = rows * 128 * (576 * 2 + 513 * 4) * 15 / 16  # queries in 16 bits, parts and their sums in 32
    sent_s = config.num_layers * (
        2 * BARE.send_s(0) + sent / (BARE.link_gb_per_s * 1e9 * BARE.link_efficiency)
    )
    # A part is read faster than it is multiplied with the absorbed queries of all heads
    scored_s = config.num_layers * rows * context * 8 * 2 * 1088 / BARE.flop_per_s("bfloat16")
    assert alone - divided == pytest.approx(read_s - scored_s - sent_s, rel=0.02)
    prompt = Batch(slots[:1], ends[:1] - 2048, ends[:1], slots[:1], slots[:1], ends[:1])
    alone, divided = (
        Roofline(config, BARE, tensor, 4096, contexts=each).step_s(prompt, table) for each in (1, tensor)
    )
    gathered = config.num_layers * context * 576 * 2 * 15 / 16
    assert divided - alone == pytest.approx(BARE.send_s(gathered) + 2 * gathered / BARE.bytes_per_s, rel=0.02)


def test_a_copied_state_is_read_and_written_whole() -> None:
    """Its group comes behind those of tokens, and it is as large whatever a page of tokens is."""
    config, one = decoder_config(published.QWEN3_NEXT_80B), np.array([1])
    step = Batch(one - 1, one * 63, one * 64, one - 1, one - 1, one * 64)
    tokens, state = (replace(step, copies=(PageCopy(one, one + 1, group=each),)) for each in (0, 1))
    for tensor, contexts in ((1, 1), (8, 1), (8, 4)):
        costs, slots = Roofline(config, BARE, tensor, contexts=contexts), SlotPool(1, 128, 64)
        alone_s, copied_s, kept_s = (costs.step_s(each, slots) for each in (step, tokens, state))
        page_bytes = 64 * config.kv_bytes_per_token(tensor) / contexts
        assert copied_s - alone_s == pytest.approx(2 * page_bytes / BARE.bytes_per_s)
        assert kept_s - alone_s == pytest.approx(2 * config.state_bytes / tensor / BARE.bytes_per_s)
