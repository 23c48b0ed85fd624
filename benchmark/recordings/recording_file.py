"""Read the file of a recording up to its end, or to where it is damaged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO

from borders.framing import CutShort, DamagedRecording
from continuous_batching.recording.format import FORMAT, Added, Entry, Header, read_entries

DAMAGED, CUT_SHORT = 2, 3  # exit statuses of a command that has read such a recording


class Recording:
    """The entries of a file up to its end, or to where it is damaged, which is reported on stderr.

    Afterwards `status` is the exit status of the command that read it, 0 for a whole recording, and `damage`
    says where it is damaged; a file made from it must say so, too. With `needs_all`, damage raises ValueError
    instead.
    """

    def __init__(self, file: IO[bytes], name: str, *, needs_all: bool = False) -> None:
        self._entries = read_entries(file)
        self._name = name
        self._needs_all = needs_all
        self.status = 0
        self.damage: str | None = None
        try:
            header = next(self._entries)
        except (StopIteration, DamagedRecording) as error:
            raise ValueError(
                f"{name} is no recording of format {FORMAT}: {str(error) or 'it is empty'}"
            ) from error
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
            if self._needs_all:
                raise ValueError(f"{self._name}: {damage}; a recording that is whole is needed") from damage
            self.damage = str(damage)
            self.status = CUT_SHORT if isinstance(damage, CutShort) else DAMAGED
            print(f"{self._name}: {damage}; only what comes before is used", file=sys.stderr)
