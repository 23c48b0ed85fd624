"""What does the file of a recording hold, up to its end or to where it is damaged?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO

from continuous_batching.recording.format import Added, DamagedRecording, Entry, Header, read_entries


class Recording:
    """The entries of a file up to its end, or to where it is damaged, which is reported on stderr."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._entries = read_entries(file)
        self._name = name
        try:
            header = next(self._entries)
        except (StopIteration, DamagedRecording) as error:
            raise ValueError(f"{name} is no recording: {str(error) or 'it is empty'}") from error
        assert isinstance(header, Header), "a recording starts with its header"
        self.facts = header.facts
        self.added: list[Added] = []

    def __iter__(self) -> Iterator[Entry]:
        try:
            for entry in self._entries:
                if isinstance(entry, Added):
                    self.added.append(entry)
                yield entry
        except DamagedRecording as damage:
            print(f"{self._name}: {damage}; what comes before it is replayed", file=sys.stderr)
