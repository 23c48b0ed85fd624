"""Load adapters into a serving engine without a step that waits for a file."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from borders.files import in_one_line
from models.checkpoint.adapter_files import look_at
from models.step.adapters import Adapters, Parts
from serving.engine.messages import AdapterPut, PutAdapter


class AdapterLoads:
    """Reads adapters in a thread; only the copy to the device happens between two steps."""

    def __init__(self, adapters: Adapters | None) -> None:
        self._adapters = adapters
        self._reading: list[tuple[PutAdapter, Future[Parts]]] = []
        self._thread = ThreadPoolExecutor(1, "adapters")

    def __len__(self) -> int:
        return len(self._reading)

    def begin(self, message: PutAdapter) -> None:
        """Begin to read an adapter."""
        self._reading.append((message, self._thread.submit(self._read, message)))

    def take_done(self) -> list[AdapterPut]:
        """Put the adapters that were read into their places, and return the answers to their messages."""
        done = [each for each in self._reading if each[1].done()]
        self._reading = [each for each in self._reading if not each[1].done()]
        return [self._put(*each) for each in done]

    def _read(self, message: PutAdapter) -> Parts:
        if self._adapters is None:
            raise ValueError("the recipe has no room for adapters; set adapters.most")
        files = look_at(Path(message.folder), self._adapters.rooms.rank)
        if files.digest != message.digest:
            raise ValueError(f"{message.folder} has changed while it was loaded; load it again")
        return self._adapters.read(files)

    def _put(self, message: PutAdapter, read: Future[Parts]) -> AdapterPut:
        try:
            parts = read.result()
        except (ValueError, OSError) as error:
            return AdapterPut(message.number, message.digest, in_one_line(error))
        assert self._adapters is not None, "read for a place"
        self._adapters.put(message.number, parts)
        return AdapterPut(message.number, message.digest, "")
