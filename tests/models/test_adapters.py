"""Each request gets what its own adapter makes of the model, whatever adapters its neighbours have.

The judge is peft: adapters that it made and saved are merged into the weights of transformers' model in
float32.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from continuous_batching.request import Request, SamplingParams
from models.checkpoint.adapter_files import look_at
from models.layers.low_rank import AdapterRooms, LowRank
from models.ops.reference import Ops
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import settings
from tests.each_of import each_of
from tests.lazy import peft
from tests.models.families import VARIANTS, VOCABULARY, followed, generated, make, wide
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.thorough import cases

NUM_NEW = cases(12, 24)
# Fused and split linears, rotary heads in another order, experts beside attention
NAMES = ("phi3_part", "glm4", "qwen3_moe")
# Ways to begin that change the base weights, in peft 0.21, and any that a later peft may add
CHANGING_STARTS = ("pissa", "OLoRA", "corda", "lora_ga", "unheard_of")
QUICK = ("qwen3_moe",)  # experts, beside which attention alone is adapted
JOINED = {"phi3_part": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
JOINED["glm4"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def adapted(model: Any, folder: Path, seed: int, **options: Any) -> Any:
    """transformers' model with an adapter of peft's merged into it, which peft saves in the folder."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL} | options)
    with warnings.catch_warnings():  # peft and copies of models ask torch for what will be no more
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(deepcopy(model), config)
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if "lora_" in name:
                    weight.copy_(torch.randn(weight.shape) * 0.25)
        wrapped.save_pretrained(folder)
        return wrapped.merge_and_unload()


def built(path: Path, folders: Sequence[Path], *overrides: str, most: int = 4, rank: int = 8) -> BuiltEngine:
    named = ", ".join(f"a{number}: {folder}" for number, folder in enumerate(folders, 1))
    texts = [
        *(f"model.path={path}", "model.dtype=float32", "device.compile=false", "cache.memory_gib=null"),
        *("cache.page_size=16", "cache.num_pages=26", "scheduler.num_slots=6"),
        *("scheduler.max_batch_tokens=40", "scheduler.max_request_tokens=160"),
        *(f"adapters.most={most}", f"adapters.rank={rank}", f"adapters.folders={{{named}}}"),
    ]
    return build(load(ROOT / "recipes/any/cpu.yaml", [*texts, *overrides]))


def serve(engine: Any, asked: Sequence[tuple[list[int], int]], **params: Any) -> list[Request]:
    """The requests of prompts and adapters, two joining at each step."""
    chosen = SamplingParams(**{"max_tokens": NUM_NEW, "temperature": 0.0, "ignore_eos": True} | params)
    requests = [
        Request(str(index), np.array(prompt), chosen, adapter=adapter, cache_salt=f"adapter {adapter}")
        for index, (prompt, adapter) in enumerate(asked)
    ]
    waiting = list(requests)
    while waiting or engine.has_work:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        engine.step()
    return requests


def check(requests: Sequence[Request], asked: Sequence[tuple[list[int], int]], models: Sequence[Any]) -> None:
    """Each answer is the greedy one of its adapter's merged model, which is asked once for all its tokens."""
    for request, (prompt, adapter) in zip(requests, asked, strict=True):
        answer = request.answer.tolist()
        assert answer == followed(models[adapter], prompt, answer, NUM_NEW)[0], (adapter, len(prompt))


def prompts_of(adapters: int, seed: int = 5) -> list[tuple[list[int], int]]:
    """Equal prompts for each adapter and for none: their pages would be shared if they could."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in (70, 33, 5)]
    prompts.insert(1, prompts[0])
    return [(prompt, adapter) for prompt in prompts for adapter in range(adapters + 1)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_tokens_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    variant = next(each for each in VARIANTS if each.name == name)
    model, path = make(variant, tmp_path)
    modules = ATTENTION if name == "qwen3_moe" else JOINED.get(name, ALL)
    ways: list[dict[str, Any]] = [
        {"target_modules": modules},
        {
            "target_modules": [modules[0], modules[-1]],
            "r": 8,
            "lora_alpha": 4,
            "use_rslora": True,
            "rank_pattern": {r"layers\.[01]\.self_attn\.(q|qkv)_proj": 3, rf"^.*\.2\..*{modules[-1]}": 5},
            "alpha_pattern": {rf"\w+_attn\.{modules[0]}": 3, ".*(down|o)_?proj": 9},
        },
        {"target_modules": modules[1:], "r": 1, "layers_to_transform": [1]},
        {
            "target_modules": modules,
            "use_rslora": name == "glm4",
            # The first name that fits counts, and "proj" fits none: names end after a dot
            "rank_pattern": {f"model.layers.1.self_attn.{modules[0]}": 7, modules[0]: 2, "proj": 1},
            "alpha_pattern": {f"^model.layers.0.self_attn.{modules[0]}": 3, modules[-1]: 16.5},
        },
    ]
    folders = [tmp_path / f"adapter{number}" for number in range(len(ways))]
    models = [model, *(adapted(model, at, seed, **way) for seed, (at, way) in enumerate(zip(folders, ways)))]
    engine = built(path, folders).engine
    requests = serve(engine, asked := prompts_of(len(ways)))
    counters = engine.scheduler.counters
    assert counters.preemptions, "no request came back"
    assert counters.hit_tokens, "no prefix was shared"
    check(requests, asked, models)
    answers = {tuple(request.answer.tolist()) for request in requests[:4]}
    assert len(answers) == 4, "adapters change nothing"


def llama(folder: Path) -> tuple[Any, Path]:
    return make(next(each for each in VARIANTS if each.name == "llama_biased"), folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and an adapter of it in a folder that tests copy before they change it."""
    folder = tmp_path_factory.mktemp("saved")
    model, path = llama(folder)
    adapted(model, folder / "adapter", seed=1)
    return path


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """An adapter for the checkpoint `saved`."""
    return Path(shutil.copytree(saved.parent / "adapter", tmp_path / "adapter"))


@pytest.mark.slow
def test_beams_scores_and_guesses_are_those_of_merged_weights(tmp_path: Path) -> None:
    model, path = llama(tmp_path)
    merged = adapted(model, tmp_path / "adapter", seed=1)
    merged.save_pretrained(tmp_path / "merged")
    guessing = ("speculation.kind=ngram", "speculation.max_tokens=3", "speculation.adaptive=fixed")
    ours = built(path, [tmp_path / "adapter"], *guessing).engine
    theirs = built(tmp_path / "merged", [], *guessing, most=0).engine
    prompt = [3, 5, 7, 9] * 8
    for params in (
        {"beam_width": 3},
        {"prompt_logprobs": 2, "logprobs": 2},
        {"pooling": "mean", "max_tokens": 1},
        {"max_tokens": 40},
    ):
        (mine,), (other,) = (serve(each, [(prompt, at)], **params) for each, at in ((ours, 1), (theirs, 0)))
        assert mine.answer.tolist() == other.answer.tolist()
        for name in ("logprobs", "prompt_logprobs"):
            found, wanted = ([each.logprob for each in getattr(one, name)] for one in (mine, other))
            np.testing.assert_allclose(found, wanted, atol=1e-4)
        if "pooling" in params:
            np.testing.assert_allclose(mine.embedding, other.embedding, atol=1e-4)
    assert ours.scheduler.counters.accepted_tokens, "no guess was right"


@pytest.mark.slow
def test_so_they_are_on_a_virtual_npu(tmp_path: Path) -> None:
    """In captured steps, and in eager ones, which hold prompts."""
    model, path = make(wide(next(each for each in VARIANTS if each.name == "qwen2_yarn")), tmp_path)
    folders = [tmp_path / f"adapter{number}" for number in range(2)]
    models = [model, *(adapted(model, at, seed) for seed, at in enumerate(folders))]
    engine = built(path, folders, *settings("npu"), "device.graphs=6").engine
    check(serve(engine, asked := prompts_of(2)), asked, models)


@pytest.mark.slow
def test_int8_weights_take_adapters(tmp_path: Path) -> None:
    """Nothing else adds to products in int8: alone, beside others, and of a place, tokens are the same."""
    model, path = llama(tmp_path)
    folders = [tmp_path / f"adapter{number}" for number in range(2)]
    for seed, at in enumerate(folders):
        adapted(model, at, seed)
    engines = [
        built(path, some, "model.quantization=w8a8").engine for some in (folders, folders[1:], folders[::-1])
    ]
    prompt = prompts_of(0)[0][0]
    together = serve(engines[0], [(prompt, adapter) for adapter in (0, 1, 2)])
    answers = [request.answer.tolist() for request in together]
    assert len(set(map(tuple, answers))) == 3
    for engine, adapter, at in (
        (engines[1], 1, 2),
        (engines[2], 2, 1),
        (engines[2], 1, 2),
        (engines[1], 0, 0),
    ):
        (alone,) = serve(engine, [(prompt, adapter)])
        assert alone.answer.tolist() == answers[at]


def test_what_another_adapter_makes_of_a_token_reaches_it_not_even_where_it_is_infinite() -> None:
    rooms = AdapterRooms(3, 2, torch.device("cpu"))
    low_rank = LowRank(rooms, Ops(), 4, [5, 1], torch.float16, torch.device("cpu"))
    x = torch.ones(4, 4, dtype=torch.float16)
    for number in (1, 2, 3):
        a = torch.full((2, 4), 10.0 if number == 3 else 60_000.0)  # sums of which are infinite
        for index, width in enumerate(low_rank.widths):
            low_rank.put(number, index, a, torch.full((width, 2), number / 10))
    for numbers in ([3, 1, 0, 3], [3, 0, 0, 3], [0, 0, 0, 0], None):
        rooms.choose(None if numbers is None else torch.tensor(numbers), 4)
        outputs = torch.zeros(4, 5, dtype=torch.float16), torch.zeros(4, 1, dtype=torch.float16)
        low_rank.add(outputs, x)
        for row, number in enumerate(numbers or [0] * 4):
            wanted = {3: 24.0, 1: torch.inf, 0: 0.0}[number]  # 2 * 40 * 0.3
            for output in outputs:
                found = output[row].float()
                torch.testing.assert_close(found, torch.full_like(found, wanted), rtol=1e-3, atol=0)


def test_a_place_holds_nothing_of_what_it_held() -> None:
    rooms = AdapterRooms(2, 2, torch.device("cpu"))
    rooms.choose(torch.tensor([2]), 1)
    used, new = (LowRank(rooms, Ops(), 3, [4], torch.float32, torch.device("cpu")) for _ in range(2))
    used.put(2, 0, torch.randn(2, 3), torch.randn(4, 2))
    for rank in (1, 0):
        a, b, x = torch.randn(rank, 3), torch.randn(4, rank), torch.randn(1, 3)
        found = []
        for each in (used, new):
            each.put(2, 0, a, b)
            output = torch.zeros(1, 4)
            each.add([output], x)
            found.append(output)
        assert torch.equal(*found)
        torch.testing.assert_close(found[0], x @ a.T @ b.T)


@each_of(
    "change, why",
    [
        ({"use_dora": True}, "use_dora: true"),
        ({"bias": "all"}, 'bias: "all"'),
        ({"peft_type": "IA3"}, 'peft_type: "IA3"'),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (
            {"rank_pattern": {"(q|k)_proj": 2, "(a+)+b": 2}},
            'rank_pattern has the expression "(a+)+b", which is none or may take long to match; name its',
        ),
        ({"rank_pattern": {"a?" * 40 + "a" * 40: 2}}, "may take long to match"),
        ({"alpha_pattern": {".*.*.*.*q_proj": 2}}, "may take long to match"),
        ({"alpha_pattern": {"(q_proj": 2}}, 'alpha_pattern has the expression "(q_proj", which is none'),
        ({"rank_pattern": ["q_proj"]}, "it must map linears to numbers"),
        (
            {"rank_pattern": {"q_proj": 9}},
            "r is 9; it must be an integer from 1 to 8",
        ),
        ({"alpha_pattern": {"q_proj": None}}, "lora_alpha is null; it must be a number from"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
        *(({"init_lora_weights": start}, f'init_lora_weights is "{start}"') for start in CHANGING_STARTS),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion=INITIAL"),
        ({"init_lora_weights": "loftq"}, "merge it with peft: model.merge_and_unload()"),
        # test_forty_numbers.py has other numbers
        ({"r": 9}, "r is 9; it must be an integer from 1 to 8, for which adapters.rank leaves room"),
        ({"lora_alpha": 1e300}, "it must be a number from -1000000000 to 1000000000"),
        ({"use_rslora": 10**400}, "use_rslora is 1000"),
        ({"peft_type": None}, "does not say of which kind it is; peft writes peft_type: save the adapter"),
    ],
)
def test_forms_that_are_not_computed_are_refused(
    change: dict[str, Any], why: str, saved: Path, adapter: Path
) -> None:
    said = json.loads((saved.parent / "adapter/adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(said | change))
    with pytest.raises(ValueError, match=re.escape(why)) as refused:
        look_at(adapter, 8)
    assert len(str(refused.value)) < 600


@each_of("change", [{"r": 3}, {"rank_pattern": {"q_proj": 2}}, {"use_dora": True}])
def test_a_recipe_names_the_adapter_that_is_none_of_its_model(
    change: dict[str, Any], saved: Path, adapter: Path
) -> None:
    said = json.loads((saved.parent / "adapter/adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(said | change))
    with pytest.raises(RecipeError, match=r"adapters\.folders\.a1: .*(and this model needs|use_dora: true)"):
        built(saved, [adapter])


@pytest.mark.parametrize("start", cases(["pissa"], ["pissa", "pissa_niter_4", "olora"]))
def test_an_adapter_that_changed_the_base_is_read_once_peft_has_converted_it(
    start: str, tmp_path: Path
) -> None:
    """The refusal names peft's conversion: with it, tokens are those of the weights that peft trained."""
    model, path = llama(tmp_path)
    raw, initial, converted = (tmp_path / name for name in ("raw", "initial", "converted"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=ALL, init_lora_weights=start)
        wrapped = peft.get_peft_model(deepcopy(model), config)
        wrapped.peft_config["default"].init_lora_weights = True  # peft's documentation says so
        wrapped.save_pretrained(initial)
        wrapped.peft_config["default"].init_lora_weights = start
        with torch.no_grad():
            for name, weight in wrapped.named_parameters():
                if "lora_" in name:
                    weight.add_(torch.randn(weight.shape) * 0.2)
        wrapped.save_pretrained(raw)
        wrapped.save_pretrained(converted, path_initial_model_for_weight_conversion=str(initial))
        trained = wrapped.merge_and_unload()
    with pytest.raises(RecipeError, match="path_initial_model_for_weight_conversion"):
        built(path, [raw])
    engine = built(path, [converted]).engine
    prompt = prompts_of(0)[0][0]
    (request,) = serve(engine, [(prompt, 1)])
    expected = generated(trained, prompt, NUM_NEW)[0]
    assert request.answer.tolist() == expected
    assert expected != generated(model, prompt, NUM_NEW)[0]


@each_of("start", [False, "gaussian", "eva", "orthogonal", "mica", None])
def test_a_start_that_leaves_the_base_alone_is_taken(start: Any, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": start}))
    assert look_at(adapter, 8).rank == 4


@pytest.mark.parametrize(("name", "modules"), [("llama_biased", ["lm_head"]), ("qwen2_moe", ALL)])
def test_adapters_of_other_linears_are_refused(name: str, modules: list[str], tmp_path: Path) -> None:
    model, path = make(next(each for each in VARIANTS if each.name.startswith(name)), tmp_path)
    adapted(model, tmp_path / "adapter", seed=1, target_modules=modules)
    with pytest.raises(RecipeError, match="changes what adapters cannot change here: they are of"):
        built(path, [tmp_path / "adapter"])


def test_numbers_that_are_none_are_refused(saved: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[next(name for name in tensors if "lora_B" in name)][0, 0] = torch.nan
    save_file(tensors, file)
    with pytest.raises(RecipeError, match="holds NaN or infinity"):
        built(saved, [adapter])


def test_a_recipe_says_what_adapters_take_and_where_they_cannot_be(tmp_path: Path) -> None:
    _, path = llama(tmp_path)
    with_room, without = (built(path, [], most=most) for most in (4, 0))
    linears = [(48, 48), (48, 24), (48, 24), (48, 48), (48, 80), (48, 80), (80, 48)]
    expected = 4 * 8 * 3 * sum(map(sum, linears)) * 4  # places, rank, layers, numbers of A and B, bytes
    assert with_room.memory.adapter_bytes == expected
    held = sum(
        4 * each.rooms.most * each.rooms.rank * (len(each.widths) * each.num_inputs + sum(each.widths))
        for each in with_room.runner.decoder.modules()
        if isinstance(each, LowRank)
    )
    assert held == expected
    assert without.memory.adapter_bytes == 0


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepseek_v2", "attention over latents has"),
        *((name, "layers that keep a recurrent state have") for name in ("qwen3_next", "qwen3_5")),
    ],
)
def test_layers_that_cannot_have_adapters_are_named(name: str, what: str, tmp_path: Path) -> None:
    path = make(next(each for each in [*VARIANTS, *RECURRENT_VARIANTS] if each.name == name), tmp_path)[1]
    with pytest.raises(RecipeError, match=rf"adapters\.most: {what} no adapters here; set it to 0") as caught:
        built(path, [], "scheduler.max_batch_tokens=80")
    assert "\n" not in str(caught.value)
