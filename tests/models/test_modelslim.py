"""Checkpoints of msModelSlim answer as its own arithmetic says, on one rank and on several."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from continuous_batching.request import Request, SamplingParams
from models.checkpoint import weights
from models.checkpoint.files import SINGLE
from models.layers.linear import Linear
from models.layers.mixture import Mixture
from models.parallel.group import ALONE
from recipes.__main__ import main
from recipes.assembly.engine import build
from recipes.assembly.families import config_in, model_config
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import Kind, settings, stand_in_alone
from tests.models.families import VARIANTS, VOCABULARY, generated, make
from tests.models.modelslim_checkpoints import DESCRIPTION, Types, checkpoint, oracle_logprobs, stored_as
from tests.models.product_runs import HAPPENED, NUM_NEW, AskedRequest, Run, outcome_of
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.tensor_rank import STOPS, built, empty, logits_of, table
from tests.models.test_block_scales import assert_ranges, qkv_of
from tests.models.test_random_shares import together
from tests.models.test_weights import bare
from tests.thorough import first_quick


def everywhere(kind: str) -> Types:
    """All linears but the routers and the head."""
    return lambda name: "FLOAT" if name == "lm_head" else kind


def asked(path: Path) -> list[list[int]]:
    """The two prompts of `logits_of`, whole."""
    slots = table(empty(config_in(path), ALONE))
    return [slots.token_ids[row, : max(stops)].tolist() for row, stops in enumerate(zip(*STOPS))]


def expected(model: Any, path: Path) -> Tensor:
    theirs = oracle_logprobs(model, asked(path))
    return torch.stack([theirs[row][stop - 1] for stops in STOPS for row, stop in enumerate(stops)])


def is_alike(found: Tensor, right: Tensor) -> bool:
    return bool((found.log_softmax(-1) - right).abs().max() < 2e-3)


def assert_answers(
    name: str,
    types: Types,
    root: Path,
    compute: Callable[[Path], list[Tensor]] = lambda path: [logits_of(built(path, ALONE)[0])],
    **more: Any,
) -> None:
    """Every rank answers as the arithmetic says, with the same best tokens.

    An activation that lies between two integers to the last bit may fall on either, as the order of a sum
    has it, and then all that follows moves. Weights and scales are drawn anew for it, twice at most.
    """
    for salt in range(3):
        model, path = checkpoint(name, root / str(salt), types, salt=salt, **more)
        right = expected(model, path)
        all_found = compute(path)
        if all(is_alike(found, right) for found in all_found):
            assert all(torch.equal(found.argmax(-1), right.argmax(-1)) for found in all_found)
            return
    worst = max(float((found.log_softmax(-1) - right).abs().max()) for found in all_found)
    raise AssertionError(f"log-probabilities differ by {worst:.3g}")


def mostly(**kinds: str) -> Types:
    """Each type for the linears whose names hold the word before it; all others are not quantised."""
    return lambda name: next((kind for word, kind in kinds.items() if word in name), "FLOAT")


def kimi(name: str) -> str:
    """Experts in 4 bits, dense and shared MLPs by token, attention static."""
    return "W4A8_DYNAMIC" if ".experts." in name else mostly(self_attn="W8A8", mlp="W8A8_DYNAMIC")(name)


def v32(name: str) -> str:
    """As published: attention static but for its indexer and the up-projection, MLPs by token."""
    is_plain = ".indexer." in name or name.endswith("kv_b_proj")
    return "FLOAT" if is_plain else mostly(self_attn="W8A8", mlp="W8A8_DYNAMIC")(name)


def glm_5(name: str) -> str:
    """The same with static index queries and experts in 4 bits."""
    if name.endswith("indexer.wq_b"):
        return "W8A8"
    return "W4A8_DYNAMIC" if ".experts." in name else v32(name)


# As published: attention static and experts by token, or all of them in one way
QWEN3_MOE = mostly(self_attn="W8A8", experts="W8A8_DYNAMIC")
EVEN: dict[str, Any] = {"moe_intermediate_size": 32}  # 16 pieces of whose inputs have sums of their own


@pytest.mark.parametrize(
    ("name", "types", "more"),
    first_quick(
        9,
        [
            *((name, everywhere("W8A8_DYNAMIC"), {}) for name in ("qwen3", "llama_biased", "qwen3_moe")),
            ("qwen3", everywhere("W8A8"), {}),
            # Queries, keys and values have scales of their own
            ("qwen3", everywhere("W8A8"), {"form": {"are_apart": True}}),
            ("llama_biased", everywhere("W8A8"), {"form": {"norm_biases": True}}),
            ("llama_biased", everywhere("W8A8"), {"dtype": torch.float16}),
            ("qwen3", everywhere("W8A8_MIX"), {}),
            ("qwen3_moe", QWEN3_MOE, {"form": {"norm_biases": True}}),
            ("qwen3_moe", kimi, EVEN),
            ("qwen3", everywhere("W4A8_DYNAMIC"), {}),  # dense linears, which are widened
            ("llama_biased", everywhere("W8A16"), {}),
            ("deepseek_v3", mostly(self_attn="W8A16", mlp="W8A8_DYNAMIC"), {}),
            ("deepseek_v3", kimi, EVEN),
            ("deepseek_v3", everywhere("W8A8"), {"form": {"norm_biases": True}}),
            ("deepseek_v3", mostly(self_attn="W8A8", mlp="W8A8_DYNAMIC"), {}),
            ("deepseek_v3_one_group", everywhere("W8A8"), {"form": {"are_apart": True}}),
            ("v32", v32, {}),
            ("glm_5_shared", glm_5, EVEN),
        ],
    ),
)
def test_answers_are_those_of_the_arithmetic(
    name: str, types: Types, more: dict[str, Any], tmp_path: Path
) -> None:
    assert_answers(name, types, tmp_path, **more)


ON_AN_NPU = (
    ("qwen3", everywhere("W8A8_DYNAMIC")),
    ("qwen3", everywhere("W8A8")),
    ("llama_biased", everywhere("W8A8")),
    ("qwen3_moe", QWEN3_MOE),
    ("qwen3_moe", kimi),
    ("llama_biased", everywhere("W8A16")),
)


@pytest.mark.npu
@pytest.mark.parametrize(
    ("name", "types", "dtype"),
    first_quick(2, [(*case, ("bfloat16", "float16")[number % 2]) for number, case in enumerate(ON_AN_NPU)]),
)
def test_an_npu_answers_so_within_its_rounding(name: str, types: Types, dtype: Any, tmp_path: Path) -> None:
    """By its operators, in steps that are captured too, which fetch weights while attention runs."""
    more = {"form": {"norm_biases": True}, "is_wide": True, "dtype": getattr(torch, dtype)}
    more |= EVEN if name == "qwen3_moe" else {}
    model, path = checkpoint(name, tmp_path, types, **more)
    right = expected(model, path)
    for graphs in (False, True):
        decoder, _ = built(path, ALONE, "npu", way="fused", dtype=dtype)
        decoder.ops._prefetches = torch.npu.Stream()  # set where verify_npu.sh has found that it gains
        for mixture in (layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Mixture)):
            held = torch.int32 if types is kimi else torch.int8
            assert all(each.weight.dtype == held for each in mixture._joined), "all experts are one product"
        assert_near(logits_of(decoder, graphs=graphs), right)


def assert_near(found: Tensor, right: Tensor) -> None:
    """Of 16 bits: each row's distribution is near, and a best token that is decisive is the same."""
    made = found.float().log_softmax(-1)
    assert float((made - right).abs().mean()) < 0.2
    best = right.topk(2).values
    is_decisive = best[:, 0] - best[:, 1] > 0.5
    assert int(is_decisive.sum()) > len(right) // 3
    assert torch.equal(made.argmax(-1)[is_decisive], right.argmax(-1)[is_decisive])


def of_ranks(path: Path, experts: int = 1) -> list[Tensor]:
    """What each of two tensor ranks computes, which hold so many parts of the experts."""
    return together(2, lambda group: logits_of(built(path, group, experts=experts)[0]))


@pytest.mark.parametrize(
    ("types", "experts", "divided"),
    [(QWEN3_MOE, 1, 2), (kimi, 1, 2), (kimi, 2, 1), (everywhere("W8A16"), 2, 1)],
)
def test_ranks_hold_their_shares_of_every_scale(
    experts: int, divided: int, types: Types, tmp_path: Path
) -> None:
    """Two tensor ranks, which divide each expert or have half of them each."""
    ranks = partial(of_ranks, experts=experts)
    assert_answers("qwen3_moe", types, tmp_path, ranks, form={"ranks": 2, "divided": divided}, **EVEN)


def test_ranks_widen_their_ranges(tmp_path: Path) -> None:
    """Of Qwen3.5's joined queries, keys and values in 4 bits, which is no expert's and so becomes int8."""
    (variant,) = (each for each in RECURRENT_VARIANTS if each.name == "qwen3_5")
    _, path = make(variant, tmp_path)
    tensors = load_file(path / SINGLE)
    types = dict.fromkeys(tensors, "FLOAT")
    for stem in ("model.layers.0.linear_attn.in_proj_qkv", "model.layers.0.linear_attn.in_proj_z"):
        weight = tensors.pop(f"{stem}.weight")
        made = stored_as("W4A8_DYNAMIC", weight, None, seed=0, is_half=False, role="in_proj").tensors
        for end, tensor in made.items():
            tensors[f"{stem}.{end}"], types[f"{stem}.{end}"] = tensor, "W4A8_DYNAMIC"
    save_file(tensors, path / SINGLE)
    (path / DESCRIPTION).write_text(json.dumps(types))
    config = config_in(path)
    joined = [qkv_of(path, rank, size, config.quantization) for rank, size in ((0, 1), (0, 2), (1, 2))]
    assert joined[0].dtype == torch.int8
    assert_ranges(config, *joined)


def test_ranks_add_a_quantised_bias_once(tmp_path: Path) -> None:
    assert_answers("llama_biased", everywhere("W8A8"), tmp_path, of_ranks, form={"norm_biases": True})


def greedy(path: Path, *more: str, prompt: Sequence[int] = range(3, 40), kind: Kind = "cpu") -> list[int]:
    """The tokens of an engine that a recipe of any checkpoint describes."""
    asked = [f"model.path={path}", "cache.memory_gib=null", "cache.num_pages=40", "cache.page_size=16"]
    asked += [*settings(kind), "model.dtype=float32", *more]
    engine = build(load(ROOT / "recipes/any/cpu.yaml", asked)).engine
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    request = Request("0", np.array(prompt), params)
    engine.add(request)
    while engine.has_work:
        engine.step()
    return request.answer.tolist()


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("qwen3", everywhere("W8A8_DYNAMIC")),
        ("llama_biased", everywhere("W8A8")),
        ("qwen3_moe", kimi),
        pytest.param("deepseek_v3", kimi, marks=pytest.mark.slow),
    ],
)
def test_an_engine_gives_the_tokens_that_the_arithmetic_gives(
    name: str, types: Types, tmp_path: Path
) -> None:
    path, right = decisive(name, tmp_path, types, **(EVEN if types is kimi else {}))
    assert greedy(path) == right


def decisive(name: str, root: Path, types: Types, **more: Any) -> tuple[Path, list[int]]:
    """A checkpoint, and its tokens behind the prompt of `greedy`, of which no sum in another order brings two
    so near.
    """
    for salt in range(9):
        model, path = checkpoint(name, root / str(salt), types, salt=salt, **more)
        right, logprobs = generated(model, list(range(3, 40)), 8)
        if float(logprobs.topk(2).values.diff().abs().min()) > 0.1:
            return path, right
    raise AssertionError("no checkpoint has decisive tokens")


@pytest.mark.parametrize(
    ("name", "form", "ranks"),
    [
        ("qwen3", {}, 2),
        ("llama_biased", {"has_cache_scales": "one"}, 2),
        ("ernie4_5", {}, 2),  # whose heads are held in another order
        ("mistral_window", {}, 1),
    ],
)
def test_keys_and_values_are_kept_by_the_scales_of_the_checkpoint(
    name: str, form: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    """By transformers' attention, which rounds keys and values to them; other scales give other answers."""

    def compute(path: Path) -> list[Tensor]:
        return together(ranks, lambda group: logits_of(built(path, group, int8_cache=True)[0]))

    assert_answers(name, everywhere("FLOAT"), tmp_path, compute, form={"has_cache_scales": True} | form)
    path = next(tmp_path.glob("*/*"))
    plain = logits_of(built(path, ALONE)[0])
    assert float((compute(path)[0].log_softmax(-1) - plain.log_softmax(-1)).abs().max()) > 0.05


def test_an_engine_keeps_keys_and_values_by_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """And refuses them by their name where its cache is not quantised."""
    path, right = decisive("qwen3", tmp_path, everywhere("FLOAT"), form={"has_cache_scales": True})
    assert greedy(path, "cache.dtype=int8", "device.attention=reference") == right
    with pytest.raises(RecipeError, match=r"has model\.layers\.0\.self_attn\.k_proj\.kv_cache_scale, a"):
        greedy(path)


@pytest.mark.npu
@stand_in_alone
def test_pages_in_int8_are_copied_and_moved_as_others_are(tmp_path: Path) -> None:
    """Between captured steps of an NPU they are swapped, compacted and resized; tokens are transformers'."""
    more: dict[str, Any] = {"is_wide": True, "form": {"has_cache_scales": True}}
    model, path = checkpoint("qwen3", tmp_path, everywhere("FLOAT"), **more)
    asked: list[AskedRequest] = []
    answers, random = [], np.random.default_rng(3)
    opening = random.integers(0, VOCABULARY, 70).tolist()
    while len(asked) < 6:
        prompt = opening + random.integers(0, VOCABULARY, int(random.integers(1, 60))).tolist()
        tokens, logprobs = generated(model, prompt, NUM_NEW)
        if float(logprobs.topk(2).values.diff().abs().min()) > 0.05:
            asked.append(AskedRequest(prompt=prompt, seed=None))
            answers.append(tokens)
    keys = {"cache.dtype": "int8", "cache.page_size": "32", "cache.num_pages": "13"}
    found = outcome_of("910B", Run(path=str(path), way="disturbed", more=keys, requests=asked))
    assert (found["refused"], found["answers"]) == (None, answers)
    assert set(found["happened"]) == set(HAPPENED["disturbed"])


@pytest.mark.npu
@pytest.mark.parametrize(("name", "ranks"), [("qwen3", 1), ("llama_biased", 2), ("qwen3_moe", 2)])
def test_npus_keep_keys_and_values_by_them_too(name: str, ranks: int, tmp_path: Path) -> None:
    """Within the rounding of bfloat16, in which their operators take the scales; one rank also captured."""
    more: dict[str, Any] = {"is_wide": True, "dtype": torch.bfloat16, "form": {"has_cache_scales": True}}
    model, path = checkpoint(name, tmp_path, everywhere("FLOAT"), **more)

    def logits(group: Any, graphs: bool = False) -> Tensor:
        decoder, _ = built(path, group, "npu", way="fused", dtype="bfloat16", int8_cache=True)
        return logits_of(decoder, graphs=graphs)

    right = expected(model, path)
    found = together(ranks, logits) if ranks > 1 else [logits(ALONE), logits(ALONE, graphs=True)]
    for each in found:
        assert_near(each, right)


def test_an_npu_takes_an_int8_cache_by_scales_of_channels_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {"is_wide": True, "form": {"has_cache_scales": True}}
    _, path = checkpoint("qwen3", tmp_path, everywhere("FLOAT"), **more)
    asked = [f"model.path={path}", "model.dtype=bfloat16", "cache.dtype=int8", "device.memory_gib=8"]
    config = model_config(load(ROOT / "recipes/any/910b.yaml", asked))
    assert config.kv_head_bytes == 2 * config.head_dim, "the pages hold no scales"
    shown = ["show", str(ROOT / "recipes/any/910b.yaml"), *asked]
    main(shown)
    assert "layers, int8; scales are the checkpoint's" in capsys.readouterr().out
    for product, dtype in (("950", "bfloat16"), ("310P", "float16")):
        words = (
            f"attention of the {product} reads no keys and values in int8, and that of 910B, 910C does: use"
        )
        with pytest.raises(ValueError, match=words):
            main([*shown, f"device.product={product}", f"model.dtype={dtype}"])
    change(path, **{f"model.layers.1.self_attn.{each}_proj.kv_cache_scale": None for each in "kv"})
    words = r"a scale for each channel, and model\.layers\.1\.self_attn has none \(C8 of msModelSlim\); set"
    with pytest.raises(RecipeError, match=words):
        main(shown)


@pytest.mark.npu
@stand_in_alone
@pytest.mark.slow
def test_a_draft_model_keeps_its_own_keys_where_it_has_no_scales(tmp_path: Path) -> None:
    """Beside the model's own, which are in int8: the tokens are those of the model alone."""
    more: dict[str, Any] = {"is_wide": True, "form": {"has_cache_scales": True}}
    _, path = checkpoint("qwen3", tmp_path / "model", everywhere("FLOAT"), **more)
    _, draft = checkpoint("llama_biased", tmp_path / "draft", everywhere("FLOAT"), is_wide=True)
    asked = ["cache.dtype=int8", "cache.page_size=32", "device.graphs=8"]
    alone = greedy(path, *asked, kind="npu")
    drafted = greedy(path, *asked, "speculation.kind=draft", f"speculation.draft_path={draft}", kind="npu")
    assert drafted == alone


@pytest.mark.parametrize(
    ("end", "number", "words"),
    [
        ("k_proj.kv_cache_scale", 0.0, "holds a number that is no scale above 0"),
        ("v_proj.kv_cache_scale", torch.inf, "holds a number that is no scale above 0"),
        ("k_proj.kv_cache_offset", 1.0, "is not zero, and what is read is symmetric"),
    ],
)
def test_scales_of_a_cache_that_are_none_are_refused(
    end: str, number: float, words: str, tmp_path: Path
) -> None:
    _, path = checkpoint("qwen3", tmp_path, everywhere("FLOAT"), form={"has_cache_scales": True})
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name in (name for name in tensors if name.endswith(end)):
            tensors[name][-1] = number
        save_file(tensors, file)
    with pytest.raises(ValueError, match=f"{end} {words}"):
        built(path, ALONE, int8_cache=True)
    change(path, **{f"model.layers.1.self_attn.{end[:6]}.kv_cache_scale": None})
    other = "v_proj" if end.startswith("k") else "k_proj"
    with pytest.raises(ValueError, match=rf"has model\.layers\.1\.self_attn\.{other}\.kv_cache_scale, and"):
        config_in(path)


def test_scales_of_latents_are_of_a_quantised_cache(tmp_path: Path) -> None:
    """Which has scales of its own, as fine as these: the tokens are those of the model."""
    types = everywhere("W8A8_DYNAMIC")
    path, right = decisive("deepseek_v3", tmp_path, types, form={"has_cache_scales": True})
    with pytest.raises(RecipeError, match=r"has model\.layers\.0\.self_attn\.fa_q\.scale, a scale of"):
        greedy(path)
    assert greedy(path, "cache.dtype=int8", "device.attention=reference") == right


def change(path: Path, **said: Any) -> None:
    """Replace entries of the description, or remove those that are None."""
    described = json.loads((path / DESCRIPTION).read_text()) | said
    kept = {name: value for name, value in described.items() if value is not None}
    (path / DESCRIPTION).write_text(json.dumps(kept))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in W8A8_DYNAMIC, whose files no test changes."""
    return checkpoint("qwen3", tmp_path_factory.mktemp("stored"), everywhere("W8A8_DYNAMIC"))[1]


Q_PROJ, O_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({O_PROJ: "W8A8SC"}, "self_attn.o_proj.weight is 'W8A8SC', which needs the 310P's operator"),
        ({O_PROJ: "W8A8S"}, "needs the sparse products of the Ascend 310P"),
        (
            {O_PROJ: "W8A8_MXFP8"},
            "needs microscaling floats of 8 bits, whose products only the Ascend 950 has",
        ),
        ({O_PROJ: "W4A4_MXFP4"}, "only the Ascend 950"),
        ({O_PROJ: "W4A4_DYNAMIC"}, "needs activations in 4 bits"),
        ({O_PROJ: "W2A2"}, "a form that is not known here; read are FLOAT, "),
        ({O_PROJ: None}, f"it has no entry {O_PROJ}, which the model of config.json has"),
        ({Q_PROJ: "FLOAT"}, "q_proj FLOAT, .*k_proj W8A8_DYNAMIC, .* all must have one type"),
        ({"model.embed_tokens.weight": "W8A8"}, "model.embed_tokens.weight is 'W8A8', and .* unquantised"),
        (
            {"model.layers.9.mlp.up_proj.weight": "W8A8"},
            r"it has an entry model\.layers\.9\.mlp\.up_proj\.weight, and the model of .* has 3 layers",
        ),
        ({"model.language_model.layers.0.self_attn.q_proj.weight": "W8A8"}, "under two names with two types"),
        *(({Q_PROJ: kind}, f"{Q_PROJ} is .*, which needs a form") for kind in ("", 3, ["W8A8"], {}, "w8a8")),
        ({"group_size": "x"}, "group_size is 'x'"),
        ({"metadata": {"quarot": {"heads_rotation": {"layers": [3]}}}}, "heads_rotation names layers whose"),
    ],
)
def test_what_is_not_read_is_refused_by_the_name_of_the_description(
    said: dict[str, Any], words: str, stored: Path, tmp_path: Path
) -> None:
    for file in stored.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / DESCRIPTION).unlink()
    (tmp_path / DESCRIPTION).write_text((stored / DESCRIPTION).read_text())
    change(tmp_path, **said)
    with pytest.raises(ValueError, match=f"{DESCRIPTION}: .*{words}") as caught:
        config_in(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("phi3", "qkv_proj and gate_up_proj"),
        ("glm4", "gate_up_proj"),
        ("gpt_oss", "the experts of a layer"),
    ],
)
def test_families_that_store_linears_as_one_say_why_they_are_not_read(
    name: str, joined: str, tmp_path: Path
) -> None:
    """Whatever the description names: linears as they are stored, or one by one."""
    variant = next(each for each in VARIANTS if each.name == name)
    _, path = make(replace(variant, options=variant.options | {"max_position_embeddings": 512}), tmp_path)
    (path / DESCRIPTION).write_text(json.dumps({"model.layers.0.self_attn.qkv_proj.weight": "W8A8_DYNAMIC"}))
    words = f"{DESCRIPTION}: checkpoints of {name} store {joined} as one tensor, and how msModelSlim"
    with pytest.raises(ValueError, match=words):
        config_in(path)


def test_a_tensor_that_does_not_belong_is_named_with_the_description(tmp_path: Path) -> None:
    _, path = checkpoint("qwen3", tmp_path, everywhere("W8A8_DYNAMIC"))
    file = path / "quant_model_weights-00001-of-00002.safetensors"
    tensors = load_file(file)
    scale = next(name for name in tensors if name.endswith("weight_scale"))
    save_file(tensors | {scale.replace("weight_scale", "weird"): torch.ones(1)}, file)
    with pytest.raises(ValueError, match=f"not those of its config.json and {DESCRIPTION}") as caught:
        weights.load(bare(config_in(path)), path)
    assert f"surplus: {scale.replace('weight_scale', 'weird')} has no place" in str(caught.value)


def test_weights_that_are_not_symmetric_are_refused(tmp_path: Path) -> None:
    _, path = checkpoint("qwen3", tmp_path, everywhere("W8A8_DYNAMIC"))
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: each + (name.endswith("weight_offset")) for name, each in tensors.items()}, file)
    with pytest.raises(ValueError, match=r"quant_model_weights-0000\d.*weight_offset is not zero"):
        weights.load(bare(config_in(path)), path)


def with_tensors(path: Path, change_of: Callable[[str, Tensor], Tensor | None]) -> None:
    """Replace tensors of a checkpoint by what this returns, or take them away."""
    where = {}
    for file in sorted(path.glob("*.safetensors")):
        made = {name: change_of(name, each) for name, each in load_file(file).items()}
        kept = {name: each.contiguous() for name, each in made.items() if each is not None}
        save_file(kept, file)
        where |= dict.fromkeys(kept, file.name)
    index = path / "quant_model_weights.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize(
    ("name", "types", "end", "changed", "words"),
    [
        # What is read whatever its type and its shape, or where it is not there
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", Tensor.half, None),
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", Tensor.double, None),
        ("qwen3", "W8A8_DYNAMIC", "weight_offset", lambda _: None, None),
        ("qwen3", "W8A8_DYNAMIC", "weight_offset", lambda old: old[0, 0], None),
        ("qwen3", "W8A8_DYNAMIC", "weight_offset", Tensor.char, None),
        ("qwen3", "W8A8_MIX", "input_scale", lambda old: old[0], None),
        ("qwen3", "W8A8_MIX", "deq_scale", lambda old: old[:0], None),
        ("qwen3", "W4A8_DYNAMIC", "scale_bias", lambda old: old[0, 0], None),
        ("qwen3", "W4A8_DYNAMIC", "scale_bias", lambda _: None, None),
        ("qwen3", "W8A8", "input_scale", Tensor.half, None),
        # What is not is refused by the tensor
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", lambda _: None, "missing: model.layers.*weight_scale"),
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", lambda old: old[0, 0], "misshapen: .*weight_scale is"),
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", Tensor.char, "wrongly typed: .*weight_scale is I8"),
        ("qwen3", "W8A8_DYNAMIC", "weight_scale", torch.neg, "weight_scale holds -.*, and no scale is"),
        ("qwen3", "W8A8", "deq_scale", lambda old: old[:, None], "misshapen: .*deq_scale is"),
        ("qwen3", "W8A8", "deq_scale", torch.neg, "deq_scale holds -.*, and no scale is negative"),
        ("qwen3", "W8A8", "quant_bias", Tensor.float, "wrongly typed: .*quant_bias is F32"),
        ("qwen3", "W8A8", "input_offset", lambda old: old + 0.5, "input_offset holds .*a whole number"),
        ("qwen3", "W8A8", "input_scale", lambda _: None, "missing: model.layers.*input_scale"),
        ("qwen3", "W4A8_DYNAMIC", "proj.weight", lambda old: old.repeat(2, 1), "misshapen: .*proj.weight is"),
        ("deepseek_v3", "W8A8", "kv_b_proj.deq_scale", Tensor.int, "wrongly typed: .*deq_scale is I32"),
        ("deepseek_v3", "W8A8", "kv_b_proj.input_scale", Tensor.char, "wrongly typed: .*input_scale is I8"),
        ("deepseek_v3", "W8A8", "kv_b_proj.deq_scale", torch.neg, "weight_scale holds -.*, and no scale is"),
    ],
)
def test_every_tensor_of_a_type_is_read_or_refused_by_its_name(
    name: str,
    types: str,
    end: str,
    changed: Callable[[Tensor], Tensor | None],
    words: str | None,
    tmp_path: Path,
) -> None:
    _, path = checkpoint(name, tmp_path, everywhere(types))
    if changed is Tensor.half:  # the numbers are those of 16 bits in either type
        with_tensors(path, lambda key, old: old.half().float() if key.endswith(end) else old)
    right = None if words else logits_of(built(path, ALONE)[0])
    with_tensors(path, lambda key, old: changed(old) if key.endswith(end) else old)
    if right is not None:
        assert torch.equal(logits_of(built(path, ALONE)[0]), right)
        return
    with pytest.raises(ValueError, match=words):
        built(path, ALONE)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_checkpoint_that_reads_images_is_described_under_its_names(
    prefix: str, tmp_path: Path
) -> None:
    """Some linears of its tower are quantised, too, of which nothing is read."""
    _, path = checkpoint("deepseek_v3", tmp_path, everywhere("W8A8_DYNAMIC"))
    right = logits_of(built(path, ALONE)[0])
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."

    def renamed(name: str) -> str:
        return (
            name.replace("model.", prefix, 1) if name.startswith("model.") else name.replace("lm_head.", head)
        )

    for file in path.glob("*.safetensors"):
        save_file({renamed(name): each for name, each in load_file(file).items()}, file)
    tower = {"vision_tower.layers.0.up_proj.weight": "W8A8_DYNAMIC", "vision_tower.norm.bias": "FLOAT"}
    described = json.loads((path / DESCRIPTION).read_text())
    described = {renamed(name): kind for name, kind in described.items()} | tower
    (path / DESCRIPTION).write_text(json.dumps(described))
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))
    with_tensors(path, lambda _, old: old)  # and the index
    assert torch.equal(logits_of(built(path, ALONE)[0]), right)


@pytest.mark.parametrize(
    ("method", "words"), [(None, None), ("ascend", None), ("gptq", "'gptq', and quant_")]
)
def test_another_method_beside_the_description_is_a_contradiction(
    method: str | None, words: str | None, tmp_path: Path
) -> None:
    _, path = checkpoint("qwen3", tmp_path, everywhere("W8A8_DYNAMIC"))
    file = path / "config.json"
    said = {"quantization_config": {"quant_method": method} if method else {"sparsity": 0}}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    if words is None:
        weights.load(bare(config_in(path)), path)
        return
    with pytest.raises(ValueError, match=words):
        config_in(path)


@pytest.mark.parametrize("name", ["quant_model_weight_w8a8_dynamic", "qwen3-w8a8"])
def test_older_exports_have_other_names(name: str, tmp_path: Path) -> None:
    """One file without an index, and the type in both names."""
    model, path = checkpoint("qwen3", tmp_path, everywhere("W8A8_DYNAMIC"))
    parts = sorted(path.glob("*.safetensors"))
    save_file(
        {name: each for part in parts for name, each in load_file(part).items()},
        path / f"{name}.safetensors",
    )
    for file in (*parts, path / "quant_model_weights.safetensors.index.json"):
        file.unlink()
    (path / DESCRIPTION).rename(path / "quant_model_description_w8a8_dynamic.json")
    assert is_alike(logits_of(built(path, ALONE)[0]), expected(model, path))
    (path / f"{name}.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"holds quant_model_description_w8a8_dynamic\.json, and none of the w"
    ):
        weights.load(bare(config_in(path)), path)


def test_older_static_exports_have_the_scales_of_weights_too(tmp_path: Path) -> None:
    """With which kv_b_proj is multiplied out; other linears do not need them."""
    model, path = checkpoint("deepseek_v3", tmp_path, everywhere("W8A8"))
    file = min(path.glob("*.safetensors"))
    tensors = {name: each for part in path.glob("*.safetensors") for name, each in load_file(part).items()}
    more = {}
    for name in (name for name in tensors if name.endswith("deq_scale")):
        stem = name.removesuffix("deq_scale")
        more[f"{stem}weight_scale"] = (tensors[name] / tensors[f"{stem}input_scale"])[:, None].contiguous()
        more[f"{stem}weight_offset"] = torch.zeros_like(more[f"{stem}weight_scale"])
    save_file(load_file(file) | more, file)
    index = path / "quant_model_weights.safetensors.index.json"
    where = json.loads(index.read_text())["weight_map"] | dict.fromkeys(more, file.name)
    index.write_text(json.dumps({"weight_map": where}))
    change(path, **dict.fromkeys(more, "W8A8"))
    assert is_alike(logits_of(built(path, ALONE)[0]), expected(model, path))


def test_one_export_alone_is_read(tmp_path: Path) -> None:
    """And its files count before those of the original model, if these lie beside them."""
    model, path = checkpoint("qwen3", tmp_path, everywhere("W8A8_DYNAMIC"))
    save_file({"model.norm.weight": torch.ones(48)}, path / "model.safetensors")
    assert is_alike(logits_of(built(path, ALONE)[0]), expected(model, path))
    (path / "quant_model_description_w8a8.json").write_text("{}")
    with pytest.raises(ValueError, match=r"several descriptions, quant_model_description\.json, quant_model"):
        config_in(path)


@pytest.mark.parametrize(
    ("name", "types"),
    [("qwen3", everywhere("W8A8")), ("qwen3_moe", kimi), ("llama_biased", everywhere("W8A16"))],
)
def test_what_is_planned_is_what_is_held(name: str, types: Types, tmp_path: Path) -> None:
    """But for what exists until a linear is packed (scales of inputs), and for what an NPU alone has."""
    options = EVEN if name == "qwen3_moe" else {}
    _, path = checkpoint(name, tmp_path, types, form={"norm_biases": True}, **options)
    config = config_in(path)
    decoder = bare(config)
    held = sum(each.nbytes for each in decoder.parameters())
    for linear in decoder.modules():
        if isinstance(linear, Linear) and linear.static is not None:
            held -= linear.static.input_scale.nbytes + linear.static.input_offset.nbytes
        if isinstance(linear, Linear) and linear.form == "w4a8":
            held += 8 * len(linear.weight_scale)
    assert config.weight_bytes == held


def test_scales_of_a_cache_are_planned(tmp_path: Path) -> None:
    _, path = checkpoint("qwen3", tmp_path, everywhere("FLOAT"), form={"has_cache_scales": True})
    config = replace(config_in(path), int8_cache=True)
    assert config.weight_bytes == sum(each.nbytes for each in bare(config).parameters())


@pytest.mark.npu
@stand_in_alone
@pytest.mark.parametrize(
    ("types", "dtype", "vocabulary", "said"),
    [
        (
            mostly(lm_head="W8A8_DYNAMIC"),
            "bfloat16",
            70_000,
            "a linear has a side of 70000; products of int8",
        ),
        (everywhere("W8A16"), "float32", VOCABULARY, "model.dtype is float32; products of int8 give"),
    ],
)
def test_what_an_npu_does_not_multiply_in_int8_is_refused_before_weights_are_read(
    types: Types, dtype: str, vocabulary: int, said: str, tmp_path: Path
) -> None:
    more = {"vocab_size": vocabulary, "tie_word_embeddings": False}
    _, path = checkpoint("qwen3", tmp_path, types, is_wide=True, **more)
    for each in path.glob("*.safetensors"):
        each.unlink()
    with pytest.raises(ValueError, match=said):
        greedy(path, f"model.dtype={dtype}", kind="npu")


def test_gate_and_up_are_one_product_in_int8(tmp_path: Path) -> None:
    """Of a linear that is not quantised no side counts."""
    for types, side in (
        (everywhere("W8A8"), 160),
        (mostly(self_attn="W8A16"), 128),
        (everywhere("FLOAT"), 0),
    ):
        _, path = checkpoint("qwen3", tmp_path / str(side), types)
        assert config_in(path).largest_int8_side == side


def test_a_checkpoint_that_multiplies_nothing_in_int8_asks_for_no_such_products(tmp_path: Path) -> None:
    for kind, is_int8 in (("FLOAT", False), ("W8A16", False), ("W8A8", True)):
        _, path = checkpoint("qwen3", tmp_path / kind, everywhere(kind))
        assert config_in(path).is_int8 == is_int8


def test_a_description_is_named_alike_in_every_process_and_folder(tmp_path: Path) -> None:
    """The identity of stored pages follows from the name, and each process hashes strings in its own way."""
    form = {"norm_biases": True, "has_cache_scales": True}
    _, path = checkpoint("llama_biased", tmp_path / "one", everywhere("W8A8"), form=form)
    said = json.loads((path / DESCRIPTION).read_text())
    said["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    (path / DESCRIPTION).write_text(json.dumps(said))
    other = shutil.copytree(path, tmp_path / "other")
    command = (
        "import sys; from pathlib import Path; from recipes.assembly.families import config_in;"
        " print(repr(config_in(Path(sys.argv[1]))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", command, other],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    name = repr(config_in(path))
    assert "norm_biases=(" in name
    assert "scaled_caches=(" in name
    assert "rotation='optional/quarot.safetensors'" in name
    assert found.stdout.strip() == name
