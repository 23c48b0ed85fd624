"""Show what an engine does while it starts: on a terminal a line that is rewritten, or one every few seconds.

Loading, quantising and compiling take minutes; whoever waits sees which of them is going on, how far it is
and since when. A start that ends soon shows nothing.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

EVERY_S = 5.0  # time between two lines
REDRAW_S = 0.5  # time between two states of a terminal's line
GIB = 2**30
LOADING, QUANTISING = "loading its weights", "loading and quantising its weights"
TAKING, KEEPING = "taking its kept weights", "keeping its weights"


class StartReport:
    """The current stage of a start; `tell` names the next one, and the empty text none.

    Inside the context, stages are shown on `stream`, or passed to `say` line by line.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = EVERY_S,
    ) -> None:
        self._stream, self._clock, self._every_s = stream, clock, every_s
        self._say = say or self._print
        self._is_terminal = say is None and stream is not None and stream.isatty()
        self._stage, self._doing, self._since_s = "", "", clock()
        self.stages_s: dict[str, float] = {}  # how long each stage that has ended took, of this start
        self._shown_s = clock()  # when a line was last shown
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="start-report", daemon=True)

    def __enter__(self) -> StartReport:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._is_terminal:
            self._write("\r\033[K")

    def tell(self, doing: str) -> None:
        """Take what is done from now on; what follows a colon is how far the same stage is."""
        stage = doing.partition(":")[0]
        if stage != self._stage:
            now_s = self._clock()
            if self._stage:
                self.stages_s[self._stage] = self.stages_s.get(self._stage, 0.0) + now_s - self._since_s
            self._stage, self._since_s = stage, now_s
        self._doing = doing
        if not self._is_terminal:
            self.show()

    @property
    def text(self) -> str:
        """The current stage and its time so far; empty where there is none."""
        return f"{self._doing}, {self._clock() - self._since_s:.0f} s" if self._doing else ""

    def show(self) -> None:
        """Show a line if the last one is old enough."""
        now_s, text = self._clock(), self.text
        if text and now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._say(text)

    def _show(self) -> None:
        while not self._is_over.wait(REDRAW_S):
            if not self._is_terminal:
                self.show()
            elif text := self.text:
                room = shutil.get_terminal_size().columns - len("start: ") - 1
                self._write(f"\r\033[Kstart: {text[:room]}")

    def _print(self, text: str) -> None:
        self._write(f"start: {text}\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


def paced(
    tell: Callable[[str], None], every_s: float = REDRAW_S, clock: Callable[[], float] = time.monotonic
) -> Callable[[str], None]:
    """Return a `tell` that passes on each stage, and how far one is at most every `every_s`."""
    last_stage, last_s = "", clock() - every_s

    def pass_on(doing: str) -> None:
        nonlocal last_stage, last_s
        stage, now_s = doing.partition(":")[0], clock()
        if stage != last_stage or now_s - last_s >= every_s:
            last_stage, last_s = stage, now_s
            tell(doing)

    return pass_on


@contextmanager
def repeated(say: Callable[[], None], every_s: float = REDRAW_S) -> Iterator[None]:
    """Call `say` at once and then now and then, from a thread of its own, while inside this context."""
    is_over = threading.Event()

    def run() -> None:
        say()
        while not is_over.wait(every_s):
            say()

    thread = threading.Thread(target=run, name="start-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class ReadingReport:
    """How much of a checkpoint's files has been read, in words for `tell`; `doing` names the stage."""

    def __init__(
        self,
        tell: Callable[[str], None],
        file_bytes: dict[str, int],
        num_tensors: dict[str, int],
        clock: Callable[[], float] = time.monotonic,
        doing: str = LOADING,
    ) -> None:
        self._doing = doing
        self._tell, self._clock, self._began_s = tell, clock, clock()
        self._bytes, self._tensors = file_bytes, num_tensors
        self._told_s = self._began_s - REDRAW_S
        self._read = dict.fromkeys(file_bytes, 0)

    def read(self, file: str) -> None:
        """Count a tensor of a file, and tell now and then."""
        self._read[file] += 1
        now_s = self._clock()
        if now_s - self._told_s >= REDRAW_S / 2:
            self._told_s = now_s
            self._tell(self.text)

    @property
    def text(self) -> str:
        """The shards that are read, their bytes and the rate."""
        total = sum(self._bytes.values())
        read = sum(
            size * self._read[file] / max(1, self._tensors[file]) for file, size in self._bytes.items()
        )
        whole = sum(self._read[file] >= count for file, count in self._tensors.items())
        rate = read / GIB / max(1e-3, self._clock() - self._began_s)
        return (
            f"{self._doing}: {read / max(1, total):.0%}, {whole} of {len(self._bytes)} shards,"
            f" {read / GIB:.2f} of {total / GIB:.2f} GiB, {rate:.2f} GiB/s"
        )
