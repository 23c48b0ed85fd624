"""Each recipe for Ascend loads, fits its device, and states in its README what it takes."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from attention.divided import shapes_of
from attention.latent import LatentAttention
from devices.ascend_limits import product
from models.checkpoint.int4 import largest_side
from models.config import DecoderConfig
from models.layers.dtypes import TORCH_DTYPES
from models.parallel.share import Share
from models.step.graphs import doubling, ladder
from recipes.__main__ import main
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import share_of
from recipes.assembly.memory_plan import GIB, MemoryPlan, report
from recipes.assembly.operators import check_operators, divides_pages
from recipes.assembly.sizing import plan_memory
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, Recipe
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import stand_in_alone
from tests.each_of import each_of
from tests.recipes import published
from tests.serving.warm import CODE, completed
from tests.thorough import THOROUGH, cases

RECIPES = sorted(path for chip in ("310p", "910") for path in ROOT.glob(f"recipes/*/*_{chip}*.yaml"))
FIRST = {path.parent: path for path in reversed(RECIPES)}.values()  # one of each folder
CHIP_GIB = {"310P": 24, "910": 32, "910B": 64, "910C": 64}  # memory of a chip, or of a die


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    published.write(root)
    return root


@pytest.fixture(autouse=True)
def _weights(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", os.fspath(written))
    monkeypatch.chdir(ROOT)


@cache
def shared(path: Path) -> tuple[Recipe, DecoderConfig, Share]:
    """A recipe, its whole model, and what its first rank holds of that."""
    recipe = load(str(path))
    return recipe, *share_of(recipe, 0)


def row(path: Path) -> str:
    """A recipe's row in its folder's README."""
    recipe, config, share = shared(path)
    assert recipe.device.memory_gib is not None, "it is sized without its device"
    sizing = plan_memory(recipe, config, int(recipe.device.memory_gib * GIB), share=share)
    said = dict(report(recipe, config, sizing, share))
    page = said["a page"].split(", ", 1)[1].partition(" over")[0]
    cells = [said["weights"], page, f"{sizing.num_pages:,}", f"{sizing.cache_tokens - 1:,}", said["sum"]]
    return f"| [{path.name}]({path.name}) | " + " | ".join(cells) + " |"


def test_there_are_recipes_for_each_machine() -> None:
    recipes = [load(str(path)) for path in RECIPES]
    assert {each.device.product for each in recipes} == set(CHIP_GIB)
    assert {each.model.quantization for each in recipes} == {"auto", "w8a8", "w4a16"}


def fits(path: Path) -> None:
    recipe, _, _ = shared(path)
    assert recipe.device.product is not None
    assert recipe.device.memory_gib is not None
    assert recipe.device.memory_gib < 0.95 * CHIP_GIB[recipe.device.product]
    assert recipe.cache.page_size == 128
    readme = (path.parent / "README.md").read_text()
    assert row(path) in readme
    assert "not measured on hardware yet" in readme.lower()


def asks_for_what_its_product_has(path: Path) -> None:
    recipe, whole, share = shared(path)
    config = share.part(whole)
    shape = shape_of(recipe.cache.page_size, config)
    named = product(recipe.device.product, "")
    if config.quantization is not None:
        named.check_int8(TORCH_DTYPES[config.dtype], config.int8_forms, config.largest_int8_side)
    if config.kept_form is not None:
        named.check_int4(TORCH_DTYPES[config.dtype], config.kept_form.group_size, largest_side(config))
    if recipe.device.attention == "fused":
        named.check(shape)
        page_size = recipe.cache.page_size
        asked, slots = recipe.speculation, recipe.scheduler.num_slots
        width = 1 if asked.kind == "none" else 1 + asked.max_tokens
        sizes = ladder(min(recipe.device.graphs, slots), page_size)
        spans = doubling(recipe.device.graphs // width) if width > 1 else []
        joins = recipe.parallel.tensor > 1
        assert named.graph_sizes(sizes, config.num_layers, page_size, len(spans), joins=joins) == sizes
        assert recipe.device.graphs <= slots * width
    else:
        with pytest.raises(ValueError, match=r"no fused attention|fused attention takes"):
            named.check(shape)
        assert recipe.device.graphs == 0
    if recipe.device.product in ("310P", "910"):
        assert config.dtype == "float16", "it has no bfloat16"


@each_of("path", FIRST)
def test_a_recipe_fits_its_device_and_its_readme(path: Path) -> None:
    fits(path)
    asks_for_what_its_product_has(path)


@pytest.mark.slow
@each_of("path", sorted({*RECIPES} - {*FIRST}))
def test_so_does_each_further_recipe_of_a_family(path: Path) -> None:
    fits(path)
    asks_for_what_its_product_has(path)


def test_show_plans_without_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    path = "recipes/qwen3/qwen3_8b_910c_w8a8.yaml"
    main(["show", path])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "model qwen3, 8,190.7 M parameters, bfloat16, W8A8" in lines
    assert "weights 8.79 GiB" in lines
    with pytest.raises(RecipeError, match=r"cache\.memory_fraction: 0\.9 of the 12\.00 GiB"):
        main(["show", path, "device.memory_gib=12"])


DEEPSEEK, QWEN = "recipes/deepseek/deepseek_v3.1_910c_tp16.yaml", "recipes/qwen3/qwen3_8b_910b.yaml"


@pytest.mark.slow
def test_ranks_that_divide_pages_hold_as_many_times_the_tokens() -> None:
    def planned(count: int) -> MemoryPlan:
        ranks = (f"parallel.context={count}", "cache.page_size=256")
        recipe = load(DEEPSEEK, [*ranks, "cache.memory_gib=6", "cache.memory_fraction=null"])
        config, share = share_of(recipe, 0)
        return plan_memory(recipe, config, 64 * GIB, share=share)

    whole, (config, _) = planned(1), share_of(load(DEEPSEEK), 0)
    for count in (2, 16):
        divided = planned(count)
        assert divided.page_bytes * count == whole.page_bytes
        assert count * whole.num_pages <= divided.num_pages < count * (whole.num_pages + 1)
        shape = shape_of(256, Share(0, 16, contexts=count).part(config))
        parts, _ = shapes_of(shape, count)
        held = [sum(each.nbytes for each in LatentAttention(each).new_planes(3)) for each in (shape, parts)]
        assert held[0] == count * held[1], "what is allocated is what is planned"


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        (DEEPSEEK, "parallel.context=32", "parallel.context: 32 ranks cannot divide a page of the cache: 16"),
        (DEEPSEEK, "cache.page_size=68", "cache.page_size is 68, which it does not divide"),
        (QWEN, "parallel.context=2", "parallel.context: 2 ranks cannot divide a page of the cache: 1 of 1"),
        ("recipes/gpt_oss/gpt_oss_20b_910b.yaml", "parallel.context=2", "the model has sliding windows"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(path: str, change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        share_of(load(path, [change]), 0)


@pytest.mark.parametrize(
    ("path", "changes", "divides"),
    [
        (QWEN, [], True),
        (QWEN, ["device.product=310P", "model.dtype=float16"], False),
        (QWEN, ["device.product=null"], True),
        ("recipes/qwen3_5/qwen3_5_9b_910b.yaml", [], False),  # single queries read heads of 256
        (DEEPSEEK, [], True),
        (QWEN, ["device.kind=cuda", "device.product=null"], False),
        ("recipes/tiny/cpu.yaml", [], False),
        ("recipes/tiny/cpu.yaml", ["device.compile=auto"], True),
        (
            QWEN,
            ["device.kind=cuda", "device.product=null", "device.attention=reference", "device.graphs=0"],
            True,
        ),
    ],
)
def test_attention_without_sums_divides_no_pages(path: str, changes: list[str], divides: bool) -> None:
    recipe = load(path, changes)
    config, share = share_of(recipe, 0)
    assert divides_pages(recipe, config) == divides
    if not divides:
        with pytest.raises(ValueError, match=r"parallel\.context is 2; .* gives no sums by which parts"):
            check_operators(recipe, config, 1024, replace(share, contexts=2))


@pytest.mark.slow
def test_show_says_what_divided_pages_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", DEEPSEEK, "parallel.context=1"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    # Queries and outputs of the heads of eight ranks
    cost = "a decode reads 1/8 of its context on each rank, and sends 10.9 MB"
    held = "divided pages parallel.context=8 would hold 810,880 tokens, a request up to 163,840"
    assert f"{held}; {cost}" in lines
    assert "cache 6.81 GiB, 103,936 tokens" in lines
    main(["show", DEEPSEEK])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"divided pages between 8 ranks; {cost}" in lines


def traits_of(recipe: Recipe) -> set[tuple[str, object]]:
    """What of a recipe matters where another model is served; all of it with --thorough.

    The contract of a 910C is the 910B's.
    """
    device, model, parallel = recipe.device, recipe.model, recipe.parallel
    if THOROUGH:
        return {("recipe", recipe)}
    return {
        ("attention", device.attention),
        ("graphs", device.graphs > 0),
        ("quantization", model.quantization),
        *((name, getattr(parallel, name) > 1) for name in ("tensor", "pipeline", "expert")),
        ("policy", recipe.scheduler.policy),
        ("overlap", recipe.scheduler.overlap),
    }


def one_of_each() -> dict[str | None, list[str]]:
    """By product, as few recipes as have all that its recipes have: to start an engine of each takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS", os.curdir)
        recipes = sorted(RECIPES, key=lambda path: "910c" in path.stem)  # so that few processes start
        loaded = {str(path): load(str(path)) for path in recipes}
    has = {path: {(contract_of(each), *trait) for trait in traits_of(each)} for path, each in loaded.items()}
    lacking = set[tuple[object, ...]]().union(*has.values())
    by_product: dict[str | None, list[str]] = {}
    while lacking:
        path = max(loaded, key=lambda path: len(has[path] & lacking))
        lacking -= has[path]
        by_product.setdefault(loaded[path].device.product, []).append(path)
    return by_product


def contract_of(recipe: Recipe) -> str | None:
    """The product whose operators a recipe calls."""
    return "910B" if recipe.device.product == "910C" else recipe.device.product


SERVED_PRODUCTS = cases(["310P", "910", "910B"], sorted(CHIP_GIB))
SERVED = """
import sys
from recipes.schema.reader import load
from serving.llm import LLM, SamplingParams

TINY = "model.path=recipes/tiny/weights"
SMALL = (TINY, "cache.num_pages=64", "server.step_timeout_s=300", "device.virtual=true")
for path in sys.argv[1:]:
    recipe = load(path)
    tensor = 1 if recipe.parallel.pipeline > 1 else min(2, recipe.parallel.tensor)  # two ranks are enough
    # The tiny model has a key-value head for each of two ranks
    changes = [*SMALL, f"parallel.tensor={tensor}", "parallel.context=1"]
    # A start measures the largest step and captures all sizes, which here takes seconds of a processor
    changes += ["scheduler.max_batch_tokens=16", "scheduler.num_slots=2"]
    changes += ["device.graphs=2"] if recipe.device.graphs else []
    if recipe.model.quantization == "w4a16":  # the tiny model is not packed
        changes.append("model.quantization=auto")
    if recipe.speculation.kind == "mtp":  # nor has it such a layer
        changes.append("speculation.kind=none")
    llm = LLM(path, *changes)
    (output,) = llm.generate("348+275=", SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    print(output.outputs[0].text, flush=True)
    llm.engine.observer.close()
"""


@pytest.mark.slow
@pytest.mark.npu
@stand_in_alone
@pytest.mark.parametrize("product", SERVED_PRODUCTS)
def test_recipes_serve_the_tiny_model_on_the_stand_in(product: str) -> None:
    by_product = one_of_each()
    assert by_product.keys() == set(SERVED_PRODUCTS), "a recipe of another product is served by no test"
    paths = by_product[product]
    done = completed(CODE, SERVED, *paths)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["623"] * len(paths)), done.stderr
