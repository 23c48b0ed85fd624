"""Files that no engine can serve are refused in words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from recipes.assembly.engine import build
from recipes.schema.reader import load
from serving.text.tokenizer import Text
from tests.serving.damage import WEIGHTS, Damage, cut, kinds
from tests.serving.server import TINY, Server
from tests.test_imports import ROOT


def use(path: Path) -> None:
    recipe = load(TINY, [f"model.path={path}", "cache.num_pages=64"])
    Text.load(path)
    build(recipe)


def refusal(folder: Path, damage: Damage) -> str:
    path = folder / "weights"
    shutil.copytree(ROOT / "recipes/tiny/weights", path)
    damage(path)
    try:
        use(path)
    except (ValueError, OSError) as error:
        return str(error)
    finally:
        shutil.rmtree(path)
    return "served"


def test_a_hundred_kinds_of_damage_are_refused(tmp_path: Path) -> None:
    said = {name: refusal(tmp_path, damage) for name, damage in kinds()}
    assert len(said) >= 100
    assert all(len(line) > 20 for line in said.values()), said


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_the_server_in_words(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    shutil.copytree(ROOT / "recipes/tiny/weights", path)
    cut(WEIGHTS, 0.5)(path)
    server = Server(TINY, f"model.path={path}")
    assert server.wait() == 1
    assert any("cannot be read as safetensors" in line for line in server.log)
    assert not any("Traceback" in line for line in server.log)
