"""The change that an int8 cache makes to log-probabilities is measured, and it is small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.micro import kv
from scripts.benchmark import main


def test_log_probabilities_and_attention_move_a_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("876+141=1017\n716+127=843\n7+46=53\n", encoding="utf-8")
    main(["kv", "--types", "--text", str(text), "--json"])
    result = json.loads(capsys.readouterr().out)
    distance = {row["type"]: row["distance"] for row in result["texts"]}
    assert distance["float32"] == 0
    assert 0 < distance["float32, cache in int8"] < 0.1
    assert 0 < distance["bfloat16, cache in int8"] < 0.2
    for row in result["attention"]:
        assert 0 < row["bfloat16"] < row["int8"] < (0.02 if row["keys"] == "normal" else 0.1)
        assert row["row_bytes"] == row["head_dim"] + 4
    kv.print_types(result)
    assert "| bfloat16, cache in int8 |" in capsys.readouterr().out


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(
        ValueError, match="has no tokenizer, so that no text can be scored; name another model"
    ):
        main(["kv", "--types", "--model", str(tmp_path)])
