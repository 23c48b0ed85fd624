"""Run cases, compute their figures, and let the gate judge them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import as_completed
from typing import Any

from benchmark.gate.gate import with_verdict
from benchmark.processes import process_pool
from benchmark.reproduce.case import Case
from benchmark.simulate.deployment import SIMULATED, Deployment
from benchmark.simulate.placement import Placement, place
from recipes.schema.reader import read
from simulation.roofline import Roofline

Result = dict[str, Any]
Results = dict[str, Result]  # results by the label of the case
RECIPE = "recipes/bench/llama2_7b_cuda.yaml"  # Llama-2-7B has the shape of LLaMA-7B
KEYS = (  # Ascend 910 has no bfloat16; a prompt of 4,096 tokens needs room for its answer
    "model.dtype=float16",
    "device.graphs=0",
    "model.config.max_position_embeddings=8192",
    "scheduler.max_request_tokens=8192",
)
OBJECTIVES = {"ttft": 1000.0, "tpot": 50.0}  # milliseconds


def placement_of(case: Case) -> Placement:
    """Return the engine of a case; raises ValueError if it cannot run."""
    recipe = read(RECIPE, [*KEYS, *case.keys], None).recipe
    return place(recipe, case.device, case.tensor, case.pipeline)


def run(case: Case) -> Result:
    """Return the figures of one case, with their verdict and their records."""
    deployment = Deployment(placement_of(case), case.replicas, "least_loaded", case.split, "always")
    totals, own = deployment.serve(case.offered.trace(), None, records=True)
    figures = totals.figures()
    records = totals.records or []
    figures["itl_ms"]["max"] = round(1e3 * totals.itl.most_s, 3)
    good = num_good(records, **OBJECTIVES)
    return with_verdict(
        {
            "SIMULATED": SIMULATED,
            "case": case.label,
            "recipe": RECIPE,
            "overrides": [*KEYS, *case.keys],
            **deployment.placement.facts(),
            "devices": deployment.num_devices,
            "slots": deployment.num_slots,
            "max_tokens_per_step": 1,
            "warm_up_counted": 0,
            **figures,
            **own,
            "goodput": OBJECTIVES,
            "request_goodput": round(good / figures["duration_s"], 4),
            "records": records,
        }
    )


def num_good(records: Iterable[Result], ttft: float, tpot: float) -> int:
    """Return how many of the requests met both objectives, in milliseconds."""
    return sum(ttft_ms(each) <= ttft and tpot_ms(each) <= tpot for each in records)


def ttft_ms(record: Result) -> float:
    """Return the time from arrival to first token."""
    return 1e3 * float(record["first_token_s"] - record["arrival_s"])


def tpot_ms(record: Result) -> float:
    """Return the mean gap of an answer."""
    gaps = max(1, record["output_tokens"] - 1)
    return 1e3 * float(record["finish_s"] - record["first_token_s"]) / gaps


def run_all(cases: Iterable[Case], jobs: int, report: Callable[[str], None]) -> dict[Case, Result]:
    """Run each case once, in several processes; the results do not depend on the order in which they end."""
    wanted = sorted(dict.fromkeys(cases), key=_work, reverse=True)
    found: dict[Case, Result] = {}
    with process_pool(jobs) as pool:
        futures = {pool.submit(run, case): case for case in wanted}
        for number, future in enumerate(as_completed(futures), 1):
            case = futures[future]
            found[case] = future.result()
            outcome = found[case]["verdict"]["outcome"]
            report(f"{number}/{len(wanted)}  {outcome:8} {case.label}")
    return found


def _work(case: Case) -> int:
    return case.offered.requests * case.offered.answer_tokens


def alone_s(case: Case, num_tokens: int, chunk: int) -> float:
    """Return the seconds that a prompt alone takes on the engine, in chunks."""
    found = placement_of(case)
    roofline = found.costs()
    assert isinstance(roofline, Roofline), "nothing was fitted"
    layers, total_s = found.config.num_layers, 0.0
    for start in range(0, num_tokens, chunk):
        stop = min(num_tokens, start + chunk)
        pairs = layers * (stop - start) * (start + stop + 1) / 2
        total_s += roofline.time_s(stop - start, 1, int(stop == num_tokens), layers * stop, pairs)
    return total_s
