"""What does the gate say of a result?"""

from __future__ import annotations

from benchmark.gate.gate import audit

Result = dict[str, object]


def with_verdict(result: Result) -> Result:
    """The result with what the gate says of it, and its records last."""
    kept = result.pop("records", None)
    verdict = audit(result if kept is None else {**result, "records": kept}).describe()
    return {**result, "verdict": verdict, **({} if kept is None else {"records": kept})}
