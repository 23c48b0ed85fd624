"""Fit a simulated device's rates, host times and links to measurements.

A roofline (simulation/roofline.py) states how the parts of a step scale with its size and with the devices
that share it. With rates fitted to the steps of one device and to messages between several, it predicts steps
that several devices share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from devices.rates import DeviceRates
from models.config import DecoderConfig
from simulation.fitted import non_negative
from simulation.roofline import Roofline

# Factors by which rates are changed in turn, in falling order
FACTORS = (4.0, 2.0, 1.4, 1.2, 1.1, 1.05, 1.02)
MOST_TURNS = 50  # most turns with one factor
Rates = tuple[float, float, float]  # TFLOP/s, and the host's microseconds for a step and for a row


@dataclass(frozen=True, slots=True)
class StepSize:
    """The arguments of `Roofline.time_s` for one step, whatever the number of devices."""

    num_tokens: int
    captured: int
    num_sampled: int
    context: float
    pairs: float


def predicted_s(roofline: Roofline, size: StepSize) -> float:
    """Return the predicted seconds of a step of this size."""
    return roofline.time_s(size.num_tokens, size.captured, size.num_sampled, size.context, size.pairs)


def fitted_device(
    device: DeviceRates,
    config: DecoderConfig,
    steps: Sequence[tuple[StepSize, float]],
    memory_gb_per_s: float,
) -> DeviceRates:
    """Return the device whose product rate and host times come nearest to measured steps of one device.

    The mean of |log(predicted / measured)| is minimised, so that stalls count little. The memory rate is
    measured separately: steps of few rows all read the same weights, which cannot be told from host time, and
    devices that share a step do not share that time. Operators take no time of their own, because on a CPU
    the host is the device. In each turn all three rates are tried one factor away from the best, and the
    factors fall.
    """
    device = replace(
        device,
        launch_us=0.0,
        kernel_us=0.0,
        graph_us=0.0,
        memory_gb_per_s=memory_gb_per_s,
        matrix_efficiency=1.0,
        memory_efficiency=1.0,
    )
    dtype = config.dtype
    taken_s = np.log([seconds for _, seconds in steps])

    def of(rates: Rates) -> DeviceRates:
        tflop, host_us, row_us = rates
        return replace(
            device, tflop_per_s=device.tflop_per_s | {dtype: tflop}, host_us=host_us, row_us=row_us
        )

    def error(rates: Rates) -> float:
        roofline = Roofline(config, of(rates))
        said = np.log([predicted_s(roofline, size) for size, _ in steps])
        return float(np.abs(said - taken_s).mean())

    best = (0.1, 500.0, 100.0)  # the order of magnitude of one core
    least = error(best)
    for factor in FACTORS:
        for _ in range(MOST_TURNS):
            tried = [
                (best[0] * one, best[1] * other, best[2] * third)
                for one, other, third in product((factor, 1.0, 1 / factor), repeat=3)
            ]
            errors = [error(each) for each in tried]
            if min(errors) >= least:
                break
            least = min(errors)
            best = tried[errors.index(least)]
    return of(best)


def with_links(device: DeviceRates, num_devices: int, sums: Sequence[tuple[int, float]]) -> DeviceRates:
    """Return the device with links fitted to the seconds of sums over `num_devices` devices.

    The fit is a least squares of relative errors (see `DeviceRates.all_reduce_s`).
    """
    hops = 2 * (num_devices - 1).bit_length()
    moved = [2 * (num_devices - 1) / num_devices * num_bytes for num_bytes, _ in sums]
    taken_s = np.array([seconds for _, seconds in sums])
    left = np.array([[hops, each] for each in moved]) / taken_s[:, None]
    hop_s, byte_s = non_negative(left, np.ones(len(sums)))
    return replace(device, link_us=1e6 * hop_s, link_gb_per_s=1e-9 / max(byte_s, 1e-15), link_efficiency=1.0)
