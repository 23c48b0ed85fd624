"""The fit finds the device with which steps and collectives were made.

It predicts what several devices take together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from devices.rates import DeviceRates
from models.config import DecoderConfig
from recipes.assembly.families import decoder_config
from simulation.roofline import Roofline, StepSize, fitted_device, predicted_s, with_links

CONFIG: DecoderConfig = decoder_config(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }
)
CORE = replace(
    DeviceRates.load("epyc"),
    tflop_per_s={"float32": 0.07},
    memory_gb_per_s=11.0,
    host_us=900.0,
    row_us=600.0,
    launch_us=0.0,
    kernel_us=0.0,
    graph_us=0.0,
    matrix_efficiency=1.0,
    memory_efficiency=1.0,
)


def sizes(random: np.random.Generator) -> list[StepSize]:
    """Steps of decodes, and of prompts."""
    found = []
    for _ in range(60):
        rows, seen = int(random.integers(1, 33)), float(random.integers(10, 400))
        found.append(StepSize(rows, rows, rows, 12 * rows * seen, 12 * rows * seen))
        tokens, spans = int(random.integers(16, 512)), int(random.integers(1, 8))
        pairs = 12 * tokens**2 / (2 * spans)
        found.append(StepSize(tokens, spans, spans, 12.0 * tokens, pairs))
    return found


@pytest.mark.parametrize("stalls", [0.0, 0.1])
def test_rates_are_found_again_and_say_what_two_devices_take(stalls: float) -> None:
    random = np.random.default_rng(4)
    truth, all_sizes = Roofline(CONFIG, CORE), sizes(random)
    slow = np.where(random.random(len(all_sizes)) < stalls, 5.0, 1.0)
    steps = [(size, predicted_s(truth, size) * by) for size, by in zip(all_sizes, slow)]
    found = fitted_device(DeviceRates.load("epyc"), CONFIG, steps, 11.0)
    assert found.tflop_per_s["float32"] == pytest.approx(0.07, rel=0.05)
    assert found.host_us == pytest.approx(900.0, rel=0.2)
    assert found.row_us == pytest.approx(600.0, rel=0.1)
    both = [Roofline(CONFIG, replace(each, link_us=700.0, link_gb_per_s=1.5), 2) for each in (found, CORE)]
    for size in all_sizes:
        said, true = (predicted_s(each, size) for each in both)
        assert said == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_links_are_found_again(num_devices: int) -> None:
    linked = replace(CORE, link_us=350.0, link_gb_per_s=1.25, link_efficiency=1.0)
    sums = [(size, linked.all_reduce_s(size, num_devices)) for size in (3072, 24576, 196608, 786432)]
    found = with_links(CORE, num_devices, sums)
    assert found.link_us == pytest.approx(350.0)
    assert found.link_gb_per_s == pytest.approx(1.25)
    assert found.all_reduce_s(10**6, num_devices) == pytest.approx(linked.all_reduce_s(10**6, num_devices))


def test_products_are_read_before_they_are_multiplied_on_a_core_and_meanwhile_elsewhere() -> None:
    assert CORE.operator_s(7e9, "float32", 11e8) == pytest.approx(0.2)
    assert replace(CORE, reads_ahead=True).operator_s(7e9, "float32", 11e8) == pytest.approx(0.1)
