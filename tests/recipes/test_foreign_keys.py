"""Keys of other engines are taken as ours where they mean the same, and refused with our key elsewhere."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.verbs import BENCHMARKS, SIMULATIONS, parser_of, simulate
from benchmark.verbs import main as benchmark_main
from doctor.verify import probes, product, tokens
from models.checkpoint.huggingface import rope_config, ropes_by_layer_type
from recipes import __main__ as recipes_main
from recipes.assembly.engine import build
from recipes.assembly.families import model_config
from recipes.config_overrides import ROPES, named_overrides, with_overrides
from recipes.schema.command_line import with_keys
from recipes.schema.foreign_keys import FOREIGN, SWITCHES, names_table
from recipes.schema.reader import KEYS, load, read
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from scripts import follow, generate, serve, verify
from tests.each_of import each_of
from tests.lazy import transformers

GOOD = """
model:
  path: recipes/tiny/weights
device:
  kind: cpu
cache:
  num_pages: 64
scheduler:
  num_slots: 4
  max_batch_tokens: 64
"""
TINY = ROOT / "recipes/tiny/cpu.yaml"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def recipe(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text.lstrip())
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as refused:
        load(path, overrides)
    assert "\n" not in str(refused.value)
    return str(refused.value).removeprefix(f"{path.parent}/")


def test_every_name_leads_to_keys_that_there_are() -> None:
    names = [name for each in FOREIGN for name in each.names]
    assert len(set(names)) == len(names)
    assert {key for each in FOREIGN for key in each.keys} <= set(KEYS)
    page = (ROOT / "docs/recipe_keys.md").read_text()
    assert names_table() in page, "else replace the table by what `python -m recipes names` prints"


LONGEST = "scheduler.max_request_tokens"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (GOOD.replace("num_pages: 64", "gpu_memory_utilization: 0.5"), "cache.memory_fraction", 0.5),
        (f"{GOOD}tensor-parallel-size: 2\n", "parallel.tensor", 2),
        (f"{GOOD}disable_radix_cache: true\n", "cache.prefix_sharing", False),
        (f"{GOOD}batching:\n  max_batch_size: 4\n  scheduling_policy: sjf\n", "scheduler.queue", "sjf"),
        (f"{GOOD}A:\n  B:\n    maxSeqLen: 512\n    cacheBlockSize: 32\n", LONGEST, 512),
    ],
)
def test_a_key_of_the_same_meaning_is_taken_as_ours(
    text: str, key: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_recipe = read(recipe(tmp_path, text))
    assert read_recipe.recipe.value(key) == value
    assert f"is taken as {key}=" in caplog.text
    assert "r.yaml:" in read_recipe.origin(key)


def test_names_of_vllms_parsers_are_taken_as_ours() -> None:
    for given, meant in (("deepseek_v3", "deepseek"), ("hermes", "hermes")):
        for key in ("tool_call_parser", "server.tool_format"):
            assert load(TINY, [f"{key}={given}"]).server.tool_format == meant
    assert load(TINY, ["tool_call_parser=openai", "server.reasoning=harmony"]).server.tool_format == "harmony"


def test_the_command_line_takes_them_too(caplog: pytest.LogCaptureFixture) -> None:
    assert load(TINY, ["max_num_seqs=3", "scheduler.max_model_len=64"]).scheduler.num_slots == 3
    assert "command line: max_num_seqs=3: max_num_seqs is taken as scheduler.num_slots=3" in caplog.text


@pytest.mark.parametrize("number", [3, 4])
def test_a_number_of_guesses_is_refused_where_nobody_guesses(number: int, tmp_path: Path) -> None:
    """Also the number that ours is by default; but not if a later place wants no guesses."""
    asked = f"num_speculative_tokens={number}"
    assert load(TINY, [asked, "speculation.kind=ngram"]).speculation.max_tokens == number
    words = r"speculation\.max_tokens: read only where speculation\.kind is not none"
    for more in ([], ["speculation.kind=none"]):
        with pytest.raises(RecipeError, match=words):
            load(TINY, [asked, *more])
    path = recipe(tmp_path, f"{GOOD}num_speculative_tokens: {number}\nspeculation:\n  kind: ngram\n")
    assert load(path).speculation.max_tokens == number
    assert load(path, ["speculation.kind=none"]).speculation.kind == "none"


@each_of(
    "given, meant",
    [
        ("r.yaml --tensor-parallel-size 2", "r.yaml tensor_parallel_size=2"),
        ("--tensor-parallel-size 2 r.yaml a.b=c", "r.yaml tensor_parallel_size=2 a.b=c"),
        ("-tp 2 --json r.yaml --max_model_len=9", "--json r.yaml tp=2 max_model_len=9"),
        ("--enforce-eager r.yaml --prompt --tp", "r.yaml enforce_eager=true --prompt --tp"),
        ("r.yaml --no-enable-prefix-caching --port 1", "r.yaml enable_prefix_caching=false --port 1"),
        ("--model DIR --tp 2", "DIR tp=2"),
        ("r.yaml --model DIR -- --tp 2", "r.yaml model=DIR -- --tp 2"),
        ("--enable-auto-tool-choice r.yaml", "r.yaml enable_auto_tool_choice=true"),
        ("r.yaml --unknown 2", "r.yaml --unknown 2"),
    ],
)
def test_options_of_other_engines_are_keys(given: str, meant: str) -> None:
    assert with_keys(given.split()) == meant.split()


def test_an_option_of_another_engine_without_its_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^--max-num-seqs has no value; give one"):
        with_keys(["r.yaml", "--max-num-seqs"])


def test_options_of_our_own_stay_what_they_are() -> None:
    """No option of a verb with a recipe is taken for a key of another engine."""
    parsers = {"serve": [serve.parser()], "generate": [generate.parser()]}
    parsers["benchmark"] = [parser_of(each, "") for each in BENCHMARKS if each.takes_recipe]
    parsers["simulate"] = [parser_of(each, "") for each in SIMULATIONS]
    for verb, some in parsers.items():
        for action in (each for parser in some for each in parser._actions):
            for name in (each for each in action.option_strings if each.startswith("--")):
                assert with_keys(["r.yaml", f"{name}=1"], verb=verb) == ["r.yaml", f"{name}=1"]


def test_switches_are_names_that_there_are() -> None:
    assert set(SWITCHES) <= {name for each in FOREIGN for name in each.names}


def verbs() -> Iterator[tuple[str, Callable[[list[str]], object], list[str]]]:
    """Every verb that takes a recipe, as its module's main and what it needs before the recipe."""
    yield "serve", serve.main, []
    yield "generate", generate.main, ["--prompt", "a"]
    yield "follow", follow.main, []
    yield "verify", verify.main, []
    yield "recipes show", recipes_main.main, ["show"]
    for each in (tokens, product, probes):
        yield each.__name__, each.main, []
    for verb in BENCHMARKS:
        if verb.takes_recipe:
            yield f"benchmark {verb.title}", benchmark_main, [*verb.title.split()]
    for verb in SIMULATIONS:
        if verb.takes_recipe:
            yield f"simulate {verb.title}", simulate, [*verb.title.split()]


@pytest.mark.parametrize(("main", "before"), [pytest.param(*each[1:], id=each[0]) for each in verbs()])
def test_every_verb_with_a_recipe_reads_them(
    main: Callable[[list[str]], object], before: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, OSError, SystemExit)) as refused:
        main([*before, "--enable-chunked-prefill", str(TINY), *("--max-num-seqs", "many")])
    assert "unrecognized" not in capsys.readouterr().err + str(refused.value)


@pytest.mark.parametrize(
    ("main", "before"),
    [(generate.main, ["--prompt", "a"]), (recipes_main.main, ["show"]), (follow.main, [])],
)
def test_their_values_are_judged_as_keys(main: Callable[[list[str]], object], before: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"^command line: max_num_seqs=many: scheduler\.num_slots: "):
        main([*before, str(TINY), "--max-num-seqs", "many"])
    with pytest.raises(RecipeError, match=r"^command line: n_workers=4: n_workers: is a key of another"):
        main([*before, "--n-workers", "4", str(TINY)])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("n_workers: 4", "r.yaml:10: n_workers: is a key of another engine, and there is none here ("),
        ("batching:\n  prefill_decode_ratio: 0.5", "is split); set scheduler.prompt_share"),
        ("scheduler2:\n  max_bs: 4\n  wrong: 1", "r.yaml:12: scheduler2.wrong: unknown key"),
        ("engine:\n  max_tokens_per_batch: 9", "r.yaml:11: engine.max_tokens_per_batch: is a key of another"),
        ("enforce_eager: true", "(0: none); set device.graphs"),
        ("quantization: ascend", "(a checkpoint says its own: leave it out); set model.quantization"),
        ("enable_auto_tool_choice: true", "wherever `server.tool_format` is set); leave it out"),
        ("max_num_seqs: many", "r.yaml:10: scheduler.num_slots: 'many' is not allowed"),
        ("max_num_seqs: 5", "scheduler.num_slots: 5 here, there max_num_seqs, and 4 at "),
        ("max_bs: 4\nmaxBatchSize: 8", "8 here, there maxBatchSize, and 4 at r.yaml:10, there max_bs"),
        ("npuMemSize: 3", "excludes cache.memory_gib, and both are set"),
        ("tuning:\n  a: 1", "r.yaml:10: tuning: unknown key"),
    ],
)
def test_what_means_something_else_or_disagrees_is_refused(more: str, words: str, tmp_path: Path) -> None:
    said = refusal(recipe(tmp_path, f"{GOOD}{more}\n"))
    assert words in said.replace(f"{tmp_path}/", "")


def folder_with(path: Path, **fields: Any) -> Path:
    """The tiny model's configuration with other fields, as someone would edit the file."""
    config = json.loads((ROOT / "recipes/tiny/weights/config.json").read_text())
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ([f"model.config_overrides.rope_scaling={json.dumps(YARN)}"], {"rope_scaling": YARN}),
        (
            ["model.config_overrides={rms_norm_eps: 0.1, rope_theta: 7.0}"],
            {"rms_norm_eps": 0.1, "rope_parameters": {"rope_theta": 7.0}},
        ),
        (["hf_overrides={eos_token_id: 7}"], {"eos_token_id": 7}),
    ],
)
def test_a_replaced_field_counts_as_if_the_file_said_it(
    given: list[str], fields: dict[str, Any], tmp_path: Path
) -> None:
    edited = folder_with(tmp_path / "edited", **fields)
    plain = folder_with(tmp_path / "plain")
    expected = model_config(load(TINY, [f"model.path={edited}"]))
    assert expected != model_config(load(TINY, [f"model.path={plain}"]))
    assert model_config(load(TINY, [f"model.path={plain}", *given])) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("hidden_size=64", "hidden_size is what the checkpoint's weights were made with; leave it out"),
        ("rope_scalling=null", "rope_scalling is no field that may be replaced; it may be one of"),
        ("rope_scalling=null", "did you mean rope_scaling?"),
        ("attn_logit_softcapping=50.0", "has no effect: a model of the family llama does not have it"),
        ("torch_dtype=float16", "torch_dtype is set by a key of its own; set model.dtype"),
    ],
)
def test_a_field_that_cannot_be_replaced_is_refused(given: str, words: str) -> None:
    with pytest.raises(RecipeError, match=r"^model\.config_overrides: ") as refused:
        model_config(load(TINY, [f"model.config_overrides.{given}"]))
    assert words in str(refused.value)


def test_a_checkpoint_of_text_and_images_has_its_text_changed() -> None:
    nested = {"model_type": "x", "text_config": {"rope_theta": 1.0}}
    assert with_overrides(nested, {"rope_theta": 2.0})["text_config"] == {"rope_theta": 2.0}


BY_TYPE = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize(
    "given",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN},
        {"rope_scaling": YARN, "rope_theta": 5e6},
        {"rope_scaling": YARN | {"rope_theta": 5e6}},
        {"rope_theta": 5e6},
        {"partial_rotary_factor": 0.25},
        {"rope_scaling": None},
    ],
)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling", None])
def test_another_rope_keeps_the_base_wherever_the_checkpoint_has_it(
    key: str | None, given: dict[str, Any]
) -> None:
    own = {"rope_theta": 1e6, "partial_rotary_factor": 0.5}
    hf = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 8192}
    hf |= own if key is None else {key: own | {"rope_type": "linear", "factor": 2.0}}
    merged = with_overrides(hf, given)
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    expected = {name: given.get(name, own[name]) for name in own} | scaling
    theirs = transformers.LlamaConfig(**copy.deepcopy(merged)).rope_parameters
    assert {name: theirs[name] for name in expected} == expected
    ours = rope_config(merged, 64, 8192, turned=1.0)
    assert (ours.theta, ours.dim) == (expected["rope_theta"], 64 * expected["partial_rotary_factor"])
    is_plain = ("rope_scaling" in given and not scaling) or key is None
    assert ours.kind == theirs["rope_type"] == scaling.get("rope_type", "default" if is_plain else "linear")


def test_a_rope_of_each_layer_type_keeps_both_bases_or_refuses() -> None:
    hf = {"rope_parameters": BY_TYPE}
    full, local = ropes_by_layer_type(with_overrides(hf, {"rope_scaling": YARN}), theta=7.0, local_theta=7.0)
    assert (full, local) == (BY_TYPE["full_attention"] | YARN, BY_TYPE["sliding_attention"])
    for name in ("rope_theta", "partial_rotary_factor", "rope_local_base_freq", "rope_scaling"):
        with pytest.raises(RecipeError, match=f"{name} is of each type of layer .*give rope_parameters as a"):
            with_overrides(hf, {name: None})
    other = {key: {"rope_theta": 5.0} for key in BY_TYPE}
    old = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    for each in (hf, old, {"rope_parameters": {"rope_theta": 1e6}}):
        full, local = ropes_by_layer_type(
            with_overrides(each, {"rope_parameters": other}), theta=7.0, local_theta=7.0
        )
        assert full == local == {"rope_theta": 5.0}


def test_a_field_of_a_text_model_counts_although_the_whole_says_it() -> None:
    """As published: the end tokens of generation_config.json stand beside `text_config`."""
    hf = {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}}
    replaced = with_overrides(hf, {"eos_token_id": [50]})
    assert replaced["eos_token_id"] == replaced["text_config"]["eos_token_id"] == [50]
    assert next(named_overrides(hf, {"eos_token_id": [50]})).endswith("says [1, 106]")


def test_what_is_said_twice_of_a_rope_is_refused() -> None:
    for given in (
        {"rope_scaling": YARN | {"rope_theta": 1.0}, "rope_theta": 2.0},
        dict.fromkeys(ROPES, YARN),
    ):
        with pytest.raises(RecipeError, match="give one of them"):
            with_overrides({}, given)


def test_replaced_fields_are_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    build(load(TINY, ["model.config_overrides.rms_norm_eps=0.5", "device.compile=false", "device.threads=1"]))
    line = "model.config_overrides: rms_norm_eps is 0.5, where the checkpoint's config.json says 1e-05"
    assert line in caplog.text
    said = next(named_overrides({"rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 5e6}))
    assert said == "rope_theta is 5000000.0, where the checkpoint's config.json says 1000000.0"
