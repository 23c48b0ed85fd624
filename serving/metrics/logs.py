"""Write the log in a thread, so that neither a full disk nor a hanging reader can stop the server."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_MOST_LINES = 10_000  # lines that may wait to be written; further lines are dropped and counted
_LAST_S = 1.0  # time to write the last lines


def _one_line(text: str) -> str:
    """Escape control characters, so that a client's text neither begins a line nor controls a terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class TextLines(logging.Formatter):
    """Formats a record as its message, followed by the traceback of a defect."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        line = _one_line(record.getMessage())
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, its `fields`, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        time_s = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said = {
            "time": f"{time_s}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False, default=str)


FORMATS = {"text": TextLines, "json": JsonLines}


class Lines(logging.Handler):
    """A handler that writes to a file descriptor in a thread of its own.

    Only that thread can hang.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.num_lost = 0
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_LINES)
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; this never waits and never raises."""
        try:
            self._waiting.put_nowait(f"{self.format(record)}\n".encode("utf-8", "replace"))
        except (queue.Full, TypeError, ValueError):  # no room, or a record that cannot be formatted
            self.num_lost += 1

    def close(self) -> None:
        """Wait a moment for the last lines to be written."""
        try:
            self._waiting.put(None, timeout=_LAST_S)
        except queue.Full:
            self.num_lost += self._waiting.qsize()
        else:
            self._writer.join(_LAST_S)
        super().close()

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError:
                self.num_lost += 1


def install(form: str, descriptor: int = 2) -> Lines:
    """Log everything to this descriptor from now on, in one of FORMATS."""
    lines = Lines(descriptor)
    lines.setFormatter(FORMATS[form]())
    root = logging.getLogger()
    root.handlers = [lines]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    return lines
