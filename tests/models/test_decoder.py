"""The decoder gives transformers' log-probabilities, however a prompt is cut and whatever runs beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_batching.batch import Batch, Sampled
from continuous_batching.request import Request
from continuous_batching.slots import SlotPool
from kv_cache.device.storage import KVCache, LayerPages
from kv_cache.groups import DType
from models.checkpoint import weights
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.sampling.sampler import Chosen
from models.step.runner import ModelRunner
from recipes.assembly import families as recipe_families
from recipes.assembly.decoders import shape_of
from tests.device_kinds import Kind, Way, on_each, operators
from tests.models.families import VARIANTS, VOCABULARY, Variant, expected_logprobs, make, wide
from tests.thorough import cases

LENGTHS = (1, 17, 96, 150)
Pair = tuple[Kind, Way]


@dataclass
class Recorder:
    """Stands in for the sampler: keeps log-probabilities by (row, position)."""

    seen: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def prepare(self, rows: np.ndarray, targets: np.ndarray, slots: SlotPool) -> None:
        """Nothing is chosen."""

    def start(
        self, logits: Tensor, rows: np.ndarray, targets: np.ndarray, slots: SlotPool, best: object = None
    ) -> Chosen:
        for row, target, line in zip(rows.tolist(), targets.tolist(), logits):
            self.seen[row, target - 1] = line.float().log_softmax(-1).cpu()
        return Chosen(logits[:, 0].long(), lambda: Sampled(np.zeros(len(rows), np.int64)))


def make_decoder(path: Path, dtype: DType, page_size: int, pair: Pair) -> Decoder:
    config = replace(recipe_families.decoder_config(recipe_families.read(path)), dtype=dtype)
    ops, attention = operators(*pair, shape_of(page_size, config))
    attention.check()
    decoder = Decoder(config, ops, attention)
    weights.load(decoder, path)
    return decoder


def run_in_chunks(decoder: Decoder, prompts: list[list[int]], seed: int) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities at the end of every span; prompts cut and packed at random over shuffled pages."""
    rng = np.random.default_rng(seed)
    config, page_size = decoder.config, decoder.attention.shape.page_size
    slots = SlotPool(len(prompts), max(LENGTHS), page_size)
    num_pages = 1 + sum(-(-len(prompt) // page_size) for prompt in prompts)
    cache = KVCache([LayerPages(decoder.attention.new_planes)] * config.num_layers, page_size, [num_pages])
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    free = list(1 + rng.permutation(num_pages - 1))
    for number, prompt in enumerate(prompts):
        request = Request(str(number), np.array(prompt))
        request.number = number
        row = slots.take(request)
        count = -(-len(prompt) // page_size)
        slots.page_table[row, :count] = [free.pop() for _ in range(count)]
    recorder = Recorder()
    runner = ModelRunner(decoder, cache, decoder.attention, recorder, slots)
    while (slots.num_computed < slots.num_tokens).any():
        missing = slots.num_tokens - slots.num_computed
        rows = rng.permutation(np.flatnonzero(missing))[: rng.integers(1, len(prompts) + 1)]
        most = rng.choice([1, 2, 40, 200], len(rows))
        starts = slots.num_computed[rows]
        stops = starts + np.minimum(missing[rows], rng.integers(1, most + 1))
        runner.run(Batch(rows, starts, stops, np.arange(len(rows)), rows, stops))
        slots.num_computed[rows] = stops
    return recorder.seen


def fitting(variant: Variant, pair: Pair) -> Variant:
    """The checkpoint, or one like it with heads, and sinks, that the operator takes."""
    if pair != ("npu", "fused"):
        return variant
    return replace(wide(variant), saved_as=torch.bfloat16) if variant.family == "gpt_oss" else wide(variant)


WIDE_ANGLES = ("ernie4_5", "olmo3")  # whose angles transformers keeps in float32
# Of each kind of decoder some: dense, with windows or sinks, mixtures and latents
IN_HALVES = ("llama", "qwen2", "qwen3", "phi3", "glm4", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3")
# One of each family, since all would take minutes
ONE_A_FAMILY = [*{each.family: each for each in VARIANTS}.values()]
SOME = cases(ONE_A_FAMILY, VARIANTS)
QUICK_ON_NPU = ("llama_biased", "gemma3_pattern", "qwen3_moe_tied", "gpt_oss_unbiased", "deepseek_v2")


def is_taken(variant: Variant, pair: Pair) -> bool:
    """Whether the device computes it; that a cap of scores is refused is held in test_every_product.py."""
    return pair != ("npu", "fused") or not variant.options.get("attn_logit_softcapping")


def prompts_of(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, VOCABULARY, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def each_on_each() -> list[Any]:
    """All checkpoints in plain torch on a CPU, and one of each family by the operators of other devices.

    Of the two other ways, a CPU's own has all of them in test_identity.py, and plain torch is the same on an
    NPU. A run without slow tests has one of each family in plain torch, and one of each kind of attention
    and of experts by an NPU's operators.
    """
    thorough = cases({"cpu-fused", "npu-reference"}, set())
    return [
        pytest.param(
            variant,
            *pair.values,
            id=f"{pair.id}-{variant.name}",
            marks=[*pair.marks, *([] if is_quick(variant, pair.id) else [pytest.mark.slow])],
        )
        for pair in on_each("reference", "fused")
        if pair.id not in thorough
        for variant in (VARIANTS if pair.id == "cpu-reference" else SOME)
    ]


def is_quick(variant: Variant, pair: str) -> bool:
    """Whether a checkpoint is of those that every run has."""
    return variant in ONE_A_FAMILY if pair == "cpu-reference" else variant.name in QUICK_ON_NPU


def check_sizes(variant: Variant, model: Any, path: Path) -> None:
    """config.json says how many parameters there are, and of which type."""
    config = recipe_families.decoder_config(recipe_families.read(path))
    corrections = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    assert config.num_parameters == sum(each.numel() for each in [*model.parameters(), *corrections])
    assert TORCH_DTYPES[config.dtype] == variant.saved_as


@pytest.mark.parametrize(("variant", "pair"), each_on_each())
def test_logprobs_are_those_of_transformers(variant: Variant, pair: Pair, checkpoints: Path) -> None:
    if not is_taken(variant, pair):
        pytest.skip("its operator has no cap of scores, and is refused for it")
    variant = fitting(variant, pair)
    model, path = make(variant, checkpoints)
    check_sizes(variant, model, path)
    prompts = prompts_of(np.random.default_rng(7))
    decoder = make_decoder(path, "float32", 32, pair)
    seen = run_in_chunks(decoder, prompts, seed=3)
    expected = [expected_logprobs(model, prompt) for prompt in prompts]
    for (row, position), logprobs in seen.items():
        torch.testing.assert_close(logprobs, expected[row][position], rtol=0, atol=1e-4)
    assert {(row, length - 1) for row, length in enumerate(LENGTHS)} <= set(seen)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_transformers_as_its_own_float32(checkpoints: Path) -> None:
    """Of mixtures a rounding may choose other experts, and Gemma rounds norms with their 1, as NPUs take
    them: twice as far from its float32 at most, together.
    """
    pairs: list[Pair] = [("cpu", "reference"), ("cpu", "fused")]  # a CPU rounds as transformers does
    ours: dict[Pair, dict[str, list[Tensor]]] = {pair: {"dense": [], "other": []} for pair in pairs}
    own: dict[str, list[Tensor]] = {"dense": [], "other": []}  # mean distances, one a variant
    for variant in cases([each for each in ONE_A_FAMILY if each.family in IN_HALVES], VARIANTS):
        exact_model, path = make(replace(variant, saved_as=torch.bfloat16), checkpoints)
        prompts = prompts_of(np.random.default_rng(8))
        exact = [expected_logprobs(exact_model, prompt) for prompt in prompts]
        model = exact_model.to(torch.bfloat16)
        theirs = [expected_logprobs(model, prompt) for prompt in prompts]
        for pair in pairs:
            decoder = make_decoder(path, "bfloat16", 16, pair)
            seen = run_in_chunks(decoder, prompts, seed=4)
            rounds_alike = not decoder.config.norms_add_one and variant.family not in WIDE_ANGLES
            is_dense = decoder.config.mixture is None and rounds_alike
            kind, near = ("dense", theirs) if is_dense else ("other", exact)
            apart = torch.stack([logprobs - near[row][at] for (row, at), logprobs in seen.items()])
            far = torch.stack([exact[row][at] - theirs[row][at] for row, at in seen]).abs().mean()
            ours[pair][kind].append(apart.abs().mean())
            if pair == pairs[0]:
                own[kind].append(far)
            is_near = kind == "other" or apart.abs().mean() <= 1.15 * far
            assert is_near, f"{variant.name}, {pair}: {apart.abs().mean():.4f} against {far:.4f}"
    for pair in pairs:
        assert sum(ours[pair]["dense"]) <= sum(own["dense"])
        assert sum(ours[pair]["other"]) <= 2 * sum(own["other"])
