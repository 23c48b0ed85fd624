"""Clients that people have, unmodified: those of `scripts.clients`, lm-eval and guidellm, and more of some.

They live in an environment of their own, which `bash scripts/setup.sh clients` makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from tests.lazy import transformers
from tests.patience import PATIENCE_S
from tests.serving.clients.__main__ import main as table_of_clients
from tests.serving.clients.tried import CLIENTS
from tests.serving.server import Server
from tests.test_imports import ROOT

APART = ROOT / ".venv/clients"
PYTHON = APART / "bin/python"
SCRIPTS = ROOT / "tests/serving/clients"
WEIGHTS = ROOT / "recipes/tiny/weights"

needs_clients = pytest.mark.skipif(
    not (APART / "bin/guidellm").exists(),
    reason="there is no .venv/clients; run `bash scripts/setup.sh clients`",
)
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (APART / "node_modules/openai").exists(),
    reason="there is no node, or no openai for it in .venv/clients; run `bash scripts/setup.sh clients`",
)


def run(*command: str | Path, folder: Path) -> str:
    """What a client says; its complaints, if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@needs_clients
@needs_node
@pytest.mark.slow
def test_every_client_is_served() -> None:
    """The command prints its table, and ends with 0 only if each client got what it asked for."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.clients"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split("`")[1] for line in done.stdout.splitlines() if line.startswith("| `")}
    assert {*CLIENTS} < said
    assert "ai+@ai-sdk/anthropic (npm)" in said


def test_the_clients_are_looked_for_before_a_server_is_started(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=r"bash scripts/setup\.sh clients"):
        table_of_clients(["--environment", str(tmp_path)])


@pytest.fixture(scope="module")
def evaluated(shared: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-eval found."""
    out = run(PYTHON, SCRIPTS / "evaluate.py", shared.url, folder=tmp_path_factory.mktemp("lm_eval"))
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@needs_clients
@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["own", "remote"])
def test_lm_eval_finds_the_likelihoods_of_the_model(evaluated: dict[str, Any], tokenizer: str) -> None:
    """Those that transformers computes, by a log-softmax over its own logits."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(WEIGHTS / "tokenizer.model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    samples = evaluated[tokenizer]["samples"]["tiny_sums"]
    assert len(samples) == 4
    for sample in samples:
        question = pieces.encode(sample["doc"]["question"])
        for choice, (told,) in zip(sample["doc"]["choices"], sample["told"]):
            whole = [1, *pieces.encode(sample["doc"]["question"] + choice)]
            assert whole[: len(question) + 1] == [1, *question]
            answer = torch.tensor(whole[len(question) + 1 :])
            with torch.no_grad():
                rows = model(torch.tensor([whole])).logits[0, len(question) : -1].log_softmax(-1)
            likelihood = rows.gather(1, answer[:, None]).sum()
            assert told[0] == pytest.approx(float(likelihood), abs=1e-3)
            assert told[1] == bool((rows.argmax(-1) == answer).all())


@needs_clients
@pytest.mark.slow
def test_lm_eval_finds_the_answers_right(evaluated: dict[str, Any]) -> None:
    for way in ("own", "remote"):
        assert evaluated[way]["results"]["tiny_sums"]["acc,none"] == 1.0
        assert evaluated[way]["results"]["tiny_answers"]["exact_match,none"] == 1.0
    assert evaluated["chats"]["results"]["tiny_chats"]["exact_match,none"] == 1.0


@needs_clients
@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures(shared: Server, tmp_path: Path, path: str) -> None:
    run(
        *(PYTHON, "-m", "guidellm", "run"),
        *("--backend", f"kind=openai_http,target={shared.url},request_format={path}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", "kind=max_requests,count=12"),
        *("--tokenizer", f"kind=hf_auto,model={WEIGHTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=12"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        "--disable-console",
        folder=tmp_path,
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (12, 0, 0)
    counts = {each["output_metrics"]["text_tokens"] for each in benchmark["requests"]["successful"]}
    assert counts == {12}
