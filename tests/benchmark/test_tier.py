"""Does the benchmark of tiers start servers that find their pages, and those that cannot?"""

from __future__ import annotations

import json

import pytest

from scripts.benchmark import main
from tests.serving.server import TINY


@pytest.mark.slow
def test_a_server_with_a_folder_finds_what_one_without_computes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--prompts", "2", "--lengths", "40,100", "--entry-kib", "4", "--json")
    main(["serve", "--tier", TINY, "cache.host_gib=0.05", *small])
    found = json.loads(capsys.readouterr().out)["tier"]
    for length, tokens in (("40", 32), ("100", 96)):
        assert found["ways"]["none"][length]["found"] == 0
        assert found["ways"]["disk"][length]["found"] == 2 * tokens
    assert min(found["stores"]["disk"].values()) > 0
