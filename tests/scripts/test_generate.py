"""Files of requests become files of answers, through the command that users run."""

from __future__ import annotations

import io
import json
import resource
from pathlib import Path

import pytest

from benchmark.recordings import CUT_SHORT
from borders.files import in_one_line
from recipes.tiny.corpus import messages
from scripts.generate import main
from scripts.replay import main as replay
from serving.offline import write_record
from serving.text.tokenizer import Text
from tests.thorough import cases

RECIPE = "recipes/tiny/cpu.yaml"
QUICK = ["device.compile=false", "device.threads=1"]


def generate(tmp_path: Path, lines: list[object], *overrides: str) -> dict[str, dict]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
    )
    main([RECIPE, *QUICK, *overrides, "--input", str(source), "--output", str(target)])
    records = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert len(records) == len(lines)
    return {record["id"]: record for record in records}


def test_sums_chats_and_token_ids_are_answered_and_bad_lines_are_named(tmp_path: Path) -> None:
    records = generate(
        tmp_path,
        [
            {"id": "sum", "prompt": "12+7=", "temperature": 0, "max_tokens": 8},
            {"id": "chat", "messages": messages("123+456"), "temperature": 0, "max_tokens": 24},
            {"id": "late", "prompt": "30+12=", "temperature": 0, "max_tokens": 8, "arrival_s": 0.2},
            {"id": "ids", "prompt_token_ids": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "logprobs": 2},
            {"id": "typo", "prompt": "1+1=", "max_tokns": 3},
            {"id": "long", "prompt": "1+1=", "max_tokens": 10**6},
        ],
    )
    assert records["sum"]["text"].startswith("19")
    assert "579" in records["chat"]["text"]
    assert records["late"]["text"].startswith("42")
    assert records["late"]["first_token_s"] >= records["late"]["arrival_s"] == 0.2
    assert len(records["ids"]["token_ids"]) == len(records["ids"]["logprobs"]) == 3
    assert "max_tokens" in records["typo"]["error"]
    assert "maximum context length is" in records["long"]["error"]


def test_a_line_that_is_no_unicode_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = b'{"id": "good", "prompt": "12+7=", "temperature": 0}'
    lines = [b'{"id": "bad", "prompt": "12+7=\xff"}', b'{"id": "\\ud800", "prompt": "1+1="}', good]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    main([RECIPE, *QUICK, "--input", str(tmp_path / "in.jsonl"), "--output", "-"])
    bad, half, answered = map(json.loads, capsys.readouterr().out.splitlines())
    assert bad["error"] == "line 1: not UTF-8 at column 31"
    assert (half["id"], half["error"][:15]) == ("\ud800", "line 2: id is n")
    assert (answered["id"], answered["text"]) == ("good", "19")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "UTF-8"])
def test_answers_are_written_in_any_encoding(encoding: str) -> None:
    record = {"id": "é\ud800", "text": "狐"}
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    write_record(output, record)
    line = output.buffer.getvalue()
    assert json.loads(line) == record
    assert ("狐".encode() in line) == (encoding == "UTF-8")


def test_answers_that_are_there_are_kept_where_no_engine_can_be_built(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "1+1="}\n')
    target.write_text("answers of before")
    asked = [RECIPE, *QUICK, "model.path=recipes/tiny", "--input", str(source), "--output", str(target)]
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        main([*asked, "--resume"])
    assert target.read_text() == "answers of before"


def test_where_a_recording_reaches_a_limit_no_answer_is_lost_and_the_recording_stays_readable(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"id": f"{n}", "prompt": "1+1=", "max_tokens": 20, "ignore_eos": True} for n in range(12)]
    path, limits = tmp_path / "recording", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, limits[1]))  # any file's, as by `ulimit -f`
    try:
        records = generate(tmp_path, lines, f"scheduler.record={path}", "scheduler.num_slots=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {len(record["token_ids"]) for record in records.values()} == {20}
    (said,) = [each for each in caplog.messages if "recording" in each]
    assert said == (
        f"recording ended: {path}: file too large; raise the limit (ulimit -f), or write elsewhere;"
        " serving goes on without it"
    )
    assert path.stat().st_size == 6_000
    assert replay([str(path)]) == CUT_SHORT
    assert "every decision is the same" in capsys.readouterr().out


def test_where_the_answers_reach_a_limit_their_file_is_named(tmp_path: Path) -> None:
    lines: list[object] = [{"id": f"{n}", "prompt": "1+1=", "max_tokens": 9} for n in range(20)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            generate(tmp_path, lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert in_one_line(caught.value).startswith(f"{tmp_path / 'out.jsonl'}: file too large; raise the limit")


def test_answers_are_not_written_over(tmp_path: Path) -> None:
    """Whoever forgets --resume would lose hours of a run."""
    lines: list[object] = [{"id": f"{n}", "prompt": "1+1=", "max_tokens": 3} for n in range(2)]
    path = tmp_path / "out.jsonl"
    path.touch()
    assert set(generate(tmp_path, lines)) == {"0", "1"}, "an empty file holds none"
    before = path.read_bytes()
    with pytest.raises(ValueError, match="add --resume to go on with it, remove it, or name another file"):
        generate(tmp_path, lines)
    assert path.read_bytes() == before


AGENT = ("model.path=recipes/tiny/agent", "server.tool_format=hermes", "server.reasoning=think")
SUM: dict[str, object] = {"messages": [{"role": "user", "content": "What is 12+30?"}], "temperature": 0}
ADD = {"type": "function", "function": {"name": "add"}}
NUMBER = {"type": "integer", "maximum": 999}
TOTAL = {"type": "object", "properties": {"total": NUMBER}, "required": ["total"]}


def test_a_form_begins_behind_the_thoughts_and_tools_are_for_servers(tmp_path: Path) -> None:
    """The recipe says how the model thinks; and no calls are looked for in the answers of a file."""
    records = generate(
        tmp_path,
        [
            SUM | {"id": "form", "guided_json": TOTAL, "max_tokens": 100},
            SUM | {"id": "brief", "guided_json": TOTAL, "max_tokens": 100, "thinking_token_budget": 2},
            SUM | {"id": "tools", "tools": [ADD]},
            SUM | {"id": "no calls", "tools": [ADD], "tool_choice": "none", "max_tokens": 4},
        ],
        *AGENT,
    )
    text = Text.load("recipes/tiny/agent", reasoning="think")
    assert text is not None
    num_thought = []
    for name in ("form", "brief"):
        tokens = records[name]["token_ids"]
        at = tokens.index(text.think_marks[-1])
        assert json.loads(text.decode(tokens[at + 1 :])).keys() == {"total"}
        num_thought.append(at)
    assert num_thought[0] > num_thought[1]
    assert "tools are not supported in a file of requests" in records["tools"]["error"]
    assert len(records["no calls"]["token_ids"]) == 4


def test_the_lines_of_a_file_say_how_long_their_answers_are(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "prompt": "a"}\n')
    with pytest.raises(ValueError, match="--max-tokens is for --prompt and --chat: write max_tokens in the"):
        main([RECIPE, *QUICK, "--input", str(source), "--output", "-", "--max-tokens", "200"])


MIXED = [
    {"id": "sum", "prompt": "12+7=", "temperature": 0, "max_tokens": 8},
    {"id": "two", "prompt": "12+8=", "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 8},
    {"id": "beams", "prompt": "12+9=", "beam_width": 3, "n": 2, "max_tokens": 8},
    {"id": "cut", "prompt": "one " * 4000, "truncate_prompt_tokens": -1, "temperature": 0, "max_tokens": 8},
    {"id": "bad", "prompt": "a", "temperature": -1},
]


def answers_of(path: Path) -> dict[tuple[str, int], object]:
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(each["id"], each.get("index", 0)): each.get("token_ids", each.get("error")) for each in records}
    assert len(found) == len(records), "an answer is there twice"
    return found


@pytest.mark.slow
def test_a_run_that_ended_too_early_is_gone_on_with(tmp_path: Path) -> None:
    """Wherever it was cut, in the middle of a line too, the answers are those of a run to the end."""
    generate_all = [RECIPE, *QUICK, "scheduler.num_slots=8", "--input", str(tmp_path / "in.jsonl")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in MIXED))
    main([*generate_all, "--output", str(tmp_path / "whole.jsonl")])
    whole = (tmp_path / "whole.jsonl").read_bytes()
    expected = answers_of(tmp_path / "whole.jsonl")
    assert len(expected) == 7
    target = tmp_path / "out.jsonl"
    further = cases((), (0, len(whole) // 2, len(whole) - 1))
    for num_bytes in (None, len(whole) // 3, *further):
        if num_bytes is not None:
            target.write_bytes(whole[:num_bytes])
        main([*generate_all, "--output", str(target), "--resume"])
        assert answers_of(target) == expected, num_bytes


def test_only_the_same_input_is_gone_on_with(tmp_path: Path) -> None:
    generate(tmp_path, MIXED[:2][:1])
    before = (tmp_path / "out.jsonl").read_bytes()
    source = tmp_path / "in.jsonl"
    asked = [RECIPE, *QUICK, "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    for line, message in (
        ({"id": "other", "prompt": "1+1="}, "line 1 answers the request 'sum', which the input does not"),
        ({"id": "sum", "prompt": "12+7=19"}, "line 1 answers a prompt of"),
    ):
        source.write_text(json.dumps(line) + "\n")
        with pytest.raises(ValueError, match=message):
            main([*asked, "--resume"])
        assert (tmp_path / "out.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="--resume needs --output"):
        main([RECIPE, "--prompt", "a", "--resume"])
