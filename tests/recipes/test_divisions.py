"""The page on many devices says what goes with what, as the checks of a recipe decide it."""

from __future__ import annotations

import pytest

from recipes import divisions
from recipes.__main__ import main
from recipes.schema.recipe import ROOT


@pytest.mark.slow
def test_the_page_has_the_table_that_the_checks_make(capsys: pytest.CaptureFixture[str]) -> None:
    """Else replace the table by what `python -m recipes divisions` prints."""
    main(["divisions"])
    table = capsys.readouterr().out
    assert table in (ROOT / "docs/cluster.md").read_text()
    assert table.count("| yes") > len(divisions.FEATURES), "nothing is refused because of the model itself"
    for feature, settings in divisions.FEATURES.items():
        assert f"| {feature} | " in table, settings
