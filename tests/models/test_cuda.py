"""An engine with Triton kernels gives the CPU's tokens, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from continuous_batching.engine import Engine
from continuous_batching.request import Request, SamplingParams
from devices.host_limits import host_memory_bytes
from models.ops.cuda.ops import CudaOps
from recipes import machine
from recipes.assembly.engine import build
from recipes.machine import Cuda, Machine
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT, DeviceSection
from tests.interpreter import DEVICE, multiply_rows_alone
from tests.models.families import VOCABULARY, make
from tests.models.variants import Variant

VARIANT = Variant(
    "qwen3_window",
    "qwen3",
    {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
)


class Interpreted(Cuda):
    """A CUDA device in Triton's interpreter."""

    device = torch.device("cpu")
    name = "Triton's interpreter"

    def __init__(self, asked: DeviceSection) -> None:
        Machine.__init__(self, asked)

    def memory_bytes(self, ranks_here: int = 1) -> int:
        return host_memory_bytes() // ranks_here


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(machine, "Cuda", Interpreted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, since random weights are drawn on the device and would be a GPU's own."""
    return make(VARIANT, tmp_path_factory.mktemp("checkpoints"))[1]


def engine(checkpoint: Path, *overrides: str) -> Engine:
    said = [
        f"model.path={checkpoint}",
        "model.dtype=float32",
        "device.compile=false",
        "cache.page_size=8",
        "cache.num_pages=7",
        "cache.memory_gib=null",
        "scheduler.num_slots=3",
        "scheduler.max_batch_tokens=16",
    ]
    return build(load(ROOT / "recipes/any/cpu.yaml", [*said, *overrides])).engine


def requests(count: int, logprobs: int | None = None) -> list[Request]:
    rng = np.random.default_rng(4)
    opening = rng.integers(0, VOCABULARY, 16)
    made = []
    for number in range(count):
        prompt = np.concatenate(
            [opening[: 16 * (number % 2)], rng.integers(0, VOCABULARY, int(rng.integers(1, 14)))]
        )
        params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        made.append(Request(str(number), prompt, params))
    return made


def serve(engine: Engine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return requests


@pytest.mark.slow
def test_tokens_are_those_of_the_cpu(checkpoint: Path) -> None:
    on_cuda = engine(checkpoint, "device.kind=cuda")
    ours = serve(on_cuda, requests(4))
    expected = serve(engine(checkpoint, "device.attention=reference", "device.threads=1"), requests(4))
    assert [request.answer.tolist() for request in ours] == [request.answer.tolist() for request in expected]
    counters = on_cuda.scheduler.counters
    assert counters.preemptions, "the pool was too large to force preemptions"
    assert counters.hit_tokens, "no prefix was shared"


@pytest.mark.slow
def test_a_request_gets_the_same_bits_alone_and_among_others(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_rows_alone(monkeypatch)
    crowded = engine(checkpoint, "device.kind=cuda", "device.batch_invariant=true")
    together = serve(crowded, requests(4, logprobs=2)[1::2])
    number = 1  # it was cut otherwise, and shared its beginning
    alone = serve(
        engine(checkpoint, "device.kind=cuda", "device.batch_invariant=true"),
        [requests(4, logprobs=2)[3]],
    )
    assert together[number].answer.tolist() == alone[0].answer.tolist()
    assert together[number].logprobs == alone[0].logprobs
    assert crowded.scheduler.counters.hit_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_linear_gives_a_row_the_same_bits_wherever_it_stands(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_rows_alone(monkeypatch)
    ops = CudaOps(batch_invariant=True)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(150, 40, generator=generator), torch.randn(70, 40, generator=generator)
    x, packed = x.to(DEVICE, dtype), ops.pack(weight.to(DEVICE, dtype), None)
    whole = ops.linear(x, packed)
    for rows in (slice(0, 1), slice(77, 78), slice(3, 140), slice(60, 66)):
        assert torch.equal(ops.linear(x[rows], packed), whole[rows])


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("batch_invariant", ["false", "true"])
def test_captured_steps_give_the_same_tokens(batch_invariant: str, overlap: str, checkpoint: Path) -> None:
    changes = [f"device.batch_invariant={batch_invariant}", f"scheduler.overlap={overlap}"]
    captured = engine(checkpoint, "device.kind=cuda", "device.graphs=3", *changes)
    ours = serve(captured, requests(12))
    expected = serve(engine(checkpoint, "device.attention=reference", "device.threads=1"), requests(12))
    assert [request.answer.tolist() for request in ours] == [request.answer.tolist() for request in expected]


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
@pytest.mark.parametrize("graphs", [0, 3])
def test_log_probabilities_in_bfloat16_are_near_those_of_the_cpu(graphs: int, checkpoint: Path) -> None:
    narrow = "model.dtype=bfloat16"
    ours = serve(
        engine(checkpoint, "device.kind=cuda", f"device.graphs={graphs}", narrow), requests(12, logprobs=5)
    )
    plain = engine(checkpoint, "device.attention=reference", "device.threads=1", narrow)
    expected = serve(plain, requests(12, logprobs=5))
    for one, other in zip(ours, expected):
        first, second = dict(one.logprobs[0].top), dict(other.logprobs[0].top)
        common = sorted(first.keys() & second.keys())
        assert len(common) >= 4
        assert [first[token] for token in common] == pytest.approx(
            [second[token] for token in common],
            abs=0.125,  # four units in the last place of the largest logits, which are below 8
        )
