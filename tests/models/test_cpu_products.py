"""Products by products.cpp are exact, and each row has the same bits in any batch and on any vectors."""

from __future__ import annotations

import ctypes
import errno
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

from devices import cpp_sources
from devices.cpp_sources import KINDS, missing_for_sources
from models.ops.cpu import products as module
from models.ops.cpu.ops import CpuOps
from models.ops.cpu.products import Panels, Products, narrowed, products
from models.parallel.group import Alone
from recipes.assembly.decoders import shape_of
from recipes.assembly.families import model_config
from recipes.machine import start
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
PAIRS = 4  # the kind of the source
of_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bfloat16 here"
)


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
    weight, bias, x = some(dtype, 100, 600), some(dtype, 100), some(torch.float32, 300, 600)
    packed, expected = found.pack(weight, bias), chain(x, weight, bias)
    for first, last in ((0, 300), (0, 1), (3, 9), (5, 40), (20, 97), (31, 300)):
        for count in (1, 2, 3, 4):  # two and four divide 269 rows, too
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
    half[-1, -1] += 2**-20  # this number lies behind those that are tried first
    assert narrowed(half) is half
    assert narrowed(wide.half()).dtype == torch.float16


@pytest.fixture(scope="module")
def without_amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the products of a processor without AMX are kept, which are compiled once."""
    return tmp_path_factory.mktemp("without_amx")


@pytest.fixture(params=["", "-mno-amx-bf16"], ids=["native", "without AMX"])
def of_pairs(
    request: pytest.FixtureRequest, without_amx: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> Products:
    """The products of pairs in AMX's registers and in vectors, where this processor has both."""
    if request.param:
        if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("this processor has no AMX, so that the other case is this one")
        monkeypatch.setenv("XDG_CACHE_HOME", str(without_amx))
        monkeypatch.setenv("CXX", compiler(without_amx, request.param))
    made = products()
    assert isinstance(made, Products), made
    return made


def pairs(found: Products, *shape: int) -> Tensor:
    """A weight of bfloat16 that is multiplied in pairs, where this processor does."""
    weight = some(torch.bfloat16, *shape)
    if not found.multiplies(weight):
        pytest.skip("this processor does not multiply bfloat16 itself")
    return weight


def test_pairs_of_bfloat16_are_multiplied_as_they_are(of_pairs: Products) -> None:
    """By a processor that does so, for each number of rows of a tile, and for part panels."""
    found = of_pairs
    for num_outputs, num_inputs in ((1, 2), (31, 6), (33, 254), (100, 600), (160, 1024)):
        weight, bias = pairs(found, num_outputs, num_inputs), some(torch.bfloat16, num_outputs)
        for num_rows, offset, kind in itertools.product(
            (*range(14), 16, 17, 32, 33, 49, 97, 200, 530), (None, bias), (torch.float32, torch.bfloat16)
        ):
            x = some(kind, num_rows, 2 * num_inputs + 1)[:, :num_inputs]
            y = found.multiply(x, found.pack(weight, offset, is_widened=False))
            expected = x.bfloat16().double() @ weight.double().T + (0 if offset is None else offset.double())
            assert y.dtype == kind
            torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-1)
    assert not found.multiplies(some(torch.bfloat16, 4, 7)), "the last input has no neighbour"
    assert not found.multiplies(some(torch.float32, 4, 8))


def test_a_row_of_pairs_is_summed_in_one_order_in_any_batch(of_pairs: Products) -> None:
    found = of_pairs
    weight, x = pairs(found, 100, 600), some(torch.bfloat16, 300, 600)
    packed = found.pack(weight, some(torch.bfloat16, 100), is_widened=False)
    expected = found.multiply(x, packed)
    for first, last in itertools.product((0, 3, 20), (1, 4, 9, 21, 40, 97, 300)):
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            assert torch.equal(found.multiply(x[first:last], packed), expected[first:last])


def test_sums_of_AMX_are_in_the_order_that_its_header_states(found: Products) -> None:
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AMX")
    weight, bias, x = some(torch.bfloat16, 40, 600), some(torch.bfloat16, 40), some(torch.bfloat16, 33, 600)
    total = bias.float()
    for first in range(0, 600, 32):
        halves = []
        for one in (0, 1):
            picked = slice(first + one, min(first + 32, 600), 2)
            halves.append(chain(x[:, picked], weight[:, picked], torch.zeros(40)))
        total = total + (halves[0] + halves[1])
    packed = found.pack(weight, bias, is_widened=False)
    assert torch.equal(found.multiply(x, packed), total.bfloat16())


@of_bfloat16
def test_oneDNN_multiplies_the_type_that_it_is_to_multiply(found: Products) -> None:
    for onednn_dtype, kind in ((torch.bfloat16, Tensor), (None, Panels)):
        ops = CpuOps(products=found, onednn_dtype=onednn_dtype)
        assert isinstance(ops.pack(some(torch.float32, 48, 80), None)[0], Panels)
        assert ops.padded(9) == 9
        weight, x = some(torch.bfloat16, 48, 80), some(torch.bfloat16, 9, 80)
        packed = ops.pack(weight, None)
        assert isinstance(packed[0], kind)
        assert ops.padded(9) == (16 if kind is Tensor else 9)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(ops.linear(x, packed).double(), expected, rtol=1e-2, atol=1e-1)


class OneOfTwo(Alone):
    """A group whose other rank gives these values, in turn."""

    def __init__(self, *others: int) -> None:
        super().__init__()
        self.size, self._others = 2, iter(others)

    def least(self, value: int, device: torch.device) -> int:
        return min(value, next(self._others))


@pytest.mark.parametrize(
    ("is_ahead", "others", "chosen"), [(True, 1, torch.bfloat16), (True, 0, None), (False, 1, None)]
)
def test_ranks_choose_one_way_of_products(
    is_ahead: bool, others: int, chosen: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measures for itself, and a rank that takes another way would sum in another order."""
    monkeypatch.setattr("models.ops.cpu.ops.is_onednn_ahead", lambda own, dtype: is_ahead)
    machine = start(load(TINY, ["device.compile=auto"]).device)
    machine.join(Alone(), OneOfTwo(1, others), torch.bfloat16)
    ops, _ = machine.operators(shape_of(16, model_config(load(TINY))))
    packed, _ = ops.pack(some(torch.bfloat16, 48, 80), None)
    assert isinstance(packed, Panels) == (chosen is None)


def compiler(folder: Path, *options: str) -> str:
    """A compiler that counts its runs in `folder`/runs, and takes these options last."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\necho >> {folder}/runs\nexec g++ "$@" {" ".join(options)}\n')
    script.chmod(0o700)
    return str(script)


@pytest.mark.slow
def test_it_is_compiled_once_for_all_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-O0"))
    counts = []
    for number in range(4):
        products.cache_clear()
        if number > 1:  # a new file, since the old one is mapped; loading it may end a process by SIGBUS
            (kept,) = (tmp_path / "continuous_batching/products").iterdir()
            whole = kept.read_bytes()
            kept.unlink()
            kept.write_bytes(whole[:-200] if number == 2 else whole[: len(whole) // 2])
        assert isinstance(products(), Products)
        counts.append(len((tmp_path / "runs").read_text().splitlines()))
    assert counts == [3, 4, 7, 10], "its version, the compilation and the link; its version; all again, twice"
    assert [each.suffix for each in (tmp_path / "continuous_batching/products").iterdir()] == [".so"]


def test_the_compiler_is_named_as_for_build_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    """As a command with arguments, such as ccache's; an empty name is none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for said in ("", " "):
        monkeypatch.setenv("CXX", said)
        assert missing_for_sources() is None
    monkeypatch.setenv("CXX", 'g++ "-O0')
    assert missing_for_sources() == 'there is no C++ compiler g++ "-O0'
    monkeypatch.setenv("CXX", f"'{compiler(tmp_path, '-O0')}' -pipe")
    assert isinstance(products(), Products)
    assert len((tmp_path / "runs").read_text().splitlines()) == 3, "its version, the compilation and the link"


@pytest.mark.slow
def test_a_folder_that_is_full_or_that_others_write_to_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "continuous_batching/products"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-O0"))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cpp_sources.os, "fsync", full)
        assert isinstance(products(), Products)
    assert not [*folder.iterdir()]
    assert "cannot be kept for the next start: [Errno 28]" in caplog.text
    products.cache_clear()
    cpp_sources._folder_of.cache_clear()
    folder.chmod(0o777)
    assert isinstance(products(), Products)
    assert not [*folder.iterdir()]
    assert f"others can write to {folder}" in caplog.text


@pytest.mark.slow
def test_what_is_kept_in_a_folder_that_cannot_be_written_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-O0"))
    folder, access, denied = tmp_path / "continuous_batching/products", os.access, os.W_OK

    def allowed(path: Path, mode: int) -> bool:
        return not mode & denied and access(path, mode)  # the superuser may do everything

    assert isinstance(products(), Products)
    monkeypatch.setattr(cpp_sources.os, "access", allowed)
    caplog.set_level("INFO", "devices.cpp_sources")
    cpp_sources._folder_of.cache_clear()
    counts = []
    for _ in range(2):
        products.cache_clear()
        assert isinstance(products(), Products)
        counts.append(len((tmp_path / "runs").read_text().splitlines()))
        left = [*folder.iterdir()]
        for each in left:
            each.unlink()
    assert counts == [4, 7], "its version; all of it, since it is gone"
    assert not left
    assert [line.partition(",")[0] for line in caplog.messages] == [f"products: {folder} cannot be written"]
    denied = os.R_OK
    cpp_sources._folder_of.cache_clear()
    assert cpp_sources._folder_of(str(tmp_path)) is None


def test_a_folder_from_which_nothing_may_be_loaded_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, afresh: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "-O0"))
    load, folder = ctypes.CDLL, str(tmp_path / "continuous_batching")

    def opened(name: str, **options: int) -> ctypes.CDLL:
        if name.startswith(folder):
            raise OSError(f"{name}: failed to map segment from shared object")
        return load(name, **options)

    monkeypatch.setattr(cpp_sources.ctypes, "CDLL", opened)
    assert isinstance(products(), Products)


@pytest.mark.slow
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
    assert told.endswith("fatal error: no-such-header: No such file or directory")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            "In file included from a\na:1: error: this\na:2: error: that\n  5 | x\n    | ^\n",
            "a:1: error: this",
        ),
        (
            "/usr/bin/ld: cannot find -lx\ncollect2: error: ld returned 1 exit status\n",
            "/usr/bin/ld: cannot find -lx",
        ),
        ("collect2: error: ld returned 1 exit status\n", "collect2: error: ld returned 1 exit status"),
        ("ccache: too old\n \n", "ccache: too old"),
        ("", "Command 'g++' returned non-zero exit status 1."),
    ],
)
def test_the_first_error_of_a_compiler_is_the_reason(said: str, why: str) -> None:
    error = subprocess.CalledProcessError(1, "g++", stderr=said.encode())
    assert cpp_sources._reason(error) == why


OF_ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")
SOURCES = (
    "attention/cpu/attention.cpp",
    "attention/cpu/latent.cpp",
    "attention/cpu/recurrent.cpp",
    "models/ops/cpu/layers.cpp",
    "models/ops/cpu/products.cpp",
    "models/ops/cpu/rowwise.cpp",
)
MAIN = """
#include <cstdio>
#include <vector>
int main(int, char** given) {
    long m = atol(given[1]), n = atol(given[2]), k = atol(given[3]); int kind = atoi(given[4]);
    if (kind == PAIRS && kind_of_pairs() != PAIRS) return 2;
    long size = kind ? 2 : 4, wide = kind == PAIRS ? 2 : 4, panel = outputs_of_a_panel();
    std::vector<float> bias(n);
    std::vector<char> x(m * k * wide), y(m * n * wide), w(n * k * size), packed((n + panel) * k * size);
    if (!fread(x.data(), 1, x.size(), stdin) || !fread(bias.data(), 4, n, stdin)) return 1;
    if (!fread(w.data(), 1, w.size(), stdin)) return 1;
    pack(w.data(), packed.data(), n, k, kind);
    multiply(x.data(), k, packed.data(), bias.data(), y.data(), n, m, n, k, kind, 2);
    fwrite(y.data(), 1, y.size(), stdout);
}
"""


@pytest.fixture(scope="module")
def of_arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source for a processor of Arm that multiplies bfloat16, by a cross compiler."""
    if any(shutil.which(each) is None for each in OF_ARM):
        pytest.skip(f"needs {' and '.join(OF_ARM)}")
    folder = tmp_path_factory.mktemp("arm")
    (folder / "main.cpp").write_text(f'#include "{module.SOURCE}"\n{MAIN}')
    options = ["-O2", "-std=c++17", "-fopenmp", "-static", "-ffp-contract=fast", "-march=armv8.2-a+bf16"]
    command = [OF_ARM[0], *options, f"-I{ROOT / 'devices'}", str(folder / "main.cpp")]
    subprocess.run([*command, "-o", str(folder / "main")], check=True, timeout=PATIENCE_S)
    return folder / "main"


def by_arm(binary: Path, kind: int, x: Tensor, bias: Tensor, weight: Tensor) -> Tensor:
    """A product in an emulator, which says nothing of its speed."""
    given = b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in (x, bias, weight))
    sizes = map(str, (len(x), *weight.shape, kind))
    command = [OF_ARM[1], "-cpu", "max", str(binary), *sizes]
    done = subprocess.run(command, input=given, capture_output=True, check=True, timeout=PATIENCE_S)
    return torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(len(x), len(weight))


def test_an_arm_processor_gives_the_same_bits_and_multiplies_pairs(found: Products, of_arm: Path) -> None:
    bias = some(torch.float32, 100)
    for dtype, kind in KINDS.items():
        weight, x = some(dtype, 100, 600), some(torch.float32, 40, 600)
        assert torch.equal(by_arm(of_arm, kind, x, bias, weight), found.multiply(x, found.pack(weight, bias)))
    weight, x = some(torch.bfloat16, 100, 600), some(torch.bfloat16, 40, 600)
    y = by_arm(of_arm, PAIRS, x, bias, weight)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-1)
    assert torch.equal(by_arm(of_arm, PAIRS, x[3:10], bias, weight), y[3:10]), "the same bits in any batch"


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_compiled_for_an_arm_processor(source: str, tmp_path: Path) -> None:
    if shutil.which(OF_ARM[0]) is None:
        pytest.skip(f"needs {OF_ARM[0]}")
    options = ["-O0", "-std=c++17", "-fopenmp", "-Wno-psabi", "-DPAGES=1"]
    command = [OF_ARM[0], *options, f"-I{ROOT / 'devices'}", "-c", str(ROOT / source)]
    subprocess.run([*command, "-o", str(tmp_path / "made.o")], check=True, timeout=PATIENCE_S)
