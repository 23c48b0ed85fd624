"""Whatever happens to the file of a recording is found, with its place, before anything is believed."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest

from borders.framing import HEAD, CutShort, DamagedRecording
from continuous_batching.recording.format import Entry, read_entries
from tests.continuous_batching.test_recorder import record, scheduler
from tests.thorough import cases

EVERY = cases(7, 1)  # one of so many bits is flipped


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recording") / "file"
    record(path, scheduler(), seed=2, num_requests=3)
    return path.read_bytes()


def records(data: bytes) -> list[bytes]:
    """The records of a whole recording, each with its head."""
    found, at = [], 0
    while at < len(data):
        size = HEAD.size + int.from_bytes(data[at : at + 4], "little")
        found.append(data[at : at + size])
        at += size
    return found


def read(data: bytes) -> tuple[list[Entry], DamagedRecording | None]:
    """The entries up to the damage, and the damage."""
    found: list[Entry] = []
    try:
        for entry in read_entries(io.BytesIO(data)):
            found.append(entry)  # noqa: PERF402 - those before the damage are wanted, too
    except DamagedRecording as damage:
        return found, damage
    return found, None


def place(damage: DamagedRecording | None) -> int:
    """The byte that the damage is said to be at."""
    found = re.match(r"record \d+ at byte (\d+) ", str(damage))
    assert found is not None, damage
    return int(found[1])


def test_every_flipped_bit_is_found_where_it_is(whole: bytes) -> None:
    entries, damage = read(whole)
    assert damage is None
    starts = np.cumsum([0, *map(len, records(whole))])
    for bit in range(0, 8 * len(whole), EVERY):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        found, damage = read(bytes(data))
        assert damage is not None, bit
        assert not isinstance(damage, CutShort), f"bit {bit}: {damage}"
        number = int(np.searchsorted(starts, bit // 8, side="right")) - 1
        assert place(damage) == starts[number]
        assert found == entries[:number]


def test_every_cut_is_told_from_damage(whole: bytes) -> None:
    entries, _ = read(whole)
    starts = np.cumsum([0, *map(len, records(whole))])
    for size in range(1, len(whole)):
        found, damage = read(whole[:size])
        assert isinstance(damage, CutShort), f"{size}: {damage}"
        assert found == entries[: int(np.searchsorted(starts, size, side="right")) - 1]
        if size in starts:
            assert str(damage).startswith("it was never closed")
        else:
            assert place(damage) in starts


def test_records_that_were_dropped_moved_or_repeated_are_found(whole: bytes) -> None:
    parts = records(whole)
    for number in range(len(parts) - 1):
        here, after = parts[number], parts[number + 1]
        dropped = [*parts[:number], *parts[number + 1 :]]
        repeated = [*parts[: number + 1], *parts[number:]]
        swapped = [*parts[:number], after, here, *parts[number + 2 :]]
        for changed in (dropped, repeated, swapped):
            found, damage = read(b"".join(changed))
            assert damage is not None
            assert not isinstance(damage, CutShort)
            assert len(found) <= number + 1
            assert place(damage) >= sum(map(len, parts[:number]))


def test_of_two_recordings_in_one_file_the_second_is_not_believed(whole: bytes, tmp_path: Path) -> None:
    record(tmp_path / "other", scheduler(), seed=3, num_requests=3)
    other = (tmp_path / "other").read_bytes()
    for second in (whole, other):
        found, damage = read(whole + second)
        assert found == read(whole)[0]
        assert place(damage) == len(whole)
    mixed = b"".join([*records(whole)[:9], *records(other)[9:]])
    assert place(read(mixed)[1]) == sum(map(len, records(whole)[:9]))


def test_what_a_crash_leaves_is_damage(whole: bytes) -> None:
    half = records(whole)[: len(records(whole)) // 2]
    found, damage = read(b"".join(half) + bytes(4096))  # a file system may leave zeros
    assert found == read(whole)[0][: len(half)]
    assert place(damage) == sum(map(len, half))
