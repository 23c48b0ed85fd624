"""Bytes of states, weights and launches of models with recurrent states are those of published shapes."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from kv_cache.groups import ITEM_BYTES
from models.config import DecoderConfig
from models.cost import ENDS, MIXTURE_OPERATORS, OPERATORS, RECURRENT_OPERATORS, REDUCTIONS, Counts
from models.layers.recurrent import new_states
from models.parallel.share import Share
from recipes.assembly.families import check_states, decoder_config, model_config
from recipes.assembly.memory_plan import GIB, MemoryPlan, report
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load
from recipes.schema.recipe import CacheSection, DeviceSection, ModelSection, Recipe, SchedulerSection
from recipes.schema.recipe_error import RecipeError
from tests.models.families import make
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.state_steps import empty_decoder
from tests.recipes.published import QWEN3_5_9B, QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_NEXT_80B

# Shapes of a text model as published; what is left out is the family's default
KIMI_48B = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27,
    "num_attention_heads": 32, "vocab_size": 163840, "dtype": "bfloat16",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "short_conv_kernel_size": 4,
    },
}  # fmt: skip
MIB = 2**20


@pytest.mark.parametrize(
    ("hf", "layers", "kv_kib", "state_mib", "conv_mib", "billions", "active"),
    [
        (QWEN3_NEXT_80B, (12, 36), 24, 72, 1.7, 79.7, 3.9),
        (QWEN3_5_9B, (8, 24), 32, 48, 1.1, 9.0, 9.0),
        (QWEN3_5_27B, (16, 48), 64, 144, 2.8, 26.9, 26.9),
        (QWEN3_5_35B_A3B, (10, 30), 20, 60, 1.4, 34.7, 3.5),
        (KIMI_48B, (7, 20), 7.9, 40, 1.4, 49.1, 3.5),
    ],
    ids=["80B-A3B", "9B", "27B", "35B-A3B", "48B-A3B"],
)
def test_published_models_have_the_sizes_that_follow_from_their_shapes(
    hf: dict[str, Any],
    layers: tuple[int, int],
    kv_kib: float,
    state_mib: float,
    conv_mib: float,
    billions: float,
    active: float,
) -> None:
    """Bytes a token and a request, in float32 states and bfloat16 inputs, and billions of parameters."""
    config = decoder_config(hf)
    assert (len(config.attention_windows), config.num_recurrent) == layers
    assert round(config.kv_bytes_per_token() / 1024, 1) == kv_kib
    assert config.growing_kv_bytes_per_token == config.kv_bytes_per_token()
    states = [config.layer_state(layer) for layer in range(config.num_layers)]
    planes = [each.planes for each in states if each is not None]
    assert sum(ITEM_BYTES["float32"] * _count(state.shape) for state, _ in planes) == state_mib * MIB
    inputs = sum(ITEM_BYTES["bfloat16"] * _count(inputs.shape) for _, inputs in planes)
    assert round(inputs / MIB, 1) == conv_mib
    assert config.state_bytes == state_mib * MIB + inputs
    assert round(config.num_parameters / 1e9, 1) == billions
    assert round(config.num_active_parameters / 1e9, 1) == active
    in_16_bits = replace(config.recurrent, state_dtype="bfloat16") if config.recurrent else None
    assert replace(config, recurrent=in_16_bits).state_bytes == state_mib * MIB / 2 + inputs


def _count(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


@pytest.mark.parametrize(("variant", "dtype"), [*zip(RECURRENT_VARIANTS, cycle(["float32", "bfloat16"]))])
def test_the_plan_equals_what_is_allocated(variant: Any, dtype: Any, tmp_path: Any) -> None:
    _, path = make(variant, tmp_path)
    decoder = empty_decoder(path, dtype=dtype)
    config = decoder.config
    assert config.weight_bytes == sum(each.nbytes for each in decoder.parameters())
    assert config.num_parameters == sum(each.numel() for each in decoder.parameters())
    states = [config.layer_state(layer) for layer in range(config.num_layers)]
    made = [new_states(each, 1, torch.device("cpu")) for each in states if each is not None]
    assert config.state_bytes == sum(plane.nbytes for planes in made for plane in planes)


def test_each_slot_has_a_state_beside_the_cache() -> None:
    config = decoder_config(QWEN3_NEXT_80B)
    recipe = Recipe(
        model=ModelSection(config=QWEN3_NEXT_80B, weights="random"),
        device=DeviceSection(kind="cpu"),
        cache=CacheSection(page_size=128, num_pages=100, num_states=20),
        scheduler=SchedulerSection(num_slots=16, max_batch_tokens=256, max_request_tokens=4096),
    )
    plan = plan_memory(recipe, config, 512 * GIB)
    alone = replace(recipe, cache=replace(recipe.cache, num_states=None))
    assert plan_memory(alone, config, 512 * GIB).num_states == 33, "as many are kept as there are slots"
    plain = plan_memory(alone, replace(config, recurrent=None, layers=config.layers[3:4] * 12), 512 * GIB)
    assert (plan.num_states, plan.num_kept_states, plan.state_bytes) == (20, 3, config.state_bytes)
    assert (plain.num_states, plain.state_bytes) == (0, 0)
    assert plan.page_bytes == plain.page_bytes
    known = plan.weight_bytes + plan.slot_bytes + plan.activation_bytes + plan.reserve_bytes
    assert plan.beside_bytes == known + 17 * config.state_bytes
    rows = dict(report(recipe, config, plan))
    assert rows["states"] == (
        "20 (16 of slots, 3 kept for later requests), 73.7 MiB each over 36 layers: 1.44 GiB"
    )
    assert rows["a page"].endswith("over 12 layers")
    assert "states" not in dict(report(recipe, replace(config, layers=config.layers[3:4] * 12), plain))


def beside_states(memory_bytes: int, num_slots: int = 16, **cache: Any) -> MemoryPlan:
    """The plan of Qwen3-Next on an NPU of this memory."""
    recipe = Recipe(
        model=ModelSection(config=QWEN3_NEXT_80B, weights="random"),
        device=DeviceSection(kind="npu", product="910B"),
        cache=CacheSection(page_size=128, **cache),
        scheduler=SchedulerSection(num_slots=num_slots, max_batch_tokens=1024, max_request_tokens=128),
    )
    return plan_memory(recipe, decoder_config(QWEN3_NEXT_80B), memory_bytes)


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        ({"memory_gib": 32.0}, 29.99),
        ({"memory_gib": 300.0}, 29.99),
        ({"memory_gib": 32.0, "num_states": 60}, 29.99),
        ({"num_pages": 2**20}, 2**12),
        ({"num_pages": 2**20, "num_states": 60}, 2**12),
    ],
)
def test_the_limit_of_a_refusal_fits_beside_states(asked: dict[str, Any], least: float) -> None:
    """As much as is left beside what no size of the cache changes, kept states among it."""
    name = next(iter(asked))
    memory_bytes = beside_states(512 * GIB, num_pages=100).beside_bytes + 30 * GIB
    with pytest.raises(RecipeError, match=rf"^cache\.{name}: .* set at most [\d.]+$") as refused:
        beside_states(memory_bytes, **asked)
    limit: Any = refused.value.limit
    assert limit >= least
    beside_states(memory_bytes, **asked | {name: limit})


def test_a_refusal_lists_the_states_and_says_which_of_them_to_lower() -> None:
    alone = beside_states(512 * GIB, num_pages=33, num_states=17)
    memory_bytes = alone.total_bytes + GIB
    for sized in ({"num_pages": 33}, {"memory_gib": 4.0}, {"memory_fraction": 1.0}):
        with pytest.raises(RecipeError) as refused:
            beside_states(memory_bytes, 512, **sized)
        assert "36.92 GiB of states of slots, " in refused.value.problem
        assert refused.value.fix == "lower scheduler.num_slots, or choose a smaller model or model.dtype"
    with pytest.raises(RecipeError) as refused:
        beside_states(memory_bytes, num_pages=33, num_states=100)
    assert refused.value.fix == "lower cache.num_states, or choose a smaller model or model.dtype"
    words = r"hold 0 pages of \d+ bytes beside 1\.44 GiB of kept states"
    with pytest.raises(RecipeError, match=words) as few:
        beside_states(memory_bytes, memory_gib=0.9, num_states=37)
    assert refused.value.keys[0] == "cache.num_pages"
    least: Any = few.value.limit
    assert beside_states(2 * memory_bytes, memory_gib=least, num_states=37).num_pages >= 2
    with pytest.raises(RecipeError, match=r"GiB of kept states and a cache of 2 pages"):
        beside_states(memory_bytes, memory_fraction=0.5, num_states=100)


def of_qwen3_5(memory_bytes: int, *overrides: str, tensor: int = 1, stages: int = 1) -> MemoryPlan:
    """The plan of Qwen3.5-9B on 910B of this memory."""
    recipe = load("recipes/qwen3_5/qwen3_5_9b_910b.yaml", overrides)
    return plan_memory(recipe, decoder_config(QWEN3_5_9B), memory_bytes, tensor=tensor, stages=stages)


ONE_SLOT = ("scheduler.num_slots=1", "speculation.kind=none", "device.graphs=0")
PAGES = ("cache.memory_gib=null", "cache.num_pages=10")
STATES = ("scheduler.max_batch_tokens=1024", "scheduler.max_request_tokens=1024")


@pytest.mark.parametrize(
    ("missing", "overrides", "name"),
    [
        # Of 64 slots, 63 states of 49 MiB can go, and as many kept ones with a number of pages
        (7.8, ("cache.memory_gib=19",), ""),
        (3.7, ("cache.memory_gib=19", *ONE_SLOT), ""),
        (2.5, ("cache.memory_gib=19", *STATES), "scheduler.num_slots"),
        (4.0, ("cache.memory_gib=19", *STATES), ""),
        (4.0, (*PAGES, *STATES), "scheduler.num_slots"),
        (4.0, (*PAGES, *STATES, "cache.num_states=80"), ""),
        (3.5, (*PAGES, *STATES, "cache.num_states=80"), "cache.num_states and scheduler.num_slots"),
        (3.5, (*PAGES, *STATES, "cache.num_states=180"), "cache.num_states"),
    ],
)
def test_a_refusal_names_slots_only_where_fewer_free_enough(
    missing: float, overrides: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "models")
    roomy = of_qwen3_5(512 * GIB, *overrides)
    least = 2 * roomy.page_bytes + (roomy.kept_bytes if "cache.num_pages=10" in overrides else 0)
    with pytest.raises(RecipeError) as refused:
        of_qwen3_5(int(roomy.beside_bytes + least - missing * GIB), *overrides)
    fix = "choose a smaller model or model.dtype"
    assert refused.value.fix == (f"lower {name}, or {fix}" if name else fix)


@pytest.mark.parametrize("fraction", [0.3, 0.9])
@pytest.mark.parametrize("key", ["memory_gib", "memory_fraction"])
def test_kept_states_leave_two_pages_wherever_these_fit(
    key: str, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "models")
    sizes = ["cache.page_size=1024", f"cache.state_fraction={fraction}", "cache.state_dtype=bfloat16"]
    sizes += ["scheduler.num_slots=16", "cache.memory_gib=null", *STATES]
    beside = of_qwen3_5(64 * GIB, *sizes, "cache.memory_gib=1").beside_bytes
    too_little = "cache.memory_gib=0.04" if key == "memory_gib" else "cache.memory_fraction=0.3"
    with pytest.raises(RecipeError, match=r"set at least [\d.]+") as few:
        of_qwen3_5(3 * beside, *sizes, too_little)
    assert "states" not in few.value.fix
    assert "kept states" not in few.value.problem
    assert of_qwen3_5(3 * beside, *sizes, f"cache.{key}={few.value.limit}").num_pages >= 2
    for spare in (75, 90, 100, 120, 200):
        with pytest.raises(RecipeError, match=r"set at most [\d.]+$") as much:
            of_qwen3_5(beside + spare * MIB, *sizes, "cache.memory_gib=19")
        most = much.value.limit
        assert of_qwen3_5(beside + spare * MIB, *sizes, f"cache.memory_gib={most}").num_pages >= 2


def test_kept_states_leave_room_to_windows() -> None:
    config = decoder_config(QWEN3_NEXT_80B)
    layers = [
        replace(each, window=each.window if number % 8 == 3 else 512)
        for number, each in enumerate(config.layers)
    ]
    recipe = Recipe(
        model=ModelSection(config=QWEN3_NEXT_80B, weights="random"),
        device=DeviceSection(kind="npu", product="910B"),
        cache=CacheSection(page_size=128, memory_gib=1, state_fraction=0.9),
        scheduler=SchedulerSection(num_slots=16, max_batch_tokens=1024, max_request_tokens=128),
    )
    config = replace(config, layers=tuple(layers), window_groups=(512,))
    plan = plan_memory(recipe, config, 512 * GIB)
    assert plan.kept_bytes > 0.8 * GIB
    assert plan.num_pages >= 2
    assert plan.window_bytes > 0.01 * GIB


def test_what_lies_on_several_devices_is_said_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "models")
    words = r"^cache\.memory_gib: 0\.47 GiB on each of 4 devices hold 0 pages of \d+ bytes beside 35\.\d+ GiB"
    overrides = ["cache.memory_gib=0.47", "cache.num_states=800"]
    with pytest.raises(RecipeError, match=words) as few:
        of_qwen3_5(64 * GIB, *overrides, tensor=2, stages=2)
    least: Any = few.value.limit
    overrides[0] = f"cache.memory_gib={least}"
    assert of_qwen3_5(64 * GIB, *overrides, tensor=2, stages=2).num_pages >= 2


@pytest.mark.parametrize("name", ["num_states=40", "state_fraction=0.5", "state_dtype=bfloat16"])
def test_keys_of_states_are_refused_where_there_are_none(name: str) -> None:
    recipe = load("recipes/tiny/cpu.yaml", [f"cache.{name}"])
    with pytest.raises(RecipeError, match=r"is read for models whose layers keep a recurrent state; leave"):
        plan_memory(recipe, model_config(recipe), GIB)


@pytest.mark.parametrize("number", ["num_states=80", "num_pages=400"])
def test_a_share_for_states_is_refused_beside_numbers(number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "models")
    share, memory = "cache.state_fraction=0.5", [] if "states" in number else ["cache.memory_gib=null"]
    with pytest.raises(
        RecipeError, match=rf"state_fraction.*`cache\.{number.split('=')[0]}`.*leave one"
    ) as error:
        of_qwen3_5(64 * GIB, f"cache.{number}", share, *memory)
    assert error.value.value == 0.5
    of_qwen3_5(64 * GIB, f"cache.{number}", *memory)


def test_a_host_tier_with_states_stays_within_its_memory() -> None:
    """However few states it has: one for a request that is swapped out, and the null one, are the least."""
    config = decoder_config(QWEN3_NEXT_80B)

    def planned(host_gib: float, memory_bytes: int = 512 * GIB, **cache: Any) -> MemoryPlan:
        recipe = Recipe(
            model=ModelSection(config=QWEN3_NEXT_80B, weights="random"),
            device=DeviceSection(kind="cpu"),
            cache=CacheSection(page_size=128, num_pages=400, host_gib=host_gib, **cache),
            scheduler=SchedulerSection(num_slots=16, max_batch_tokens=256, max_request_tokens=4096),
        )
        return plan_memory(recipe, config, memory_bytes)

    for host_gib in (0.2, 0.3, 1.0, 7.0):
        plan = planned(host_gib)
        assert plan.num_host_pages >= 2
        assert plan.num_host_states >= 2
        left = host_gib * GIB - plan.host_bytes
        assert 0 <= left < plan.state_bytes + 2 * plan.page_bytes
    with pytest.raises(RecipeError, match=r"cache\.host_gib: 0\.1 GiB do not hold 2 states of 73\.7 MiB"):
        planned(0.1)
    with pytest.raises(RecipeError) as refused:
        planned(0.15)  # two states and two pages alone
    least: Any = refused.value.limit
    assert planned(least).num_host_pages >= 2
    nothing = planned(0.3, planned(0).total_bytes + 10 * GIB, host_fraction=0.01)
    assert (nothing.num_host_pages, nothing.num_host_states) == (0, 0)


def test_the_limit_of_a_refusal_leaves_room_to_a_tier_that_grows() -> None:
    """A tier in the same memory has whole pages, whose states follow from the size of the cache."""
    config = decoder_config(QWEN3_5_9B)

    def planned(memory_bytes: int, **cache: Any) -> MemoryPlan:
        recipe = Recipe(
            model=ModelSection(config=QWEN3_5_9B, weights="random"),
            device=DeviceSection(kind="cpu"),
            cache=CacheSection(page_size=128, host_gib=2.0, **cache),
            scheduler=SchedulerSection(num_slots=16, max_batch_tokens=1024, max_request_tokens=128),
        )
        return plan_memory(recipe, config, memory_bytes)

    beside = planned(512 * GIB, num_pages=1000).beside_bytes
    for spare in (300, 600, 900, 1200):
        with pytest.raises(RecipeError, match=r"^cache\.memory_gib: .* set at most [\d.]+$") as refused:
            planned(beside + spare * MIB, memory_gib=30.0)
        most: Any = refused.value.limit
        assert planned(beside + spare * MIB, memory_gib=most).num_pages >= 2


def test_ranks_and_stages_divide_the_states() -> None:
    config = decoder_config(QWEN3_5_27B)
    assert Share(1, 4).part(config).state_bytes == config.state_bytes / 4
    assert Share(0, 1, 0, 2).part(config).state_bytes == config.state_bytes / 2


def test_launches_and_bytes_of_a_step_count_the_states() -> None:
    config = decoder_config(QWEN3_5_35B_A3B)
    counts, halves = Counts(config), Counts(config, tensor=2)
    own = 10 * OPERATORS + 30 * RECURRENT_OPERATORS + 40 * MIXTURE_OPERATORS + ENDS
    assert counts.num_operators == own
    assert halves.num_operators == own + 40 * REDUCTIONS
    assert counts.state_bytes(3) == 2 * 3 * config.state_bytes == 2 * halves.state_bytes(3)
    assert _multiplied(counts, config) == _multiplied(halves, config) == _weights_of_mixers(config)


def _multiplied(counts: Counts, config: DecoderConfig) -> float:
    """Weights of attention that a step multiplies with, on all devices together."""
    mixture = config.mixture
    assert mixture is not None
    inner = (mixture.inner_size, mixture.shared_size, mixture.num_experts)
    sizes = {*inner, *(2 * each for each in inner), *(each / counts.tensor for each in inner)}
    found = [each for each in counts.products(1, 0) if each.times in (10, 30)]
    assert all(each.inputs not in sizes for each in found)
    return counts.tensor * sum(each.times * each.inputs * each.outputs for each in found)


def _weights_of_mixers(config: DecoderConfig) -> int:
    of_layers = (config.mixer_linears(layer) for layer in range(config.num_layers))
    return sum(inputs * outputs for linears in of_layers for _, inputs, outputs in linears)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["speculation.kind=ngram", "speculation.max_tokens=8"], "at most 7 drafts follow one"),
        (["scheduler.chunk_tokens=48"], "scheduler.chunk_tokens: .* cut at multiples of 64, and at nothing"),
        (["scheduler.max_batch_tokens=100"], "100 tokens for 64 slots may leave a prompt less than 64 in a"),
    ],
)
def test_what_states_cannot_have_is_refused(
    overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "models")
    config = decoder_config(QWEN3_5_9B)
    recipe = "recipes/qwen3_5/qwen3_5_9b_910b.yaml"
    check_states(load(recipe), config)
    check_states(load(recipe, ["scheduler.chunk_tokens=64"]), config)
    with pytest.raises(RecipeError, match=words):
        check_states(load(recipe, overrides), config)
