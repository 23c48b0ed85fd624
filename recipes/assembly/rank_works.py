"""Define what each rank of an engine does when the leader asks all of them.

The questions and their answers are those of `continuous_batching/recording/agreement.py`. An engine of one
rank asks itself, so that there is one way for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from continuous_batching.recording.agreement import PreparedWork, Work
from models.checkpoint.adapter_files import look_at
from models.step.adapters import Adapters, Parts
from recipes.assembly.live_memory import LiveMemory, NewWeights

ADAPTER = "adapter"  # the topic of adapters that are loaded while the engine serves
ADAPTER_WAIT_S = 300.0  # longest time for a rank to read its part of an adapter

# The topics of other weights, of pages whose memory is given back and allocated again, and of whether a rank
# has carried out what was decided before
WEIGHTS, SLEEP, WAKE, CHANGED = "weights", "sleep", "wake", "changed"
EXPERTS = "experts"  # the topic of the experts that stages have counted (models/step/expert_counts.py)


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


class WeightsAsked(msgspec.Struct, array_like=True, frozen=True):
    """The body of a question: the folder of a checkpoint, or the segment of shared memory with its digest.

    Either must be there on each machine.
    """

    folder: str
    segment: str
    sha256: str


def live_works(live: LiveMemory) -> dict[str, Work]:
    """Return the works on weights and pages.

    New weights are read and checked beside those in use, of each rank its share, and rewritten once all ranks
    have theirs. Pages are allocated again by all ranks or stay given back; only then steps are captured,
    which takes all ranks at the same time. The question whether a rank has changed is answered after the
    change, because a rank reads an entry of the recording when it has carried out the one before.
    """

    def read(_: str, body: bytes) -> NewWeights:
        asked = msgspec.msgpack.decode(body, type=WeightsAsked)
        if asked.segment:
            return live.read_segment(asked.segment, asked.sha256)
        return live.read_folder(Path(asked.folder))

    def restore(*_: object) -> bool:
        live.restore_pages()
        return True

    return {
        WEIGHTS: PreparedWork(read, live.put, NewWeights.drop),
        SLEEP: PreparedWork(_nothing, lambda _: live.release_pages()),
        WAKE: PreparedWork(restore, lambda _: live.capture_steps(), lambda _: live.give_back()),
        CHANGED: PreparedWork(_nothing, lambda _: None),
    }


def _nothing(name: str, body: bytes) -> bool:
    """Have nothing to make ready."""
    return True
