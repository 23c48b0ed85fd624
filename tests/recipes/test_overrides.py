"""Bases, overrides and paths: what replaces what, and which place an error names."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.schema.reader import KEYS, load, read
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.recipes.conftest import GOOD, error
from tests.thorough import cases


def test_overrides_come_last_and_errors_name_them(recipe):
    path = recipe()
    assert load(path, ["cache.page_size=8", "cache.page_size=32"]).cache.page_size == 32
    assert load(path, ["cache.num_pages=null", "cache.memory_gib=1"]).cache.memory_gib == 1.0
    npu = ["device.kind=npu", "device.virtual=true"]
    assert load(path, [*npu, "device.product=950"]).device.product == "950"
    assert load(path, ["model.path=/a=b"]).model.path == Path("/a=b")
    assert error(path, "cache.page_sise=1") == (
        "command line: cache.page_sise=1: cache.page_sise: unknown key; did you mean cache.page_size?"
    )
    assert error(path, "cache.page_size=x").startswith(
        "command line: cache.page_size=x: cache.page_size: 'x' is not"
    )
    assert error(path, "cache.page_size") == (
        "command line: cache.page_size: an override reads key=value, as in cache.page_size=32"
    )
    assert error(path, "cache={}") == (
        "command line: cache={}: cache is a section; set one of its keys, as in cache.page_size=..."
    )
    assert error(path, "cache.page_size.x=1").startswith(
        "command line: cache.page_size.x=1: cache.page_size.x: unknown key"
    )
    assert error(path, "model.path={").startswith("command line: model.path={: not YAML: ")
    assert error(path, "base=other.yaml").startswith("command line: base=other.yaml: base: ")


def test_a_path_of_an_override_is_whole(recipe):
    """YAML takes what follows ' #' for a comment, and quotes keep their meaning."""
    path = recipe()
    for text in ("/models/My #1", "'/models/My #1'", '"/models/My #1"', " /models/My #1"):
        assert load(path, [f"model.path={text}"]).model.path == Path("/models/My #1")
    assert load(path, ["model.path=#1"]).model.path == ROOT / "#1"
    tier = ["cache.tier.kind=disk", "cache.tier.path=/mnt/My #1", "cache.tier.gib=1", "cache.host_gib=1"]
    assert load(path, tier).cache.tier["path"] == "/mnt/My #1"
    assert load(path, ["cache.page_size=8 # tokens"]).cache.page_size == 8
    assert load(path, ["speculation.draft_path=null # none"]).speculation.draft_path is None


def test_a_number_may_have_an_exponent(recipe):
    for text in ("1e1", "1E+1", "1.e1", ".1e2", "10", "1.0e+1"):
        file = recipe(GOOD.replace("num_pages: 64", f"memory_gib: {text}"))
        assert (
            load(file).cache.memory_gib == load(file, [f"cache.memory_gib={text}"]).cache.memory_gib == 10.0
        )
    for text in ("1e999", "1e", "e1", "1e1.5"):
        assert f"'{text}' is not allowed; it must be a number" in error(file, f"cache.memory_gib={text}")
    assert "'1e1' is not allowed; it must be an integer" in error(file, "cache.page_size=1e1")


def test_a_number_in_a_mapping_may_have_an_exponent(recipe):
    said = "{rms_norm_eps: 1e-06, rope_scaling: {factor: 4e0, of: [1E3]}, far: 1e999, dtype: float32}"
    expected = {
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"factor": 4.0, "of": [1000.0]},
        "far": "1e999",
        "dtype": "float32",
    }
    file = recipe(
        GOOD.replace("path: recipes/tiny/weights", f"path: recipes/tiny/weights\n  config_overrides: {said}")
    )
    assert load(file).model.config_overrides == expected
    path = recipe()
    for name in ("model.config_overrides", "hf_overrides"):
        assert load(path, [f"{name}={said}"]).model.config_overrides == expected
    single = [f"model.config_overrides.{name}" for name in ("rope_theta=1e6", "rope_scaling={factor: 4e0}")]
    assert load(path, single).model.config_overrides == {"rope_theta": 1e6, "rope_scaling": {"factor": 4.0}}
    weights = ["scheduler.fair_tenants=true", "scheduler.tenant_weights={a: 1e1}"]
    assert load(path, weights).scheduler.tenant_weights == {"a": 10.0}


def test_an_override_reaches_into_an_inline_config(recipe):
    path = recipe(
        GOOD.replace("path: recipes/tiny/weights", "weights: random\n  config: {model_type: llama, a: 1}")
    )
    assert load(path, ["model.config.a=2", "model.config.b.c=[3]"]).model.config == {
        "model_type": "llama",
        "a": 2,
        "b.c": [3],
    }


def test_a_base_is_read_first_and_only_one_level_deep(recipe):
    recipe(GOOD, "base.yaml")
    child = recipe("base: base.yaml\ncache:\n  page_size: 4\n", "child.yaml")
    reading = read(child)
    assert reading.recipe.cache.page_size == 4
    assert reading.recipe.cache.num_pages == 64
    assert reading.origin("cache.num_pages") == "base.yaml:7"
    recipe("base: child.yaml\n", "grandchild.yaml")
    assert error("grandchild.yaml") == (
        "child.yaml:1: base: grandchild.yaml is based on this recipe, and a base may have no base itself;"
        " copy the keys"
    )
    recipe("\nbase: absent.yaml\n", "lost.yaml")
    assert error("lost.yaml") == "lost.yaml:2: base: absent.yaml: no such file or directory"
    recipe("base: 3\n", "odd.yaml")
    assert error("odd.yaml") == "odd.yaml:1: base: 3 is not the path of a recipe"


def test_an_error_names_the_place_that_was_read_last(recipe):
    path = recipe()
    both = error(path, "cache.memory_gib=1", "cache.memory_fraction=0.5")
    assert both == (
        "command line: cache.memory_fraction=0.5: cache.memory_gib: excludes cache.memory_fraction, and both"
        " are set; set one of them to null"
    )
    low = "scheduler.num_slots: 4 is more than scheduler.max_batch_tokens (2), so that not every slot could"
    assert error(recipe(GOOD.replace("tokens: 64", "tokens: 2"))).startswith(f"r.yaml:9: {low}")


def test_paths_know_the_home_and_the_environment(recipe, monkeypatch):
    path = recipe()
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.setenv("HOME", "/home/me")
    assert load(path, ["model.path=${MODELS}/x"]).model.path == Path("/models/x")
    assert load(path, ["model.path=~/x"]).model.path == Path("/home/me/x")
    # A variable that is not set is missed only where no later place gives the path
    recipe(GOOD.replace("recipes/tiny", "${NO_SUCH_PLACE}"), "base.yaml")
    based = recipe("base: base.yaml\n", "based.yaml")
    assert load(based, ["model.path=/models/y"]).model.path == Path("/models/y")
    assert error(based).startswith("base.yaml:2: model.path: ${NO_SUCH_PLACE} is not set in the environment;")


def line_of(*overrides: str) -> str | None:
    """The error that these overrides of a good recipe give."""
    try:
        load(ROOT / "recipes/tiny/cpu.yaml", overrides)
    except RecipeError as caught:
        return str(caught)
    return None


@settings(max_examples=cases(40, 100))
@given(st.text(max_size=20), st.sampled_from(["", "base", "device", "model", "cache", "scheduler"]))
def test_no_override_ends_in_anything_but_a_line(text, section):
    override = f"{section}.{text}=1" if section else f"{text}=1"
    name = override.partition("=")[0]
    line = line_of(override)
    if line is None:
        assert name.startswith("model.config.") or name in KEYS
    else:
        assert line.startswith("command line: ")


@settings(max_examples=cases(40, 100))
@given(st.text(max_size=40), st.sampled_from(sorted(KEYS)))
def test_no_value_ends_in_anything_but_a_line(value, name):
    assert (line_of(f"{name}={value}") or "command line: ").startswith("command line: ")
