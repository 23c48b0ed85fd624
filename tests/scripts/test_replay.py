"""A recording that `generate` made, as a person meets it."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import msgspec
import pytest

from borders.framing import framed
from continuous_batching.recording.format import BEGIN, FORMAT, Closed, Header, read_entries
from scripts.generate import main as generate
from scripts.replay import main
from scripts.simulate import main as simulate

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


def test_another_scheduler_is_a_divergence(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording.open("rb") as file:
        header, *entries = read_entries(file)
    assert isinstance(header, Header)
    facts = header.facts | {"scheduler": header.facts["scheduler"] | {"num_slots": 2}}  # not four
    data, check = b"", BEGIN
    for entry in (Header(FORMAT, facts), *entries, Closed()):
        record, check = framed(msgspec.msgpack.encode(entry), check)
        data += record
    (tmp_path / "other").write_bytes(data)
    assert main([str(tmp_path / "other")]) == 1
    assert "step " in capsys.readouterr().out


def test_what_comes_before_damage_is_replayed_and_the_status_says_so(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path = recording.read_bytes(), tmp_path / "other"
    at = len(whole) * 3 // 4
    damaged = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    for data, status, reason in (
        (damaged, 2, r"record \d+ at byte \d+ is damaged.*; only what comes before is used"),
        (whole[:at], 3, r"record \d+ at byte \d+ is cut short: the file ends within it; only .*"),
    ):
        path.write_bytes(data)
        for options in ([], ["--explain", "r0"], ["--trace", str(tmp_path / "line")]):
            assert main([str(path), *options]) == status
            out, err = capsys.readouterr()
            assert re.fullmatch(f"{re.escape(str(path))}: {reason}\n", err), err
            assert out
        events = json.loads((tmp_path / "line").read_text(encoding="utf-8"))["traceEvents"]
        (mark,) = (event for event in events if event.get("s") == "g")
        assert mark["name"].startswith("the recording is damaged from here: record ")
        assert mark["ts"] >= max(event["ts"] for event in events if "step" in event["name"])
        with pytest.raises(ValueError, match=r"record \d+ at byte .*; a recording that is whole is needed"):
            simulate(["fit", str(path), "--output", str(tmp_path / "costs")])
        assert not (tmp_path / "costs").exists(), "costs of a part would stand there as if of all"
        assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_fitted_costs_give_the_same_figures_again_and_say_whether_to_trust_them(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs, trace = str(tmp_path / "costs.json"), tmp_path / "trace.jsonl"
    simulate(["fit", str(recording), "--output", costs])
    assert "the fit                is not to be trusted: " in capsys.readouterr().out, "it has few steps"
    lines = [{"id": str(n), "prompt_token_ids": [1] * 40, "max_tokens": 9} for n in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    results = []
    for _ in range(2):
        capsys.readouterr()
        simulate([RECIPE, "--trace", str(trace), "--costs", costs, "--json"])
        out, err = capsys.readouterr()
        results.append(json.loads(out))
        assert err.startswith("warning: the fit is not to be trusted: ")
        assert results[-1]["fit"]["larger_than_recorded"] > 0.05, "more slots than were recorded"
    for result in results:  # the clock of the wall shows in two figures, and in their digests
        for name in [name for name in result if "wall" in name]:
            del result[name], result["digests"][name]
    assert results[0] == results[1]


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
    stories = []
    for number in range(7):
        main([str(recording), "--explain", f"r{number}"])
        stories.append(capsys.readouterr().out)
    assert any("preempted before step" in each for each in stories)
    with pytest.raises(ValueError, match="request nobody is not in this recording"):
        main([str(recording), "--explain", "nobody"])


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


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is no recording of format 5: it is empty"):
        main([str(tmp_path / "empty")])
    (tmp_path / "text").write_text("once upon a time", encoding="utf-8")
    with pytest.raises(ValueError, match="is no recording of format 5: record 1 at byte 0"):
        main([str(tmp_path / "text")])


DRAFT = ["kind=draft", "draft_path=recipes/tiny/draft", "adaptive=fixed"]


def test_drafts_are_told_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"id": "q", "prompt": "one two three four " * 4, "max_tokens": 30, "temperature": 0}
    (tmp_path / "in.jsonl").write_text(json.dumps(line | {"ignore_eos": True}), encoding="utf-8")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    path = tmp_path / "recording"
    settings = ["device.threads=1", *(f"speculation.{key}" for key in DRAFT)]
    generate([RECIPE, *settings, f"scheduler.record={path}", *files])
    answer = json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))
    assert answer["num_drafted"] >= answer["num_accepted"] > 0
    capsys.readouterr()
    main([str(path), "--explain", "q"])
    told = re.findall(r": (\d+) of (\d+) drafts were right", capsys.readouterr().out)
    main([str(path), "--trace", str(tmp_path / "line")])
    events = json.loads((tmp_path / "line").read_text(encoding="utf-8"))["traceEvents"]
    drawn = [
        (str(each["args"]["right"]), str(each["args"]["drafts"]))
        for each in events
        if "drafts" in each["name"]
    ]
    assert drawn == told
    sums = [sum(map(int, column)) for column in zip(*told)]
    assert sums == [answer["num_accepted"], answer["num_drafted"]]
