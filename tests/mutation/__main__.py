"""Would a test notice if this were wrong?

Plants one fault after the other in a copy of the tree and runs the fast tests there, cheapest first, until
one fails. Prints which test killed which fault; the status is 1 if a fault survives, or if its place in the
code is no longer found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from recipes.schema import verb
from tests.mutation.aclop_faults import ACLOP_FAULTS, ACLOP_TESTS_OF
from tests.mutation.adapter_faults import ADAPTER_FAULTS, ADAPTER_TESTS_OF
from tests.mutation.answer_faults import ANSWER_FAULTS, ATTENTION, SAMPLES
from tests.mutation.batch_faults import BATCH_FAULTS, BATCH_TESTS_OF
from tests.mutation.beam_search_faults import BEAMS, SEARCH_FAULTS, SEARCHES
from tests.mutation.cache_faults import CACHE_FAULTS, RUNNER, STORAGE
from tests.mutation.channel_faults import CHANNEL_FAULTS, CHANNEL_TESTS_OF
from tests.mutation.dispatch_faults import DISPATCH_FAULTS, DISPATCH_TESTS_OF
from tests.mutation.draft_faults import DRAFT_FAULTS, DRAFT_TESTS_OF
from tests.mutation.draft_model_faults import DRAFT_MODEL_FAULTS, DRAFT_MODEL_TESTS_OF
from tests.mutation.exchange_faults import EXCHANGE_FAULTS, EXCHANGE_TESTS_OF
from tests.mutation.fault import Fault
from tests.mutation.gemma3_faults import GEMMA3_FAULTS, GEMMA3_TESTS_OF
from tests.mutation.gpt_oss_faults import GPT_OSS_FAULTS, GPT_OSS_TESTS_OF
from tests.mutation.grammar_faults import GRAMMAR_FAULTS, GRAMMAR_TESTS_OF
from tests.mutation.graph_faults import GRAPH_FAULTS, GRAPH_TESTS_OF
from tests.mutation.hccl_faults import HCCL_FAULTS, HCCL_TESTS_OF
from tests.mutation.head_faults import HEAD_FAULTS, HEAD_TESTS_OF
from tests.mutation.host_tier_faults import HOST_TIER_FAULTS
from tests.mutation.in_flight_faults import FLIGHT_FAULTS
from tests.mutation.int4_faults import INT4_FAULTS, INT4_TESTS_OF
from tests.mutation.int8_faults import INT8_FAULTS, INT8_TESTS_OF
from tests.mutation.latent_faults import LATENT_FAULTS, LATENT_TESTS_OF
from tests.mutation.mixture_faults import MIXTURE_FAULTS, MIXTURE_TESTS_OF
from tests.mutation.mtp_faults import MTP_FAULTS, MTP_TESTS_OF
from tests.mutation.npu_faults import NPU_FAULTS, NPU_TESTS_OF
from tests.mutation.own_processor_faults import PROCESSOR_FAULTS, PROCESSOR_TESTS_OF
from tests.mutation.packing_faults import PACKING_FAULTS, PACKING_TESTS_OF
from tests.mutation.paging_faults import PAGING_FAULTS
from tests.mutation.prefix_faults import PREFIX_FAULTS
from tests.mutation.prompt_logprob_faults import FOLLOWERS, POOLING, PROMPT_FAULTS, PROMPTS, REQUEST
from tests.mutation.queue_faults import OUTRANK, QUEUE_FAULTS, QUEUES
from tests.mutation.rank_faults import RANK_FAULTS, RANK_TESTS_OF
from tests.mutation.response_faults import RESPONSE_FAULTS, RESPONSE_TESTS_OF
from tests.mutation.routing_faults import ROUTING_FAULTS, ROUTING_TESTS_OF
from tests.mutation.scaling_faults import SCALING_FAULTS, SCALING_TESTS_OF
from tests.mutation.schedule_faults import SCHEDULE_FAULTS
from tests.mutation.score_faults import SCORE_FAULTS, SCORE_TESTS_OF
from tests.mutation.speculation_faults import SPECULATION_FAULTS, SPECULATION_TESTS_OF
from tests.mutation.split_faults import SPLIT_FAULTS, SPLIT_TESTS_OF
from tests.mutation.spread_faults import SPREAD_FAULTS, SPREAD_TESTS_OF
from tests.mutation.tensor_faults import TENSOR_FAULTS, TENSOR_TESTS, TENSOR_TESTS_OF
from tests.mutation.tier_faults import TIER_FAULTS, TIER_TESTS_OF
from tests.mutation.tool_faults import TOOL_FAULTS, TOOL_TESTS_OF

ROOT = Path(__file__).resolve().parents[2]
GROUPS = (
    CACHE_FAULTS,
    PREFIX_FAULTS,
    HOST_TIER_FAULTS,
    TIER_FAULTS,
    PAGING_FAULTS,
    SCHEDULE_FAULTS,
    DRAFT_FAULTS,
    DRAFT_MODEL_FAULTS,
    HEAD_FAULTS,
    SEARCH_FAULTS,
    FLIGHT_FAULTS,
    QUEUE_FAULTS,
    ROUTING_FAULTS,
    EXCHANGE_FAULTS,
    SPLIT_FAULTS,
    SCALING_FAULTS,
    ANSWER_FAULTS,
    PROMPT_FAULTS,
    NPU_FAULTS,
    ACLOP_FAULTS,
    GRAMMAR_FAULTS,
    TOOL_FAULTS,
    CHANNEL_FAULTS,
    RESPONSE_FAULTS,
    BATCH_FAULTS,
    PROCESSOR_FAULTS,
    ADAPTER_FAULTS,
    GRAPH_FAULTS,
    HCCL_FAULTS,
    MTP_FAULTS,
    INT8_FAULTS,
    SPECULATION_FAULTS,
    RANK_FAULTS,
    TENSOR_FAULTS,
    MIXTURE_FAULTS,
    LATENT_FAULTS,
    PACKING_FAULTS,
    INT4_FAULTS,
    SPREAD_FAULTS,
    DISPATCH_FAULTS,
    GEMMA3_FAULTS,
    SCORE_FAULTS,
    GPT_OSS_FAULTS,
)
FAULTS = {name: fault for group in GROUPS for name, fault in group.items()}
ROOMS = tuple(path.parent.name for path in sorted(ROOT.glob("*/__init__.py")))

BATCHING, CACHE = "tests/continuous_batching/", "tests/kv_cache/"
HOST_TESTS = (
    *(
        CACHE + name
        for name in ("test_pages.py", "test_prefix_cache.py", "test_lookups.py", "test_host_tier.py")
    ),
    *(
        BATCHING + name
        for name in (
            "test_tier.py",
            "test_scheduler.py",
            "test_drafts.py",
            "test_slot_lifecycle.py",
            "test_in_flight.py",
            "test_overlap.py",
        )
    ),
    *(
        BATCHING + name
        for name in (
            "test_host_tier.py",
            "test_host_tier_schedules.py",
            "test_tier_schedules.py",
            "test_small_pools.py",
        )
    ),
    CACHE + "test_model.py",
    BATCHING + "test_machine.py",
    BATCHING + "test_weak_keys.py",
    BATCHING + "test_beam_search.py",
    BATCHING + "test_draft_model.py",
    BATCHING + "test_depth.py",
)
QUEUE_TESTS = tuple(
    BATCHING + name
    for name in ("test_policies.py", "test_ordering.py", "test_limits.py", "test_adaptive_prefill_budget.py")
)
PROMPT_TESTS, POOLING_TESTS = (f"tests/models/test_{name}.py" for name in ("prompt_logprobs", "pooling"))
DEVICE_TESTS = (
    CACHE + "test_storage.py",
    CACHE + "test_poison.py",
    "tests/attention/test_atb.py",
    "tests/attention/test_int8_pages.py",
)
TESTS_OF = {  # all others: HOST_TESTS
    **dict.fromkeys(QUEUES, QUEUE_TESTS),
    **dict.fromkeys((REQUEST, FOLLOWERS), (*HOST_TESTS, PROMPT_TESTS, POOLING_TESTS)),
    PROMPTS: (PROMPT_TESTS,),
    POOLING: (POOLING_TESTS, "tests/serving/test_scores.py"),
    OUTRANK: (BATCHING + "test_ordering.py", *HOST_TESTS),
    STORAGE: DEVICE_TESTS,
    RUNNER: (*DEVICE_TESTS, *TENSOR_TESTS, "tests/models/test_captured_drafts.py"),
    ATTENTION: ("tests/attention/test_attention.py", "tests/attention/test_cpu.py"),
    SAMPLES: ("tests/serving/test_samples.py",),
    BEAMS: (BATCHING + "test_beam_scoring.py", BATCHING + "test_beam_search.py"),
    SEARCHES: (BATCHING + "test_beam_search.py",),
    **DRAFT_TESTS_OF,
    **DRAFT_MODEL_TESTS_OF,
    **HEAD_TESTS_OF,
    **NPU_TESTS_OF,
    **ACLOP_TESTS_OF,
    **GRAMMAR_TESTS_OF,
    **TOOL_TESTS_OF,
    **CHANNEL_TESTS_OF,
    **RESPONSE_TESTS_OF,
    **BATCH_TESTS_OF,
    **PROCESSOR_TESTS_OF,
    **ADAPTER_TESTS_OF,
    **ROUTING_TESTS_OF,
    **SPLIT_TESTS_OF,
    **EXCHANGE_TESTS_OF,
    **SCALING_TESTS_OF,
    **GRAPH_TESTS_OF,
    **HCCL_TESTS_OF,
    **MTP_TESTS_OF,
    **INT8_TESTS_OF,
    **SPECULATION_TESTS_OF,
    **RANK_TESTS_OF,
    **TENSOR_TESTS_OF,
    **MIXTURE_TESTS_OF,
    **LATENT_TESTS_OF,
    **PACKING_TESTS_OF,
    **INT4_TESTS_OF,
    **SPREAD_TESTS_OF,
    **DISPATCH_TESTS_OF,
    **GEMMA3_TESTS_OF,
    **SCORE_TESTS_OF,
    **GPT_OSS_TESTS_OF,
    **TIER_TESTS_OF,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tests said about one fault."""

    fault: Fault | None  # None: the tree as it is, which has to pass
    killer: str  # the test that failed; empty if none did
    problem: str  # why there is no verdict, or empty
    seconds: float

    @property
    def is_good(self) -> bool:
        """Whether a fault was killed, or the sound tree passed."""
        return not self.problem and bool(self.killer) == (self.fault is not None)


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    chosen = {name: FAULTS[name] for name in FAULTS if not arguments.only or name in arguments.only}
    unknown = set(arguments.only or ()) - FAULTS.keys()
    if unknown:
        raise ValueError(f"there is no fault called {', '.join(sorted(unknown))}; --list names them")
    if arguments.list:
        for name, fault in chosen.items():
            print(f"{name:36} {fault.place:60} {fault.why}")
        return 0
    bad = 0
    judged = outcomes([*chosen.values()], arguments.jobs, arguments.timeout_s)
    for name, outcome in zip(("(no fault)", *chosen), judged):
        verdict = outcome.problem or (f"killed by {outcome.killer}" if outcome.killer else "survived")
        mark = " " if outcome.is_good else "!"
        print(f"{mark} {name:36} {outcome.seconds:6.1f} s  {verdict}", flush=True)
        bad += not outcome.is_good
    print(
        f"{len(chosen)} faults; {bad} without a test that kills them"
        if bad
        else f"{len(chosen)} faults killed"
    )
    return 1 if bad else 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(prog="python -m scripts.mutants", description=__doc__)
    options.add_argument("--only", action="append", metavar="NAME", help="this fault; may be given again")
    options.add_argument("--list", action="store_true", help="say what the faults are, and run nothing")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="faults at once (the cores)")
    options.add_argument("--timeout-s", type=float, default=300.0, help="seconds for the tests of one fault")
    return options


def outcomes(faults: Sequence[Fault], jobs: int, timeout_s: float) -> Iterator[Outcome]:
    """What becomes of each fault, in their order, the sound tree before them."""
    with ThreadPoolExecutor(jobs) as workers:
        sets = dict.fromkeys(tests_of(fault) for fault in faults)
        every = tuple(dict.fromkeys(test for tests in sets for test in tests))
        sound = workers.submit(judge, None, every, timeout_s * len(sets))  # it runs them all
        found = workers.map(lambda fault: judge(fault, tests_of(fault), timeout_s), faults)
        yield sound.result()
        yield from found


def tests_of(fault: Fault) -> tuple[str, ...]:
    """The files of tests that are to kill it."""
    return TESTS_OF.get(fault.file, HOST_TESTS)


def judge(fault: Fault | None, tests: Sequence[str], timeout_s: float) -> Outcome:
    """Run the tests in a copy of the tree that has this fault."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy_tree(Path(folder))
        try:
            if fault is not None:
                fault.plant(Path(folder))
            killer, problem = run_tests(Path(folder), tests, timeout_s)
        except ValueError as error:
            killer, problem = "", str(error)
    return Outcome(fault, killer, problem, time.monotonic() - start_s)


def copy_tree(folder: Path) -> None:
    """Copy what the tests need."""
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder: Path, tests: Sequence[str], timeout_s: float) -> tuple[str, str]:
    """The test that fails first, and what stood in the way of a verdict; empty for none."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    command += ["-m", "not slow", "--hypothesis-profile=no_shrink", "--tb=no", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"no verdict within {timeout_s:g} s"
    failed = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.MULTILINE)  # also in a fixture
    if done.returncode == 0:
        return "", ""
    if done.returncode == 1 and failed:
        return failed[0], ""
    return "", f"the tests did not run: {(done.stdout + done.stderr).strip()[-300:]}"


if __name__ == "__main__":
    verb.run(main)
