"""Describe an error of the operating system in one line: the object, the cause and the fix."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

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


def in_one_line(error: ValueError | OSError) -> str:
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


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Attach a file's name to a full disk or an exceeded limit while the file is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            error.filename = str(path)
        raise
