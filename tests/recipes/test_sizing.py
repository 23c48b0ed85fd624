"""The memory plan agrees with what is allocated, and a recipe that cannot fit is refused with the fix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.reference import Attention
from devices.host_limits import group_limits, lies_in_memory
from devices.shapes import AttentionShape
from models.decoder import Decoder
from models.layers.dtypes import TORCH_DTYPES
from models.layers.linear import Linear
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Panels, Products, products
from models.ops.reference import Ops
from models.parallel.share import Share
from models.quantization import Quantization
from models.step.warm_up import _process_bytes
from recipes.assembly.families import model_config
from recipes.assembly.memory_plan import GIB, report
from recipes.assembly.sizing import estimate, plan_memory
from recipes.machine import start
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.reader import load
from recipes.schema.recipe import CacheSection, DeviceSection, ModelSection, Recipe, SchedulerSection
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import SpeculationSection
from tests.device_kinds import has_npu, operators, section
from tests.each_of import each_of
from tests.kv_cache.caches import plain_cache

LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, kv heads, head size, float32


def made(
    changes: dict[str, Any] | None = None,
    *,
    dtype: Any = "auto",
    pages: int | None = 64,
    gib: float | None = None,
    page_size: int = 16,
    longest: int | None = None,
    **cache: Any,
) -> Recipe:
    return Recipe(
        model=ModelSection(config={**LLAMA, **(changes or {})}, weights="random", dtype=dtype),
        device=DeviceSection(kind="cpu"),
        cache=CacheSection(page_size=page_size, num_pages=pages, memory_gib=gib, **cache),
        scheduler=SchedulerSection(num_slots=4, max_batch_tokens=64, max_request_tokens=longest),
    )


def sized(recipe: Recipe, memory_bytes: int = 4 * GIB):
    return plan_memory(recipe, model_config(recipe), memory_bytes)


def refusal(recipe: Recipe, memory_bytes: int = 4 * GIB) -> str:
    with pytest.raises(RecipeError) as caught:
        sized(recipe, memory_bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@each_of("dtype", ["auto", "bfloat16"])
@each_of("family", ["llama", "qwen2", "qwen3"])
@each_of("tied", [True, False])
def test_the_plan_equals_what_is_allocated(family, tied, dtype):
    recipe = made({"model_type": family, "tie_word_embeddings": tied}, dtype=dtype)
    recipe = replace(recipe, device=DeviceSection(kind="cuda"))  # which has the weights as they are
    config, sizing = model_config(recipe), sized(recipe)
    shape = AttentionShape(4, 2, config.head_dim, 16, 1.0, TORCH_DTYPES[config.dtype], config.windows)
    decoder = Decoder(config, Ops(), Attention(shape))
    assert sizing.weight_bytes == sum(each.nbytes for each in decoder.parameters())
    cache = plain_cache(2, sizing.num_pages, (16, 2, config.head_dim), TORCH_DTYPES[config.dtype])
    assert sizing.cache_bytes == sum(each.nbytes for each in cache.tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_each_stage_is_planned_with_what_it_holds_of_embedding_and_head(tied):
    recipe = made({"tie_word_embeddings": tied, "num_hidden_layers": 4})
    recipe = replace(recipe, device=DeviceSection(kind="cuda"))
    config = model_config(recipe)
    shape = AttentionShape(4, 2, config.head_dim, 16, 1.0, TORCH_DTYPES[config.dtype], config.windows)
    for stages in (2, 3):
        for stage in range(stages):
            share = Share(0, 1, stage, stages)
            decoder = Decoder(config, Ops(), Attention(shape), share=share)
            held = sum(each.nbytes for each in decoder.parameters())
            assert plan_memory(recipe, config, 4 * GIB, share=share).weight_bytes == held, share


@pytest.mark.parametrize("has_bfloat16", {False, torch.ops.mkldnn._is_mkldnn_bf16_supported()})
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("compiles", ["auto", False])
def test_what_a_cpu_packs_is_counted(tied, has_bfloat16, compiles, monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    found = products() if compiles else None
    recipe = made({"tie_word_embeddings": tied}, dtype="bfloat16")
    recipe = replace(recipe, device=section("cpu", compile=compiles))
    config = model_config(recipe)
    shape = AttentionShape(4, 2, config.head_dim, 16, 1.0, TORCH_DTYPES[config.dtype], config.windows)
    has_products = isinstance(found, Products)
    for share in (Share(), Share(0, 1, 0, 2), Share(0, 1, 1, 2)):
        sizing = plan_memory(recipe, config, 4 * GIB, share=share)
        ops = CpuOps(products=found if has_products else None)
        decoder = Decoder(config, ops, Attention(shape), share=share)
        decoder.pack()
        packed = [each.packed[0] for each in decoder.modules() if isinstance(each, Linear)]
        packed = [each.numbers if isinstance(each, Panels) else each for each in packed]
        held = [*decoder.parameters(), *packed]
        assert sizing.weight_bytes == sum(each.numel() * each.dtype.itemsize for each in held)
        keeps = has_bfloat16 or has_products
        assert {each.dtype for each in packed} == {torch.bfloat16 if keeps else torch.float32}


@pytest.mark.npu
@pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")
def test_a_tied_head_is_counted_again_where_the_device_has_it_in_an_order_of_its_own():
    recipe = made({"tie_word_embeddings": True, "head_dim": 64}, dtype="bfloat16")
    recipe = replace(recipe, device=section("npu"))
    config, sizing = model_config(recipe), sized(recipe)
    shape = AttentionShape(4, 2, 64, 16, 1.0, TORCH_DTYPES[config.dtype], config.windows)
    decoder = Decoder(config, *operators("npu", "fused", shape))
    decoder.pack()
    packed = [each.packed[0] for each in decoder.modules() if isinstance(each, Linear)]
    heads = [part for each in packed for part in (each if isinstance(each, list) else [each])]
    held = {each.data_ptr(): each.nbytes for each in (*decoder.parameters(), *heads)}
    assert sizing.weight_bytes == sum(held.values()) == config.weight_bytes
    assert not start(recipe.device).tiles_weights
    tiled = replace(recipe, device=section("npu", product="310P"))
    assert sized(tiled).weight_bytes == config.weight_bytes + config.vocab_size * config.hidden_size * 2
    wide = replace(tiled, model=replace(recipe.model, dtype="float32"))
    assert sized(wide).weight_bytes == model_config(wide).weight_bytes


def test_what_a_device_has_answered_says_whether_a_tied_head_is_kept_twice():
    recipe = made({"tie_word_embeddings": True}, dtype="bfloat16")
    config = model_config(recipe)
    for product, tiles in ((None, True), ("910B", True), ("310P", False)):
        asked = replace(recipe, device=DeviceSection(kind="npu", product=product))
        plan = plan_memory(asked, config, 4 * GIB, tiles_weights=tiles)
        assert plan.weight_bytes == config.weight_bytes + tiles * 2 * config.vocab_size * config.hidden_size


def test_memory_is_turned_into_whole_pages():
    sizing = sized(made(pages=None, gib=1.0))
    assert sizing.page_bytes == PAGE_BYTES
    assert sizing.num_pages == GIB // PAGE_BYTES
    assert sizing.cache_bytes <= GIB


def test_the_longest_request_is_what_every_limit_allows():
    assert sized(made()).longest_tokens == 512
    assert sized(made(longest=500)).longest_tokens == 500
    few = sized(made(pages=3))
    assert few.longest_tokens == 2 * 16 + 1
    assert few.longest_because == "what the cache holds"


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_a_stretched_rope_reaches_further(rope, positions):
    assert model_config(made({"rope_scaling": rope})).reach == positions


def test_what_cannot_fit_is_refused_with_the_fix():
    assert refusal(made(longest=513)) == (
        "scheduler.max_request_tokens: 513 is more than the 512 positions of the model; lower it to 512"
    )
    assert refusal(made({"head_dim": 64}, pages=None, gib=0.001, longest=500)).startswith(
        "scheduler.max_request_tokens: 500 is more than the 497 tokens that the cache holds; lower it"
    )
    coarse = {"changes": {"head_dim": 64}, "pages": None, "page_size": 1024}
    few = refusal(made(**coarse, gib=0.002))
    assert few.startswith("cache.memory_gib: 0.002 GiB hold 1 pages of 2097152 bytes, and 2 is the least; ")
    assert sized(made(**coarse, gib=float(few.partition("at least ")[2].partition(",")[0]))).num_pages == 2
    many = refusal(made(pages=2**20), GIB)
    assert many.startswith("cache.num_pages: ")
    most = int(many.rpartition(" ")[2])
    sized(made(pages=most), GIB)
    assert refusal(made(pages=most + 1), GIB)
    much = refusal(made(pages=None, gib=2.0), GIB)
    sized(made(pages=None, gib=float(much.rpartition(" ")[2])), GIB)
    assert refusal(made(), GIB // 2).endswith("choose a smaller model or model.dtype")


WINDOWS = {
    "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4096,
    "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "most"),
    [
        ({"pages": None, "gib": 0.5}, 0.09),
        ({"pages": None, "gib": 4.0}, 0.09),
        ({"pages": 2**20}, 10_000),
        ({"pages": None, "gib": 4.0, "num_window_pages": 1000}, 0.09),
    ],
)
def test_the_limit_of_a_refusal_fits_beside_windows(cache, most):
    def planned(**more):
        recipe = made(WINDOWS, longest=8000, reserve_gib=0, **cache | more)
        scheduler = replace(recipe.scheduler, num_slots=64)
        recipe = replace(recipe, scheduler=scheduler)
        return plan_memory(recipe, model_config(recipe), 128 * 2**20, activation_bytes=2**20)

    with pytest.raises(RecipeError, match="set at most") as caught:
        planned()
    limit = caught.value.limit
    assert limit >= most
    planned(**{"gib" if cache["pages"] is None else "pages": limit})


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="eos_token_id: 320; the vocabulary goes from 0 to 319"):
        model_config(made({"eos_token_id": 320}))


def test_the_dtype_of_the_recipe_replaces_that_of_the_model():
    assert model_config(made()).dtype == "float32"
    assert model_config(made(dtype="bfloat16")).dtype == "bfloat16"


def test_the_report_says_what_was_counted():
    recipe = made(pages=65, host_gib=1)
    config = model_config(recipe)
    lines = dict(report(recipe, config, sized(recipe)))
    assert lines["host tier"] == "1.00 GiB, 131,071 pages"
    assert lines["activations"].endswith(" in the largest step, estimated")
    assert lines["reserve"] == "0.50 GiB"
    assert lines["sum"] == "1.52 GiB of 4.00 GiB"
    assert lines["pages"].startswith("65; ")
    assert lines["all slots at longest"] == "4 x 32 pages; the cache holds 50%"
    assert lines["longest request"] == "512 tokens (the model's positions)"


V2, V1 = (
    ("memory.max", "0::/a.slice/b.service\n"),
    ("memory.limit_in_bytes", "4:memory,x:/a.slice/b.service\n2:cpu:/other\n0::/\n"),
)


@pytest.mark.parametrize(("file", "names"), [V2, V1], ids=["version 2", "version 1"])
def test_the_limits_of_all_groups_around_a_process_are_found(tmp_path: Path, file: str, names: str) -> None:
    for folder, limit in {".": "max", "a.slice": "3000", "a.slice/b.service": "2000", "other": "1"}.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / file).write_text(limit + "\n")
    assert sorted(group_limits(names, tmp_path, file)) == [2000, 3000]
    assert group_limits("", tmp_path, file) == []


@pytest.mark.parametrize("name", ["/docker/0123", "/../../elsewhere"], ids=["the host's", "outside"])
def test_within_a_container_its_group_lies_at_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "memory.max").write_text("4000\n")
    assert group_limits(f"0::{name}\n", tmp_path, "memory.max") == [4000]


def test_a_limit_that_cannot_be_read_limits_nothing(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/memory.max").mkdir()  # cannot be read, also by root
    (tmp_path / "a/memory.max").write_bytes(b"\xff")
    (tmp_path / "memory.max").write_text("4000\n")
    assert group_limits("0::/a/b\nwithout colons\n\n", tmp_path, "memory.max") == [4000]


def test_a_figure_that_the_system_does_not_tell_is_unknown() -> None:
    assert _process_bytes("VmOfAnotherKernel") is None


def test_a_part_of_the_memory_holds_what_all_else_leaves():
    recipe = made(pages=None, memory_fraction=0.75)
    sizing = sized(recipe)
    assert sizing.total_bytes <= 0.75 * 4 * GIB < sizing.total_bytes + PAGE_BYTES
    assert sizing.cache_bytes == sizing.total_bytes - sizing.beside_bytes
    more = plan_memory(recipe, model_config(recipe), 4 * GIB, sizing.activation_bytes + GIB)
    assert sizing.num_pages - more.num_pages == GIB // PAGE_BYTES
    assert sized(made(pages=None, memory_fraction=0.75, reserve_gib=1.5)).num_pages == more.num_pages


def test_a_part_that_is_too_small_is_refused_with_what_is_missing():
    text = refusal(made(pages=None, memory_fraction=0.1))
    assert text.startswith("cache.memory_fraction: 0.1 of the 4.00 GiB of this machine are 0.12 GiB less")
    least = float(text.rpartition(" ")[2])
    assert sized(made(pages=None, memory_fraction=least)).num_pages >= 2
    assert refusal(made(pages=None, memory_fraction=least - 0.001))
    text = refusal(made(pages=None, memory_fraction=1.0, reserve_gib=5))
    assert text.endswith("; lower cache.reserve_gib, or choose a smaller model or model.dtype")


def test_a_host_tier_has_room_for_what_the_windows_of_a_request_see():
    """By its share of the device's pages it would have 3, and no request could be swapped out."""
    windows = {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 64,
    }
    recipe = made(windows, pages=512, host_gib=40 * PAGE_BYTES / GIB, num_window_pages=33)
    (window,) = sized(recipe).windows
    assert window.most_of_a_request == 5
    assert window.num_host_pages == 6
    assert sized(recipe).host_bytes <= 40 * PAGE_BYTES


def test_the_ranks_of_a_machine_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.assembly.sizing.host_memory_bytes", lambda: 8 * GIB)
    monkeypatch.setattr("recipes.machine.host_memory_bytes", lambda: 8 * GIB)
    four = ParallelSection(tensor=2, pipeline=2)
    cpu = replace(made(pages=None, memory_fraction=0.9), parallel=four)
    for asked, ranks_here in ((None, 4), (2, 2)):  # a launcher may name more machines than the recipe
        plan = plan_memory(cpu, model_config(cpu), ranks_here=asked)
        assert plan.memory_bytes == start(cpu.device).memory_bytes(ranks_here) == 8 * GIB // ranks_here
        assert plan.total_bytes <= 0.9 * plan.memory_bytes
    tiered = made(host_gib=32, host_fraction=0.5)
    npu = replace(tiered, parallel=four, device=DeviceSection(kind="npu"))
    assert GIB - PAGE_BYTES < sized(npu).host_bytes <= GIB
    named = replace(npu, cache=replace(npu.cache, host_gib=3, host_fraction=None))
    assert "3 is more than the 2.00 GiB of this host for each of its 4 ranks; set at most 2" in refusal(named)


def test_weights_that_are_kept_in_memory_leave_less_to_the_host_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.assembly.sizing.lies_in_memory", Path("/in_memory").__eq__)
    host = ["cache.host_gib=1000000", "cache.host_fraction=0.5", "device.kind=npu", "device.virtual=true"]
    on_disk, in_memory = (
        sized(load("recipes/tiny/cpu.yaml", [*host, f"model.kept_in=/{folder}"]))
        for folder in ("on_disk", "in_memory")
    )
    less = on_disk.host_bytes - in_memory.host_bytes
    assert abs(less - in_memory.weight_bytes / 2) < in_memory.page_bytes


def test_a_path_lies_in_memory_by_what_is_mounted_last_above_it(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nb /there tmpfs rw 0 0\nc /there/more\\040so xfs rw 0 0\n")
    lies = {path: lies_in_memory(Path(path), mounts) for path in ("/else", "/there/x", "/there/more so/x")}
    assert lies == {"/else": False, "/there/x": True, "/there/more so/x": False}


def test_a_host_tier_is_whole_pages_and_must_fit_beside_the_cache():
    sizing = sized(made(host_gib=1))
    assert sizing.num_host_pages == GIB // PAGE_BYTES
    assert sizing.total_bytes == sized(made()).total_bytes + sizing.host_bytes
    assert sized(made(host_gib=0)).num_host_pages == 0
    text = refusal(made(host_gib=64))
    assert text.startswith("cache.host_gib: ")
    assert "64.00 GiB of host tier" in text
    assert "60.5" in text
    most = float(text.rpartition(" ")[2])
    assert 3.4 < most < 3.5
    sized(made(host_gib=most))
    assert refusal(made(host_gib=most + 0.001))
    assert refusal(made(host_gib=1e-6)).startswith("cache.host_gib: 1e-06 GiB hold 0 pages of 8192 bytes")


def test_what_a_step_takes_grows_with_its_budget():
    def taken(**changes: int) -> int:
        scheduler = SchedulerSection(**{"num_slots": 4, "max_batch_tokens": 64, **changes})
        recipe = made()
        return estimate(replace(recipe, scheduler=scheduler), model_config(recipe))

    assert taken() < taken(max_batch_tokens=128) < taken(max_batch_tokens=128, num_slots=128)


def test_the_logits_of_drafts_are_in_the_plan():
    """As many rows as a step may sample: those of all slots' guesses, within its budget."""
    recipe = made()
    config = model_config(recipe)

    def taken(num_guesses: int, **changes: Any) -> int:
        drafts = (
            SpeculationSection(kind="ngram", max_tokens=num_guesses) if num_guesses else recipe.speculation
        )
        return estimate(replace(recipe, speculation=drafts, **changes), config)

    a_row = (taken(1) - taken(0)) // recipe.scheduler.num_slots
    assert a_row >= config.vocab_size * (config.dtype_bytes + 8)
    assert taken(4) - taken(0) == 4 * recipe.scheduler.num_slots * a_row
    assert taken(64) == taken(60), "no step has more rows than tokens"


def test_a_step_that_takes_too_much_is_refused():
    recipe = made()
    with pytest.raises(RecipeError, match=r"lower scheduler.max_batch_tokens, or choose a smaller model"):
        plan_memory(recipe, model_config(recipe), 4 * GIB, activation_bytes=5 * GIB)


def test_int8_weights_are_counted_with_their_scales() -> None:
    recipe = made()
    plain = plan_memory(recipe, model_config(recipe))
    recipe = replace(recipe, model=replace(recipe.model, quantization="w8a8"))
    in_int8 = plan_memory(recipe, model_config(recipe))
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 64 * 96 * 3)  # two layers
    scales = 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    assert plain.weight_bytes - in_int8.weight_bytes == 3 * weights - 4 * scales


def test_random_weights_of_a_quantised_model_are_quantised_when_they_are_drawn() -> None:
    recipe = made({"quantization_config": Quantization().in_json()})
    assert model_config(recipe).quantization == Quantization(is_stored=False)
