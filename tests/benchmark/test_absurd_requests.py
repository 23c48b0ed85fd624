"""Every absurd number in a trace is refused with the number of its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.serve.client import read_requests
from serving.offline import read_jobs

ABSURD: list[Any] = [-1, 1e300, 10**400, "12", True, [], {}, [[]], "x" * 10_000]


@pytest.mark.parametrize("key", ["arrival_s", "max_tokens", "n", "prompt_token_ids"])
@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:8])
def test_an_absurd_value_is_refused_by_its_line(key: str, value: Any, tmp_path: Path) -> None:
    fields = {"id": "a", "prompt_token_ids": [1], key: value}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    if not (key == "n" and value is True):  # which Python takes for 1
        with pytest.raises(ValueError, match="line 1: ") as refusal:
            read_requests(path, skip_bad=False)
        assert len(str(refusal.value)) < 400
    (record,) = read_jobs([json.dumps(fields)], None)
    assert "line 1: " in record["error"]
    assert len(record["error"]) < 400
