"""A sweep goes on where it was, and a page holds all that it shows."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmark.serve.report import read
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.simulation.queue import honest

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Its words, its cells by row, and whether each tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in VOID else [tag]
        self.links += [str(value) for name, value in attrs if name in ("src", "href") and value]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [str(value) for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def checked(path: Path) -> Page:
    """A page that is whole, and needs nothing beside itself."""
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert not [link for link in page.links if not link.startswith("#")]
    assert "url(http" not in text
    assert 'name="viewport"' in text
    return page


def swept(stub: Stub, folder: Path, *options: str) -> None:
    asked = [{"id": str(n), "prompt_token_ids": [n + 1, 2], "max_tokens": 3} for n in range(31)]
    trace = folder / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in asked))
    where = ["--base-url", stub.url, "--trace", str(trace), "--result-dir", str(folder / "sweep")]
    main(["sweep", *where, "--request-rates", "300,inf", "--goodput", "ttft:9e5", "tpot:9e5", *options])


def test_a_sweep_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmark.gate.measurement.LATE_MS", 60_000.0)  # this machine may be busy
    monkeypatch.setattr("benchmark.serve.report.pictures", lambda drawn: "")  # which other tests draw
    monkeypatch.setattr("benchmark.serve.report.curves", lambda sweeps: [])
    monkeypatch.setattr("benchmark.serve.report.goodput", lambda sweeps: "")
    with running(Stub()) as stub:
        swept(stub, tmp_path)
        first = capsys.readouterr().out
        assert "within the objectives for 99% of requests: inf requests/s" in first
        salts = {each["cache_salt"] for each in stub.asked}
        assert sorted(each.split(", ")[0] for each in salts) == ["rate 300", "rate inf"]
        stub.asked.clear()
        swept(stub, tmp_path)
        assert capsys.readouterr().out == first
        assert not stub.asked
        whole = (tmp_path / "sweep" / "rate-inf.json").read_text()
        (tmp_path / "sweep" / "rate-inf.json").write_text(whole[:-20])
        swept(stub, tmp_path)
        assert len(stub.asked) == 32, "one rate, and its warm-up"
        assert len({each["cache_salt"] for each in stub.asked} - salts) == 1, "nothing of before is cached"
        assert re.search(r"rate-inf\.json is not JSON: .*; it is measured again", capsys.readouterr().err)
        result = json.loads((tmp_path / "sweep" / "rate-300.json").read_text())
        tampered = result | {"request_throughput": result["request_throughput"] * 3}
        (tmp_path / "sweep" / "rate-300.json").write_text(json.dumps(tampered))
        stub.asked.clear()
        swept(stub, tmp_path)
        assert not stub.asked
        assert "refused" in capsys.readouterr().out, "a file that was changed since is not believed"
        with pytest.raises(ValueError, match=r"rate-300.json is of another sweep: its seed differ"):
            swept(stub, tmp_path, "--seed", "3")
        elsewhere = ("--base-url", "http://127.0.0.1:1", "--model", "b", "--num-warmups", "2")
        with pytest.raises(ValueError, match="its base_url, model_id, warm_up_runs differ"):
            swept(stub, tmp_path, *elsewhere)
    page = checked(tmp_path / "sweep" / "report.html")
    assert [row[0] for row in page.rows if row[0] in ("300", "inf")] == ["300", "inf"]


@pytest.mark.parametrize(
    ("shares", "most"), [((1.0, 0.5, 1.0), "1 requests/s"), ((0.5, 1.0, 1.0), "none of these rates")]
)
def test_a_rate_is_borne_only_with_all_lower_ones(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    shares: tuple[float, ...],
    most: str,
) -> None:
    good = dict(zip((1.0, 2.0, 3.0), shares))

    def points(plan: Any, options: Any) -> Any:
        verdict = {"outcome": "pass", "refused": {}}
        for rate in options.request_rates:
            yield rate, {"request_throughput": rate, "good_share": good[rate], "verdict": verdict}

    monkeypatch.setattr("benchmark.serve.measure.sweep", points)
    for name in ("read", "write"):
        monkeypatch.setattr(f"benchmark.serve.report.{name}", lambda *_: None)
    asked = tmp_path / "trace.jsonl"
    asked.write_text('{"id": "a", "prompt_token_ids": [1]}\n')
    where = ("--base-url", "http://127.0.0.1:1", "--trace", str(asked), "--result-dir", str(tmp_path))
    main(["sweep", *where, "--request-rates", "3,1,2", "--goodput", "ttft:9"])
    assert f"within the objectives for 99% of requests: {most}" in capsys.readouterr().out


def write(path: Path, result: dict[str, Any]) -> str:
    path.write_text(json.dumps(result))
    return str(path)


def test_two_results_stand_beside_one_another(tmp_path: Path) -> None:
    first, second = honest(1), honest(2)
    second["machine"] = {"cpu": "<script>alert(1)</script>"}
    paths = [write(tmp_path / "a.json", first), write(tmp_path / "b&b.json", second)]
    main(["report", *paths, "--output", str(tmp_path / "out" / "report.html")])
    page = checked(tmp_path / "out" / "report.html")
    rows = {row[0]: row[1:] for row in page.rows}
    assert rows[""] == ["a", "b&b", "times"] or page.rows[0] == ["", "a", "b&b", "times"]
    a, b, times = rows["output tokens/s"]
    assert float(a.replace(",", "")) == pytest.approx(first["output_tokens_per_s"], rel=0.001)
    assert float(b.replace(",", "")) == pytest.approx(second["output_tokens_per_s"], rel=0.001)
    assert float(times) == pytest.approx(
        second["output_tokens_per_s"] / first["output_tokens_per_s"], rel=0.01
    )
    assert rows["machine: cpu"] == ["<script>alert(1)</script>"]
    assert "<script>" not in (tmp_path / "out" / "report.html").read_text()


def test_pieces_that_came_together_can_be_drawn(tmp_path: Path) -> None:
    result = honest(1)
    for record in result["records"]:
        record["token_times_s"] = [record["finish_s"]] * record["output_tokens"]
    point = {**result, "request_rate": 5.0, "itl_ms": dict.fromkeys(result["itl_ms"], 0.0)}
    (tmp_path / "sweep").mkdir()
    write(tmp_path / "sweep" / "rate-5.json", point)
    main(["report", str(tmp_path / "sweep"), "--output", str(tmp_path / "a.html")])
    checked(tmp_path / "a.html")


def test_a_page_audits_what_it_shows(tmp_path: Path) -> None:
    result = honest(1) | {"verdict": {"outcome": "pass", "refused": {}}}
    result["ttft_ms"]["mean"] /= 3
    main(["report", write(tmp_path / "a.json", result), "--output", str(tmp_path / "a.html")])
    checked(tmp_path / "a.html")
    assert "; recount: ttft_ms.mean" in (tmp_path / "a.html").read_text()


def test_a_result_of_vllm_with_details_is_shown(tmp_path: Path) -> None:
    told = {"duration": 2.0, "completed": 2, "request_throughput": 1.0, "mean_itl_ms": 8.5}
    told |= {"ttfts": [0.1, 0.2, 0.0, 0.0], "itls": [[0.0085], [0.0085], [], []], "output_lens": [2, 2, 0, 0]}
    told |= {"errors": ["", "", "broke", "broke"], "server": "theirs"}
    main(["report", write(tmp_path / "vllm.json", told), "--output", str(tmp_path / "a.html")])
    rows = {row[0]: row[1:] for row in checked(tmp_path / "a.html").rows}
    assert {name: row for name, row in rows.items() if "errors" in name} == {"errors: broke": ["2"]}


def test_the_best_of_a_sweep_is_not_one_that_the_gate_refuses(tmp_path: Path) -> None:
    better, worse = sorted((honest(1), honest(2)), key=lambda each: -each["requests_per_s"])
    late = {**better, "client": {"lag_ms": {"p99": 9e5}, "late_ms": {"p99": 9e5}}}
    write(tmp_path / "rate-2.json", {**late, "request_rate": 2.0})
    assert read(tmp_path).result["request_rate"] == 2.0, "there is no other"
    write(tmp_path / "rate-1.json", {**worse, "request_rate": 1.0})
    assert read(tmp_path).result["request_rate"] == 1.0
    write(tmp_path / "rate-2.json", {**better, "request_rate": 2.0})
    assert read(tmp_path).result["request_rate"] == 2.0


def test_a_sweep_is_drawn_from_what_its_results_have(tmp_path: Path) -> None:
    """vllm writes null for a goodput that nobody asked for, and another result may lack a rate or a p99."""
    few = honest(1)
    del few["ttft_ms"]["p99"]
    write(tmp_path / "rate-1.json", {**honest(2), "request_rate": 1.0, "request_goodput": None})
    write(tmp_path / "rate-2.json", few)
    write(tmp_path / "rate-3.json", {"duration": 2.0, "completed": 2, "request_rate": 3.0})
    main(["report", str(tmp_path), "--output", str(tmp_path / "a.html")])
    assert len([row for row in checked(tmp_path / "a.html").rows if row[0] in ("0", "1", "3")]) == 3


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    names = [r"a$\foo$", "_b", "c$d$e"]
    for seed, name in enumerate(names, 1):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "rate-5.json", {**honest(seed), "request_rate": 5.0})
    main(["report", *(str(tmp_path / name) for name in names), "--output", str(tmp_path / "a.html")])
    checked(tmp_path / "a.html")
    legends = re.findall(r"<text [^>]*>([^<]*?)</text>", (tmp_path / "a.html").read_text())
    assert {r"a$\foo$ p50", " _b p50", "c$d$e p50"} <= {*legends}


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"a": 1}', '{"duration_s": "x"}'])
def test_what_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json (is no result of|is not JSON|holds no object)"):
        main(["report", str(tmp_path / "a.json"), "--output", str(tmp_path / "a.html")])


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no rate-\*.json"):
        main(["report", str(tmp_path), "--output", str(tmp_path / "a.html")])
