"""Define what each rank of an engine does when the leader asks all of them.

The questions and their answers are those of `continuous_batching/recording/agreement.py`. An engine of one
rank asks itself, so that there is one way for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from continuous_batching.recording.agreement import PreparedWork
from models.checkpoint.adapter_files import look_at
from models.step.adapters import Adapters, Parts

ADAPTER = "adapter"  # the topic of adapters that are loaded while the engine serves
ADAPTER_WAIT_S = 300.0  # longest time for a rank to read its part of an adapter


class AdapterAsked(msgspec.Struct, array_like=True, frozen=True):
    """The body of a question: the place of an adapter, the folder of its files, and their digest."""

    number: int
    folder: str
    digest: str


@dataclass(frozen=True, slots=True)
class _ReadAdapter:
    """An adapter that a rank has read and is still to put into its place."""

    asked: AdapterAsked
    parts: Parts


def adapter_work(adapters: Adapters) -> PreparedWork[_ReadAdapter]:
    """Return the work on an adapter: each rank reads its own slices, and puts them into their place.

    The folder must be there on each machine, with the same files.
    """

    def read(_: str, body: bytes) -> _ReadAdapter:
        asked = msgspec.msgpack.decode(body, type=AdapterAsked)
        files = look_at(Path(asked.folder), adapters.rooms.rank)
        if files.digest != asked.digest:
            raise ValueError(f"{asked.folder} has changed while it was loaded; load it again")
        return _ReadAdapter(asked, adapters.read(files))

    def put(read: _ReadAdapter) -> None:
        adapters.put(read.asked.number, read.parts)
        adapters.digests[read.asked.number] = read.asked.digest

    return PreparedWork(read, put)
