"""The command tells what the gate says, by its words and by how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.audit import main
from tests.simulation.queue import honest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "result.json"


def test_a_result_passes_or_is_refused_with_the_law_and_the_numbers(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = honest(1)
    file.write_text(json.dumps(result))
    assert main([str(file)]) == 0
    assert "refused" not in capsys.readouterr().out
    file.write_text(json.dumps(result | {"offered_per_s": 0.5}))
    assert main([str(file)]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("refused        served <= offered  requests_per_s is ")
    assert "above offered_per_s, 0.5" in line
    assert main([str(file), "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["outcome"] == "refused"
    assert list(verdict["refused"]) == ["served <= offered", "recount"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[1]", "holds no object"), ("{}", "no law can be checked")],
)
def test_an_unusable_file_is_said_to_be_one(content: str, message: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"result.json.*{message}"):
        main([str(file)])
