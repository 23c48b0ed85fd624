"""Compute the figures of a run, under the names that `vllm bench serve` gives them.

A latency X has `mean_X_ms`, `median_X_ms`, `std_X_ms` and percentiles such as `p99_X_ms`; X is ttft (first
piece), tpot ((last - first piece) / (tokens - 1)), itl (between two pieces) or e2el (last piece); ttft and
e2el count from when the request was sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmark.serve.client import ClientAnswer
from benchmark.serve.objectives import Objectives
from benchmark.serve.sending import ClientRun

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
PERCENTILES = (50, 90, 99)
Result = dict[str, object]


def latencies(done: Sequence[ClientAnswer], parts: Sequence[float]) -> tuple[Result, int]:
    """Return all four latencies in milliseconds, and the number of gaps between pieces."""
    gaps = [np.diff(each.piece_times_s) for each in done if len(each.piece_times_s) > 1]
    values_s = {
        "ttft": np.array([each.piece_times_s[0] - each.sent_s for each in done]),
        "tpot": np.array(
            [
                (each.piece_times_s[-1] - each.piece_times_s[0]) / (each.output_tokens - 1)
                for each in done
                if each.output_tokens > 1
            ]
        ),
        "itl": np.concatenate(gaps) if gaps else np.array([]),
        "e2el": np.array([each.piece_times_s[-1] - each.sent_s for each in done]),
    }
    figures: Result = {}
    for name, values in values_s.items():
        if len(values):
            figures[f"mean_{name}_ms"] = _ms(values.mean())
            figures[f"median_{name}_ms"] = _ms(np.median(values))
            figures[f"std_{name}_ms"] = _ms(values.std())
            found = np.percentile(values, parts)
            figures |= {f"p{part:g}_{name}_ms": _ms(value) for part, value in zip(parts, found)}
    return figures, len(values_s["itl"])


def summarise(run: ClientRun, objectives: Objectives | None, parts: Sequence[float] = PERCENTILES) -> Result:
    """Return rates, latencies, and what the gate needs beside them.

    Failed requests are counted, their tokens are not. The duration runs from the first request sent to the
    last piece or failure.
    """
    answers = sorted(run.answers, key=lambda each: each.sent_s)
    done = [each for each in answers if each.error is None]
    origin_s = answers[0].sent_s
    duration_s = max(_finish_s(each) for each in answers) - origin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_input = sum(each.prompt_tokens or 0 for each in done)
    num_output = sum(each.output_tokens for each in done)
    lens = [each.output_tokens for each in done]
    asked = [each.ask.max_tokens for each in answers]
    figures, num_gaps = latencies(done, sorted({*PERCENTILES, *parts}))
    due_s = sorted(each.ask.due_s for each in answers)
    spread_s = due_s[-1] - due_s[0]
    in_flight = round(sum(_finish_s(each) - each.sent_s for each in answers) * per_s, 4)
    good = None if objectives is None else [objectives.met(each) for each in answers]
    fluidity = None if objectives is None else objectives.fluidity(answers)
    with_cached = [each for each in done if each.cached_tokens is not None]
    asked_for = sum(each.prompt_tokens or 0 for each in with_cached)
    return {
        "duration": round(duration_s, 6),
        "num_prompts": len(answers),
        "completed": len(done),
        "failed": len(answers) - len(done),
        "rejected": sum(each.rejected for each in answers),
        "retried": sum(each.retries > 0 for each in answers),
        "ended_by": dict(Counter(sorted(str(each.finish_reason) for each in done))),
        "errors": kinds([each.error for each in answers if each.error is not None]),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": round(len(done) * per_s, 4),
        "output_throughput": round(num_output * per_s, 3),
        "total_token_throughput": round((num_input + num_output) * per_s, 3),
        **({} if good is None else {"request_goodput": round(sum(good) * per_s, 4)}),
        **({} if good is None else {"good_share": round(sum(good) / len(good), 4)}),
        **({} if fluidity is None else {"fluidity": round(fluidity, 4)}),
        **figures,
        "itl_gaps": num_gaps,
        **(
            {"prefix_hit_rate": round(sum(each.cached_tokens or 0 for each in with_cached) / asked_for, 4)}
            if asked_for
            else {}
        ),
        "mean_in_flight": in_flight,
        "max_concurrent_requests": run.most,
        # W is the time of answered requests.
        **({"mean_in_system": in_flight} if len(done) == len(answers) else {}),
        "offered_per_s": round((len(answers) - 1) / spread_s, 4) if spread_s > 0 else None,
        "least_output_tokens": min(lens, default=None),
        "most_output_tokens": max(lens, default=None),
        "asked_output_tokens": None if None in asked else sum(filter(None, asked)),
        "client": client(run),
    }


def kinds(errors: Sequence[str]) -> dict[str, int]:
    """Count errors that differ at most in their numbers and ids; each kind has the text of its first."""
    alike: dict[str, list[str]] = {}
    for error in errors:
        alike.setdefault(re.sub(r"(?<!HTTP )\b[\w.-]*\d[\w.-]*", "#", error), []).append(error)
    return {each[0]: len(each) for each in sorted(alike.values(), key=len, reverse=True)}


def client(run: ClientRun) -> Result:
    """Return how late the client itself was: sending what was due, and running its event loop."""
    late_s = [each.late_s for each in run.answers]
    cpu = run.passed["cpu_s"] / run.passed["monotonic_s"]
    return {
        "late_ms": _spread(late_s),
        "lag_ms": _spread(run.lags_s or [0.0]),
        "held_ms": _spread([each.held_s for each in run.answers]),
        "cpu_share": round(cpu, 4),
        "tokens_counted_by_pieces": sum(not each.from_usage for each in run.answers if each.error is None),
    }


def records(run: ClientRun) -> list[Result]:
    """Return a record of each request; times count from the first that was sent."""
    origin_s = min(each.sent_s for each in run.answers)
    return [_record(each, origin_s) for each in sorted(run.answers, key=lambda each: each.sent_s)]


def _record(answer: ClientAnswer, origin_s: float) -> Result:
    record: Result = {
        "id": answer.ask.id,
        "arrival_s": round(answer.sent_s - origin_s, 6),
        "end_s": round(answer.end_s - origin_s, 6),
        **({} if answer.due_s is None else {"due_s": round(answer.due_s - origin_s, 6)}),
        "late_ms": _ms(answer.late_s),
        "held_ms": _ms(answer.held_s),
        "max_tokens": answer.ask.max_tokens,
    }
    if answer.error is not None:
        return {**record, "finish_reason": "error", "error": answer.error}
    times_s = [round(each - origin_s, 6) for each in answer.piece_times_s]
    record |= {
        "first_token_s": times_s[0],
        "finish_s": times_s[-1],
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "finish_reason": answer.finish_reason,
        "piece_times_s": times_s,
    }
    if answer.cached_tokens is not None:
        record["cached_tokens"] = answer.cached_tokens
    if answer.piece_tokens is not None and set(answer.piece_tokens) != {1}:
        record["piece_tokens"] = answer.piece_tokens
    return record


def _finish_s(answer: ClientAnswer) -> float:
    return answer.end_s if answer.error is not None else answer.piece_times_s[-1]


def _spread(values_s: Sequence[float]) -> Result:
    p50, p99 = np.percentile(values_s, [50, 99])
    return {"p50": _ms(p50), "p99": _ms(p99), "max": _ms(max(values_s))}


def _ms(value_s: float) -> float:
    return round(float(value_s) * 1e3, 3)
