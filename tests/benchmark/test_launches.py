"""The launches, copies and waits of a decode step on an NPU, which are exact on any machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from benchmark.micro import launches
from devices.ascend_limits import answers_file, write_answers
from recipes import machine as machines
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import section, stand_in_alone
from tests.models.test_published_files import GPT_OSS
from tests.recipes import published
from tests.thorough import cases

pytestmark = [pytest.mark.npu, stand_in_alone]


def written(hf: dict[str, Any]) -> str:
    """A configuration as an override holds it."""
    return yaml.safe_dump(hf, default_flow_style=True, width=10**6).strip()


AWQ = published.QWEN2_5_32B_AWQ["quantization_config"]
LLAMA, QWEN2, QWEN3 = map(written, (published.LLAMA2_7B, published.QWEN2_5_7B, published.QWEN3_8B))
QWEN2_AWQ = written(published.QWEN2_5_7B | {"torch_dtype": "float16", "quantization_config": AWQ})
QWEN3_MOE = written(published.QWEN3_30B_A3B | {"num_experts": 16})
# A layer's launches are for all of its experts
DEEPSEEK_V3_FEW = published.DEEPSEEK_V3 | {"n_routed_experts": 32, "n_group": 8, "topk_group": 4}
DEEPSEEK_V32 = written(published.DEEPSEEK_V3_2 | {"n_routed_experts": 32})
DEEPSEEK_V3 = written({key: each for key, each in DEEPSEEK_V3_FEW.items() if key != "quantization_config"})
DEEPSEEK_V2_LITE, MIXTRAL = map(written, (published.DEEPSEEK_V2_LITE, published.MIXTRAL_8X7B))
MODELS = {
    "Qwen3-8B, bfloat16": ("qwen3/qwen3_8b_910b", QWEN3),
    "Qwen3-8B, W8A8": ("qwen3/qwen3_8b_910b_w8a8", QWEN3),
    "Llama-2-7B, float16": ("llama/llama2_7b_910b", LLAMA),
    "Qwen2.5-7B, W8A8": ("qwen2/qwen2.5_7b_910b_w8a8", QWEN2),
    "Qwen2.5-7B, W4A16": ("qwen2/qwen2.5_32b_910b_w4a16", QWEN2_AWQ),
    "Qwen3-30B-A3B, bfloat16": ("qwen3_moe/qwen3_30b_a3b_910b_tp2", QWEN3_MOE),
    "Qwen3-30B-A3B, W8A8": ("qwen3_moe/qwen3_30b_a3b_910b_w8a8", QWEN3_MOE),
    "Mixtral-8x7B over two, W8A8": ("mixtral/mixtral_8x7b_910b_tp2", MIXTRAL),
    "Mixtral-8x7B over four, W8A8": ("mixtral/mixtral_8x7b_910b_tp4", MIXTRAL),
    "DeepSeek-V2-Lite, bfloat16": ("deepseek/deepseek_v2_lite_910b", DEEPSEEK_V2_LITE),
    "DeepSeek-V3, bfloat16": ("deepseek/deepseek_v3_910b_tp16", DEEPSEEK_V3),
    "DeepSeek-V3, W8A8": ("deepseek/deepseek_v3_910b_tp16", DEEPSEEK_V3),
}
# Launches a layer, in the graph, in the graph that draws by top-k and top-p, and outside of both: greedy,
# with top-p, with top-k and top-p, and by temperature alone
EXPECTED = {
    "Qwen3-8B, bfloat16": (13, 482, 29, 0, 0, 0, 13),
    "Qwen3-8B, W8A8": (14, 519, 29, 0, 0, 0, 13),
    "Llama-2-7B, float16": (11, 366, 29, 0, 0, 0, 13),
    "Qwen2.5-7B, W8A8": (12, 351, 29, 0, 0, 0, 13),
    "Qwen2.5-7B, W4A16": (11, 322, 29, 0, 0, 0, 13),
    "Qwen3-30B-A3B, bfloat16": (20, 974, 29, 0, 0, 0, 13),
    "Qwen3-30B-A3B, W8A8": (20, 975, 29, 0, 0, 0, 13),
    "Mixtral-8x7B over two, W8A8": (20, 655, 29, 0, 0, 0, 13),
    "Mixtral-8x7B over four, W8A8": (18, 591, 29, 0, 0, 0, 13),
    "DeepSeek-V2-Lite, bfloat16": (22, 600, 29, 0, 0, 0, 13),
    "DeepSeek-V3, bfloat16": (25, 1513, 29, 0, 0, 0, 13),
    "DeepSeek-V3, W8A8": (27, 1638, 29, 0, 0, 0, 13),
}
# Launches a layer and in the graph where probes have found what no other engine calls right and faster, by
# the answers that are yes
ANSWERED = {
    ("Qwen3-8B, bfloat16", "groups_products"): (12, 446),
    ("Qwen3-8B, bfloat16", "joins_heads"): (10, 374),
    ("Qwen3-8B, W8A8", "joins_heads"): (11, 411),
    ("Qwen3-30B-A3B, bfloat16", "groups_products, divides_gates"): (17, 830),
    ("Qwen3-30B-A3B, bfloat16", "joins_heads"): (17, 830),
    ("Qwen3-30B-A3B, bfloat16", "joins_heads, divides_gates"): (15, 734),
    ("Qwen3-30B-A3B, W8A8", "divides_gates"): (18, 879),
    ("Qwen3-30B-A3B, W8A8", "joins_heads"): (17, 831),
    ("Qwen3-30B-A3B, W8A8", "joins_heads, divides_gates"): (15, 735),
    ("DeepSeek-V3, bfloat16", "groups_products"): (23, 1391),
}
# Most launches a layer with joined heads, as few as other engines have with a kernel of their own
TARGETS = {"Qwen3-8B, bfloat16": 12, "Qwen3-8B, W8A8": 12, "Qwen3-30B-A3B, W8A8": 17}
# DeepSeek-V3's launches a layer and in the graph with all before latent attention in one of them
JOINED = {"bfloat16": (18, 1086), "W8A8": (19, 1150)}
# DeepSeek-V3.2's in captured steps, whose layers choose what they read, apart and joined
SPARSE = {False: (37, 2246), True: (30, 1819)}
WAITS = 1
DRAWN = ("Llama-2-7B, float16", "Qwen3-30B-A3B, W8A8")  # how tokens are drawn does not depend on the layers
# A plain layer and a latent one, then one of experts in int8; the rest are other forms of these
QUICK = ("Llama-2-7B, float16",)
MORE = ("DeepSeek-V3, bfloat16", "Qwen3-30B-A3B, W8A8", "Qwen2.5-7B, W4A16", "Mixtral-8x7B over two, W8A8")
QUICK_ANSWERS = (
    ("Qwen3-8B, bfloat16", "joins_heads"),
    ("Qwen3-30B-A3B, bfloat16", "groups_products, divides_gates"),
)

SLOW_ANSWERS = (
    ("Qwen3-30B-A3B, W8A8", "joins_heads, divides_gates"),
    ("DeepSeek-V3, bfloat16", "groups_products"),
)
SLOW = pytest.mark.slow


def marked(names: Iterable[Any], quick: tuple[Any, ...], slow: tuple[Any, ...]) -> list[Any]:
    """Parameters: the quick ones, those that are slow, and with --thorough all others."""
    some = [name for name in names if name in (*quick, *slow)]
    return [
        pytest.param(*(name if isinstance(name, tuple) else (name,)), marks=[] if name in quick else SLOW)
        for name in cases(some, [*names])
    ]


def steps_of(
    recipe: str, chosen: list[str], samplings: Iterable[str] = ("greedy",)
) -> dict[str, dict[str, Any]]:
    """The counts by step, of a recipe for an NPU with what is chosen of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELS", "/models")
        result: dict[str, Any] = launches.measure(load(ROOT / f"recipes/{recipe}.yaml", chosen), samplings)
    return {each["step"]: each for each in result["steps"]}


def chosen_of(config: str, *, is_int8: bool = False) -> list[str]:
    """The overrides that give a recipe another model, of random weights."""
    chosen = ["model.path=null", f"model.config={config}", "model.weights=random"]
    return [*chosen, "model.quantization=w8a8"] if is_int8 else chosen


@cache
def counted(name: str, *overrides: str) -> dict[str, dict[str, Any]]:
    """The counts by step, of the recipe with the configuration of the real model."""
    recipe, config = MODELS[name]
    chosen = [*chosen_of(config, is_int8=name.endswith("W8A8")), *overrides]
    return steps_of(recipe, chosen, launches.SAMPLING if name in DRAWN else ("greedy",))


@pytest.mark.parametrize("name", marked(MODELS, QUICK, MORE))
def test_a_step_asks_for_so_many_launches_copies_and_waits(name: str) -> None:
    steps = counted(name)
    captured = [step for way, step in steps.items() if way.startswith("captured")]
    layer, graph, drawing, *outside = EXPECTED[name]
    assert {step["a_layer"] for step in steps.values()} == {layer}
    assert {step["in_graph"] for step in captured} == {graph}
    assert [step["drawing"] for step in captured] == [0, drawing, drawing, 0][: len(captured)]
    assert [step["outside_graph"] for step in captured] == outside[: len(captured)]
    for way, step in steps.items():
        if way.startswith("captured"):
            copies = 2 if way.endswith("temperature") else 1
            assert [step[each] for each in ("to_device", "to_host", "waits")] == [copies, 1, WAITS], way


def answering(answers: dict[str, bool], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let machines read these answers of the probes."""
    machine = start(section("npu", virtual_fp32=False))
    assert isinstance(machine, Npu)
    write_answers(answers_file(folder, machine.product.name, machine.cann, virtual=True), answers)
    monkeypatch.setattr(machines, "ANSWERS", folder)


@pytest.mark.parametrize(("name", "answers"), marked(ANSWERED, QUICK_ANSWERS, SLOW_ANSWERS))
def test_fewer_launches_follow_what_probes_found(
    name: str, answers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(dict.fromkeys(answers.split(", "), True), tmp_path, monkeypatch)
    recipe, config = MODELS[name]
    captured = steps_of(recipe, chosen_of(config, is_int8=name.endswith("W8A8")))["captured, greedy"]
    assert (captured["a_layer"], captured["in_graph"]) == ANSWERED[name, answers]


def test_joined_heads_reach_the_targets() -> None:
    assert all(ANSWERED[name, "joins_heads"][0] <= most for name, most in TARGETS.items())


@pytest.mark.parametrize("form", cases(["bfloat16"], [*JOINED]))
def test_one_launch_of_all_before_latent_attention_takes_the_place_of_many(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering({"joins_latents": True}, tmp_path, monkeypatch)
    chosen = chosen_of(DEEPSEEK_V3, is_int8=form == "W8A8")
    steps = steps_of("deepseek/deepseek_v3_910b_tp16", chosen)
    captured = steps["captured, greedy"]
    assert steps["eager, greedy"]["a_layer"] == captured["a_layer"]
    assert (captured["a_layer"], captured["in_graph"]) == JOINED[form]


@pytest.mark.slow
@pytest.mark.parametrize("joins", cases([True], [*SPARSE]))
def test_sparse_attention_is_two_launches_and_updates_none(
    joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside those, an indexer has products, a norm and rotations; eager steps of few tokens choose none."""
    answering({"joins_latents": joins}, tmp_path, monkeypatch)
    steps = steps_of("deepseek/deepseek_v3_910b_tp16", chosen_of(DEEPSEEK_V32))
    captured, eager = steps["captured, greedy"], steps["eager, greedy"]
    assert (captured["a_layer"], captured["in_graph"]) == SPARSE[joins]
    assert captured["updates"] == 0
    of_layer = [each["operators"]["each further layer"] for each in (captured, eager)]
    for name in ("npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention"):
        assert [each.get(name, 0) for each in of_layer] == [1, 0]


@pytest.mark.slow
def test_a_host_that_is_ahead_asks_for_one_copy_more_where_tokens_are_drawn_outside() -> None:
    name = "Llama-2-7B, float16"
    apart = counted(name, "scheduler.overlap=false")
    for step, ahead in counted(name).items():
        if step.startswith("captured"):
            more = {key: value - apart[step][key] for key, value in ahead.items() if isinstance(value, int)}
            expected = {"outside_graph": 1} if step == "captured, temperature" else {}
            assert {key: by for key, by in more.items() if by} == expected


@pytest.mark.parametrize(
    ("recipe", "hf", "key"),
    [
        ("glm4_moe/glm4.5_air_910b_tp8", published.GLM_4_5_AIR, "first_k_dense_replace"),
        ("ernie4_5/ernie4.5_21b_a3b_910b", published.ERNIE_4_5_21B_A3B, "moe_layer_start_index"),
        ("hy_v3/hy3_910b_tp16", published.HY3, "mlp_layer_types"),
    ],
)
def test_experts_behind_several_dense_layers_are_counted(recipe: str, hf: dict[str, Any], key: str) -> None:
    num_layers = hf["num_hidden_layers"]
    few = dict.fromkeys(("n_routed_experts", "moe_num_experts", "num_experts"), 16)
    by_layer = ["dense"] * 3 + ["sparse"] * (num_layers - 3)
    said = {key: by_layer if key == "mlp_layer_types" else 3}
    step = steps_of(recipe, chosen_of(written(hf | few | said)))["captured, greedy"]
    dense, sparse, rest = (
        sum(step["operators"][each].values())
        for each in ("first layer", "each further layer", "rest of the graph")
    )
    assert sparse > dense
    assert step["in_graph"] == 3 * dense + (num_layers - 3) * sparse + rest


OF_A_DRAFT = ("in_graph", "outside_graph", "to_device", "waits")


def test_a_captured_step_of_a_draft_model_is_a_replay() -> None:
    config = LLAMA.replace("vocab_size: 32000", "vocab_size: 1024")
    draft = ["speculation.kind=draft", "speculation.draft_path=recipes/tiny/draft"]
    chosen = [*chosen_of(config), *draft]
    eager, captured = steps_of("llama/llama2_7b_910b", chosen, ()).values()
    assert [eager["step"], captured["step"]] == ["eager, a draft", "captured, a draft"]
    assert eager["a_layer"] == captured["a_layer"] == 11
    counts = [tuple(step[name] for name in OF_A_DRAFT) for step in (eager, captured)]
    assert counts == [(0, 31, 4, 0), (34, 1, 1, 0)]


@pytest.mark.slow
def test_clamped_experts_are_two_products() -> None:
    """Of gpt-oss-20b's sizes, whose layers took 620 while each of 32 experts was multiplied by itself."""
    left_out = {"quantization_config", "rope_scaling"}
    hf = {key: value for key, value in GPT_OSS.items() if key not in left_out}
    hf |= {"num_hidden_layers": 2, "vocab_size": 2048, "eos_token_id": 2}
    steps = steps_of("qwen3_moe/qwen3_30b_a3b_910b_tp2", chosen_of(written(hf)))
    assert {step["a_layer"] for step in steps.values()} == {18}
    assert "18 launches a layer" in (ROOT / "docs/ascend.md").read_text()


@pytest.mark.slow
def test_so_is_one_of_a_head(tmp_path: Path) -> None:
    hf = yaml.safe_load(LLAMA) | {"num_hidden_layers": 1, "draft_vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    save_file({"d2t": torch.zeros(320, dtype=torch.int64)}, tmp_path / "model.safetensors")
    draft = ["speculation.kind=eagle3", f"speculation.draft_path={tmp_path}"]
    chosen = [*chosen_of(LLAMA), *draft]
    eager, captured = steps_of("llama/llama2_7b_910b", chosen, ()).values()
    counts = [tuple(step[name] for name in OF_A_DRAFT) for step in (eager, captured)]
    assert captured["in_graph"] > eager["a_layer"] == captured["a_layer"] > 10
    assert counts == [(0, 48, 5, 0), (59, 1, 1, 0)]


@pytest.mark.slow
def test_so_is_one_of_a_layer_that_predicts_further_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3_FEW))
    chosen = [f"model.path={tmp_path}", "model.quantization=auto", "speculation.kind=mtp"]
    *steps, eager, captured = steps_of("deepseek/deepseek_v3_910b_tp16", chosen).values()
    counts = [tuple(step[name] for name in OF_A_DRAFT) for step in (eager, captured)]
    layer = next(step["a_layer"] for step in steps if step["step"] == "captured, greedy")
    assert eager["a_layer"] == captured["a_layer"] > layer
    assert counts == [(0, 54, 5, 0), (66, 1, 1, 0)]


def test_the_counts_stand_in_the_manual() -> None:
    lines = (ROOT / "docs/ascend.md").read_text().splitlines()
    for name, counts in EXPECTED.items():
        begin = f"| {name} | {' | '.join(map(str, (*counts, WAITS)))} |"
        assert [line for line in lines if line.startswith(begin)], begin
    for (name, answers), (layer, graph) in ANSWERED.items():
        said = " and ".join(f"`{each}`" for each in answers.split(", "))
        assert f"| {name} | {said} | {layer} | {graph} |" in lines, name


def test_a_recipe_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"device\.kind: no NPU, whose launches are counted"):
        launches.measure(load(ROOT / "recipes/tiny/cpu.yaml"))
