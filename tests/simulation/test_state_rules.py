"""The tokens computed for each place of kept states agree by hand, by a loop, and by the real scheduler."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmark.simulate.states import PEERS, scheduler
from benchmark.verbs import simulate
from simulation import shared_prompts
from simulation.shared_prompts import WORKLOADS, Turn, few_shot
from simulation.state_rules import (
    SGLANG,
    STATE_BYTES,
    STATELESS,
    TOKEN_BYTES,
    UNBOUNDED,
    VLLM,
    VLLM_BRANCHES,
    SplitMemory,
    foreseen_share,
    ruled_share,
    served_share,
)
from tests.thorough import first_quick

ROOMY = SplitMemory(2**20, 2**10)


def drawn(name: str, count: int) -> list[Turn]:
    return WORKLOADS[name](np.random.default_rng(7), count)


def test_shared_examples_are_computed_as_counted_by_hand() -> None:
    """Of 2,300 tokens 2,000 are shared: 15 pages of 128, 3 blocks of 528, 31 of 64."""
    turns, total = few_shot(np.random.default_rng(7), 20), 20 * 2300
    assert ruled_share(turns, STATELESS, UNBOUNDED) == (2300 + 19 * (2300 - 15 * 128)) / total
    # The second prompt finds the state at a half of the first, and leaves one where it parts from it
    computed = 2300 + 2300 - 8 * 128 + 18 * (2300 - 15 * 128)
    assert served_share(turns, scheduler(turns, ROOMY, 1)) == computed / total
    assert ruled_share(turns, SGLANG, ROOMY) == (2 * 2300 + 18 * (2300 - 31 * 64)) / total
    # A step of 2,048 tokens ends in block 3, whose end all share: 1,584 tokens are found from the second on
    for rule in (VLLM, VLLM_BRANCHES):
        assert ruled_share(turns, rule, ROOMY) == (2300 + 19 * (2300 - 3 * 528)) / total


def test_a_prompt_shorter_than_a_block_is_never_found() -> None:
    tokens = np.arange(500, dtype=np.int32)
    turns = [Turn(0, tokens, tokens[:4])] * 4
    assert ruled_share(turns, VLLM_BRANCHES, ROOMY) == 1.0
    # The last page of 128 tokens holds the last token, which is computed again
    assert served_share(turns, scheduler(turns, ROOMY, 1)) == (500 + 3 * (500 - 384)) / 2000


@pytest.mark.parametrize("name", first_quick(1, sorted({*WORKLOADS} - {"few-shot"})))
def test_the_scheduler_is_near_the_bound_where_memory_is_ample(name: str) -> None:
    turns = drawn(name, 2)
    bound = ruled_share(turns, STATELESS, UNBOUNDED)
    share = served_share(turns, scheduler(turns, ROOMY, 2))
    # Two prompts may be computed whole before the branch that they share is seen
    assert bound <= share <= bound + 2 / len(turns)
    assert all(bound <= ruled_share(turns, rule, ROOMY) + 0.05 for rule in PEERS)


def test_a_page_that_has_gone_takes_its_state_along() -> None:
    first, second = (np.full(300, each, dtype=np.int32) for each in (1, 2))
    turns = [Turn(each, prompt, prompt[:4]) for each, prompt in enumerate((first, second, first))]
    assert ruled_share(turns, SGLANG, SplitMemory(4 * 64, 8)) == 1.0
    assert ruled_share(turns, SGLANG, SplitMemory(8 * 64, 8)) == (300 + 300 + 300 - 4 * 64) / 900
    # One state is left beside the two that an engine holds for what runs, and the second prompt takes it
    assert ruled_share(turns, SGLANG, SplitMemory(8 * 64, 3)) == 1.0


def test_whoever_foresees_the_turns_keeps_what_is_wanted_soonest() -> None:
    """Of two beginnings of four pages that return, the first is wanted first; else both are computed."""
    texts = [np.arange(each, each + 600, dtype=np.int32) for each in (0, 1000, 2000, 0, 1000)]
    turns = [Turn(at, np.append(text, np.int32(at)), text[:4]) for at, text in enumerate(texts)]
    total, part = 5 * 601, 512 * TOKEN_BYTES + STATE_BYTES
    for num_bytes, found in ((part - 1, 0), (part, 512), (2 * part - 1, 512), (2 * part, 1024)):
        assert foreseen_share(turns, num_bytes) == 1 - found / total


@pytest.mark.slow
def test_one_command_compares_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*WORKLOADS]:
        if name in ("few-shot", "documents"):
            monkeypatch.setitem(shared_prompts.FULL_COUNTS, name, 2)
        else:
            monkeypatch.delitem(shared_prompts.WORKLOADS, name)
    asked = ["states", "--memory-gib", "8", "--seeds", "7"]
    simulate([*asked, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [each["workload"] for each in rows] == ["few-shot", "documents"]
    turns = drawn("few-shot", 2)
    expected = served_share(turns, scheduler(turns, SplitMemory.split(8 * 2**30, 0.3), 8))
    assert rows[0]["ours"]["0.3"] == round(expected, 4)
    simulate(asked)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("SIMULATED")
    assert len(lines) == 3 + len(rows)
