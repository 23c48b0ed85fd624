"""The angles of the rope are transformers' own, number for number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.checkpoint.huggingface import rope_config
from models.layers.rope import Rope, is_scaled
from tests.each_of import each_of
from tests.lazy import transformers

DIM, MAX_POSITIONS = 32, 256
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1 + each / 16 for each in range(16)],
    "long_factor": [1.5 + each / 2 for each in range(16)],
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_betas": YARN | {"beta_fast": 20, "beta_slow": 2},
    "yarn_mscale": YARN | {"mscale": 0.9, "mscale_all_dim": 0.3},
    "yarn_mscale_alone": YARN | {"mscale": 0.9},
    "yarn_attention_factor": YARN | {"attention_factor": 0.7},
    "yarn_not_truncated": YARN | {"truncate": False},
    "yarn_narrow_ramp": YARN | {"beta_fast": 1.001, "beta_slow": 1.0, "truncate": False},
    "yarn_by_lengths": YARN | {"factor": None},
    "longrope": LONGROPE,
    "longrope_factor": LONGROPE | {"factor": 7.0},
    "longrope_attention_factor": LONGROPE | {"attention_factor": 1.3},
}


def theirs(
    rope: dict[str, Any], theta: float, length: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=rope | {"rope_theta": theta},
    )
    if rope["rope_type"] == "default":
        embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
        return embedding.inv_freq, embedding.attention_scaling
    scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    return scaled(config, torch.device("cpu"), seq_len=length)


def ours(rope: dict[str, Any], theta: float) -> Rope:
    return Rope(rope_config({"rope_parameters": rope | {"rope_theta": theta}}, DIM, MAX_POSITIONS))


@each_of("theta", [10000.0, 5e5, 123.0])
@each_of("rope", KINDS.values())
def test_frequencies(rope: dict[str, Any], theta: float) -> None:
    frequencies, factor = theirs(rope, theta)
    mine = ours(rope, theta)
    torch.testing.assert_close(mine.frequencies, frequencies, rtol=1e-7, atol=0)
    assert mine.factors.tolist() == pytest.approx([factor] * len(mine.factors), rel=1e-6)
    assert is_scaled(None, mine.config) == (factor > 1)
    positions = torch.tensor([0, 1, 63, 255, 4000])
    mine.tabulate(4001, torch.float32)
    frequencies, _ = theirs(rope, theta, torch.tensor(4000))
    cos, sin = mine.cos_sin(positions, None, torch.float32)
    angles = torch.cat((positions[:, None] * frequencies,) * 2, dim=-1)
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=0, atol=1e-6)


def test_requests_that_are_all_short_are_turned_by_short_factors() -> None:
    mine = ours(LONGROPE, 1e4)
    for longest, length in ((64, 64), (65, 64), (66, 65)):  # the last token of a request is never computed
        mine.tabulate(longest, torch.float32)
        frequencies, _ = theirs(LONGROPE, 1e4, torch.tensor(length))
        torch.testing.assert_close(mine.frequencies, frequencies, rtol=1e-7, atol=0)


@pytest.mark.parametrize("factor", [1.0, 1.3, 4.0])
def test_dynamic_takes_each_token_by_its_own_length(factor: float) -> None:
    rope = {"rope_type": "dynamic", "factor": factor}
    lens = torch.tensor([1, *range(MAX_POSITIONS, MAX_POSITIONS + 64), 5000])  # whole vectors of them
    mine = ours(rope, 1e4)
    mine.tabulate(5000, torch.float32)
    cos, _ = mine.cos_sin(lens - 1, lens, torch.float32)
    for line, length in zip(cos, lens):
        frequencies, _ = theirs(rope, 1e4, length if length > MAX_POSITIONS else None)
        torch.testing.assert_close(line[: DIM // 2], ((length - 1) * frequencies).cos(), rtol=0, atol=1e-6)


def test_both_spellings_say_the_same() -> None:
    for rope in [*KINDS.values(), {"rope_type": "dynamic", "factor": 2.0}]:
        rest = {key: value for key, value in rope.items() if key != "rope_type"}
        new = rope_config({"rope_parameters": rope | {"rope_theta": 77.0}}, DIM, MAX_POSITIONS)
        for kind in ("type", "rope_type"):
            old = {"rope_theta": 77.0, "rope_scaling": {kind: rope["rope_type"], **rest}}
            assert rope_config(old, DIM, MAX_POSITIONS) == new
    assert rope_config({"rope_scaling": None}, DIM, 9) == rope_config({"rope_theta": 1e4}, DIM, 9)


def test_original_length_beside_the_rope_comes_first() -> None:
    hf = {"original_max_position_embeddings": 32, "rope_scaling": YARN}
    assert rope_config(hf, DIM, MAX_POSITIONS).original_max_positions == 32


@each_of(
    "hf, words",
    [
        ({"rope_scaling": {"type": "abf"}}, "rope_scaling.rope_type: 'abf'; supported are default"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor: '2'; it must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor: 0.5; .* at least 1"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling: 3; it must be a mapping"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for all layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5; whole heads"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "whole heads"),
        ({"rope_theta": -1}, "rope_theta: -1; it must be a number"),
    ],
)
def test_a_rope_that_cannot_be_honoured_is_refused(hf: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rope_config(hf, DIM, MAX_POSITIONS)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_a_step_computes_no_power_and_the_plain_kinds_no_angle(kind: str) -> None:
    mine = ours({"rope_type": kind, "factor": 2.0}, 1e4)
    mine.tabulate(600, torch.bfloat16)
    places = torch.tensor([3, 599])
    asked: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.add(operator.overloadpacket.__name__)
            return operator(*args, **kwargs or {})

    with Watch():
        cos, _ = mine.cos_sin(places, places + 1, torch.bfloat16)
    assert "embedding" in asked
    assert not asked & {"pow", "reciprocal", "where"}
    assert ("cos" in asked) == (kind == "dynamic")
    assert cos.dtype == torch.bfloat16
