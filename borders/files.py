"""Read and write files that a user named, and describe what the operating system refuses.

A checkpoint's files must be plain ones (`check_regular`). A file named on a command line may be a pipe too,
as in `--trace <(zcat trace.gz)`: it is read as a whole (`read_bounded`) or line by line (`lines_of`), never
beyond a bound, and the wait for its writer is bounded. Folders, sockets and devices are refused. A file is
written as a whole or not at all (`whole_file`). An error of the operating system becomes one line: the
object, the cause and the fix.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import select
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_FIX_OF = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name a new file",
    errno.EACCES: "ask for the right to use it, or name another",
    errno.EPERM: "ask for the right to use it, or name another",
    errno.EROFS: "name a path that can be written to",
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "raise the limit (ulimit -f), or write elsewhere",
    errno.ENXIO: "it is a socket, or a device that is not there: name a file",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "the link leads to itself: name another",
    errno.EMFILE: "let this process open more (ulimit -n)",
    errno.ENFILE: "the whole system has no more: close some programs",
    errno.EAGAIN: "let this user start more processes (ulimit -u)",
    errno.ENOMEM: "free some memory",
    errno.EIO: "see the system's log for the disk's state",
}


def in_one_line(error: ValueError | OSError | RuntimeError) -> str:
    """Return the text of an error; for one of the operating system, its object, its cause and its fix."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    what = error.filename if error.filename is not None else "reading or writing"
    what = what if what != "" else "an empty path"
    # The number of a failed host name look-up, for example, is none of errno's
    wrong = os.strerror(error.errno) if error.errno in errno.errorcode else str(error.strerror)
    said = f"{os.fsdecode(what) if isinstance(what, bytes) else what}: {wrong.lower()}"
    fix = _FIX_OF.get(error.errno)
    return f"{said}; {fix}" if fix else said


def first_line(error: Exception) -> str:
    """Return what a library's error says, without the lines on where it happened."""
    return str(error).strip().partition("\n")[0]


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Attach a file's name to a full disk or an exceeded limit while the file is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)
        raise


MOST_JSON_BYTES = 2**24  # a config.json, an index or a template: the largest published ones have 1 MiB
MOST_TOKENIZER_BYTES = 2**28  # the largest published ones have 35 MiB
MOST_LINE_BYTES = 2**26  # one request: a prompt of a million token ids has 8 MiB
MOST_INPUT_BYTES = 2**36  # all requests of a file, or a recording, which are not held in memory at once
PIPE_WAIT_S = 60.0  # how long the writer of a pipe may take to begin or to go on


def is_there(path: Path) -> bool:
    """Whether a folder has an entry of this name, even one that cannot be read.

    A dangling link counts, as it is left by a cleared download cache: such a file is damaged, not absent.
    """
    return os.path.lexists(path)


def check_regular(path: Path, most_bytes: int = MOST_JSON_BYTES, fix: str = "download it again") -> None:
    """Raise ValueError unless `path` is a plain file of at most so many bytes; OSError if it cannot be found.

    A pipe would have to be waited for, and a device may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no plain file but a folder, pipe or device; {fix}")
    if found.st_size > most_bytes:
        raise _too_long(path, most_bytes)


def json_object(
    path: Path, most_bytes: int = MOST_JSON_BYTES, fix: str = "download it again"
) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint; raises ValueError for anything else."""
    check_regular(path, most_bytes, fix)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {fix}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; {fix}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; {fix}")
    return found


def optional_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, as `json_object` does, or an empty one without the file."""
    return json_object(path) if is_there(path) else {}


def check_rereadable(path: Path) -> None:
    """Raise ValueError for a file that can be read only once, if a command reads it repeatedly."""
    check_regular(path, MOST_INPUT_BYTES, "this command reads it more than once: write it to a file")


def opened(path: str | Path, most_bytes: int = MOST_INPUT_BYTES) -> io.BufferedReader:
    """Open a plain file, a pipe or a terminal, to be read in parts.

    Raises OSError or ValueError for anything else. Reading raises ValueError for more than `most_bytes`, and
    if nobody writes to a pipe for PIPE_WAIT_S.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe may have no writer yet
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        is_null = stat.S_ISCHR(mode) and os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or is_null or os.isatty(descriptor)):
            raise ValueError(f"{path} is a device, which has no end; name a file")
        return io.BufferedReader(_Bounded(descriptor, path, most_bytes), 2**16)
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a file, which may be a pipe; raises ValueError for more than `most_bytes`."""
    with opened(path, most_bytes) as file:
        parts = iter(lambda: file.read(2**20), b"")
        return b"".join(parts)


def lines_of(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file, which may be a pipe; raises ValueError for a line above MOST_LINE_BYTES."""
    with opened(path) as file:
        yield from bounded_lines(file, str(path))


def bounded_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield the lines of an open file with the same bound; `name` is what an error calls it."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(
                f"{name}: line {number} has more than {MOST_LINE_BYTES:,} bytes, which no request has;"
                " name the right file"
            )
        yield line


class _Bounded(io.FileIO):
    """A descriptor that returns at most `most_bytes`, and whose reads wait for a bounded time."""

    def __init__(self, descriptor: int, path: str | Path, most_bytes: int) -> None:
        super().__init__(descriptor, "rb")
        self._path = path
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._waits = not stat.S_ISREG(os.fstat(descriptor).st_mode)

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = None
        while count is None:  # another reader of the pipe may have taken the bytes
            if self._waits and not self._poll.poll(1e3 * PIPE_WAIT_S):
                raise ValueError(
                    f"{self._path}: nothing came for {PIPE_WAIT_S:g} s; write to this pipe, or name a file"
                )
            count = super().readinto(buffer)
        self._num_bytes += count
        if self._num_bytes > self._most_bytes:
            raise _too_long(self._path, self._most_bytes)
        return count


def _too_long(path: str | Path, most_bytes: int) -> ValueError:
    return ValueError(
        f"{path} has more than {most_bytes:,} bytes, which no file of its kind has; name the right one"
    )


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """Yield a text file that replaces `path` once it is written; after an error `path` is unchanged.

    Its `buffer` takes bytes. A pipe or a device is written to directly. The error of a full disk, or of a
    file that is too large, names `path`.
    """
    if Path(path).exists() and not Path(path).is_file():
        # By the name that was given: what /dev/stdout resolves to, `pipe:[1]`, can't be opened.
        with naming(path), Path(path).open("w", encoding="utf-8") as output:
            yield output
        return
    target = Path(path).resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as output:
            yield output
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
