"""Tensor ranks over gloo compute together what one rank computes alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from models.checkpoint.files import SINGLE
from models.decoder import Decoder
from models.ops.reference import Ops, Packed
from models.parallel.group import (
    _SET_HCCL,
    ALONE,
    UNLIMITED,
    Backend,
    Group,
    divided,
    hccl_timeouts,
    join,
    tell_hccl,
    watchdog_s,
)
from models.parallel.share import Share
from tests.device_kinds import Way
from tests.models.families import VARIANTS, make
from tests.models.tensor_rank import built, collectives, first_logits_of, greedy_of, held, tokens_of
from tests.models.test_quantization import stored_in_int8
from tests.patience import PATIENCE_S
from tests.serving.warm import start_session
from tests.thorough import first_quick

# Each family, and together: biases, norms of heads, windows, a tied head, a vocabulary that no number of
# ranks divides, and fewer key-value heads than ranks
MODELS: dict[str, dict[str, Any]] = {
    "llama_biased": {"vocab_size": 509},
    "qwen2_yarn": {"vocab_size": 509, "num_key_value_heads": 1},
    "qwen3_layer_types": {},
    "mistral_window": {"sliding_window": 7, "num_key_value_heads": 1},
    "qwen3_moe": {},
    "mixtral_window": {"sliding_window": 7, "intermediate_size": 48},
    "deepseek_v2": {"vocab_size": 509, "q_lora_rank": None},
    "deepseek_v3": {},
    "qwen2_moe": {"num_key_value_heads": 1},
    "glm4_moe": {},
    "glm4": {},
    "gpt_oss": {"vocab_size": 509, "num_local_experts": 4},
    "gpt_oss_half": {},
    "gemma2": {"vocab_size": 509},
    "gemma3_layer_types": {"vocab_size": 509},
    "phi3_part": {"vocab_size": 509},
    "phi3_long": {},
    "internlm3_biased": {"vocab_size": 509},
    "minimax_m2": {},
    "olmo3_full": {"vocab_size": 509},
    "hunyuan_moe": {},
    "ernie4_5_moe": {},
    "hy_v3": {},
}
# Those whose whole experts are spread over two parts of the ranks; test_spread_experts.py has more
SPREAD = {f"{name}_spread": name for name in ("deepseek_v3", "gpt_oss", "minimax_m2")}
# Those whose pages two neighbours divide: latents, and a key-value head of which both have copies
BY_ALL = "deepseek_v3_divided"  # four ranks divide it, where there are four
DIVIDED = {BY_ALL: "deepseek_v3", "qwen2_yarn_divided": "qwen2_yarn"}
# Those whose prompts, of 22 and 25 tokens a step here, have divided rows: norms before and after, whole and
# divided experts, a shared expert and its gate, biases that are added once, no norm in front
ROWS = {
    f"{name}_rows": name
    for name in ("llama_biased", "gemma2", "olmo3_full", "gpt_oss", "qwen2_moe", "deepseek_v3_spread")
}
LEAST_DIVIDED = 3  # tokens; decodes of two rows stay whole
# Those whose tokens are chosen, too, which hangs on a rank's rows of the head alone: where these do not
# divide evenly, are tied to the embedding, and have caps
CHOOSE = ("llama_biased", "qwen2_yarn", "deepseek_v3", "gemma2", "fused")
# What four ranks compute otherwise than two: fewer heads of keys than ranks, and vocabularies, experts and
# int8 that do not divide alike
AMONG_FOUR = (
    *("qwen2_yarn", "phi3_part", "olmo3_full", "deepseek_v3_spread", "deepseek_v3_divided"),
    *("int8_at_load", "int8_rows", "gpt_oss_rows"),
)
# What is divided in these as in others of the table; they are left to the tests marked slow
FURTHER = (
    *("mixtral_window", "glm4_moe", "glm4", "gpt_oss_half", "gemma3_layer_types", "phi3_long"),
    *("internlm3_biased", "minimax_m2", "hunyuan_moe", "ernie4_5_moe", "hy_v3", "qwen3_layer_types"),
    *("gpt_oss_spread", "minimax_m2_spread", "qwen2_moe_rows", "gemma2_rows"),
)
AT_LOAD, STORED, BFLOAT16, FUSED = "int8_at_load", "int8_stored", "bfloat16", "fused"
INT8_MODEL, INT8_ROWS = "llama_biased", "int8_rows"
# Every rank holds these whole, beside all norms: routers, first steps of latents, biases that are added once
REPLICATED = (
    *("mlp.gate.weight", "block_sparse_moe.gate.weight", "router.weight", "router.bias"),
    *("mlp.router.gate.weight", "expert_bias", "gate.wg.weight"),
    *("e_score_correction_bias", "shared_expert_gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight"),
    *("o_proj.bias", "down_proj.bias"),
)
KEYS_AND_VALUES = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
OF_WHOLE_ROWS = ("o_proj.weight", "down_proj.weight")  # which are read for the scales of these
Cases = dict[str, dict[str, Any]]
Ranks = list[dict[str, Any]]
Found = dict[str, Ranks]
SIZES = [2, pytest.param(4, marks=pytest.mark.slow)]


def each_of(names: Iterable[str], among_four: Iterable[str] = AMONG_FOUR) -> pytest.MarkDecorator:
    """Parametrised by the number of ranks and the name of a case; four ranks compute some, else all."""
    names, slow = [*names], pytest.mark.slow
    of_two = [pytest.param(2, name, marks=[slow] * (name in FURTHER)) for name in names]
    of_four = [pytest.param(4, name, marks=slow) for name in names if name in among_four]
    return pytest.mark.parametrize(("size", "name"), [*of_two, *of_four])


def checkpoints(folder: Path) -> Cases:
    """The cases that ranks compute: each family, and one also in bfloat16 and in int8, quantized at load or
    before.
    """
    cases: Cases = {}
    for variant in VARIANTS:
        if variant.name in MODELS:
            options = variant.options | MODELS[variant.name]
            changed = replace(variant, options=options, saved_as=torch.float32, shard_size="5GB")
            cases[variant.name] = {"path": str(make(changed, folder)[1])}
    cases |= {name: cases[of] | {"experts": 2} for name, of in SPREAD.items()}
    cases |= {name: cases[of] | {"contexts": 2} for name, of in DIVIDED.items()}
    cases |= {name: cases[of] | {"least_divided": LEAST_DIVIDED} for name, of in ROWS.items()}
    cases[INT8_ROWS] = cases[INT8_MODEL] | {"int8_at_load": True, "least_divided": LEAST_DIVIDED}
    cases[BFLOAT16] = cases["qwen2_yarn"] | {"dtype": "bfloat16"}
    cases[FUSED] = cases["qwen2_yarn"] | {"way": "fused"}
    cases[AT_LOAD] = cases[INT8_MODEL] | {"int8_at_load": True}
    variant = next(each for each in VARIANTS if each.name == INT8_MODEL)
    changed = replace(variant, name=STORED, options=variant.options | MODELS[INT8_MODEL], shard_size="5GB")
    path = make(changed, folder)[1]
    stored_in_int8(path)
    cases |= {STORED: {"path": str(path)}}
    return {name: case | {"chooses": name in CHOOSE} for name, case in cases.items()}


def run_ranks(backend: Backend, size: int, folder: Path, cases: Cases) -> Found:
    """By case, what each rank computed. Whatever happens, none is left behind."""
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "printed").open("wb") as file:
        arguments = backend, str(size), str(folder)
        ranks = start_session("tests.models.tensor_rank", arguments, environment, file)
    try:
        status = ranks.wait(PATIENCE_S)
        printed = [path.read_text(errors="replace")[-3000:] for path in sorted(folder.glob("printed*"))]
        assert status == 0, "\n".join(printed)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(size)]
        for name in (*cases, "collectives")
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def found(cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Ranks]:
    """What each of so many ranks computed in a case; those of one set of cases are computed together."""

    @cache
    def of(size: int, is_further: bool) -> Found:
        some = {name: cases[name] for name in names_of(size, is_further, cases)}
        if BY_ALL in some:
            some[BY_ALL] = some[BY_ALL] | {"contexts": size}
        return run_ranks("gloo", size, tmp_path_factory.mktemp("ranks"), some)

    return lambda size, name: of(size, size == 2 and name in FURTHER)[name]


def names_of(size: int, is_further: bool, cases: Iterable[str]) -> tuple[str, ...]:
    """Return the cases that so many ranks compute together."""
    if size == 4:
        return AMONG_FOUR
    return FURTHER if is_further else tuple(name for name in cases if name not in FURTHER)


def check_collectives(ranks: list[dict[str, Tensor]]) -> None:
    """Every rank has what `tensor_rank.collectives` comes to, by the formula."""
    size = len(ranks)
    total = size * (size + 1) / 2
    expected = {
        "sum": [[total, size - total]],
        "sum of a column": [[total]] * 3,
        "largest": [[size, 0]],
        "all": [[[rank + 1, -rank]] for rank in range(size)],
        "all of a column": [[[rank + 1]] * 3 for rank in range(size)],
        "rows of the sum": [[total, size - total]],
        "one of each": [10 * rank for rank in range(size)],
        "of the last": [[size, 1 - size]],
    }
    for rank in ranks:
        assert {name: tensor.tolist() for name, tensor in rank.items()} == expected


class InParts(Ops):
    """Scales each rank's part of a token by itself, as ranks do."""

    def __init__(self, size: int) -> None:
        self.size = size

    def linear_int8(self, x: Tensor, packed: Packed) -> Tensor:
        weight, scale, bias = packed
        parts = zip(x.chunk(self.size, -1), weight.chunk(self.size, -1))
        products = [super(InParts, self).linear_int8(rows, (part, scale, None)) for rows, part in parts]
        return sum(products) + (0 if bias is None else bias)

    def mlp_int8(self, x: Tensor, gate_up: Packed, down: Packed) -> Tensor:
        return self.linear_int8(self.swiglu(Ops().linear_int8(x, gate_up)), down)


def alone(case: dict[str, Any]) -> Decoder:
    case = {name: value for name, value in case.items() if name not in ("experts", "contexts", "chooses")}
    return built(Path(case.pop("path")), ALONE, **case)[0]


@cache
def alone_of(path: str, way: Way | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What one rank computes of a checkpoint in float32: its logits, drawn tokens and best tokens.

    It is the same for however many ranks, and for experts that are spread over them or sent to.
    """
    decoder = built(Path(path), ALONE, way=way)[0]
    return first_logits_of(decoder), tokens_of(decoder), greedy_of(decoder)[0]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_what_all_brought(size: int, found: Callable[[int, str], Ranks]) -> None:
    check_collectives(found(size, "collectives"))


def test_a_group_waits_as_long_as_it_was_told() -> None:
    group = join("gloo", dist.HashStore(), 0, 1, timeout_s=7.5)
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7.5)
        check_collectives([collectives(group, torch.device("cpu"))])
    finally:
        dist.destroy_process_group()
    check_collectives([collectives(ALONE, torch.device("cpu"))])


def test_hccl_waits_as_long_as_it_allows() -> None:
    told = [tuple(hccl_timeouts(timeout_s).values()) for timeout_s in (0.2, 30.5, 600, 1e5)]
    assert told == [("1", "120"), ("31", "120"), ("600", "600"), ("17340", "7200")]


def test_what_the_user_has_told_hccl_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own limit, which the result is for, must not end a collective that HCCL still waits for."""
    monkeypatch.setenv(_SET_HCCL, "")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "300")
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "3600")
    assert tell_hccl(1800.0) == 3600.0
    assert (os.environ["HCCL_CONNECT_TIMEOUT"], os.environ["HCCL_EXEC_TIMEOUT"]) == ("300", "3600")
    assert [line.partition(":")[0] for line in caplog.messages] == ["HCCL_CONNECT_TIMEOUT=300 stays"]
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "0")  # there is no limit
    assert tell_hccl(1800.0) == 0.0
    assert len(caplog.messages) == 2, "a variable without a limit was complained of"


@pytest.mark.parametrize(
    ("said", "expected"), [("60", 1810.0), ("3600", 3610.0), ("0", UNLIMITED.total_seconds())]
)
def test_the_watchdog_of_torch_waits_longer_than_hccl(
    said: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(_SET_HCCL, "")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "7200")
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", said)
    assert watchdog_s(1800.0) == expected


def test_groups_of_some_ranks_wait_as_long_as_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[timedelta] = []

    class Some:
        """A process group of two."""

        def __init__(self, _: object, timeout: timedelta) -> None:
            waits.append(timeout)

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    monkeypatch.setattr(dist, "new_group", Some)
    world = Group(Some((), timedelta()))
    world.size, world.timeout_s = 4, 3610.0
    few = divided(world, Share(0, 4, experts=2))[0].few
    assert few is not None
    assert few.size == 2
    assert set(waits[1:]) == {timedelta(seconds=3610)}


def test_what_one_engine_has_told_hccl_the_next_one_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT"):
        monkeypatch.setenv(name, "1")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv(_SET_HCCL, "")
    assert [tell_hccl(limit_s) for limit_s in (100.0, 1800.0)] == [100.0, 1800.0]
    assert os.environ["HCCL_EXEC_TIMEOUT"] == "1800"
    assert caplog.messages == []


@each_of([*MODELS, *SPREAD, *DIVIDED, *ROWS, FUSED])
def test_ranks_compute_what_one_computes(
    size: int, name: str, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    expected, _, _ = alone_of(cases[name]["path"], cases[name].get("way"))
    first, *others = (rank["logits"] for rank in found(size, name))
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))
    assert all(torch.equal(first, other) for other in others), "ranks have the same logits, to the bit"


@each_of([AT_LOAD, STORED])
def test_ranks_hold_the_int8_weights_of_one(
    size: int, name: str, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    whole, parts = held(alone(cases[name])), [rank["held"] for rank in found(size, name)]
    for layer in range(3):
        for linear in (f"layers.{layer}.attention.output", f"layers.{layer}.mlp.down"):
            weight, scale, _ = whole[linear]
            assert weight.dtype == torch.int8
            assert torch.equal(torch.cat([part[linear][0] for part in parts], dim=1), weight)
            assert all(torch.equal(part[linear][1], scale) for part in parts)
        linear = f"layers.{layer}.mlp.gate_up"
        for kind in range(2):
            halves = [part[linear][kind].chunk(2) for part in parts]
            rows = torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
            assert torch.equal(rows, whole[linear][kind])
    for kind in range(2 if name == AT_LOAD else 1):  # the head is in int8, or plain
        rows = torch.cat([part["head"][kind] for part in parts])
        assert torch.equal(rows[: len(whole["head"][kind])], whole["head"][kind])


@each_of([AT_LOAD, STORED, INT8_ROWS])
def test_ranks_in_int8_compute_what_one_computes(
    size: int, name: str, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    decoder = alone(cases[name])
    whole = first_logits_of(decoder)
    for layer in decoder.layers:
        layer.attention.output.ops = layer.mlp.ops = InParts(size)
    expected = first_logits_of(decoder)
    first, *others = (rank["logits"] for rank in found(size, name))
    # A sum in another order may round an activation to the next of its 255 steps, here and there
    assert (first - expected).norm() <= 1e-2 * expected.norm()
    assert (first - whole).norm() <= 5e-2 * whole.norm()
    assert all(torch.equal(first, other) for other in others)


def test_ranks_in_bfloat16_are_as_near_to_float32_as_one_is(
    cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    exact = first_logits_of(alone(cases[BFLOAT16] | {"dtype": "float32"}))
    whole = first_logits_of(alone(cases[BFLOAT16]))
    assert (found(2, BFLOAT16)[0]["logits"] - exact).norm() <= 1.5 * (whole - exact).norm()


@each_of(CHOOSE)
def test_ranks_draw_the_tokens_that_one_draws(
    size: int, name: str, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    _, expected, _ = alone_of(cases[name]["path"], cases[name].get("way"))
    first, *others = (rank["tokens"] for rank in found(size, name))
    assert first.tolist() == expected.tolist()
    assert not any(other.numel() for other in others), "the leader alone chooses"


@each_of(CHOOSE)
def test_all_ranks_choose_the_best_tokens_of_one_without_joining_logits(
    size: int, name: str, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    _, _, expected = alone_of(cases[name]["path"], cases[name].get("way"))
    ranks = found(size, name)
    assert [rank["greedy"].tolist() for rank in ranks] == [expected.tolist()] * size
    assert {rank["gathered"] for rank in ranks} == {0}


@pytest.mark.parametrize(("size", "is_further"), first_quick(1, [(2, False), (2, True), (4, False)]))
def test_no_rank_reads_what_another_holds(
    size: int, is_further: bool, cases: Cases, found: Callable[[int, str], Ranks]
) -> None:
    for name in names_of(size, is_further, cases):
        ranks, path = found(size, name), Path(cases[name]["path"])
        with safe_open(path / SINGLE, "pt") as file:
            bytes_of = {each: file.get_tensor(each).nbytes for each in [*file.keys()]}
        heads = json.loads((path / "config.json").read_text())["num_key_value_heads"]
        replicated = (*REPLICATED, *(KEYS_AND_VALUES if heads < len(ranks) else ()))
        if cases[name].get("int8_at_load"):
            replicated += OF_WHOLE_ROWS
        whole = sum(size for each, size in bytes_of.items() if "norm" in each or each.endswith(replicated))
        share = (sum(bytes_of.values()) - whole) / len(ranks)
        # Numbers of rows that no number of ranks divides; one head of keys within a joined tensor, and
        # blocks of 32 inputs that are of two ranks
        slack = 1.05 if name.startswith(("phi3_part", "gpt_oss_half")) else 1.01
        assert max(rank["bytes"] for rank in ranks) <= slack * (share + whole), name
