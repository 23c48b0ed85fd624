"""Run a command, and end it with one line and status 2 if its user made a mistake."""

from __future__ import annotations

import codecs
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from borders.files import in_one_line
from borders.version import VERSION

# Characters of an error, shortened in the middle, since both of its ends say what is wrong.
_LONGEST_LINE = 2000
UNUSABLE = 2  # the status for a recipe, file or option that cannot be used


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command on its arguments and exit; an unusable recipe, file or option is one line on stderr."""
    # recipes/__init__.py has set both for the time of the imports.
    gc.freeze()
    gc.enable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        # What was computed is shown also where the terminal lacks a character, as standard error does it.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if sys.argv[1:] == ["--version"]:
            print(VERSION)
            status = 0
        else:
            status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `... | head`
        _discard_output()
        status = 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        status = refused(error)
    except MemoryError:
        status = refused(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def refused(error: ValueError | OSError) -> int:
    """Print the one line of an error, and return the exit status for it."""
    _discard_output()  # the rest of the buffer may be what cannot be written
    try:
        print(_printable(in_one_line(error)), file=sys.stderr, flush=True)
    except OSError:
        _replace(sys.stderr.fileno())  # nobody reads it, and the status alone has to tell
    return UNUSABLE


def _printable(text: str) -> str:
    """Return a line without control characters, and shortened, whatever its arguments contained."""
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return (
        line
        if len(line) <= _LONGEST_LINE
        else f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    )


def open_missing_streams() -> None:
    """Open the null device for standard streams that are closed, as by `>&-`.

    Otherwise the next file or socket that is opened would get the descriptor of one of them, and receive what
    is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            _replace(number)
        if getattr(sys, name) is None:  # the stream was closed when Python started
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end


def _discard_output() -> None:
    """Discard what was not written to standard output; otherwise it would be tried again at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _replace(sys.stdout.fileno())


def _replace(number: int) -> None:
    """Let a descriptor refer to the null device."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
