"""The serving client records what really happened, counts every error, and reports every lag."""

from __future__ import annotations

import gc
import json
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.gate.gate import audit
from benchmark.serve import client
from benchmark.serve.client import ClientAnswer, ClientRun, Events, TraceRequest
from benchmark.serve.figures import kinds, parse_metrics, records, summarise
from benchmark.serve.measure import _begun_by
from scripts.benchmark import main
from tests.benchmark.openai_server import FAULTS, Stub, running
from tests.thorough import cases

Lines = list[dict[str, Any]]


def lines(count: int, *, every_s: float = 0.0, max_tokens: int = 4) -> Lines:
    return [
        {"id": f"r{n}", "arrival_s": n * every_s, "prompt_token_ids": [n + 1, 7, 7], "max_tokens": max_tokens}
        for n in range(count)
    ]


def write(path: Path, asked: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in asked))
    return path


def measured(
    stub: Stub, asked: Lines, folder: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    path = write(folder / "trace.jsonl", asked)
    main(["serve", "--base-url", stub.url, "--trace", str(path), *options, "--json"])
    return json.loads(capsys.readouterr().out)


def refused(result: dict[str, Any]) -> set[str]:
    """The laws that refuse it, whatever else this machine has to do meanwhile."""
    return {*result["verdict"]["refused"]} - {"client on time"}


def test_every_token_is_counted_and_the_result_passes_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(Stub(first_s=0.02, gap_s=0.004)) as stub:
        asked = lines(40, every_s=0.005)
        result = measured(stub, asked, tmp_path, capsys, "--goodput", "ttft:500000", "tpot:500000", "e2el:20")
    assert (result["completed"], result["failed"]) == (40, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40 * 3, 40 * 4)
    assert result["itl_gaps"] == 40 * 3
    assert result["output_throughput"] == pytest.approx(4 * result["request_throughput"], rel=0.001)
    assert result["p50_ttft_ms"] == result["median_ttft_ms"] >= 20
    assert result["mean_itl_ms"] == pytest.approx(result["mean_tpot_ms"], rel=0.001)
    assert result["mean_e2el_ms"] >= 32, "of the gaps a busy client may read several at once"
    assert result["request_goodput"] == 0, "none can be so fast"
    assert result["offered_per_s"] == pytest.approx(200)
    assert len(stub.asked) == 41, "one of them to warm up, with other tokens in front"
    assert stub.asked[0]["prompt"] == [7, 7, 1]
    assert stub.asked[1] | {"seed": 0} == {
        "model": "stub",
        "prompt": [1, 7, 7],
        "max_tokens": 4,
        "seed": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert result["server"] is None, "it has no such path"
    assert result["server_said"]["/v1/models"]["data"][0]["recipe"] == {"model": "none"}
    assert result["prefix_hit_rate"] == 0.3333
    assert result["metrics"]["preemptions"] == 40
    assert result["metrics"]["prefix_hit_rate"] == 0.4
    assert result["metrics"]["mean_prefill_ms"] == 20
    assert "mean_queue_ms" not in result["metrics"], "it tells nothing of a queue"
    assert not refused(result)
    assert {"Little", "recount", "goodput", "E2E = TTFT + gaps", "tokens by request"} <= {
        *result["verdict"]["passed"]
    }
    assert result["verdict"] == audit(result), "the file can be audited as it is"
    assert gc.get_freeze_count(), "what was frozen before stays so"


@pytest.mark.parametrize(("tells", "pieces"), [(True, 2), (False, 2), (False, 1)])
def test_tokens_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tells: bool, pieces: int
) -> None:
    with running(Stub(tokens_in_piece=pieces, tells_usage=tells)) as stub:
        result = measured(stub, lines(2, max_tokens=5), tmp_path, capsys)
    assert result["total_output_tokens"] == 10, "the usage at the end counts"
    assert result["itl_gaps"] == 2 * (-(-5 // pieces) - 1)
    told = [record.get("piece_tokens") for record in result["records"]]
    assert told == [[2, 2, 1] if tells else None] * 2
    assert refused(result) == {"samples"}


def test_usage_beside_the_last_choice_is_no_piece() -> None:
    answer = ClientAnswer(TraceRequest("a", 0.0, 20, True, [{}], None, {}))
    text = b'{"choices": [{"delta": {"content": "word "}}]}'
    end = b'{"choices": [{"delta": {"content": ""}, "finish_reason": "length"}], "usage": %s}'
    for number, chunk in enumerate([*[text] * 20, end % b'{"completion_tokens": 20}']):
        client._take(answer, client.read_chunk(chunk), float(number))
    client._close(answer, True)
    assert answer.piece_times_s == [float(number) for number in range(20)]
    assert (answer.output_tokens, answer.piece_tokens, answer.error) == (20, [1] * 20, None)


@pytest.mark.slow
def test_every_kind_of_failure_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {name: {"id": name, "prompt_token_ids": [key]} for key, name in FAULTS.items()}
    slow, limit = faults.pop("slow"), ("--request-timeout-s", "0.5", "--num-warmups", "0")
    with running(Stub()) as stub:
        goodput = ("--goodput", "ttft:9e6", "itl:9e6")
        result = measured(stub, [*lines(3), *faults.values()], tmp_path, capsys, *goodput)
        late = measured(stub, [slow], tmp_path, capsys, *limit)
    told = {record["id"]: record.get("error", "") for record in (*late["records"], *result["records"])}
    assert told["refuses"] == "HTTP 400: no such thing"
    assert told["busy"] == "HTTP 429: busy"
    assert any(word in told["breaks off"] for word in ("Payload", "Disconnected", "reset", "broke off"))
    assert told["errs"] == "in the stream: out of cards"
    assert told["no stream"] == "the server sent application/json, no stream of events"
    assert told["no reason"] == "the stream has no finish_reason"
    assert told["slow"] == "no end within the limit of time"
    assert (result["num_prompts"], result["completed"], result["failed"]) == (9, 3, 6)
    assert result["rejected"] == 1
    assert sum(result["errors"].values()) == 6
    assert result["total_output_tokens"] == 3 * 4
    assert result["good_share"] == round(3 / 9, 4)
    assert refused(result) == {"samples"}


def test_a_result_of_failures_alone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace.jsonl", [{"id": "a", "prompt_token_ids": [900, 1]}])  # 1, 900 warms up
    with running(Stub()) as stub:
        saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "a.json"]
        main(["serve", "--base-url", stub.url, "--trace", str(path), "--goodput", "ttft:9", *saved])
    told = capsys.readouterr().out
    assert "failed 1: HTTP 400: no such thing" in told
    assert "samples: 0 requests were answered" in told
    main(["report", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.html")])
    assert "requests failed" in (tmp_path / "a.html").read_text()


def test_chats_go_where_chats_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [{"id": "a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "tenant": "t"}]
    with running(Stub(first_s=0.05)) as stub:
        result = measured(stub, asked, tmp_path, capsys, "--extra-body", '{"seed": null, "top_k": 3}')
    assert result["total_output_tokens"] == 3
    assert result["mean_ttft_ms"] >= 50, "the role alone is no token"
    sent = stub.asked[-1]
    assert "seed" not in sent
    assert (sent["max_completion_tokens"], sent["user"], sent["top_k"]) == (3, "t", 3)
    assert stub.asked[0]["messages"] == [{"role": "user", "content": "warm-up-0 "}]


def test_a_warm_up_begins_as_no_request_does() -> None:
    part = {"type": "text", "text": "Hi"}
    parts, text = {"role": "user", "content": [part]}, {"type": "text", "text": "w "}
    assert _begun_by("w ", [parts, parts]) == [{"role": "user", "content": [text, part]}, parts]
    assert _begun_by("w ", [{"content": None}]) == [{"content": "w "}]
    assert [_begun_by("w ", each) for each in ("Hi you", ["Hi"], [1, 2])] == ["w  you", ["w "], [2, 1]]


def test_a_server_may_have_its_own_limit_of_tokens() -> None:
    asks = [TraceRequest(str(n), 0.0, 4, False, [1], 1, {}).limited({"max_tokens": None}) for n in range(2)]
    assert "max_tokens" not in json.loads(asks[0].body("a", 0, {}))
    failed = ClientAnswer(asks[0], sent_s=1.0, end_s=2.0, error="broke")
    whole = ClientAnswer(asks[1], 0.0, 0.0, 1.0, 1.3, [1.1], [1], "stop", 1, 1)
    assert [each["max_tokens"] for each in records(ClientRun([failed, whole]))] == [None, None]


@pytest.mark.parametrize(
    ("chat", "extra", "sent"),
    [
        (True, {"max_tokens": 9}, {"max_completion_tokens": 9}),
        (True, {"max_tokens": None}, {}),
        (True, {"max_completion_tokens": None, "max_tokens": 9}, {"max_tokens": 9}),
        (False, {"max_completion_tokens": 9}, {"max_tokens": 9}),
    ],
)
def test_a_further_limit_of_tokens_has_the_requests_name(
    chat: bool, extra: dict[str, Any], sent: dict[str, int]
) -> None:
    ask = TraceRequest("a", 0.0, 4, chat, [1], 1, {})
    body = json.loads(ask.body("a", 0, extra))
    assert {name: value for name, value in body.items() if name.startswith("max_")} == sent
    assert ask.limited(extra).max_tokens == sent.get(ask._limit)


def test_a_client_of_a_closed_loop_waits_for_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = lines(12)
    for number, line in enumerate(asked):
        line["id"] = f"{number % 3}/{number // 3}"
    with running(Stub(first_s=0.005)) as stub:
        result = measured(stub, asked, tmp_path, capsys)
    assert result["loop"] == "closed, 3 clients"
    assert stub.most <= result["max_concurrent_requests"] == 3
    by_client: dict[str, list[dict[str, Any]]] = {}
    for record in result["records"]:
        by_client.setdefault(record["id"][0], []).append(record)
    for records_ in by_client.values():
        assert [each["id"][2:] for each in records_] == ["0", "1", "2", "3"]
        assert all(b["arrival_s"] >= a["finish_s"] for a, b in pairwise(records_))


def test_concurrency_has_a_limit_and_a_rate_takes_the_place_of_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(Stub(first_s=0.005)) as stub:
        limits = ("--request-rate", "inf", "--max-concurrency", "2", "--num-prompts", "8")
        result = measured(stub, lines(9, every_s=60.0), tmp_path, capsys, *limits)
    assert stub.most <= result["max_concurrent_requests"] == 2
    assert (result["completed"], result["request_rate"], result["offered_per_s"]) == (8, "inf", None)
    assert result["client"]["held_ms"]["max"] > 5


def test_what_the_server_says_of_itself_is_kept_but_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = {"recipe": {"cache": {"page_size": 16}}, "api_key": "s", "args": [{"admin_api_key": "s"}]}
    with running(Stub(info=info)) as stub:
        result = measured(stub, lines(2), tmp_path, capsys)
    assert result["server"] == {"recipe": {"cache": {"page_size": 16}}, "args": [{}]}


def test_nobody_listens(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", lines(1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"^{url}/v1/models: nobody answers there: .*$"):
            main(["serve", "--base-url", url, "--trace", str(path)])


def test_a_server_that_starts_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(Stub(unready=1)) as stub:
        assert measured(stub, lines(2), tmp_path, capsys)["completed"] == 2
        stub.unready = 1
        with pytest.raises(ValueError, match="HTTP 503: it starts"):
            measured(stub, lines(2), tmp_path, capsys, "--ready-check-timeout-sec", "0")


def test_a_server_that_refuses_the_warm_up_is_told_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", [{"id": "a", "prompt_token_ids": [900]}])
    told = "the warm-up request failed: HTTP 400: no such thing"
    with running(Stub()) as stub, pytest.raises(ValueError, match=told):
        main(["serve", "--base-url", stub.url, "--trace", str(path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ("7", "a request must be a JSON object"),
        ('{"prompt": "x"}', "id is missing"),
        ('{"id": "b"}', "exactly one of prompt_token_ids, prompt, messages"),
        ('{"id": "b", "prompt": "x", "prompt_token_ids": [1]}', "exactly one of"),
        ('{"id": "a", "prompt": "x"}', "the id a is taken"),
        ('{"id": "b", "prompt": "x", "arrival_s": -1}', "arrival_s is -1"),
        ('{"id": "b", "prompt": "x", "arrival_s": NaN}', "arrival_s is nan"),
        ('{"id": "b", "prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
        ('{"id": "b", "prompt": "x", "n": 2}', "n is 2; the benchmark counts one answer"),
        ('{"id": "b", "prompt_token_ids": "x"}', "prompt_token_ids must be a list of integers"),
    ],
)
def test_a_bad_line_is_named_and_left_out_only_when_asked(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"trace.jsonl: line 3: .*{message}.*--skip-bad"):
        client.read_requests(path, skip_bad=False)
    asks, skipped = client.read_requests(path, skip_bad=True)
    assert [ask.id for ask in asks] == ["a"]
    assert len(skipped) == 1


@settings(max_examples=cases(40, 100))
@given(st.lists(st.binary(max_size=8)), st.integers(1, 9), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_events_are_the_same_however_they_are_cut(found: list[bytes], size: int, end: bytes) -> None:
    said = [each.replace(b"\r", b"").replace(b"\n", b"") or b"-" for each in found]
    stream = b": hello" + end + end
    stream += b"".join(b"id: 1" + end + b"data: " + each + end + end for each in said)
    events = Events()
    cut = [data for at in range(0, len(stream), size) for data in events.feed(stream[at : at + size])]
    assert cut + events.feed(b"\n") == said


def test_several_lines_of_data_are_one() -> None:
    assert Events().feed(b"data: a\ndata:b\n\n") == [b"a\nb"]


def test_metrics_of_several_engines_add_up() -> None:
    text = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_running{engine="1"} 4.0\n'
    text += 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 1\nother 9\n'
    assert parse_metrics(text) == {"running": 7, "kv_usage": 0.75}


def by_hand() -> ClientRun:
    """Two answers and a failure, with known figures: 4 tokens 10 ms apart, and 3, two of them at once."""
    first = TraceRequest("a", 0.0, 4, False, [1, 2], 2, {})
    second = TraceRequest("b", 1.0, 3, False, [1], 1, {})
    third = TraceRequest("c", 2.0, 5, False, [1], 1, {})
    answers = [
        ClientAnswer(first, 0.0, 0.0, 10.0, 10.14, [10.1, 10.11, 10.12, 10.13], [1, 1, 1, 1], "length", 2, 4),
        ClientAnswer(second, 0.001, 0.0, 11.0, 11.3, [11.2, 11.26], [1, 2], "stop", 1, 3),
        ClientAnswer(third, 0.002, 0.0, 12.0, 14.0, [12.5], [1], None, 1, 1, error="broke"),
    ]
    return ClientRun(answers, 0, 1, [0.001, 0.003], {"cpu_s": 0.4, "monotonic_s": 4.0})


def test_figures_are_those_of_their_closed_forms() -> None:
    result = summarise(by_hand(), {"ttft": 150, "tpot": 10.1})
    assert result["duration"] == 4.0
    assert (result["completed"], result["failed"], result["itl_gaps"]) == (2, 1, 4)
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 7 / 4
    assert result["total_token_throughput"] == 10 / 4
    assert (result["mean_ttft_ms"], result["std_ttft_ms"]) == (150.0, 50.0)
    assert result["mean_tpot_ms"] == 20.0, "of 10 and (260 - 200) / 2"
    assert result["mean_itl_ms"] == 22.5, "of 10, 10, 10 and 60"
    assert result["p90_itl_ms"] == pytest.approx(float(np.percentile([10, 10, 10, 60], 90)))
    assert (result["median_e2el_ms"], result["p99_e2el_ms"]) == (195.0, 258.7)
    assert result["request_goodput"] == 0.25
    assert result["mean_in_flight"] == round(2.39 / 4, 4)
    assert "mean_in_system" not in result, "what failed has no end"
    assert result["client"]["late_ms"] == {"p50": 1.0, "p99": 1.98, "max": 2.0}
    assert result["client"]["cpu_share"] == 0.1
    kept = records(by_hand())
    assert kept[1]["piece_tokens"] == [1, 2]
    assert "piece_tokens" not in kept[0]
    failed = {"end_s": 4.0, "max_tokens": 5, "finish_reason": "error", "error": "broke"}
    assert kept[2] == {"id": "c", "arrival_s": 2.0, "late_ms": 2.0, "held_ms": 0.0, **failed}


def test_an_answer_that_tells_of_no_cached_tokens_had_none_where_others_tell() -> None:
    run = by_hand()
    assert "prefix_hit_rate" not in summarise(run, None)
    run.answers[0].cached_tokens = 1
    assert summarise(run, None)["prefix_hit_rate"] == 0.3333, "one of 2 + 1"


def test_who_is_held_waits_from_when_it_was_due() -> None:
    """Of ten requests due at once, each takes 100 ms, and the limit of concurrency lets one go at a time."""
    answers = [
        ClientAnswer(
            TraceRequest(str(n), 0.0, 1, False, [1], 1, {}),
            held_s=n / 10, sent_s=n / 10, end_s=n / 10 + 0.1, piece_times_s=[n / 10 + 0.1],
            piece_tokens=[1], finish_reason="length", prompt_tokens=1, output_tokens=1, due_s=0.0,
        )
        for n in range(10)
    ]  # fmt: skip
    result = summarise(ClientRun(answers, 0, 1, [], {"cpu_s": 0.1, "monotonic_s": 1.0}), {"e2el": 250})
    assert result["p99_e2el_ms"] == 100.0, "as vLLM counts"
    assert (result["good_share"], result["request_goodput"]) == (0.2, 2.0)
    assert "goodput" in audit({"benchmark": "serve", "goodput": {"e2el": 250}, **result})["passed"]


def test_a_low_rate_keeps_enough_digits_for_the_gate() -> None:
    """Of 40 requests, one every 37 minutes, each takes 30 ms."""
    answers = [
        ClientAnswer(
            TraceRequest(str(n), 0.0, 1, False, [1], 1, {}),
            held_s=0.0, sent_s=n * 2222.2, end_s=n * 2222.2 + 0.03, piece_times_s=[n * 2222.2 + 0.03],
            piece_tokens=[1], finish_reason="length", prompt_tokens=1, output_tokens=1, due_s=n * 2222.2,
        )
        for n in range(40)
    ]  # fmt: skip
    result = summarise(ClientRun(answers, 0, 1, [], {"cpu_s": 0.1, "monotonic_s": 1.0}), {"e2el": 250})
    verdict = audit({"benchmark": "serve", "goodput": {"e2el": 250}, **result})
    assert not verdict["refused"]
    assert {"goodput", "Little", "recount"} <= {*verdict["passed"]}


def test_errors_that_differ_in_ids_are_one_kind() -> None:
    busy = [f"HTTP 429: request cmpl-{n}a waits behind {n} others: try again in {n}.5 s" for n in (3, 4)]
    assert kinds(["HTTP 400: no", *busy, "HTTP 500: no"]) == {
        busy[0]: 2,
        "HTTP 400: no": 1,
        "HTTP 500: no": 1,
    }


def test_a_poisson_process_has_its_rate_and_its_seed() -> None:
    asks = [TraceRequest(str(n), 5.0, 1, False, [1], 1, {}) for n in range(4000)]
    times_s = [ask.due_s for ask in client.at_rate(asks, 50.0, seed=3)]
    assert times_s[0] == 0
    assert 4000 / times_s[-1] == pytest.approx(50, rel=0.05)
    assert times_s == [ask.due_s for ask in client.at_rate(asks, 50.0, seed=3)]
    assert {ask.due_s for ask in client.at_rate(asks, float("inf"), seed=3)} == {0.0}
