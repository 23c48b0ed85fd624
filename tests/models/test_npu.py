"""An engine on an NPU makes the expected calls, and a test reaches every line that makes them."""

from __future__ import annotations

import inspect
import json
import logging
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from attention.reference import StaticDecodes
from continuous_batching.batch import Batch
from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from devices.ascend_limits import MOST_GATHERED, AscendProduct, product
from models.config import MixtureConfig
from models.ops.operands import ExpertKind, Int4Weight, PairedInt4, StaticInt8, UnpackedLinear
from models.ops.reference import Ops
from models.parallel.group import ALONE, Group, join
from recipes.assembly.engine import build
from recipes.machine import Npu, start
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.attention import test_sparse_npu, test_sums
from tests.attention.planned import eager, planned, replayed
from tests.attention.test_atb import answering_as, atb
from tests.attention.test_attention import NOTHING, Bench, shape
from tests.attention.test_channel_scales import ChannelBench
from tests.attention.test_latent import on_an_npu
from tests.device_kinds import has_npu, operators, section, settings, stand_in_alone
from tests.models import test_sparse_on_npu
from tests.serving.warm import CODE, completed

pytestmark = [pytest.mark.npu, pytest.mark.skipif(not has_npu(), reason="torch_npu is not installed")]

FUSED_ATTENTION = "npu_fused_infer_attention_score"
NUM_LAYERS = 4


# Layers with and without a window, whose captured calls are updated in the order in which they run
WINDOWED = (
    '{"model_type": "gemma3_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,'
    ' "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,'
    ' "max_position_embeddings": 256, "sliding_window": 9, "sliding_window_pattern": 2,'
    ' "query_pre_attn_scalar": 64, "rope_theta": 10000.0, "rope_local_base_freq": 500.0}'
)
RANDOM = ("model.weights=random", "model.dtype=float32")


def engine_of(*overrides: str) -> Engine:
    few = ["cache.num_pages=64", "scheduler.num_slots=6", "scheduler.max_batch_tokens=48"]
    return build(load(ROOT / "recipes/tiny/cpu.yaml", [*settings("npu"), *few, *overrides])).engine


def requests() -> list[Request]:
    """Prompts longer and shorter than a page and a chunk."""
    random = np.random.default_rng(3)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    return [
        Request(str(number), random.integers(3, 300, length), params)
        for number, length in enumerate((5, 70, 16, 1, 33, 90, 17))
    ]


def serve(
    engine: Engine, calls: Counter[str] | None = None
) -> tuple[list[list[int]], list[tuple[bool, int]]]:
    """The answers; and of each step whether it was decodes alone, and how many calls of attention it made."""
    made, steps = requests(), []
    for request in made:
        engine.add(request)
    while engine.has_work:
        before = 0 if calls is None else calls[FUSED_ATTENTION]
        step = engine.step()
        assert step is not None
        only_decodes = step.batch.is_one_token_each
        steps.append((only_decodes, 0 if calls is None else calls[FUSED_ATTENTION] - before))
    return [request.answer.tolist() for request in made], steps


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each operator of torch_npu is called by its name."""
    start(section("npu"))
    import torch_npu

    counted: Counter[str] = Counter()

    def watch(name: str) -> None:
        inner = getattr(torch_npu, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return inner(*args, **kwargs)

        call.out = getattr(inner, "out", None)  # the form for captures, not counted
        monkeypatch.setattr(torch_npu, name, call)

    for name in (FUSED_ATTENTION, "npu_scatter_pa_kv_cache", "npu_add_rms_norm"):
        watch(name)
    return counted


def test_a_mixed_batch_is_one_call_a_layer(calls: Counter[str]) -> None:
    engine = engine_of()
    calls.clear()
    _, steps = serve(engine, calls)
    assert {count for _, count in steps} == {NUM_LAYERS}
    assert {only_decodes for only_decodes, _ in steps} == {True, False}
    assert calls["npu_scatter_pa_kv_cache"] == NUM_LAYERS * len(steps)
    assert calls["npu_add_rms_norm"] == (2 * NUM_LAYERS - 1) * len(steps)


def test_captured_steps_give_the_same_tokens_and_ask_for_no_operator(
    calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = serve(engine_of())
    engine = engine_of("device.graphs=4")
    replayed = []
    replay = torch.npu.NPUGraph.replay
    monkeypatch.setattr(torch.npu.NPUGraph, "replay", lambda graph: replayed.append(1) or replay(graph))
    calls.clear()
    answers, steps = serve(engine, calls)
    assert answers == expected
    assert {count for only_decodes, count in steps if not only_decodes} == {NUM_LAYERS}
    assert {count for only_decodes, count in steps if only_decodes} == {0, NUM_LAYERS}  # larger steps, too
    assert len(replayed) == sum(not count for _, count in steps) > 5


def test_a_step_that_chooses_no_token_is_waited_for() -> None:
    """Its time is measured, too, and the next chunk is not sent to a device that has not begun this one."""
    engine = engine_of("scheduler.overlap=false")
    machine = start(section("npu"))
    assert isinstance(machine, Npu)
    assert machine.launch_log is not None
    engine.add(Request("long", np.arange(3, 103), SamplingParams(max_tokens=1)))
    with machine.launch_log.reading() as asked:
        step = engine.step()
    assert step is not None
    assert not len(step.batch.owners)
    assert [each.kind for each in asked][-1] == "wait"


def test_more_graphs_than_streams_are_refused() -> None:
    deep = "model.config={model_type: llama, vocab_size: 64, hidden_size: 64, num_hidden_layers: 99,"
    deep += " num_attention_heads: 1, num_key_value_heads: 1, intermediate_size: 64, eos_token_id: 2}"
    many = ["device.graphs=512", "scheduler.num_slots=1024", "scheduler.max_batch_tokens=1024"]
    with pytest.raises(ValueError, match="asks for 36 graphs of 99 layers; the 910B holds 17: set it to at"):
        engine_of("model.path=null", deep, "model.weights=random", *many)


def test_requests_longer_than_a_decode_reads_are_refused() -> None:
    far = "model.config={model_type: llama, vocab_size: 64, hidden_size: 64, num_hidden_layers: 1,"
    far += " num_attention_heads: 1, num_key_value_heads: 1, intermediate_size: 64, eos_token_id: 2,"
    far += " max_position_embeddings: 300000}"
    said = ["model.path=null", far, "model.weights=random", "cache.page_size=1024", "cache.num_pages=300"]
    with pytest.raises(ValueError, match=r"a request may have 300000 tokens; .* keys: set scheduler.max_req"):
        engine_of(*said)


@pytest.mark.parametrize("name", ["310P", "910"])
def test_a_type_that_a_product_has_not_is_refused_with_plain_attention_too(name: str) -> None:
    machine = start(section("npu", "reference"))
    assert isinstance(machine, Npu)
    machine.product = product(name, "")
    machine.operators(shape(dtype=torch.float16))
    with pytest.raises(ValueError, match=f"bfloat16; the {name} computes in float16 or float32: set model"):
        machine.operators(shape(dtype=torch.bfloat16))


@stand_in_alone
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["device.virtual_fp32=false"], r"model\.dtype is float32; .*: set model\.dtype to bfloat16, or set"),
        (["cache.page_size=24"], r"cache\.page_size is 24; .*: set 128, or set"),
        (["device.product=950"], r"device\.virtual: the stand-in does not start: .*Ascend910B1.*another"),
        (
            ["device.virtual=false", "device.virtual_fp32=false", "device.virtual_release=null"],
            r"device\.virtual: this process has a stand-in",
        ),
    ],
)
def test_what_does_not_go_is_refused_in_one_line(overrides: list[str], words: str) -> None:
    start(section("npu"))
    with pytest.raises(ValueError, match=words) as caught:
        engine_of(*overrides)
    assert "\n" not in str(caught.value)


@stand_in_alone
def test_every_start_and_every_result_says_virtual(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from scripts import benchmark, generate

    monkeypatch.chdir(ROOT)
    trace, answers = tmp_path / "trace.jsonl", tmp_path / "answers.jsonl"
    trace.write_text(json.dumps({"id": "a", "prompt": "1+1=", "max_tokens": 3, "temperature": 0}) + "\n")
    npu = settings("npu")
    with caplog.at_level(logging.WARNING):
        generate.main(["recipes/tiny/cpu.yaml", *npu, "--input", str(trace), "--output", str(answers)])
    assert any("VIRTUAL" in line for line in caplog.messages)
    assert json.loads(answers.read_text())["device"] == "VIRTUAL"
    benchmark.main(["offline", "recipes/tiny/cpu.yaml", *npu, "--trace", str(trace), "--json"])
    device = json.loads(capsys.readouterr().out)["machine"]["device"]
    assert device.startswith("VIRTUAL Ascend910B1 (910B): ")
    assert device.endswith(", and takes float32 as no product does")
    assert "float32" not in start(section("npu", virtual_fp32=False)).name


class Lines:
    """Which lines of some files' functions run while this is entered."""

    def __init__(self, paths: list[Path]) -> None:
        self.wanted = {str(path): lines_of(compile(path.read_text(), str(path), "exec")) for path in paths}
        self.seen: dict[str, set[int]] = {path: set() for path in self.wanted}
        self._of_code: dict[CodeType, set[int]] = {}

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        threading.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def missing(self) -> dict[str, list[int]]:
        return {
            path: sorted(lines - self.seen[path])
            for path, lines in self.wanted.items()
            if lines - self.seen[path]
        }

    def _called(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in self.seen:
            return None
        if code not in self._of_code:
            self._of_code[code] = {line for *_, line in code.co_lines() if line}
        # A function all of whose lines have run is no longer watched, which would take long
        return self._ran if self._of_code[code] - self.seen[code.co_filename] else None

    def _ran(self, frame: FrameType, event: str, _: object) -> Any:
        self.seen[frame.f_code.co_filename].add(frame.f_lineno)
        return self._ran


def lines_of(code: CodeType) -> set[int]:
    """The lines of all functions in a module's code, their first ones left out."""
    found: set[int] = set()
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= lines_of(each)
            if each.co_flags & inspect.CO_OPTIMIZED:  # a function; a class runs when it is imported
                found |= {line for *_, line in each.co_lines() if line and line > each.co_firstlineno}
    return found


def _as_a_310p() -> None:
    """Run what an engine runs there alone."""
    from models.ops.npu.ops import NpuOps

    bench = Bench(atb())
    assert bench.attention.num_runs == 1
    bench.step({0: 20, 3: 1})
    bench.step({3: 1, 0: 1})
    zeros = torch.zeros(2, dtype=torch.int32, device="npu:0")
    bench.attention.plan_static(StaticDecodes(zeros, zeros[:, None], zeros + 1))
    ops, heads = NpuOps(product("310P", "")), torch.ones(3, 2, 16, device="npu:0")
    ops.rotary(heads, heads.clone(), heads[:, 0], heads[:, 0])
    ops.rotary_of_one(heads, heads[:, 0], heads[:, 0])
    ops.swiglu(heads[..., :2].contiguous())
    ops.clamped_swiglu(heads, 1.0, 7.0)
    rows = torch.ones(3, 32, dtype=torch.float16, device="npu:0")
    ops.add_rms_norm_wide(rows, rows, rows[0].clone(), 1e-5)
    _by_experts(ops, rows)
    bias = torch.ones(32, dtype=torch.float16, device="npu:0")
    ops.linear(heads[:, 0].half(), ops.pack(torch.ones(32, 16, device="npu:0").half(), bias))
    half = torch.ones(32, 16, dtype=torch.float16, device="npu:0")
    ops.linear_split(half, ops.pack_split(half, None, (16, 16)), (16, 16))
    ones = torch.ones(16, device="npu:0")
    static = StaticInt8(ones[:, None].expand(16, 16).to(torch.int8), ones, ones.int(), ones, ones)
    packed, rows = ops.pack_static(static, half.dtype), half[:, :16]
    turned = ops.static_rows(rows, ops.pack_static_rows(static, half.dtype))
    assert torch.equal(ops.linear_static(turned, packed, half.dtype), torch.full_like(rows, 2 * 16 + 1))
    with pytest.raises(ValueError, match="a head has no key at the first"):
        atb(first_key=1).check()


def _in_int8(ops: Ops, rows: torch.Tensor) -> None:
    """Run what a layer in W8A8 runs, on rows of 32."""
    _, _, residual = ops.add_rms_norm_wide(rows, rows, rows[0].clone(), 1e-5)
    x, _ = ops.add_rms_norm_int8(rows, residual, rows[0].clone(), 1e-5)
    square, scale = torch.ones(32, 32, dtype=torch.int8, device="npu:0"), torch.ones(32, device="npu:0")
    for widths in ((16, 16), (16, 8, 8)):
        packed = ops.pack_int8_split(square, scale, None, widths)
        assert len(ops.linear_int8_split(x, packed, widths)) == len(widths)
    down = ops.pack_int8(square[:, :16], scale, None)
    for bias in (None, scale):
        ops.mlp_int8(x, ops.pack_int8(square, scale, bias), down)


def _joined(limits: AscendProduct) -> None:
    """Norm and rotate heads in one launch, and twice the same ones."""
    from models.ops.npu.ops import NpuOps

    ops, half = NpuOps(limits), torch.bfloat16
    for size in (64, 128, 128):
        joined = ops.join_heads(2, 1, size, half, torch.device("npu:0"))
        if joined is None:
            continue
        qkv = torch.ones(3, 4 * size, dtype=half, device="npu:0")
        assert joined.takes(len(qkv))
        joined(qkv, *qkv[:2, :size].clone(), 1e-5, *(qkv[:, :size].clone() for _ in range(2)))


def _by_experts(ops: Ops, rows: torch.Tensor) -> None:
    """Run a mixture of four experts on rows of 32, also in int8, where the product joins them."""
    wide, router = torch.ones(6, 32, device="npu:0"), torch.ones(4, 32, device="npu:0")
    plain, bias = MixtureConfig(4, 2, 32, True), torch.zeros(4, device="npu:0")
    grouped = {"num_groups": 2, "num_chosen_groups": 1, "scale": 2.0}
    for more in (grouped, grouped | {"scores": "sigmoid"}, {"scores": "sigmoid", "normalizes": False}):
        ops.route(rows, wide, None, replace(plain, num_experts=6, **more))
    ops.route(rows, router, None, replace(plain, **grouped))  # groups of two
    ops.route(rows, router, bias, replace(plain, scores="sigmoid", is_corrected=True))
    routed = ops.route(rows, router, None, plain)
    if not ops.joins_experts(ExpertKind(32, 32)):
        return
    up, down = (torch.ones(size, 32, dtype=rows.dtype, device="npu:0") for size in (64, 32))
    bias, words = torch.ones(32, dtype=rows.dtype, device="npu:0"), torch.ones(32, 4, device="npu:0").int()
    up_scale, two = torch.ones(64, device="npu:0"), torch.ones(32, 1, dtype=rows.dtype, device="npu:0")
    gate_up = UnpackedLinear(up)
    kept = [Int4Weight(words, two, offset, 32) for offset in (None, two)]
    ops.linear_int4_split(rows, ops.pack_int4_split(kept[1], None, (16, 16)), (16, 16))
    downs = [
        UnpackedLinear(down, bias=bias),
        *map(UnpackedLinear, kept),
        UnpackedLinear(down.to(torch.int8), bias),
    ]
    for each in downs:
        in_int8 = UnpackedLinear(up.to(torch.int8), up_scale)
        packed = ops.pack_experts([gate_up if each.scale is None else in_int8] * 4, [each] * 4)
        ops.joined_mixture(rows, *routed, packed, 5, ops.swiglu)
    apart = torch.ones(48, 32, dtype=torch.int8, device="npu:0"), torch.ones(48, device="npu:0")
    down = UnpackedLinear(apart[0].view(32, 48)[:, :24], bias)
    ops.joined_mixture(
        rows, *routed, ops.pack_experts([UnpackedLinear(*apart)] * 4, [down] * 4), 5, ops.swiglu
    )


def _among_ranks(ops: Ops, rows: torch.Tensor) -> None:
    """Multiply rows of a prompt, and send tokens to experts, as a rank of two does, which is alone here."""
    config = MixtureConfig(4, 2, 32, True)
    up, down = (torch.ones(size, 32, dtype=rows.dtype, device="npu:0") for size in (64, 32))
    packed = ops.pack_experts([UnpackedLinear(up)] * 2, [UnpackedLinear(down)] * 2)
    group = join("hccl", dist.HashStore(), 0, 1, 60.0)
    group.size, group.all_gather = 2, lambda x: torch.stack([x, x])
    try:
        assert torch.equal(ops.linear_summed(rows, (rows, None), group), rows @ rows.t())
        assert ops.dispatch_of(32, config, group) is None, "there is no communicator for it"
        group.tokens = Group(dist.new_group([0]))
        assert ops.dispatch_of(32, config, group) is None, "it is not open"
        group.open_for_tokens(200, torch.device("npu"))
        assert ops.dispatch_of(32, config, group) is None, "no device has said that sending is faster"
        product, ops.product = ops.product, replace(ops.product, dispatches=True)
        dispatch = ops.dispatch_of(32, config, group)
        ops.product = product
        assert dispatch is not None
        weights, places = ops.route(rows, torch.eye(4, 32, device="npu:0"), None, config)
        for some in (slice(2), slice(3)):  # both have as many, and not
            sent = rows[some], weights[some], places[some]
            assert [len(each) for each in dispatch.own(*sent)] == [(len(sent[0]) + 1) // 2] * 3
            assert dispatch.takes(len(sent[0]), sent[0].dtype)
            dispatch.mixture(*sent, packed, ops.swiglu)
    finally:
        dist.destroy_process_group()


def _of_modelslim(ops: Ops, rows: torch.Tensor) -> None:
    """Multiply rows of 32 by weights in W8A8, W8A16 and W4A8, as msModelSlim has them."""
    weight, scale = torch.ones(16, 32, dtype=torch.int8, device="npu:0"), torch.ones(16, device="npu:0")
    static = StaticInt8(weight, scale, scale.int(), scale, scale)
    for dtype in (torch.bfloat16, torch.float16):
        packed, of_rows = ops.pack_static(static, dtype), ops.pack_static_rows(static, dtype)
        ops.linear_static(ops.static_rows(rows.to(dtype), of_rows), packed, dtype)
    ops.linear_w8a16(rows, ops.pack_w8a16(weight, scale, scale.to(rows.dtype), rows.dtype))
    router = torch.ones(4, 32, device="npu:0")
    pairs = [
        UnpackedLinear(PairedInt4(router.new_ones(n, 32).char(), router.new_ones(2 * n))) for n in (32, 16)
    ]
    routed = ops.route(rows, router, None, MixtureConfig(4, 2, 32, True, (True,)))
    assert ops.joins_experts(ExpertKind(32, 32, "w4a8"))
    assert not ops.joins_experts(ExpertKind(32, 36, "w4a8"))
    assert not ops.joins_experts(ExpertKind(32, 32, "static"))
    joined = ops.pack_experts(*([each] * 4 for each in pairs))
    ops.joined_mixture(rows, *routed, joined, 4, ops.swiglu)


def _with_sinks() -> None:
    """Run a step, and capture one, of a model that has attention sinks."""
    attention = operators("npu", "fused", shape(windows=(None,), has_sinks=True))[1]
    bench = Bench(attention)
    bench.step({0: 20, 3: 1})
    zeros, query = torch.zeros(2, dtype=torch.int32, device="npu:0"), torch.ones(2, 4, 64, device="npu:0")
    metadata = attention.plan_static(StaticDecodes(zeros, zeros[:, None], zeros + 1))
    with torch.npu.graph(torch.npu.NPUGraph()):
        attention.attend(query, *bench.cache.of(0), metadata, 0)


def _over_int8_pages() -> None:
    """Run steps of short, long and mixed spans over pages of int8, and capture rows of one and two tokens."""
    from attention.npu.fused_attention import _divided

    attention = operators("npu", "fused", shape(windows=(None,), page_size=32, int8_pages=True))[1]
    bench = ChannelBench(attention)
    for spans in ({0: 2}, {1: 20}, {0: 1, 1: 30, 2: 1}):
        bench.step(spans)
    far = np.array([MOST_GATHERED, MOST_GATHERED])
    assert [each.tolist() for each in _divided(np.arange(2), far)] == [[0], [1]]
    table, query = torch.zeros(2, 1, dtype=torch.int32, device="npu:0"), torch.ones(4, 4, 64, device="npu:0")
    for width in (1, 2):
        places = torch.zeros(2 * width, dtype=torch.int32, device="npu:0")
        metadata = attention.plan_static(StaticDecodes(places, table, places + 1))
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            attention.attend_by_channel(query[: 2 * width], bench.scales, *bench.cache.of(0), metadata, 0)
        attention.replay(graph, [metadata], [width] * 2)
    asked = query[:2], bench.scales, *bench.cache.of(0)
    places = torch.zeros(2, dtype=torch.int32, device="npu:0")
    metadata = attention.plan_static(StaticDecodes(places, table, places + 1))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        attention.attend_with_sums_by_channel(*asked, metadata, 0)
    attention.replay(graph, [metadata], [1] * 2)
    rows = np.arange(2)
    batch = Batch(rows, rows * 0, rows * 0 + 1, NOTHING, NOTHING, NOTHING)
    eager = planned(attention, batch, bench.page_table)
    attention.attend_with_sums_by_channel(*asked, eager, 0)


@stand_in_alone
@pytest.mark.parametrize("more", [{}, {"normalizes": False, "scale": 2.0}, {"num_experts": 2}])
def test_a_950_chooses_experts_by_the_operator_of_groups(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are defined; a product of fewer than three experts does so in plain torch."""
    start(section("npu"))
    import torch_npu

    from models.ops.npu.ops import NpuOps

    config = replace(MixtureConfig(8, 2, 32, True), **more)
    generator = torch.Generator().manual_seed(6)
    x, router = (torch.randn(size, 32, generator=generator) for size in (7, config.num_experts))
    wanted = Ops().route(x, router, None, config)
    ops = NpuOps(product("950", ""))
    assert ops.joins_experts(ExpertKind(32, 32))
    with answering_as("950"), monkeypatch.context() as patch:
        counted, inner = [], torch_npu.npu_moe_gating_top_k
        patch.setattr(torch_npu, "npu_moe_gating_top_k", lambda *x: counted.append(1) or inner(*x))
        found = ops.route(x.to("npu:0"), router.to("npu:0"), None, config)
    torch.testing.assert_close(found[0].cpu(), wanted[0])
    assert torch.equal(found[1].cpu(), wanted[1].int())
    assert len(counted) == (config.num_experts > 2)


def _fetching(ops: Ops, rows: torch.Tensor) -> None:
    """Capture a product whose weight is fetched before it."""
    with torch.npu.graph(torch.npu.NPUGraph()):
        ops.prefetch((rows, None), rows)
        ops.await_prefetch()
        torch.mm(rows, rows.t())


def _overlapping(ops: Ops, rows: torch.Tensor) -> None:
    """Capture a product beside another, and compute it once more as it is asked for."""
    with torch.npu.graph(torch.npu.NPUGraph()):
        begun = ops.begin_beside(lambda: torch.mm(rows, rows.t()))
        torch.mm(rows, rows.t()) + begun()
    ops.begin_beside(lambda: rows)()


@stand_in_alone
def test_angles_that_a_model_scales_are_turned_in_plain_torch() -> None:
    start(section("npu"))
    from models.ops.npu.ops import NpuOps

    ops, generator = NpuOps(product("910B", "")), torch.Generator().manual_seed(4)
    query, key = (torch.randn(5, heads, 96, generator=generator) for heads in (4, 2))
    angles = torch.randn(5, 48, generator=generator).repeat(1, 2)
    cos, sin = 1.19 * angles.cos(), 1.19 * angles.sin()
    there = [each.to("npu:0") for each in (query, key, cos, sin)]
    with pytest.raises(ValueError, match=r"npu_rotary_mul: r1 is of up to 1\.\d+; .*plain torch"):
        ops.rotary(*there)
    ops.scales_angles = True
    found = [*ops.rotary(*there), ops.rotary_of_one(there[0], *there[2:])]
    expected = Ops().rotary(query, key, cos, sin)
    for turned, wanted in zip(found, (*expected, expected[0])):
        torch.testing.assert_close(turned.cpu(), wanted, rtol=0, atol=1e-6)
    long = "rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64}"
    config = f"{{model_type: llama, vocab_size: 320, hidden_size: 96, num_hidden_layers: 1, {long},"
    config += " num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 64, eos_token_id: 2}"
    plain = ("device.attention=reference", "model.path=null", f"model.config={config}", *RANDOM)
    engine = engine_of(*plain)
    assert engine.runner.decoder.ops.scales_angles
    serve(engine)


@pytest.mark.slow
@stand_in_alone
def test_every_line_of_every_npu_file_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start(section("npu"))

    from models.ops.npu.ops import NpuOps, chip, num_npus

    files = sorted((ROOT / "models/ops/npu").glob("[!_]*.py"))
    files += sorted((ROOT / "attention/npu").glob("*_attention.py"))
    with Lines(files) as lines:
        serve(engine_of("device.graphs=2"))
        serve(engine_of("device.graphs=2", f"model.config={WINDOWED}", "model.path=null", *RANDOM))
        engine = engine_of("device.graphs=2")
        with torch.npu.stream(engine.runner.attention.update_stream):
            serve(engine)
        ops, attention = operators("npu", "fused", shape(page_size=128))
        attention.graph_sizes([1, 2, 4])
        attention.product = replace(product("950", ""), unmasks_decodes=True)
        Bench(attention).step({0: 20, 3: 1})
        Bench(operators("npu", "fused", shape(windows=(None,), first_key=1))[1]).step({0: 1})
        _with_sinks()
        _over_int8_pages()
        tiled = replace(ops.product, tiles_weights=True)
        NpuOps(tiled).pack(torch.ones(16, 32, dtype=torch.bfloat16, device="npu:0"), None)
        ops.check_int8(torch.bfloat16, {"int8"}, 32)
        ones = torch.ones(16, 32, dtype=torch.int8, device="npu:0")
        packed = ops.pack_int8(ones, torch.ones(16, device="npu:0"), torch.ones(16, device="npu:0"))
        rows = torch.ones(3, 32, dtype=torch.bfloat16, device="npu:0")
        ops.linear_int8(rows, packed)
        grouping = replace(ops.product, groups_products=True, divides_gates=True)
        for each in (ops, NpuOps(grouping)):
            weight = torch.ones(16, 32, dtype=torch.bfloat16, device="npu:0")
            each.linear_split(rows, each.pack_split(weight, None, (8, 8), in_parts=True), (8, 8))
            each.route(rows, weight.float(), None, MixtureConfig(16, 2, 32, True))
        NpuOps(product("950", "")).route(rows, weight.float(), None, MixtureConfig(16, 2, 32, True))
        _in_int8(ops, rows)
        _by_experts(ops, rows)
        for each in (ops, NpuOps(replace(ops.product, has_int4=False))):
            _of_modelslim(each, rows)
        ops.check_int4(torch.bfloat16, 32, 32, (32,))
        _fetching(NpuOps(replace(ops.product, prefetches=True)), rows)
        _overlapping(NpuOps(replace(ops.product, overlaps_experts=True)), rows)
        ops.linear_summed(rows, (rows, None), ALONE)
        ops.clamped_swiglu(rows, 1.0, 7.0)
        prompt = torch.ones(256, 32, dtype=torch.bfloat16, device="npu:0")
        both = replace(ops.product, sums_products=True)
        monkeypatch.setattr("virtual_npu.device.JoinedRanks.size", lambda *_: 2)
        _among_ranks(NpuOps(both), prompt)
        _joined(replace(ops.product, joins_heads=True))
        heads, angles = torch.ones(3, 2, 16, device="npu:0"), torch.ones(3, 16, device="npu:0")
        ops.rotary(heads, heads.clone(), angles, angles)
        on_an_npu()
        for sizes in (test_sums.PLAIN, test_sums.LATENT):
            for way in (eager, replayed):
                test_sums.test_sums_are_those_of_the_definition(sizes, way)
        for each in (test_sparse_npu.SHAPE, test_sparse_npu.IN_INT8):
            test_sparse_npu.test_steps_read_what_the_definition_reads(each)
            test_sparse_npu.test_a_replay_reads_its_lengths_on_the_device(each, 2)
            test_sparse_npu.test_ranks_read_together_what_one_reads(1, each)
        test_sparse_npu.test_what_was_chosen_is_kept_for_the_layers_behind()
        in_int8 = test_sparse_npu.Bench(test_sparse_npu.IN_INT8).fused
        assert not in_int8.joins(64, 64)
        assert in_int8.gives_sums == in_int8.product.sums_latents
        with monkeypatch.context() as patch:
            joined = test_sparse_on_npu.test_an_indexer_reads_the_queries_of_one_launch_before_attention
            joined(tmp_path, patch)
            test_sparse_npu.test_a_release_without_the_operators_is_refused(patch)
        with answering_as("310P"):
            _as_a_310p()
        assert num_npus() > 0
        monkeypatch.setattr(torch.npu, "is_available", lambda: False)
        with pytest.raises(ValueError, match="finds no NPU"):
            chip()
    assert len(files) == 13
    assert all(lines.wanted.values())
    assert lines.missing() == {}


CAPTURED = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from tests.models.test_npu import engine_of, requests

engine = engine_of("device.product=950", "device.graphs=10", "scheduler.num_slots=10", "cache.page_size=128")
engine.add(requests()[0])
while engine.has_work:
    engine.step()
sizes = sorted(size for size, _ in engine.runner.graphs.steps)
import torch
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        pass
    said = "captured"
except RuntimeError as error:
    said = str(error)
print(json.dumps([sizes, said]))
"""


@pytest.mark.slow
@stand_in_alone
def test_a_sample_of_the_sizes_is_captured_and_said() -> None:
    """On a 950, which holds four graphs; a process has one NPU, so this one has a process of its own."""
    done = completed(CODE, CAPTURED)
    assert done.returncode == 0, done.stderr
    sizes, said = json.loads(done.stdout.splitlines()[-1])
    assert sizes == [1, 2, 8, 10]
    assert "4 graphs are held, and this product has no room for more" in said
    assert "graphs: of the sizes 1, 2, 4, 8, 10 the device holds 1, 2, 8, 10" in done.stderr
