"""Traces that others published become requests that `generate` reads, line by line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.trace import main
from serving.offline import Job, read_jobs
from serving.text.tokenizer import Text

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [0, 7]},
    {"timestamp": 6052, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 9]},
]
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,30,7,37,API log\n"
)


def conversation(*said: Any, role: Any = "gpt") -> Any:
    """Turns of a human and, by default, of an assistant."""
    return [{"from": role if at % 2 else "human", "value": value} for at, value in enumerate(said)]


SHAREGPT: list[Any] = [
    {"id": "x", "conversations": conversation("Hi", "Hello there", "Bye", "So long")},
    {"id": "y", "conversations": conversation("One?", "Two")},
]


def traced(tmp_path: Path, form: str, text: str, *arguments: str) -> list[dict[str, Any]]:
    """`text` may hold bytes that are not UTF-8, as halves of surrogate pairs from \\udc80 on."""
    source, output = tmp_path / "source", tmp_path / "trace.jsonl"
    source.write_bytes(text.encode(errors="surrogateescape"))
    main(["--from", f"{form}:{source}", *arguments, "--output", str(output)])
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def json_lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    trace = traced(tmp_path, "mooncake", json_lines(MOONCAKE), "--vocab-size", "900")
    assert [each["arrival_s"] for each in trace] == [0.0, 0.0, 3.052]
    assert [each["max_tokens"] for each in trace] == [5, 4, 3]
    one, two, three = (each["prompt_token_ids"] for each in trace)
    assert [len(one), len(two), len(three)] == [1300, 600, 1100]
    assert one[:512] == two[:512] == three[:512]
    assert one[:1024] == three[:1024]
    assert one[512:600] != two[512:600]
    assert one[1024:1100] != three[1024:1100]
    jobs = list(read_jobs(map(json.dumps, trace), None))
    assert all(isinstance(job, Job) for job in jobs)


def test_mooncake_without_hashes_shares_nothing(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "hash_ids"} for row in MOONCAKE]
    one, two, _ = traced(tmp_path, "mooncake", json_lines(rows), "--vocab-size", "900")
    assert one["prompt_token_ids"][:20] != two["prompt_token_ids"][:20]


def test_burstgpt_columns_are_read_by_name(tmp_path: Path) -> None:
    trace = traced(tmp_path, "burstgpt", BURSTGPT, "--vocab-size", "900", "--tenants", "a=1")
    found = [(each["arrival_s"], len(each["prompt_token_ids"]), each["max_tokens"]) for each in trace]
    assert found == [(0.0, 472, 18), (40.0, 30, 7)]
    assert {each["tenant"] for each in trace} == {"a"}
    with pytest.raises(ValueError, match="has no column Response tokens; is it BurstGPT's"):
        traced(tmp_path, "burstgpt", "Timestamp,Request tokens\n1,2\n", "--vocab-size", "9")


def test_sharegpt_turns_become_requests_of_a_session(tmp_path: Path) -> None:
    options = ["--rate", "2", "--think-s", "1", "--output-tokens", "6"]
    trace = traced(tmp_path, "sharegpt", json.dumps(SHAREGPT), *options)
    by_id = {each["id"]: each for each in trace}
    assert set(by_id) == {"1/0", "1/1", "2/0"}
    assert [(m["role"], m["content"]) for m in by_id["1/1"]["messages"]] == [
        ("user", "Hi"),
        ("assistant", "Hello there"),
        ("user", "Bye"),
    ]
    assert by_id["1/1"]["arrival_s"] > by_id["1/0"]["arrival_s"] > 0
    assert {each["max_tokens"] for each in trace} == {6}
    assert len(traced(tmp_path, "sharegpt", json.dumps(SHAREGPT), *options, "--requests", "2")) == 2


def test_a_ramp_of_conversations_has_its_rates_in_requests(tmp_path: Path) -> None:
    talks = json.dumps([{"conversations": conversation(*"abababab")}] * 500)
    options = ["--output-tokens", "1", "--rate", "2", "--arrivals", "ramp:20"]
    assert traced(tmp_path, "sharegpt", talks, *options)[-1]["arrival_s"] == pytest.approx(
        2000 / 11, rel=0.15
    )


def test_sharegpt_answers_are_as_long_as_they_were(tmp_path: Path) -> None:
    folder = "recipes/tiny/weights"
    text = Text.load(folder)
    assert text is not None
    trace = traced(tmp_path, "sharegpt", json.dumps(SHAREGPT), "--tokenizer", folder)
    wanted = {
        name: len(text.encode(answer)) - 1  # without the token that begins a text
        for name, answer in (("1/0", "Hello there"), ("1/1", "So long"), ("2/0", "Two"))
    }
    assert {each["id"]: each["max_tokens"] for each in trace} == wanted
    with pytest.raises(ValueError, match="holds no tokenizer"):
        traced(tmp_path, "sharegpt", json.dumps(SHAREGPT), "--tokenizer", str(tmp_path))


def mooncake(**changes: Any) -> str:
    """The lines, behind which one is bad."""
    return json_lines([*MOONCAKE, MOONCAKE[0] | changes])


def sharegpt(value: Any, role: Any = "gpt") -> str:
    """The conversations, of which the first is bad."""
    return json.dumps([{"conversations": conversation("Hi", value, role=role)}, *SHAREGPT])


BAD = [
    ("mooncake", json_lines(MOONCAKE[:1]) + "{oops\n" + json_lines(MOONCAKE[1:2]), "line 2: not JSON", 2),
    ("mooncake", mooncake(hash_ids=[1]), "line 4: 1300 tokens and", 3),
    ("mooncake", mooncake(hash_ids=[0, 1.5, 2]), r"line 4: hash_ids is .* each must be a whole number", 3),
    ("mooncake", mooncake(hash_ids=[True, 1, 2]), r"line 4: hash_ids is .* each must be a whole number", 3),
    ("mooncake", mooncake(timestamp=None), "line 4: .*timestamp.* is", 3),
    ("mooncake", mooncake(output_length=0), "line 4: output_length is 0", 3),
    ("mooncake", mooncake(input_length=10**400), "line 4: input_length", 3),
    ("mooncake", mooncake(timestamp=10**400), "line 4: timestamp is a number of 1329 bits", 3),
    ("mooncake", mooncake(input_length=10**14), "line 4: .* from 1 to 1048576", 3),
    ("mooncake", json_lines(MOONCAKE[:1]) + '{"\udcff": 1}\n', "line 2: not UTF-8 at byte 2", 1),
    ("mooncake", "[" * 100_000 + "\n" + json_lines(MOONCAKE), "line 1: the JSON is nested too deeply", 3),
    ("burstgpt", f"{BURSTGPT}46,ChatGPT,9,0,9,API log\n", "line 4: Response tokens is '0'", 2),
    ("burstgpt", f"{BURSTGPT}46,ChatGPT\n", "line 4: Request tokens is None", 2),
    ("burstgpt", f"{BURSTGPT}-1,ChatGPT,9,3,12,API log\n", "line 4: Timestamp is '-1'", 2),
    ("burstgpt", f"{BURSTGPT}46,Chat\udcffGPT,9,3,12,API log\n", "line 4: not UTF-8 at byte 7", 2),
    ("burstgpt", f"{BURSTGPT}46,{'x' * 131_073},9,3,12,API log\n", "line 4: field larger than", 2),
    (
        "burstgpt",
        f"{BURSTGPT}46,ChatGPT,1e14,3,12,API log\n",
        "line 4: Request tokens is '1e14'; .* to 10",
        2,
    ),
    ("sharegpt", sharegpt("x", ["gpt"]), "conversation 1: a turn is .* from", 3),
    ("sharegpt", sharegpt(["x"]), "conversation 1: a turn is .* a value of text", 3),
    ("sharegpt", sharegpt("\ud800"), "conversation 1: half a surrogate pair at character 0", 3),
    ("sharegpt", json.dumps([*SHAREGPT, {"id": "z"}]), "conversation 3: it has no list", 3),
    ("sharegpt", json.dumps([{"conversations": []}, *SHAREGPT]), "conversation 1: no human turn", 3),
]


@pytest.mark.parametrize(("form", "text", "message", "count"), BAD)
def test_a_line_that_cannot_be_read_is_named_and_skipped_only_if_asked(
    form: str, text: str, message: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--output-tokens", "5"] if form == "sharegpt" else ["--vocab-size", "50"]
    with pytest.raises(ValueError, match=rf"source: {message}.*; --skip-bad leaves such out"):
        traced(tmp_path, form, text, *options)
    assert not (tmp_path / "trace.jsonl").exists()
    assert len(traced(tmp_path, form, text, *options, "--skip-bad")) == count
    captured = capsys.readouterr()
    assert re.search(message, captured.err)
    assert captured.err.count("skipped") == 1


@pytest.mark.parametrize(
    ("form", "text", "options", "message"),
    [
        ("mooncake", "", ["--vocab-size", "9"], "holds no request that can be read"),
        ("mooncake", "", ["--vocab-size", "9", "--rate", "2"], "--rate has no meaning for mooncake"),
        ("sharegpt", "[]", [], "sharegpt needs --tokenizer"),
        ("sharegpt", "{}", ["--output-tokens", "3"], "is no list of conversations"),
        ("sharegpt", "{", ["--output-tokens", "3"], "is not JSON"),
        ("sharegpt", "\udcff", ["--output-tokens", "3"], "is not JSON: not UTF-8 at byte 0"),
        ("sharegpt", "[" * 100_000, ["--output-tokens", "3"], "is not JSON: the JSON is nested too deeply"),
        ("burstgpt", "Time\udcff\n", ["--vocab-size", "9"], "source: line 1: not UTF-8 at byte 4"),
    ],
)
def test_what_cannot_be_a_source_is_refused(
    form: str, text: str, options: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        traced(tmp_path, form, text, *options)
