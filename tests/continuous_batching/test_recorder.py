"""A recording holds all that a replay needs; a decision that changes is found; damage is named."""

from __future__ import annotations

import copy
import dataclasses
import errno
import io
import logging
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from borders.framing import DamagedRecording, framed
from continuous_batching.batch import Batch, StateCut
from continuous_batching.engine import Engine
from continuous_batching.policies.batching import StallFree, Static
from continuous_batching.recording.format import (
    BEGIN,
    FORMAT,
    Added,
    Chain,
    Closed,
    Committed,
    Entry,
    Header,
    Looked,
    SampleEntry,
    Scheduled,
    read_entries,
)
from continuous_batching.recording.recorder import Recorder, RecordingFile
from continuous_batching.recording.replay import Divergence, Replayed, replay
from continuous_batching.request import Request, SamplingParams
from continuous_batching.scheduling.scheduler import Scheduler
from continuous_batching.slots import SlotPool
from kv_cache.pages import PageCopy, PagePool
from tests.continuous_batching.checksum import VOCAB_SIZE, ChecksumRunner
from tests.continuous_batching.test_schedules import (
    DEPTHS,
    Arrival,
    Made,
    Resizes,
    over_schedules,
    preempting_all,
    schedulers,
    serve,
    serve_to_nothing,
)

FACTS = {"made by": "a test"}


class Memory:
    """A sink that keeps a recording."""

    def __init__(self) -> None:
        self._file = io.BytesIO()

    def write(self, record: bytes) -> None:
        self._file.write(record)

    def close(self, last: bytes) -> None:
        self._file.write(last)

    def entries(self) -> list[Entry]:
        self._file.seek(0)
        return list(read_entries(self._file))


def test_a_recording_from_before_a_parameter_was_there_is_read() -> None:
    added = Added([SampleEntry("a", SamplingParams(seed=3))], b"", "", "", 0, 0.0)
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(added))
    del fields[1][0][1]["max_draft_tokens"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Added) == added


@pytest.mark.parametrize(
    "other",
    [
        "page",
        "window",
        "state",
        "cut",
        "group",
        "keys",
        "way",
        "sources",
        "draft_stops",
        "targets",
        "nothing",
    ],
)
def test_batches_that_differ_in_anything_that_was_decided_have_other_digests(other: str) -> None:
    digests = []
    for changes in ("nothing", other):
        slots = SlotPool(2, 32, 4)
        window, states = np.zeros((2, 8), dtype=np.int32), np.array([3, 4], dtype=np.int32)
        slots.window_tables, slots.state_pages = (window,), states
        at = np.array([0, 1])
        asked = PageCopy(at, at, "to_tier", (b"a", b"b"))
        batch = Batch(at, 0 * at, at + 5, at, at, at + 5, (asked,), draft_starts=at, draft_stops=at + 1)
        batch = dataclasses.replace(batch, cuts=(StateCut(0, 2, 7),))
        match changes:
            case "page":
                slots.page_table[1, 1] = 9  # on which the second span ends
            case "window":
                window[1, 1] = 9
            case "state":
                states[1] = 9
            case "cut":
                batch = dataclasses.replace(batch, cuts=(StateCut(0, 2, 8),))
            case "group" | "keys" | "way" | "sources":
                values = {"group": 1, "keys": (b"a", b"c"), "way": "to_host", "sources": at + 1}
                asked = dataclasses.replace(asked, **{changes: values[changes]})
                batch = dataclasses.replace(batch, copies=(asked,))
            case "draft_stops" | "targets":
                batch = dataclasses.replace(batch, **{changes: getattr(batch, changes) + 1})
        digests.append(Chain().add(batch, slots))
    assert (digests[0] == digests[1]) == (other == "nothing")


def scheduler(
    num_slots: int = 3, num_pages: int = 9, budget: int = 6, static: bool = False, depth: int = 1
) -> Scheduler:
    """A small one, which must preempt, swap and compact."""
    return Scheduler(
        SlotPool(num_slots, 32, 4),
        PagePool(num_pages),
        Static(2, 3.0) if static else StallFree(),
        max_batch_tokens=budget,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(5,),
        host_pool=PagePool(5),
        depth=depth,
        compact_every_steps=3,
        compact_pages_per_step=1,
        seed=3,
    )


def record(
    path: Path, made: Scheduler, seed: int, num_requests: int, beam_width: int = 0, overlap: bool = False
) -> list[Request]:
    """Serve random requests with aborts and resizes in between, recording all of it;
    what was computed is forgotten now and then."""
    random = np.random.default_rng(seed)
    now = 0.0
    engine = Engine(
        made, ChecksumRunner(made.slots, made.pool, PagePool(5)), clock=lambda: now, overlap=overlap
    )
    engine.observer = Recorder(FACTS, RecordingFile(path))
    finished: list[Request] = []
    to_come = num_requests
    while to_come or engine.has_work:
        if to_come and random.random() < 0.4:
            to_come -= 1
            family = []
            for sample in range(1 if beam_width else int(random.choice([1, 1, 3]))):
                params = SamplingParams(
                    max_tokens=int(random.integers(1, 12)), temperature=0.0, beam_width=beam_width
                )
                family.append(
                    Request(f"{to_come}.{sample}", np.arange(int(now) % 2, 9), params, arrival_s=now)
                )
            family[0].followers = family[1:]
            engine.add(family[0])
        if random.random() < 0.05 and len(made.slots.busy):
            engine.abort(made.slots.requests[int(random.choice(made.slots.busy))].id)
        if random.random() < 0.05:
            engine.resize(9 + int(random.integers(0, 4)), "running")
        if random.random() < 0.05:
            engine.forget_prefixes()
        step = engine.step()
        finished += step.finished if step else []
        now += float(random.random())
    engine.observer.close()
    return finished


def entries(path: Path) -> list[Entry]:
    with open(path, "rb") as file:
        return list(read_entries(file))


def write(path: Path, changed: list[Entry]) -> None:
    """A recording of these entries."""
    check, data = BEGIN, b""
    for entry in [*changed, Closed()]:
        record, check = framed(msgspec.msgpack.encode(entry), check)
        data += record
    path.write_bytes(data)


@over_schedules(15, 3000, schedulers(DEPTHS), overlap=st.booleans())
def test_a_replay_decides_the_same(made: Made, plan: list[Arrival], resizes: Resizes, overlap: bool) -> None:
    twin, _ = copy.deepcopy(made)
    recording = Memory()
    recorder = Recorder(FACTS, recording)
    finished = serve(*made, plan, resizes, overlap=overlap, observer=recorder)
    recorder.close()
    recorded = recording.entries()
    steps = [event for event in replay(recorded, twin) if isinstance(event, Replayed)]
    assert len(steps) == sum(isinstance(entry, Scheduled) for entry in recorded)
    again = [each for step in steps for each in step.finished]
    aborted = {name for name, each in finished.items() if each.finish_reason == "abort"}
    assert {each.id for each in again} == finished.keys() - aborted
    for each in again:
        assert each.finish_reason == finished[each.id].finish_reason
        assert each.answer.tolist() == finished[each.id].answer.tolist()
    assert twin.counters == made[0].counters


def test_a_look_ahead_that_finds_nothing_is_replayed(tmp_path: Path) -> None:
    """It gives a newcomer its row, which waits for a page that is in flight."""
    made = scheduler(num_pages=40)
    now = 0.0
    engine = Engine(made, ChecksumRunner(made.slots, made.pool, PagePool(5)), clock=lambda: now, overlap=True)
    engine.observer = Recorder(FACTS, RecordingFile(tmp_path / "file"))
    for name, first, max_tokens in (("q", 60, 3), ("a", 0, 1), ("b", 0, 3)):
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.add(Request(name, np.arange(first, first + 9), params))
        engine.step()
    while engine.has_work:
        engine.step()
    engine.observer.close()
    recorded = entries(tmp_path / "file")
    assert any(isinstance(entry, Looked) for entry in recorded)
    steps = [each for each in replay(recorded, scheduler(num_pages=40)) if isinstance(each, Replayed)]
    assert sum(len(step.finished) for step in steps) == 3


def test_a_step_that_only_preempts_is_replayed() -> None:
    recording, scheduler = Memory(), preempting_all()
    recorder = Recorder(FACTS, recording)
    serve_to_nothing(scheduler, recorder)
    recorder.close()
    entries, replayed = recording.entries(), preempting_all()
    assert any(isinstance(each, Looked) for each in entries)
    steps = [each for each in replay(entries, replayed) if isinstance(each, Replayed)]
    assert len(steps) == sum(isinstance(each, Committed) for each in entries)
    assert replayed.counters == scheduler.counters


def test_a_replay_searches_the_same(tmp_path: Path) -> None:
    finished = record(tmp_path / "file", scheduler(), seed=5, num_requests=12, beam_width=2)
    steps = [each for each in replay(entries(tmp_path / "file"), scheduler()) if isinstance(each, Replayed)]
    again = [each for step in steps for each in step.finished]
    assert [each.id for each in again] == [each.id for each in finished]
    for one, other in zip(again, finished):
        assert [each.score for each in one.hypotheses] == [each.score for each in other.hypotheses]
        assert one.answer.tolist() == other.answer.tolist()
    assert any(each.hypotheses for each in again)


def test_another_scheduler_is_found_out(tmp_path: Path) -> None:
    record(tmp_path / "file", scheduler(budget=6), seed=1, num_requests=6)
    with pytest.raises(Divergence, match=r"step \d+: (slots|stops|starts) were \[.*\], and are \[.*\] now"):
        list(replay(entries(tmp_path / "file"), scheduler(budget=4)))


def test_why_the_head_of_the_queue_waits(tmp_path: Path) -> None:
    def reasons(made: Scheduler, prompts: list[int], max_tokens: int = 4) -> set[str | None]:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        engine = Engine(made, ChecksumRunner(made.slots, made.pool, PagePool(5)), clock=lambda: 0.0)
        engine.observer = Recorder(FACTS, RecordingFile(path))
        for number, length in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            engine.add(Request(str(number), np.arange(number, number + length), params))
        while engine.has_work:
            if engine.step() is None:
                break
        engine.observer.close()
        return {entry.held_back for entry in entries(path) if isinstance(entry, Scheduled)}

    assert reasons(scheduler(num_slots=1, budget=16), [3, 3]) == {"slots", None}
    assert reasons(scheduler(num_slots=3, budget=4), [9, 3]) == {"tokens", None}
    assert reasons(scheduler(num_slots=3, budget=64), [20, 20, 3]) == {"pages", None}
    assert reasons(scheduler(num_slots=3, budget=64, static=True), [3, 3, 3], 1) == {"policy"}


def test_an_entry_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for wrong, reason in (
        ([Committed(0.0, b"")], "record 1 at byte 0 is out of place: a recording starts with its header"),
        ([Header(FORMAT, {})] * 2, r"record 2 at byte \d+ is out of place"),
        ([Header(99, {})], "this is format 99"),
        (
            [Header(FORMAT, {}), Closed(), Committed(0.0, b"")],
            "record 3 .* stands behind the one that closes",
        ),
        ([Header(FORMAT, {}), ["Q"]], r"record 2 at byte \d+ is no entry of a recording"),
    ):
        write(path, wrong)
        with pytest.raises(DamagedRecording, match=reason):
            entries(path)


def test_a_commit_without_a_batch_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, [Header(FORMAT, {}), Committed(0.0, b"")])
    with pytest.raises(Divergence, match="a commit without a batch"):
        list(replay(entries(path), scheduler()))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written, real = 0, os.write

    def full(descriptor: int, data: bytes) -> int:
        nonlocal written
        if written > 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        written += len(data)
        return real(descriptor, data[:100])

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.ERROR):
        finished = record(tmp_path / "full", scheduler(), seed=4, num_requests=6)
    monkeypatch.undo()
    unhindered = record(tmp_path / "unhindered", scheduler(), seed=4, num_requests=6)
    assert [each.answer.tolist() for each in finished] == [each.answer.tolist() for each in unhindered]
    (line,) = caplog.messages
    assert line.startswith(f"recording ended: {tmp_path / 'full'}: no space left on device; free some space")
    assert line.endswith("serving goes on without it")


def test_a_recording_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "file"
    Recorder(FACTS, RecordingFile(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        Recorder(FACTS, RecordingFile(path))
