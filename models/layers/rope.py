"""Compute the angles by which queries and keys are rotated.

Rotary position embedding (arXiv 2104.09864) and its extensions to longer contexts: linear interpolation
(2306.15595), dynamic NTK, YaRN (2309.00071), LongRoPE (2402.13753) and Llama 3.1's, with the same numbers as
in transformers.

Legend: T tokens of the step, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from models.config import RopeConfig, needs_long_factors


class Rope:
    """Cosines and sines of the step's positions."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        frequencies, attention_factor = _frequencies(config)  # frequencies of short requests, for "longrope"
        fixed = (0, config.num_fixed // 2)  # pairs that are not rotated
        self.frequencies = F.pad(frequencies, fixed)  # [D / 2], radians per position
        self.factors = F.pad(torch.full_like(frequencies, attention_factor), fixed, value=1.0)  # [D / 2]
        self._cos_sin: tuple[Tensor, Tensor] | None = None  # [positions, D]
        self._stretched: Tensor | None = None  # [lengths, D / 2], for "dynamic"

    def tabulate(self, num_positions: int, dtype: torch.dtype) -> None:
        """Make `cos_sin` look up positions below this, and for "dynamic" the base of lengths up to it.

        The table is computed on the host, once: a device would compute it in every step, and perhaps less
        exactly, since angles reach as many radians as there are positions. For "longrope" the longest request
        decides which factors rotate all requests, as in vLLM, because keys that are cached and shared have
        been rotated once and for all.
        """
        if self.config.kind == "dynamic":
            self._stretched = self.stretched(torch.arange(num_positions + 1)).to(self.device)
            return
        if needs_long_factors(self.config, num_positions):
            long = _divided(self.config, self.config.long_factors)
            self.frequencies = F.pad(long, (0, self.config.num_fixed // 2))
        cos, sin = self._turned(torch.arange(num_positions), self.frequencies, dtype)
        self._cos_sin = cos.to(self.device), sin.to(self.device)

    def cos_sin(self, positions: Tensor, lens: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, D] with two equal halves.

        `lens` [T], for "dynamic" only, sets the base. For a token at position p of a request with a prompt of
        L tokens it is max(L, p + 1), as when a request runs alone, its prompt in one step and its answer
        token by token.
        """
        if self.config.kind == "dynamic":
            assert lens is not None, "dynamic rope needs every token's length"
            assert self._stretched is not None, "tabulate before the first step"
            return self._turned(positions, F.embedding(lens, self._stretched), dtype)
        assert self._cos_sin is not None, "tabulate before the first step"
        cos, sin = self._cos_sin
        return F.embedding(positions, cos), F.embedding(positions, sin)

    def _turned(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if bool((self.factors != 1).any()):
            factors = torch.cat((self.factors, self.factors))
            cos, sin = cos * factors, sin * factors
        return cos.to(dtype), sin.to(dtype)

    def stretched(self, lens: Tensor) -> Tensor:
        """Return dynamic NTK frequencies of lengths [T] as [T, D / 2].

        The base grows once a length exceeds the original positions.
        """
        factor, original, dim = self.config.factor, self.config.original_max_positions, self.config.dim
        growth = (factor * lens.clamp_min(original) / original) - (factor - 1)
        # The power in float32 is off by 3e-7, which becomes visible at positions of some hundreds
        base = self.config.theta * (growth.double() ** (dim / (dim - 2))).float()
        stretched = F.pad(1.0 / base[:, None] ** _exponents(self.config), (0, self.config.num_fixed // 2))
        return torch.where((lens > original)[:, None], stretched, self.frequencies)


def is_scaled(*configs: RopeConfig | None) -> bool:
    """Whether one of these multiplies cosines and sines by more than 1, as YaRN and LongRoPE do."""
    return any(config is not None and _frequencies(config)[1] > 1 for config in configs)


def head_order(config: RopeConfig) -> Tensor | None:
    """Return the order of a head's dimensions [D] in a checkpoint by which rotated pairs lie halves apart.

    Dimensions that are not rotated lie behind the first and the second elements of the pairs; None means that
    the order is unchanged.
    """
    turned, fixed = torch.arange(config.dim), config.dim + torch.arange(config.num_fixed)
    pairs = (turned[::2], turned[1::2]) if config.interleaved else turned.chunk(2)
    order = torch.cat((pairs[0], fixed[: len(fixed) // 2], pairs[1], fixed[len(fixed) // 2 :]))
    return None if torch.equal(order, torch.arange(len(order))) else order


def _exponents(config: RopeConfig) -> Tensor:
    return torch.arange(0, config.dim, 2, dtype=torch.float32) / config.dim


def _frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Return the radians per position [D / 2], and the factor of cosines and sines."""
    plain = 1.0 / config.theta ** _exponents(config)
    if config.kind == "none":
        return torch.zeros_like(plain), 1.0
    if config.kind == "linear":
        return plain / config.factor, 1.0
    if config.kind == "llama3":
        return _llama3(config, plain), 1.0
    if config.kind == "yarn":
        return _yarn(config), _yarn_attention_factor(config)
    if config.kind == "longrope":
        return _divided(config, config.short_factors), _longrope_attention_factor(config)
    return plain, 1.0


def _divided(config: RopeConfig, factors: tuple[float, ...]) -> Tensor:
    """Return LongRoPE's frequencies, where each pair has a factor of its own."""
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * config.theta ** _exponents(config))


def _longrope_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_positions))


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and interpolate those between."""
    original, low, high = config.original_max_positions, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > original / low, plain / config.factor, plain)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * scaled / config.factor + blend * scaled
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(config: RopeConfig) -> Tensor:
    """Keep dimensions that turn often within the original length, and interpolate those that turn rarely."""

    def dimension(turns: float) -> float:
        """Return the dimension with so many turns in the original length (inverse of equation 15)."""
        length = config.original_max_positions / (turns * 2 * math.pi)
        return config.dim * math.log(length) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    if low == high:
        high += 0.001  # avoids a division by zero for a ramp of no width
    ramp = ((torch.arange(config.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    waves = config.theta ** _exponents(config)
    return 1.0 / (config.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)
