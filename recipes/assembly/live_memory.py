"""Replace the weights of a built engine by those of another checkpoint, and give its pages' memory back.

A checkpoint is a folder, or a segment of POSIX shared memory that holds one file in the safetensors form: the
length of a manifest, the manifest of names, types, shapes and offsets, and the tensors. It is loaded and
packed beside the weights in use, by the code that loads an engine, so that whatever is wrong with it is found
while the old weights are whole. `put` then rewrites them in place and forgets what was computed with them.

A draft model and a head that have a checkpoint of their own keep it, and so do adapters.
"""

from __future__ import annotations

import copy
import hashlib
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from continuous_batching.engine import Engine
from kv_cache.tier.page_tier import PageTier
from models.checkpoint import rewriting, weights
from models.checkpoint.files import SINGLE
from models.config import DecoderConfig
from models.decoder import Decoder
from models.drafting import mtp as mtp_weights
from models.drafting.config import MtpConfig
from models.drafting.drafter import Drafter
from models.drafting.mtp import Mtp
from models.modelslim import Described
from models.step.runner import ModelRunner
from recipes.assembly.families import share_of
from recipes.assembly.memory_plan import GIB, MemoryPlan
from recipes.assembly.page_tier import attach_tier, tier_for
from recipes.schema.recipe import Recipe

SEGMENTS = Path("/dev/shm")  # Linux keeps POSIX shared memory there by its names
_PIECE_BYTES = 2**22
# Bytes of a segment: those of all weights in the widest type, and a manifest
_WIDEST_BYTES, _MANIFEST_BYTES = 8, 2**26


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that have been read, checked and packed, and what has to change with them."""

    pairs: list[rewriting.Pair]
    tier: PageTier | None  # the pages of these weights rest there; None: the engine has no tier

    def drop(self) -> None:
        """Give up weights that will not be put."""
        if self.tier is not None:
            self.tier.close()


class LiveMemory:
    """What one rank of an engine holds in memory while it serves; its recipe says how weights are held."""

    def __init__(
        self, recipe: Recipe, engine: Engine, runner: ModelRunner, memory: MemoryPlan, rank: int = 0
    ) -> None:
        # The engine holds this in its questions, and is to be freed with whoever holds it last
        self._engine: Engine = weakref.proxy(engine)
        self._recipe, self._runner, self._memory = recipe, runner, memory
        self._rank = rank
        self._own_head: Mtp | None = None  # a head that is read from the model's own checkpoint
        if isinstance(runner.drafter, Drafter) and isinstance(runner.drafter.decoder, Mtp):
            self._own_head = runner.drafter.decoder

    def read_folder(self, folder: Path) -> NewWeights:
        """Read the checkpoint of a folder; raises ValueError or OSError, and changes nothing."""
        self._check_same(share_of(self._of(folder), self._rank)[0])
        return self._read(folder)

    def read_segment(self, name: str, sha256: str) -> NewWeights:
        """Read the segment of this name, whose bytes have this digest.

        Raises ValueError or OSError, and changes nothing.
        """
        with self._staged(name, sha256) as folder:
            return self._read(folder)

    def put(self, new: NewWeights) -> None:
        """Rewrite the weights, and forget all pages that were computed with the old ones.

        No request may have begun and not ended.
        """
        self._engine.forget_prefixes()
        if new.tier is not None:
            attach_tier(self._engine, self._runner.cache, new.tier)
        rewriting.rewrite(new.pairs)

    @property
    def num_bytes(self) -> int:
        """The bytes that the pages take now."""
        return self._runner.cache.num_bytes

    def release_pages(self) -> None:
        """Forget all pages and give their memory back. No step may follow."""
        self._engine.forget_prefixes()
        self._runner.release_pages()

    def restore_pages(self) -> None:
        """Allocate the pages again; raises MemoryError if there is none.

        No step may follow before `capture_steps`.
        """
        self._runner.cache.restore()

    def give_back(self) -> None:
        """Give back the pages that were allocated again while another rank had no memory for its own."""
        self._runner.cache.release()

    def capture_steps(self) -> None:
        """Capture the steps again that used the pages before."""
        self._runner.capture_steps()

    def _read(self, folder: Path) -> NewWeights:
        self._check_room()
        old = self._runner.decoder
        try:
            beside = old.group, old.share, old.stages, old.recurrence
            decoder = Decoder(old.config, old.ops, _apart(old.attention), *beside)
            weights.load(decoder, folder)
            pairs = rewriting.pairs(old, decoder)
            head = self._own_head
            if head is not None:
                assert isinstance(head.config, MtpConfig), "the layer has its own configuration"
                own = Mtp(head.config, head.ops, _apart(head.attention), old.group, head.share)
                mtp_weights.load(own, folder)
                pairs += rewriting.pairs(head, own)
        except torch.OutOfMemoryError as error:
            raise ValueError(_no_room(rewriting.num_bytes(old))) from error
        tier = None
        if self._runner.cache.tier is not None:
            tier = tier_for(self._of(folder), self._runner, self._memory)
        return NewWeights(pairs, tier)

    def _of(self, folder: Path) -> Recipe:
        """Return the recipe with a checkpoint in place of its own weights."""
        model = replace(self._recipe.model, path=folder, config=None, weights="checkpoint")
        return replace(self._recipe, model=model)

    def _check_same(self, config: DecoderConfig) -> None:
        """Raise ValueError unless a checkpoint describes the model that is served."""
        old, form = self._runner.config, config.quantization
        if isinstance(form, Described) and isinstance(old.quantization, Described):  # it names its folder
            config = replace(config, quantization=replace(form, file=old.quantization.file))
        for field in fields(old):
            asked, own = (getattr(each, field.name) for each in (config, old))
            if asked != own:
                raise ValueError(
                    f"the checkpoint is of another model: {field.name} is {asked!r:.200}, and the model that"
                    f" is served has {own!r:.200}; start another server for it"
                )

    def _check_room(self) -> None:
        """Raise ValueError where a device has no memory for a second copy of the weights.

        A step that finds no memory would end the engine.
        """
        decoder, device = self._runner.decoder, self._runner.attention.device
        needed = rewriting.num_bytes(decoder)
        if self._own_head is not None:
            needed += rewriting.num_bytes(self._own_head)
        if device.type == "cpu":
            return
        memory = torch.get_device_module(device)
        # What torch's allocator holds unused, as of a copy that was dropped, is not free to the driver; but
        # steps, and those that are captured, need their part of it while the new weights wait
        unused = memory.memory_reserved(device) - memory.memory_allocated(device)
        spare = max(0, unused - self._memory.activation_bytes)
        if memory.mem_get_info(device)[0] + spare < needed:
            raise ValueError(_no_room(needed))

    @contextmanager
    def _staged(self, name: str, sha256: str) -> Iterator[Path]:
        """Copy a segment, and yield a folder that has the copy and what describes the weights in use.

        Nothing that its writer does later can change the copy.
        """
        most_bytes = _WIDEST_BYTES * self._runner.config.num_parameters + _MANIFEST_BYTES
        copied = _copied(name, sha256, most_bytes)
        try:
            with tempfile.TemporaryDirectory(prefix="weights-") as made:
                folder, own = Path(made), self._recipe.model.path
                for file in () if own is None else own.glob("*.json"):
                    if not file.name.endswith(".index.json"):  # it would name other files of tensors
                        (folder / file.name).symlink_to(file.resolve())
                (folder / SINGLE).symlink_to(f"/proc/self/fd/{copied}")
                yield folder
        finally:
            os.close(copied)


def _apart(attention: Any) -> Any:
    """Return the operators of attention for a decoder beside another, whose sinks they do not take."""
    other = copy.copy(attention)
    other.sinks = {}
    return other


def _no_room(num_bytes: int) -> str:
    return (
        f"the device has no room for {num_bytes / GIB:.2f} GiB of new weights beside those in use; give the"
        " pages back before the update (POST /sleep)"
    )


def _copied(name: str, sha256: str, most_bytes: int) -> int:
    """Copy a segment of shared memory into memory of this process, and return its descriptor.

    Raises ValueError for bytes of another digest, and for a segment of another user.
    """
    segment = os.open(SEGMENTS / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(segment)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"the segment {name} is not one that this server's user has made")
        if found.st_size > most_bytes:
            raise ValueError(
                f"the segment {name} has {found.st_size} bytes, and the model's weights at most {most_bytes}"
            )
        copied = os.memfd_create("weights", os.MFD_CLOEXEC)
        try:
            if (has := _copy(segment, copied, most_bytes)) != sha256:
                raise ValueError(
                    f"the segment {name} has the sha256 {has}, and {sha256} was announced: fill it before the"
                    " request, and change nothing until the answer"
                )
        except BaseException:
            os.close(copied)
            raise
    finally:
        os.close(segment)
    return copied


def _copy(segment: int, copied: int, most_bytes: int) -> str:
    """Copy a file to another, of at most so many bytes, and return the digest of what was copied."""
    digest, left = hashlib.sha256(), most_bytes
    while left > 0 and (piece := os.read(segment, min(_PIECE_BYTES, left))):
        digest.update(piece)
        left -= len(piece)
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(copied, rest) :]
    return digest.hexdigest()
