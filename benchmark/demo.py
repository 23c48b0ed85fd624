"""Serve one trace by the tiny model in static and in continuous batches."""

from __future__ import annotations

import gc
import random
from typing import Any

from benchmark.offline.offline import serve
from benchmark.options import Column
from benchmark.run_record import Timeline, summarise
from recipes.assembly.engine import build
from recipes.schema.reader import read
from recipes.tiny.corpus import demo_requests
from serving.answers.jobs import Job
from serving.offline import Record
from serving.text.request_fields import parse_request, text_options
from serving.text.tokenizer import Text

RECIPE = "recipes/tiny/cpu.yaml"
NUM_SLOTS = 16
RUNS = {
    "static batching": [
        "scheduler.policy=static",
        f"scheduler.batch_size={NUM_SLOTS}",
        "scheduler.max_wait_ms=500",
    ],
    "continuous batching": ["scheduler.policy=stall_free"],
}
TWO_DIGITS = "{:,.2f}"
ROWS = (  # rows of the table: figures of `summarise`
    Column("requests_per_s", "requests/s", TWO_DIGITS),
    Column("output_tokens_per_s", "output tokens/s", TWO_DIGITS),
    Column("ttft_ms.p50", "time to first token, p50, ms", TWO_DIGITS),
    Column("ttft_ms.p99", "time to first token, p99, ms", TWO_DIGITS),
    Column("tpot_ms.p50", "time per output token, p50, ms", TWO_DIGITS),
    Column("tpot_ms.p99", "time per output token, p99, ms", TWO_DIGITS),
    Column("e2e_ms.p50", "whole request, p50, ms", TWO_DIGITS),
    Column("mean_batch", "mean batch, requests", TWO_DIGITS),
    Column("mean_page_use", "pages in use, mean share", TWO_DIGITS),
    Column("prefix_hit_rate", "prompt tokens found cached, share", TWO_DIGITS),
)


def trace(num_requests: int, rate_per_s: float, text: Text) -> list[Job]:
    """Return chats that arrive by a Poisson process, the same ones at every call."""
    arrivals, at_s = random.Random(7), 0.0
    jobs = []
    for number, messages in enumerate(demo_requests(num_requests, seed=7)):
        fields = {
            "id": f"{number}",
            "messages": messages,
            "max_tokens": 96,
            "temperature": 0,
            "arrival_s": at_s,
        }
        jobs.append(Job(parse_request(fields, text), text_options(fields)))
        at_s += arrivals.expovariate(rate_per_s)
    return jobs


def run(
    overrides: list[str], num_requests: int, rate_per_s: float
) -> tuple[dict[str, Any], Timeline, list[Record], float]:
    """Run one way of batching; returns figures, timeline, answers, and when the first request came."""
    recipe = read(RECIPE, [f"scheduler.num_slots={NUM_SLOTS}", *overrides]).recipe
    text = Text.load(recipe.model.path) if recipe.model.path else None
    assert text is not None, f"{RECIPE} names a model with a tokenizer"
    engine = build(recipe).engine
    serve(engine, text, trace(8, 1e9, text))  # warms caches; not counted
    engine.forget_prefixes()
    gc.collect()
    jobs = trace(num_requests, rate_per_s, text)
    timeline, records = serve(engine, text, jobs)
    requests = [job.request for job in jobs]
    return summarise(engine, requests, timeline), timeline, records, min(r.arrival_s for r in requests)


def print_answers(num_requests: int, records: list[Record], count: int) -> None:
    """Print the first few questions with the model's answers."""
    answers = {record["id"]: record for record in records}
    for number, messages in enumerate(demo_requests(num_requests, seed=7)[:count]):
        print(f"  {messages[-1]['content']}\n    -> {answers[str(number)]['text'].strip()}")
