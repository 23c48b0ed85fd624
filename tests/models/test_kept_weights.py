"""Weights that a rank has kept are those of its checkpoint, bit for bit, and are used for no other."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from attention.latent import LatentAttention
from borders.start_report import TAKING
from models.checkpoint import rewriting, weights
from models.checkpoint.kept_weights import KeptWeights, origin_of, remembered
from models.decoder import Decoder
from models.drafting import mtp as mtp_weights
from models.drafting.config import MtpConfig
from models.drafting.drafter import Drafter
from models.drafting.mtp import Mtp
from models.parallel.share import Share
from models.quantization import Quantization
from recipes.assembly.decoders import kept_weights
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import decoder_config, read
from recipes.assembly.live_memory import _apart
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.device_kinds import stand_in_alone
from tests.models.families import VARIANTS, make
from tests.models.tensor_rank import empty
from tests.models.test_draft_model import settings_of
from tests.models.test_live_memory import ON_CPU, ON_NPU, built
from tests.models.test_shared_weights import Rank, checkpoint
from tests.thorough import cases

Module = TypeVar("Module", bound=nn.Module)


def fresh(engine: BuiltEngine) -> Decoder:
    """Return a decoder like an engine's, whose numbers are not filled; what is left so shows as no number."""
    old = engine.runner.decoder
    beside = old.group, old.share, old.stages, old.recurrence
    return spoiled(Decoder(old.config, old.ops, _apart(old.attention), *beside))


def spoiled(module: Module) -> Module:
    for parameter in module.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(0xFF)
    return module


def check_alike(old: nn.Module, new: nn.Module) -> None:
    for held, given in rewriting.pairs(old, new):
        assert same_bits(held, given)


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.layout != torch.strided or one.is_mkldnn:
        return torch.equal(one.to_dense(), other.to_dense())
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def unreadable(*arguments: object, **options: object) -> Any:
    raise AssertionError("the checkpoint is read again")


@pytest.mark.parametrize("name", cases(("w8a8_experts", "latents", "w4a16", "mtp"), ON_CPU))
def test_what_is_taken_is_what_was_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint, more = ON_CPU[name]
    path = make_checkpoint(tmp_path / "model")
    engine = built(path, "cpu", more)
    kept = KeptWeights(tmp_path / "kept" / "rank.safetensors", origin_of(path))
    own = KeptWeights(tmp_path / "kept" / "mtp.safetensors", origin_of(path))
    drafter = engine.runner.drafter
    head = drafter.decoder if isinstance(drafter, Drafter) and isinstance(drafter.decoder, Mtp) else None

    def fresh_head() -> Mtp:
        assert head is not None
        assert isinstance(head.config, MtpConfig), "the layer has its own configuration"
        group = engine.runner.decoder.group
        return spoiled(Mtp(head.config, head.ops, _apart(head.attention), group, head.share))

    weights.load(fresh(engine), path, kept=kept)
    if head is not None:
        mtp_weights.load(fresh_head(), path, own)
    with monkeypatch.context() as patched:
        patched.setattr(weights, "fill", unreadable)
        patched.setattr(mtp_weights, "fill", unreadable)
        taken = fresh(engine)
        weights.load(taken, path, kept=kept)
        check_alike(engine.runner.decoder, taken)
        if head is not None:
            mtp_weights.load(taken_head := fresh_head(), path, own)
            check_alike(head, taken_head)
    with safe_open(kept.file, "pt") as opened:  # any tool that knows the form can read the file
        assert opened.metadata() == {"origin": kept.origin}
        assert {*opened.keys()} == {name for name, _ in fresh(engine).named_parameters()}


@pytest.mark.npu
@stand_in_alone
def test_the_next_engine_of_a_recipe_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint, more = ON_NPU["kimi"]
    path, folder = make_checkpoint(tmp_path / "model"), tmp_path / "kept"
    keys = {"cache.num_pages": 60, "model.kept_in": folder, **more, "device.graphs": 0}
    recipe = load(ROOT / "recipes/any/cpu.yaml", settings_of(path, "npu", None, 0, **keys))
    first = build(recipe)
    assert [each.name for each in folder.iterdir()] == ["decoder-0-of-1-0-of-1.safetensors"]
    stages: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(weights, "fill", unreadable)
        second = build(recipe, tell=stages.append)
    check_alike(first.runner.decoder, second.runner.decoder)
    assert any(stage.startswith(TAKING) for stage in stages)
    (folder / "decoder-0-of-1-0-of-1.safetensors").touch()
    os.utime(path / "config.json")  # whoever changes the checkpoint changes this time
    with monkeypatch.context() as patched:
        patched.setattr(weights, "fill", unreadable)
        with pytest.raises(AssertionError, match="is read again"):
            build(recipe)


def cut(kept: Path) -> None:
    os.truncate(kept, kept.stat().st_size - 1)


def of_another_form(kept: Path) -> None:
    text = kept.read_bytes()
    kept.write_bytes(text.replace(b'"F32"', b'"I32"', 1))


def by_others(kept: Path) -> None:
    kept.chmod(0o666)


def linked(kept: Path) -> None:
    kept.rename(kept.with_name("elsewhere"))
    kept.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [cut, of_another_form, by_others, linked])
def test_a_file_that_is_not_right_is_replaced(
    spoil: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(next(each for each in VARIANTS if each.name == "llama_biased"), tmp_path)[1]
    engine = built(path, "cpu", {})
    kept = KeptWeights(tmp_path / "rank.safetensors", origin_of(path))
    weights.load(fresh(engine), path, kept=kept)
    spoil(kept.file)
    left = kept.file.with_name(f".{kept.file.name}.1")
    left.touch()  # a rank that was killed while it wrote leaves this
    with caplog.at_level(logging.INFO, "models.checkpoint.kept_weights"):
        weights.load(read := fresh(engine), path, kept=kept)
    check_alike(engine.runner.decoder, read)
    assert str(kept.file) in caplog.text
    assert kept.file.lstat().st_mode == stat.S_IFREG | 0o600
    assert not left.exists()
    assert kept.take(fresh(engine)), "it is right again"


class Unheard(Rank):
    """A rank that no other answers."""

    def all_reduce_max(self, x: Tensor) -> Tensor:
        raise AssertionError("it waits for another rank while it loads")


def test_a_rank_without_its_file_reads_while_another_takes_its_own(tmp_path: Path) -> None:
    path = checkpoint("llama_biased", tmp_path)
    config = replace(decoder_config(read(path)), quantization=Quantization(is_stored=False))
    kept = [KeptWeights(tmp_path / "kept" / f"{rank}.safetensors", origin_of(path)) for rank in range(2)]

    def loaded() -> list[Decoder]:
        decoders = [spoiled(empty(config, Unheard(rank, 2))) for rank in range(2)]
        for decoder, own in zip(decoders, kept):
            weights.load(decoder, path, kept=own)
        return decoders

    first = loaded()
    kept[1].file.unlink()
    for old, new in zip(first, loaded()):
        check_alike(old, new)
    assert kept[1].file.is_file(), "it has its own at the next start"


def test_rows_in_another_order_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NPU may be found to join latents between two starts; names, types and shapes stay as they were."""
    path = ON_CPU["latents"][0](tmp_path / "model")
    engine = built(path, "cpu", {})
    asked = [f"model.path={path}", f"model.kept_in={tmp_path / 'kept'}", "device.kind=cuda"]
    recipe = load(ROOT / "recipes/any/cpu.yaml", asked)
    apart = fresh(engine)
    monkeypatch.setattr(LatentAttention, "joins", lambda *_: True)
    joined = fresh(engine)
    facts = recipe, engine.runner.config, Share(), "decoder"
    keeps, takes = (kept_weights(*facts, each) for each in (apart, joined))
    assert keeps is not None
    assert takes is not None
    assert keeps.file == takes.file
    keeps.keep(apart)
    assert keeps.take(apart)
    assert not takes.take(joined)


def test_a_full_folder_keeps_nothing_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(next(each for each in VARIANTS if each.name == "llama_biased"), tmp_path)[1]
    engine = built(path, "cpu", {})
    kept = KeptWeights(tmp_path / "kept" / "rank.safetensors", origin_of(path))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    weights.load(read := fresh(engine), path, kept=kept)
    check_alike(engine.runner.decoder, read)
    assert "no space left on device; free some space" in caplog.text
    assert not [*kept.file.parent.iterdir()]


@pytest.mark.parametrize(
    ("settings", "keys"),
    [([], ("model.kept_in", "device.kind")), (["model.weights=random"], ("model.kept_in", "model.weights"))],
)
def test_a_recipe_that_has_nothing_to_keep_is_refused(
    settings: list[str], keys: tuple[str, str], tmp_path: Path
) -> None:
    device = [] if not settings else ["device.kind=npu", "device.virtual=true", "device.threads=null"]
    with pytest.raises(RecipeError) as refused:
        load(
            ROOT / "recipes/any/cpu.yaml",
            ["model.kept_in=kept", "model.path=none", *device, *settings],
        )
    assert refused.value.keys == keys


def test_what_follows_from_a_checkpoint_is_computed_once(tmp_path: Path) -> None:
    file = tmp_path / "kept" / "digest"
    assert [remembered(file, "a", lambda: "one"), remembered(file, "a", lambda: "two")] == ["one", "one"]
    file.chmod(0o622)
    assert [remembered(file, "a", lambda: "two"), remembered(file, "b", lambda: "three")] == ["two", "three"]
