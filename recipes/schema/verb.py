"""How does a command end when its user made a mistake? With one line, and status 2."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from continuous_batching.system_error import in_one_line

_LONGEST_LINE = 2000  # characters of an error: what is wrong stands at an end, a value of any length between
UNUSABLE = 2  # the status of a recipe, file or option that cannot be used


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command on its arguments and exit; an unusable recipe, file or option is one line on stderr."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as it was while modules were imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_missing_streams()
    try:
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
    """Print the one line of an error; the status that says so."""
    _discard_output()  # what is left in the buffer may be what cannot be written
    try:
        print(_printable(in_one_line(error)), file=sys.stderr, flush=True)
    except OSError:
        _replace(sys.stderr.fileno())  # nobody reads it: the status alone says so
    return UNUSABLE


def _printable(text: str) -> str:
    """One line whatever its arguments held: no control character reaches the terminal, no value fills it."""
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return (
        line
        if len(line) <= _LONGEST_LINE
        else f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    )


def open_missing_streams() -> None:
    """Give the null device to standard streams that are closed, as by `>&-`.

    Else the next file or socket that is opened would take the place of one, and what is printed would go
    there.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            _replace(number)
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open to the end


def _discard_output() -> None:
    """What was not written to standard output is lost; else it would be tried again at the end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _replace(sys.stdout.fileno())


def _replace(number: int) -> None:
    """Let a descriptor lead to the null device."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
