"""A recording that `generate` made, as a person meets it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from scripts.generate import main as generate
from scripts.replay import main

RECIPE = "recipes/tiny/cpu.yaml"
SMALL = ["cache.num_pages=12", "scheduler.num_slots=4", "scheduler.max_batch_tokens=24", "device.threads=1"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    lines = [
        {"id": f"r{number}", "prompt": f"{number}+{number * 7}=" * 6, "max_tokens": 20, "ignore_eos": True}
        for number in range(8)
    ]
    lines.append({"id": "many", "prompt": "1+1=", "max_tokens": 4, "n": 2, "seed": 1})
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    generate([RECIPE, *SMALL, f"scheduler.record={folder / 'recording'}", *files])
    return folder / "recording"


def test_every_decision_comes_out_the_same(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(recording)]) == 0
    assert capsys.readouterr().out.startswith("9 requests, ")


def test_a_changed_answer_is_a_divergence(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = recording.read_bytes()
    at = whole.index(b'"num_slots"' if b'"num_slots"' in whole else b"num_slots") + len(b"num_slots")
    (tmp_path / "other").write_bytes(whole[:at] + bytes([2]) + whole[at + 1 :])  # two slots, not four
    assert main([str(tmp_path / "other")]) == 1
    assert "step " in capsys.readouterr().out


def test_explain_tells_of_waits_and_the_end(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(recording), "--explain", "r7"])
    story = capsys.readouterr().out
    first, *_, last = story.splitlines()
    assert "arrived: " in first
    assert "up to 20 more" in first
    assert "behind others in the queue" in story
    assert "into slot " in story
    assert "first token" in story
    assert "ended (length): 20 tokens" in last
    times = [float(line.split()[0]) for line in story.splitlines()]
    assert times == sorted(times)
    with pytest.raises(ValueError, match="request nobody is not in this recording"):
        main([str(recording), "--explain", "nobody"])


def test_a_preempted_request_says_so(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stories = []
    for number in range(8):
        main([str(recording), "--explain", f"r{number}"])
        stories.append(capsys.readouterr().out)
    assert any("preempted before step" in story for story in stories)


def test_the_time_line_can_be_loaded_and_adds_up(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(recording), "--trace", str(tmp_path / "trace.json")])
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    stays = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    arrived = [event["name"] for event in events if event["ph"] == "i" and "arrived" in event["name"]]
    assert len(arrived) == 9
    assert {event["name"] for event in stays} >= {f"r{number}" for number in range(8)}
    assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in itertools.pairwise(steps))
    for slot in range(4):  # a slot holds one request at a time
        here = sorted((event["ts"], event["ts"] + event["dur"]) for event in stays if event["tid"] == slot)
        assert all(until <= since + 1e-3 for (_, until), (since, _) in itertools.pairwise(here))
    assert f"{len(events)} events" in capsys.readouterr().out


def test_what_if_serves_the_same_requests(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(recording), "--policy", "stall_free"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert "as recorded" in head
    assert "what if: stall_free" in head
    served = next(row.split() for row in rows if row.startswith("requests"))
    assert served[1:] == ["10.00"] * 3
    with pytest.raises(ValueError, match=r"scheduler\.policy"):
        main([str(recording), "--policy", "fastest"])
    for policy in ("static", "split", "orca", "prefill_first"):
        main([str(recording), "--policy", policy])
        assert f"what if: {policy}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="with --policy NAME it may change"):
        main([str(recording), "scheduler.batch_size=3"])
    main([str(recording), "--policy", "static", "scheduler.batch_size=3", "scheduler.max_wait_ms=5"])
    assert "what if: static" in capsys.readouterr().out


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is no recording: it is empty"):
        main([str(tmp_path / "empty")])
    (tmp_path / "text").write_text("once upon a time", encoding="utf-8")
    with pytest.raises(ValueError, match="is no recording: the entry at byte 0"):
        main([str(tmp_path / "text")])
