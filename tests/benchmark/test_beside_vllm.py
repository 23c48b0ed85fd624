"""Both engines are given the same, and a ratio is printed only of figures that can be compared.

The stand-in for vLLM takes the keywords and flags that vLLM 0.32 takes of those that it is given, and no
others; it says how long answers take, not how fast vLLM is.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.offline import beside_vllm
from benchmark.offline.beside_vllm import ROWS, Load, OwnSide, Setting, VllmSide, before, summary, turn
from benchmark.run_record import OtherLoad, taken_s
from benchmark.serve.measure import measure
from benchmark.verbs import BESIDE_ROWS
from recipes.schema.reader import read
from scripts.benchmark import main
from tests.benchmark.openai_server import Stub, running
from tests.patience import PATIENCE_S

RECIPE = "recipes/bench/llama_125m.yaml"
SMALL = ["device.compile=false", "scheduler.num_slots=4"] + [
    f"model.config.{name}"
    for name in ("vocab_size=512", "hidden_size=32", "num_hidden_layers=2", "intermediate_size=64")
] + ["model.config.num_attention_heads=4", "model.dtype=float32"]  # fmt: skip
LIBRARY = '''
"""A stand-in for vLLM."""
import json, os
from pathlib import Path
from types import SimpleNamespace
__version__ = "0"
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, ignore_eos, detokenize):
        assert (temperature, ignore_eos, detokenize) == (0, True, False)
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, *, model, load_format, dtype, max_model_len, max_num_seqs, max_num_batched_tokens,
                 kv_cache_memory_bytes, enable_prefix_caching):
        assert json.loads(Path(model, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
        assert (load_format, dtype, enable_prefix_caching) == ("dummy", "float32", False)
        assert (max_num_seqs, max_num_batched_tokens) == (4, 512)
        assert {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} < {*os.environ}
        self.longest = max_model_len
    def generate(self, prompts, params, use_tqdm):
        for each, one in zip(prompts, params):
            assert len(each["prompt_token_ids"]) + one.max_tokens <= self.longest
        ids = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * each.max_tokens)]) for each in params]
        return ids
'''
SERVER = """
import argparse, threading
from tests.benchmark.openai_server import Stub, running
parser = argparse.ArgumentParser(allow_abbrev=False)
for name in ("host", "model", "load-format", "dtype"):
    parser.add_argument(f"--{name}", required=True)
for name in ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "kv-cache-memory-bytes"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, required=True)
parser.add_argument("--disable-uvicorn-access-log", action="store_true")
given = parser.parse_args()
with running(Stub(), given.port):
    print(f"Starting vLLM server on http://{given.host}:{given.port}", flush=True)
    threading.Event().wait()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "vllm/entrypoints/openai"
    folder.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text(LIBRARY)
    (folder / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def load(name: str, tmp_path: Path, num_requests: int = 8) -> Load:
    row = next(each for each in ROWS if each.name == name)
    return Load(row, tmp_path / "trace.jsonl", row.lines(512, num_requests))


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_both_serve_the_same_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rounds", "1", "--requests", "6", "--threads", "1", "--python", sys.executable]
    main(["beside", "--vllm", RECIPE, *SMALL, "--row", "at-once", "steady", "--rate", "50", *asked, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {*found["rows"]} == {"at-once", "steady"}
    for name, row in found["rows"].items():
        ours, theirs = row["ours"], row["vllm"]
        assert ours["output_tokens"] == theirs["output_tokens"] > 6 * 32
        assert min(ours["output_tokens_per_s"], theirs["output_tokens_per_s"]) > 0
        assert ("tpot_p99_ms" in ours) == ("tpot_p99_ms" in theirs) == (name == "steady")
        assert (row["ratio"] is None) == bool(row["unsaid"]), "other processes may keep this machine busy"
    assert found["rows"]["steady"]["sent_per_s"] == 50
    assert found["verdict"]["outcome"] == "pass"


def test_caches_have_room_for_all_and_share_prefixes_in_one_row_alone(tmp_path: Path) -> None:
    setting = Setting(read(RECIPE, SMALL).recipe, tmp_path, 1, {})
    shares = {}
    for name in BESIDE_ROWS:
        asked = load(name, tmp_path)
        needs = [len(each["prompt_token_ids"]) + each["max_tokens"] for each in asked.lines]
        theirs = VllmSide(setting, "python").engine(asked)
        token_bytes = 2 * 2 * 4 * 8 * 4  # keys and values of 2 layers, 4 heads of 8, float32
        assert theirs["kv_cache_memory_bytes"] >= token_bytes * sum(needs)
        assert theirs["max_model_len"] == max(needs)
        ours = dict(
            each.split("=", 1) for each in OwnSide(setting, RECIPE, SMALL)._given(asked) if "=" in each
        )
        assert (int(ours["cache.num_pages"]) - 1) * 16 * token_bytes == theirs["kv_cache_memory_bytes"]
        assert ours["cache.prefix_sharing"] == str(theirs["enable_prefix_caching"]).lower()
        shares[name] = theirs["enable_prefix_caching"]
    assert shares == {name: name == "shared" for name in BESIDE_ROWS}
    assert [each.name for each in ROWS] == [*BESIDE_ROWS]


def test_a_load_is_what_its_row_says(tmp_path: Path) -> None:
    long = load("long", tmp_path, 64).lines
    assert [(len(each["prompt_token_ids"]), each["max_tokens"]) for each in long] == [(4096, 128)] * 8
    heads = {tuple(each["prompt_token_ids"][:512]) for each in load("shared", tmp_path, 64).lines}
    assert len(heads) == 4
    assert load("burst", tmp_path).lines == load("at-once", tmp_path).lines == load("steady", tmp_path).lines


def test_a_counted_run_finds_no_prompt_of_its_own_computed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    asked = [{"id": str(n), "prompt_token_ids": [n, 9, 8], "max_tokens": 2} for n in range(3)]
    path.write_text("".join(json.dumps(each) + "\n" for each in asked))
    with running(Stub()) as stub:
        counted = beside_vllm.plan(Load(ROWS[1], path, asked), stub.url, math.inf)
        measure(before(counted))
        sent = [each["prompt"] for each in stub.asked]
    assert sorted(sent) == [[8, 9, n] for n in range(3)]


def run(rate: float, others: float = 0.01, late: str = "") -> dict[str, Any]:
    return {"output_tokens_per_s": rate, "requests_per_s": 1.0, "others": others, "late": late}


def test_a_ratio_is_of_medians() -> None:
    found = summary({"ours": [run(30.0), run(90.0), run(33.0)], "vllm": [run(22.0), run(20.0), run(5.0)]})
    assert found["ratio"] == 33 / 20
    assert (found["ours"]["spread"], found["unsaid"]) == (round(60 / 33, 4), "")


@pytest.mark.parametrize(
    ("bad", "why"), [(run(1.0, others=0.2), "others took 20%"), (run(1.0, late="it was late"), "it was late")]
)
def test_there_is_no_ratio_where_one_run_was_disturbed(bad: dict[str, Any], why: str) -> None:
    found = summary({"ours": [run(1.0), run(1.0)], "vllm": [run(1.0), bad]})
    assert found["ratio"] is None
    assert found["unsaid"].startswith(why)


class Short:
    """A side whose answers lack a token."""

    def at_once(self, asked: Load) -> tuple[float, int]:
        return 1.0, asked.output_tokens - 1

    def server(self, asked: Load) -> Any:
        raise AssertionError("this row is not served")


def test_an_answer_that_is_cut_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_vllm, "WATCH_S", 0.01)
    monkeypatch.setattr(beside_vllm, "SETTLE_S", 0.0)
    with pytest.raises(ValueError, match=r"at-once: \d+ tokens came of \d+ asked for"):
        turn(Short(), load("at-once", tmp_path), math.inf)


def test_a_signal_ends_an_engine_in_its_process(tmp_path: Path) -> None:
    """The engine sends the signal, so that it comes during the wait; its helper, with a pipe, ends too."""
    script = (
        "import os, signal, subprocess, time; pipe = open('pipe', 'wb');"
        "subprocess.Popen(['sleep', '600'], stdout=pipe); os.kill(os.getppid(), signal.SIGTERM);"
        "time.sleep(600)"
    ).replace("pipe'", f"{tmp_path}/pipe'")
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    before = signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("no one takes the signal"))
    try:
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            Setting(read(RECIPE).recipe, tmp_path, 1, {}).run("ours", [sys.executable, "-c", script], {})
        assert select.select([held], [], [], PATIENCE_S)[0], "someone still has the pipe"
        assert os.read(held, 1) == b""
    finally:
        signal.signal(signal.SIGTERM, before)
        os.close(held)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["recipes/bench/qwen3_8b_cuda.yaml"], "a CPU: device.kind=cpu"),
        (["--python", "/nonexistent/python"], "bash scripts/setup.sh vllm"),
        (["recipes/tiny/cpu.yaml"], "name a recipe with model.config"),
    ],
)
def test_what_cannot_be_compared_is_refused(given: list[str], said: str) -> None:
    recipe = [] if given[0].endswith(".yaml") else [RECIPE]
    with pytest.raises(ValueError, match=said):
        main(["beside", "--vllm", *recipe, *given])


def test_who_else_computes_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"

    def line(user: int, stolen: int) -> str:
        return f"cpu  {user} 0 0 900 5 0 0 {stolen} 0 0\ncpu0 1\n"

    stat.write_text(line(100, 0))
    monkeypatch.setattr("benchmark.run_record.STAT", stat)
    monkeypatch.setattr("benchmark.run_record.own_s", lambda: 0.0)
    monkeypatch.setattr("benchmark.run_record.os.cpu_count", lambda: 4)
    now_s = iter((10.0, 20.0))
    monkeypatch.setattr("benchmark.run_record.time.monotonic", lambda: next(now_s))
    others = OtherLoad()
    stat.write_text(line(300, 200))
    assert others.share() == pytest.approx((taken_s(line(300, 200)) - taken_s(line(100, 0))) / 40)
    assert taken_s(line(300, 200)) > taken_s(line(100, 0))
