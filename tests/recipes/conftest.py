"""A good recipe to spoil, and the one line that the reader then says."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError

GOOD = """\
model:
  path: recipes/tiny/weights
device:
  kind: cpu
cache:
  page_size: 16
  num_pages: 64
scheduler:
  num_slots: 4
  max_batch_tokens: 64
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes r.yaml into an empty working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str = GOOD, name: str = "r.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def error(path: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text
