"""Write a simulated run as trace events for the viewers of Chrome and Perfetto.

The format is the one in which `scripts.replay` writes a recording.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from continuous_batching.engine import Engine, Step

STEPS, SLOTS = 1, 2  # process numbers, by which the viewer groups
PROMPT, ANSWER = "prompt", "answer"


class TraceEventFile:
    """Writes each step to a file as it is made, so that nothing is kept; `close` ends the file.

    A slot shows the prompt and then the answer of the request that it holds.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_first = True
        self._stays: dict[int, tuple[str, str, float, float]] = {}  # row -> request, phase, since, until
        file.write('{"displayTimeUnit": "ms", "otherData": {"SIMULATED": "not measured"}, "traceEvents": [\n')
        for number, name in ((STEPS, "SIMULATED steps"), (SLOTS, "SIMULATED slots")):
            self._write({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})

    def observe(self, engine: Engine, step: Step) -> None:
        """Write one step."""
        batch, slots = step.batch, engine.slots
        if not batch.num_spans:
            return
        prompts = int(np.count_nonzero(batch.starts < slots.num_prompt[batch.slots]))
        args = {"spans": batch.num_spans, "tokens": batch.num_tokens, "spans of prompts": prompts}
        self.lane("step", 0, step.start_s, step.end_s, args)
        for name, count in (("tokens", batch.num_tokens), ("waiting", len(engine.scheduler.waiting))):
            self._write(
                {"ph": "C", "name": name, "pid": STEPS, "ts": 1e6 * step.start_s, "args": {name: count}}
            )
        for row, start in zip(batch.slots.tolist(), batch.starts.tolist()):
            name = slots.requests[row].id
            phase = PROMPT if start < slots.num_prompt[row] else ANSWER
            stay = self._stays.get(row)
            if stay is not None and stay[:2] == (name, phase):
                self._stays[row] = name, phase, stay[2], step.end_s
                continue
            self._leave(row)
            self._stays[row] = name, phase, step.start_s, step.end_s

    def lane(self, name: str, lane: int, start_s: float, end_s: float, args: dict[str, Any]) -> None:
        """Write something that took time, in one of the lanes above the slots."""
        self._write(
            {
                "ph": "X",
                "name": name,
                "pid": STEPS,
                "tid": lane,
                "ts": 1e6 * start_s,
                "dur": 1e6 * (end_s - start_s),
                "args": args,
            }
        )

    def close(self) -> None:
        """Write the requests that are still in a slot, and the end."""
        for row in list(self._stays):
            self._leave(row)
        self._file.write("\n]}\n")

    def _leave(self, row: int) -> None:
        stay = self._stays.pop(row, None)
        if stay is None:
            return
        name, phase, since_s, until_s = stay
        for event in _box(row, f"{name}: {phase}", since_s, until_s):
            self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write("" if self._is_first else ",\n")
        self._is_first = False
        self._file.write(json.dumps(event))


def _box(row: int, name: str, since_s: float, until_s: float) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "X",
        "name": name,
        "pid": SLOTS,
        "tid": row,
        "ts": 1e6 * since_s,
        "dur": 1e6 * (until_s - since_s),
        "args": {},
    }
