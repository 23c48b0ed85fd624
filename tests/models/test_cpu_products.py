"""Products with weights in their own type are exact, and a row's is the same in any batch, on any vectors."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_batching.request import Request, SamplingParams
from devices import cpp_sources
from devices.cpp_sources import KINDS, missing_for_sources
from models.ops.cpu import products as module
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Panels, Products, narrowed, products
from recipes.assembly.engine import build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(missing_for_sources() is not None, reason=str(missing_for_sources()))
SHAPES = [
    (1, 1),
    (31, 7),
    (33, 255),
    (48, 256),
    (100, 257),
    (160, 600),
]  # outputs and inputs, also of part panels
NUM_ROWS = [0, 1, 5, 6, 7, 12, 13, 40, 97, 200]
TINY = str(ROOT / "recipes/tiny/cpu.yaml")


@pytest.fixture(scope="module")
def found() -> Products:
    made = products()
    assert isinstance(made, Products), made
    return made


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def afresh() -> Iterator[None]:
    """The library is looked for anew, and again after the test."""
    products.cache_clear()
    yield
    products.cache_clear()


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_stored_numbers(
    found: Products, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = some(dtype, *shape), some(dtype, shape[0])
    for num_rows, offset, kind in itertools.product(NUM_ROWS, (None, bias), {torch.float32, dtype}):
        x = some(kind, num_rows, 2 * shape[1])[:, : shape[1]]  # rows that lie apart
        y = found.multiply(x, found.pack(weight, offset))
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        assert y.dtype == kind
        near = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[kind]
        torch.testing.assert_close(y.double(), expected, rtol=near, atol=10 * near)


def chain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The definition: fused multiply-adds in the order of the inputs, which begin with the bias."""
    total = bias.float().expand(len(x), -1).numpy()
    for k in range(x.shape[1]):
        exact = np.outer(x[:, k].double().numpy(), weight[:, k].double().numpy())
        total = (exact + total).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_row_is_summed_in_one_order_in_any_batch(found: Products, dtype: torch.dtype) -> None:
    weight, bias, x = some(dtype, 100, 600), some(dtype, 100), some(torch.float32, 97, 600)
    packed, expected = found.pack(weight, bias), chain(x, weight, bias)
    for first, last in ((0, 97), (0, 1), (3, 9), (5, 40), (20, 97), (96, 97)):
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(found.multiply(x[first:last], packed), expected[first:last]), (
                first,
                last,
                count,
            )


def test_numbers_of_bfloat16_are_kept_as_such() -> None:
    wide = some(torch.float32, 300, 300)
    assert narrowed(wide) is wide
    half = wide.bfloat16().float()
    assert torch.equal(narrowed(half).float(), half)
    assert narrowed(half).dtype == torch.bfloat16
    half[-1, -1] += 2**-20  # past what is looked at first
    assert narrowed(half) is half
    assert narrowed(wide.half()).dtype == torch.float16


def test_a_processor_that_multiplies_a_type_itself_keeps_oneDNN(
    found: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_bfloat16, kind in ((True, Tensor), (False, Panels)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda has=has_bfloat16: has)
        ops = CpuOps(products=found)
        assert isinstance(ops.pack(some(torch.float32, 48, 80), None)[0], Panels)
        assert ops.padded(9) == 9
        if not has_bfloat16 or torch.cpu._is_avx512_bf16_supported():
            assert isinstance(ops.pack(some(torch.bfloat16, 48, 80), None)[0], kind)
            assert ops.padded(9) == (16 if has_bfloat16 else 9)


def compiler(folder: Path, *options: str) -> str:
    """A compiler that counts its runs in `folder`/runs, and takes these options last."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\necho >> {folder}/runs\nexec g++ "$@" {" ".join(options)}\n')
    script.chmod(0o700)
    return str(script)


def test_it_is_compiled_once_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path))
    load = ctypes.CDLL

    def opened(name: str, **options: int) -> ctypes.CDLL:
        """This process has loaded the file of that name before, and would be given it unread."""
        if name.endswith(".so") and Path(name).read_bytes() == b"half of it":
            raise OSError(f"{name}: file too short")
        return load(name, **options)

    monkeypatch.setattr(cpp_sources.ctypes, "CDLL", opened)
    counts = []
    for is_torn in (False, False, True):
        products.cache_clear()
        if is_torn:
            (kept,) = (tmp_path / "continuous_batching/products").iterdir()
            kept.unlink()
            kept.write_bytes(b"half of it")
        assert isinstance(products(), Products)
        counts.append(len((tmp_path / "runs").read_text().splitlines()))
    assert counts == [3, 4, 8], "its version, the compilation and the link; its version; that, and all again"
    assert [each.suffix for each in (tmp_path / "continuous_batching/products").iterdir()] == [".so"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names a processor of x86_64")
def test_shorter_vectors_give_the_same_bits(
    found: Products, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-march=x86-64-v3"))
    short = products()
    assert isinstance(short, Products), short
    for dtype in KINDS:
        weight, bias, x = some(dtype, 100, 600), some(dtype, 100), some(torch.float32, 40, 600)
        assert torch.equal(
            found.multiply(x, found.pack(weight, bias)), short.multiply(x, short.pack(weight, bias))
        )


def test_a_compiler_that_is_missing_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert products() == "there is no C++ compiler no-such-compiler"
    products.cache_clear()
    monkeypatch.setenv("CXX", compiler(tmp_path, "-include", "no-such-header"))
    told = products()
    assert isinstance(told, str)
    assert told.startswith("products.cpp cannot be compiled: ")


def tokens(*overrides: str) -> list[list[int]]:
    engine = build(load(TINY, ["cache.num_pages=64", "scheduler.num_slots=4", *overrides])).engine
    prompts = [np.arange(40 + each, 60 + 3 * each, dtype=np.int32) for each in range(6)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [Request(str(number), prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return [request.answer.tolist() for request in requests]


def test_an_engine_answers_as_with_oneDNN_and_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    multiply = Products.multiply
    monkeypatch.setattr(
        module.Products, "multiply", lambda self, *args: calls.append(1) or multiply(self, *args)
    )
    plain = tokens("device.compile=false", "model.dtype=float32")
    assert not calls
    assert tokens("device.compile=true", "model.dtype=float32") == plain
    assert calls


OF_ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")
MAIN = """
#include <cstdio>
#include <vector>
int main(int, char** given) {
    long m = atol(given[1]), n = atol(given[2]), k = atol(given[3]); int kind = atoi(given[4]);
    long size = kind ? 2 : 4, panel = outputs_of_a_panel(), rows = (n + panel - 1) / panel * panel;
    std::vector<float> x(m * k), bias(n), y(m * n);
    std::vector<char> w(n * k * size), packed(rows * k * size);
    if (!fread(x.data(), 4, x.size(), stdin) || !fread(bias.data(), 4, n, stdin)) return 1;
    if (!fread(w.data(), 1, w.size(), stdin)) return 1;
    pack(w.data(), packed.data(), n, k, kind);
    multiply(x.data(), k, packed.data(), bias.data(), y.data(), n, m, n, k, kind, 2);
    fwrite(y.data(), 4, y.size(), stdout);
}
"""


@pytest.mark.skipif(
    any(shutil.which(each) is None for each in OF_ARM), reason=f"needs {' and '.join(OF_ARM)}"
)
def test_an_arm_processor_gives_the_same_bits(found: Products, tmp_path: Path) -> None:
    """Its code is made by a cross compiler and runs in an emulator, which says nothing of its speed."""
    main, binary = tmp_path / "main.cpp", tmp_path / "main"
    main.write_text(f'#include "{module.SOURCE}"\n{MAIN}')
    command = [
        OF_ARM[0],
        "-O3",
        "-std=c++17",
        "-fopenmp",
        "-static",
        "-ffp-contract=fast",
        str(main),
        "-o",
        str(binary),
    ]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    for (dtype, kind), num_rows in itertools.product(KINDS.items(), (1, 6, 40)):
        weight, bias, x = some(dtype, 100, 600), some(torch.float32, 100), some(torch.float32, num_rows, 600)
        given = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in (x, bias, weight))
        sizes = map(str, (num_rows, 100, 600, kind))
        done = subprocess.run(
            [OF_ARM[1], str(binary), *sizes], input=given, capture_output=True, check=True, timeout=PATIENCE_S
        )
        y = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(num_rows, 100)
        assert torch.equal(y, found.multiply(x, found.pack(weight, bias)))
