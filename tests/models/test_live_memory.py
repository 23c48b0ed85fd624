"""An engine whose weights were replaced computes as one that began with them, and its pages come back empty.

Prompts whose prefixes were cached with the old weights are asked for again after the update. Wrong
checkpoints leave every token as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.checkpoint import rewriting
from models.checkpoint.files import SINGLE
from models.step.runner import ModelRunner
from recipes.assembly.engine import BuiltEngine, build
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from tests.device_kinds import Kind, stand_in_alone
from tests.models import mtp_layers, test_adapters
from tests.models.families import VARIANTS, make, wide
from tests.models.modelslim_checkpoints import checkpoint
from tests.models.recurrent_variants import RECURRENT_VARIANTS
from tests.models.state_steps import Span, Steps, decoder_of
from tests.models.test_draft_model import NUM_REQUESTS, serve, settings_of, tokens_of
from tests.models.test_int4 import stored
from tests.models.test_modelslim import kimi, mostly
from tests.patience import PATIENCE_S
from tests.thorough import cases

W8A8 = {"model.quantization": "w8a8"}
FEW = cases(5, NUM_REQUESTS)
TINY_WEIGHTS = ROOT / "recipes/tiny/weights"  # which test_fence.py changes


def built(path: Path, kind: Kind, more: dict[str, Any]) -> BuiltEngine:
    keys = {"cache.num_pages": 60, "cache.host_gib": "null", "cache.compact_every_steps": 0, **more}
    return build(load(ROOT / "recipes/any/cpu.yaml", settings_of(path, kind, None, 0, **keys)))


def answered(engine: BuiltEngine) -> dict[str, list[int]]:
    """The tokens of a few requests, of which some share a beginning, and some draw or are of one prompt."""
    return tokens_of(serve(engine.engine, resizes=False, most=FEW))


def changed(path: Path, target: Path) -> Path:
    """A checkpoint of the same model with other numbers: floats with noise, whole numbers in other rows."""
    shutil.copytree(path, target)
    generator = torch.Generator().manual_seed(7)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name, each in tensors.items():
            if name.endswith(("input_scale", "input_offset")):
                continue  # linears that read the same rows share them
            if each.is_floating_point():
                noise = torch.rand(each.shape, generator=generator) + 0.5
                tensors[name] = (each.float() * noise).to(each.dtype).contiguous()
            elif each.numel() > 2:  # compressed-tensors keeps a shape as a tensor
                tensors[name] = each.flip(0).contiguous()
        save_file(tensors, file)
    return target


def one_file(name: str, *, is_wide: bool = False) -> Callable[[Path], Path]:
    variant = next(each for each in VARIANTS if each.name == name)
    return lambda root: make(wide(variant) if is_wide else variant, root)[1]


def described(name: str, types: Callable[[str], str], **more: Any) -> Callable[[Path], Path]:
    return lambda root: checkpoint(name, root, types, **more)[1]


# One checkpoint for each way in which weights are held
GRAPHS = {"device.graphs": 6}
MTP = {"speculation.kind": "mtp", "speculation.max_tokens": 2, "speculation.adaptive": "fixed"}
ON_CPU: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "tied": (one_file("qwen3"), {}),
    "experts": (one_file("qwen3_moe"), {}),
    "latents": (one_file("deepseek_v3"), {}),
    "latents_in_panels": (
        one_file("deepseek_v3"),
        {"device.batch_invariant": "true", "device.compile": "auto"},
    ),
    "w8a8": (one_file("llama_biased"), W8A8),
    "w8a8_experts": (one_file("qwen3_moe"), W8A8),
    "w4a16": (lambda root: stored("llama_biased", "awq", root)[1], {"model.quantization": "w4a16"}),
    "expanded": (lambda root: stored("llama_biased", "gptq", root)[1], {}),
    "static": (described("qwen3", mostly(_proj="W8A8")), {}),
    "mtp": (lambda root: mtp_layers.target_of("glm4_moe", root)[1], MTP),
}
ON_NPU: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "experts": (one_file("qwen3_moe", is_wide=True), GRAPHS),
    "kimi": (
        described("qwen3_moe", kimi, is_wide=True, moe_intermediate_size=32),
        GRAPHS | {"model.dtype": "bfloat16"},
    ),
}
QUICK = ("cpu-tied", "cpu-w8a8")
CASES = [
    pytest.param(
        name,
        kind,
        id=f"{kind}-{name}",
        marks=[
            *([pytest.mark.npu, stand_in_alone] if kind == "npu" else []),
            *([] if f"{kind}-{name}" in QUICK else [pytest.mark.slow]),
        ],
    )
    for kind, names in (("cpu", ON_CPU), ("npu", ON_NPU))
    for name in names
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_after_an_update_are_those_of_the_new_checkpoint(
    name: str, kind: Kind, tmp_path: Path
) -> None:
    make_checkpoint, more = (ON_CPU if kind == "cpu" else ON_NPU)[name]
    old = make_checkpoint(tmp_path / "old")
    new = changed(old, tmp_path / "new")
    updated = built(old, kind, more)
    addresses = addresses_of(updated.runner)
    before = answered(updated)
    assert updated.live is not None
    read = updated.live.read_folder(new)
    assert answered(updated) == before, "reading changes nothing"
    updated.live.put(read)
    asked = updated.engine.scheduler.counters.hit_tokens
    after = answered(updated)
    assert after != before
    assert after == answered(built(new, kind, more))
    assert updated.engine.scheduler.counters.hit_tokens > asked, "pages of the new weights are shared again"
    assert addresses_of(updated.runner) == addresses, "captured steps read the weights where they were"


def addresses_of(runner: ModelRunner) -> list[int]:
    """Where the weights lie; those in oneDNN's own order say nothing of it."""
    held = [held for held, _ in rewriting.pairs(runner.decoder, runner.decoder)]
    return [each.data_ptr() if each.layout == torch.strided else id(each) for each in held]


def test_float32_weights_may_have_numbers_that_bfloat16_does_not_hold(tmp_path: Path) -> None:
    """A float32 model of bfloat16 numbers is packed in half of the bytes, but not where others may come."""
    new = one_file("qwen3")(tmp_path / "new")
    old = tmp_path / "old"
    shutil.copytree(new, old)
    for file in old.glob("*.safetensors"):
        save_file({name: each.bfloat16().float() for name, each in load_file(file).items()}, file)
    more = {"device.compile": "auto", "server.weights_root": tmp_path}
    for served, sent in ((old, new), (new, old)):
        updated = built(served, "cpu", more)
        assert updated.live is not None
        updated.live.put(updated.live.read_folder(sent))
        assert answered(updated) == answered(built(sent, "cpu", more))


def test_recurrent_layers_are_rewritten_whole(tmp_path: Path) -> None:
    variant = next(each for each in RECURRENT_VARIANTS if each.name == "kimi_linear")
    old = make(variant, tmp_path / "old")[1]
    new = changed(old, tmp_path / "new")
    updated, fresh = decoder_of(old), decoder_of(new)
    prompts, spans = [[*range(20)], [*range(60, 100)]], [Span(0, 0, 20), Span(1, 0, 40)]
    before = Steps(updated, prompts).run(spans)
    rewriting.rewrite(rewriting.pairs(updated, fresh))
    after = Steps(updated, prompts).run(spans)
    assert not torch.equal(after, before)
    assert torch.equal(after, Steps(fresh, prompts).run(spans))


def test_adapters_are_added_to_the_new_weights(tmp_path: Path) -> None:
    model, old = make(VARIANT, tmp_path / "old")
    new = changed(old, tmp_path / "new")
    test_adapters.adapted(model, tmp_path / "adapter", 1)
    prompts = test_adapters.prompts_of(1)

    def answers(engine: BuiltEngine) -> list[list[int]]:
        return [each.answer.tolist() for each in test_adapters.serve(engine.engine, prompts)]

    updated, fresh = (test_adapters.built(path, [tmp_path / "adapter"]) for path in (old, new))
    before = answers(updated)
    put(updated, new)
    after = answers(updated)
    assert after == answers(fresh)
    assert after != before


def put(engine: BuiltEngine, path: Path) -> None:
    assert engine.live is not None
    engine.live.put(engine.live.read_folder(path))


@pytest.mark.slow
def test_pages_in_every_tier_are_those_of_their_own_weights(tmp_path: Path) -> None:
    """What rests on the disk is found by its weights: not by others, and again by the same ones."""
    old = make(VARIANT, tmp_path / "old")[1]
    new = changed(old, tmp_path / "new")
    tier = f"{{kind: disk, gib: 0.1, path: {tmp_path / 'pages'}, wait_s: 60}}"
    more = {"cache.tier": tier, "cache.host_gib": 0.01, "cache.page_size": 8}
    updated = built(old, "cpu", more)
    fresh = [answered(built(path, "cpu", {})) for path in (old, new)]
    tiers = []
    for path, expected in ((None, fresh[0]), (new, fresh[1]), (old, fresh[0])):
        if path is not None:
            put(updated, path)
        assert answered(updated) == expected
        own = updated.runner.cache.tier
        assert own is not None
        assert own.settle(PATIENCE_S)
        tiers.append(own.counters)
    assert tiers[0].written > 0
    assert tiers[1].found == tiers[0].found, "no page of the old weights"
    assert tiers[1].written > tiers[0].written
    assert tiers[2].found > tiers[1].found, "those of the first weights are theirs again"
    assert updated.engine.tier is not None
    updated.engine.close()


VARIANT = next(each for each in VARIANTS if each.name == "llama_biased")
ROW = "model.layers.1.mlp.down_proj.weight"


def with_tensor(change: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    """Change one tensor of a checkpoint's file, or leave it out."""

    def spoil(file: Path) -> None:
        tensors = load_file(file)
        tensor = tensors.pop(ROW)
        save_file(tensors if change is None else tensors | {ROW: change(tensor).contiguous()}, file)

    return spoil


def in_config(**fields: Any) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        config = file.parent / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | fields))

    return spoil


# test_weights.py has what else a reader of checkpoints refuses
IN_A_FILE: dict[str, Callable[[Path], None]] = {
    "missing": with_tensor(None),
    "transposed": with_tensor(lambda each: each.t()),
    "int8": with_tensor(lambda each: each.to(torch.int8)),
    "NaN": with_tensor(lambda each: torch.cat((each[:-1], each[-1:] * torch.nan))),
}
WRONG = IN_A_FILE | {
    "half a file": lambda file: os.truncate(file, file.stat().st_size // 2),
    "no config": lambda file: (file.parent / "config.json").unlink(),
    "more layers": in_config(num_hidden_layers=4),
    "another rope": in_config(rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "another end": in_config(eos_token_id=5),
    "another family": in_config(model_type="mistral"),
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_file("llama")(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def served(old: Path) -> BuiltEngine:
    return built(old, "cpu", {})


def test_what_is_wrong_leaves_the_old_weights(served: BuiltEngine, old: Path, tmp_path: Path) -> None:
    assert served.live is not None
    right = answered(served)
    held = [each.clone() for each, _ in rewriting.pairs(served.runner.decoder, served.runner.decoder)]
    single = changed(old, tmp_path / "new")
    for name, spoil in WRONG.items():
        folder = Path(shutil.copytree(single, tmp_path / name))
        spoil(folder / SINGLE)
        refused(served, folder, name)
        if name in IN_A_FILE:
            data = (folder / SINGLE).read_bytes()
            with segment(data) as shared, pytest.raises(ValueError, match=r"weights in|holds NaN"):
                served.live.read_segment(shared, hashlib.sha256(data).hexdigest())
    still = [each for each, _ in rewriting.pairs(served.runner.decoder, served.runner.decoder)]
    assert all(torch.equal(dense(each), dense(other)) for each, other in zip(held, still))
    assert answered(served) == right


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def refused(served: BuiltEngine, folder: Path, name: str) -> None:
    assert served.live is not None
    try:
        served.live.read_folder(folder)
    except (ValueError, OSError):
        return
    pytest.fail(f"{name} is taken")


@contextmanager
def segment(data: bytes, size: int | None = None) -> Iterator[str]:
    """The name of shared memory with these bytes at its beginning, as a trainer would make it."""
    made = shared_memory.SharedMemory(create=True, size=size or len(data))
    try:
        made.buf[: len(data)] = data
        yield made.name.lstrip("/")
    finally:
        made.close()
        made.unlink()


def test_weights_come_from_shared_memory_once_all_have_arrived(old: Path, tmp_path: Path) -> None:
    served = built(old, "cpu", {})
    live = served.live
    assert live is not None
    new = changed(old, tmp_path / "new")
    right = answered(served)
    data = (new / SINGLE).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    half = data[: len(data) // 2]
    with segment(half, len(data)) as shared, pytest.raises(ValueError, match="fill it before the request"):
        live.read_segment(shared, digest)  # the manifest is whole, and half of the tensors are zeros
    with (
        segment(bytes(len(data))) as shared,
        pytest.raises(ValueError, match="cannot be read as safetensors"),
    ):
        live.read_segment(shared, hashlib.sha256(bytes(len(data))).hexdigest())
    with segment(bytes(8), 2**28) as shared, pytest.raises(ValueError, match="the model's weights at most"):
        live.read_segment(shared, digest)
    with pytest.raises(FileNotFoundError):
        live.read_segment("no-such-segment", digest)
    assert answered(served) == right
    with segment(data) as shared:
        read = live.read_segment(shared, digest)
    live.put(read)  # the segment is gone by now
    fresh = built(new, "cpu", {})
    assert answered(served) == answered(fresh)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("cpu", {"cache.host_gib": 0.002}),
        pytest.param("npu", GRAPHS, marks=[pytest.mark.npu, pytest.mark.slow, stand_in_alone]),
    ],
)
def test_sleep_gives_all_pages_back_and_wake_brings_the_same_tokens(
    kind: Kind, more: dict[str, Any], tmp_path: Path
) -> None:
    name = "gemma2" if kind == "cpu" else "qwen3"  # which has windows
    served = built(one_file(name, is_wide=kind == "npu")(tmp_path), kind, more)
    live, cache = served.live, served.runner.cache
    assert live is not None
    right = answered(served)

    def planes() -> list[list[torch.Tensor]]:
        """Those on the device, and those on the host."""
        both = zip(*(cache.of_group(group) for group in range(cache.num_groups)))
        return [[plane for planes in each for plane in planes] for each in both]

    sizes = [[tuple(each.shape) for each in place] for place in planes()]
    whole, null_page = live.num_bytes, sum(cache.layer_bytes)
    live.release_pages()
    assert live.num_bytes == null_page < whole / 20, "a page of each layer is left"
    live.restore_pages()
    assert live.num_bytes == whole
    live.capture_steps()
    assert [[tuple(each.shape) for each in place] for place in planes()] == sizes
    assert all(not each.any() for each in planes()[1])
    assert answered(served) == right


def test_a_wake_without_memory_stays_asleep(served: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    live, cache = served.live, served.runner.cache
    assert live is not None
    right = answered(served)
    whole = live.num_bytes
    live.release_pages()
    null_page = live.num_bytes
    allocate, counted = type(cache)._allocate, []

    def fails(self: Any, layer: int, num_pages: int, num_host_pages: int) -> None:
        counted.append(layer)
        if layer == 1 and num_pages > 1:
            raise torch.OutOfMemoryError("no memory for pages")
        allocate(self, layer, num_pages, num_host_pages)

    with monkeypatch.context() as patched:
        patched.setattr(type(cache), "_allocate", fails)
        with pytest.raises(MemoryError, match="no memory for pages"):
            live.restore_pages()
        assert counted
    assert live.num_bytes == null_page, "what was allocated is given back"
    live.restore_pages()
    assert live.num_bytes == whole
    live.capture_steps()
    assert answered(served) == right
