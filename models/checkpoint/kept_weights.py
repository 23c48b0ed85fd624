"""Keep a rank's weights in a folder of the host's memory, from which its next start takes them.

A lost rank ends its engine, and the next one needs the same weights again. From a folder in memory (tmpfs) a
rank copies its own share, where it would read, cut and quantise a whole checkpoint. The folder has parameters
as they are filled, not as they are packed: packed forms are a device's own, and are made in seconds.

A file is in the safetensors form. Its header tells every parameter's name, type and shape, and its origin: a
digest of all that the numbers follow from. A file with any other header or length is replaced, never used.
"""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn

from borders.files import in_one_line, naming
from borders.start_report import KEEPING, TAKING, ReadingReport

log = logging.getLogger(__name__)

_PIECE_BYTES = 2**26
_MOST_TEXT_BYTES = 2**20
_TYPES = {  # the names that safetensors has for them
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def origin_of(folder: Path, *facts: str) -> str:
    """Return the digest of a checkpoint's files, as the file system tells them apart, and of further facts.

    Whoever writes to a file changes its times, so that no file is read for this.
    """
    digest = sha256(repr(facts).encode())
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        found = file.stat()
        digest.update(f"\n{file.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """The file in which one rank keeps the parameters of one module.

    Whatever is wrong with the file costs a start from the checkpoint and a line in the log.
    """

    file: Path
    origin: str
    tell: Callable[[str], None] = lambda _: None

    def take(self, module: nn.Module) -> int:
        """Fill the parameters of a module that is not packed; return their bytes, 0 where none are kept."""
        header = self._header(module)
        try:
            with _opened(self.file) as kept:
                size = os.fstat(kept.fileno()).st_size
                if kept.read(len(header)) != header or size != len(header) + _num_bytes(module):
                    log.info("%s holds other weights than this start needs, and is replaced", self.file)
                    return 0
                for piece in self._pieces(module, TAKING):
                    given = torch.empty(piece.shape, dtype=torch.uint8)
                    if kept.readinto(given.numpy().data) != len(given):
                        raise OSError(f"{self.file} has become shorter while it was read")
                    piece.copy_(given)
        except FileNotFoundError:
            return 0
        except OSError as error:
            log.warning("kept weights are not used, and the checkpoint is read: %s", in_one_line(error))
            return 0
        return _num_bytes(module)

    def keep(self, module: nn.Module) -> None:
        """Write all parameters of a module that is filled and not packed, in place of what was kept."""
        try:
            self.file.unlink(missing_ok=True)  # there may be no room for both
            with _written(self.file) as kept:
                kept.write(self._header(module))
                kept.writelines(piece.cpu().numpy().data for piece in self._pieces(module, KEEPING))
        except OSError as error:
            log.warning("the next start reads the checkpoint again: %s", in_one_line(error))

    def _header(self, module: nn.Module) -> bytes:
        """Return the beginning of the file: the length of the manifest, and the manifest."""
        manifest: dict[str, object] = {"__metadata__": {"origin": self.origin}}
        at = 0
        for name, tensor in _tensors(module):
            end = at + tensor.nbytes
            kind = _TYPES[tensor.dtype]
            manifest[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, end]}
            at = end
        text = json.dumps(manifest).encode()
        return len(text).to_bytes(8, "little") + text

    def _pieces(self, module: nn.Module, doing: str) -> Iterator[Tensor]:
        """Yield the bytes of all parameters in the order of the file, in pieces that a copy takes at once."""
        total = {self.file.name: _num_bytes(module)}
        pieces = [
            piece
            for _, tensor in _tensors(module)
            for piece in tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES)
            if len(piece)
        ]
        progress = ReadingReport(self.tell, total, {self.file.name: len(pieces)}, doing=doing)
        for piece in pieces:
            yield piece
            progress.read(self.file.name)


def remembered(file: Path, origin: str, make: Callable[[], str]) -> str:
    """Return a text that follows from an origin, as a file holds it; make it if that has another."""
    try:
        with _opened(file) as kept:
            said, _, text = kept.read(_MOST_TEXT_BYTES).decode(errors="replace").partition("\n")
        if said == origin:
            return text
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("what was kept is not used: %s", in_one_line(error))
    text = make()
    try:
        with _written(file) as kept:
            kept.write(f"{origin}\n{text}".encode())
    except OSError as error:
        log.warning("the next start reads the checkpoint again: %s", in_one_line(error))
    return text


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader]:
    """Open a file; raises OSError for one that others than this process's user may have written."""
    with open(file, "rb", opener=_unlinked) as kept:
        found = os.fstat(kept.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{file} may have been written by others than this user")
        yield kept


@contextmanager
def _written(file: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `file` once it is whole, and that its user alone can read."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in file.parent.glob(f".{file.name}.*"):
        left.unlink(missing_ok=True)  # a process that was killed while it wrote has left it
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with naming(file), open(partial, "xb", opener=_own) as kept:
            yield kept
            kept.flush()
            os.fsync(kept.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        assert parameter.is_contiguous(), f"{name} is not packed"
        yield name, parameter.data


def _num_bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for _, tensor in _tensors(module))


def _own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
