"""A placement of experts balances what was counted, and an engine obeys it."""

from __future__ import annotations

import json
import random
import re
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from models.parallel.placement import balanced, imbalance
from recipes.assembly.families import share_of
from recipes.cluster.rank_process import common
from recipes.schema.reader import load
from recipes.schema.recipe_error import RecipeError
from scripts.place import main
from tests.each_of import each_of
from tests.recipes.published import QWEN3_30B_A3B
from tests.serving.server import TINY

SPREAD = ("parallel.tensor=2", "parallel.expert=2")
CPU = ("device.compile=false", "device.threads=1")


@pytest.mark.parametrize(
    ("counts", "parts", "order", "before", "after"),
    [
        ([5, 5, 5, 5], 2, (0, 2, 1, 3), 1.0, 1.0),
        ([8, 8, 1, 1], 2, (0, 2, 1, 3), 16 / 9, 1.0),
        (
            [9, 1, 1, 1],
            2,
            (0, 3, 1, 2),
            10 / 6,
            10 / 6,
        ),  # the second expert goes where less is, and then fills
        ([7, 6, 5, 4, 3, 2], 3, (0, 5, 1, 4, 2, 3), 13 / 9, 1.0),
        ([0, 0, 0, 0], 4, (0, 1, 2, 3), 1.0, 1.0),
        ([3, 0, 0, 0, 0, 0], 2, (0, 4, 5, 1, 2, 3), 2.0, 2.0),
    ],
)
def test_the_most_chosen_go_to_the_least_loaded_rank_with_room(
    counts: list[int], parts: int, order: tuple[int, ...], before: float, after: float
) -> None:
    assert balanced(counts, parts) == order
    assert imbalance(counts, range(len(counts)), parts) == pytest.approx(before)
    assert imbalance(counts, order, parts) == pytest.approx(after)


@each_of("seed", range(20))
def test_it_is_near_the_best_of_all_placements(seed: int) -> None:
    rng = random.Random(seed)
    counts = [rng.randint(0, 30) for _ in range(6)]
    order = balanced(counts, 3)
    assert sorted(order) == list(range(6))
    best = min(imbalance(counts, each, 3) for each in permutations(range(6)))
    assert imbalance(counts, order, 3) <= best * 4 / 3  # Graham's bound, which two a rank meet too


def counted(path: Path, counts: list[list[int]], **more: Any) -> Path:
    path.write_text(json.dumps({"counts": counts, **more}))
    return path


def test_it_prints_the_load_and_writes_what_a_recipe_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = 2**40  # of an engine that has served for long
    layers = [[], [days * (8 * (1 + each % 2) + (each < 16) * 20) for each in range(32)], [5 * days] * 32]
    counts = counted(tmp_path / "counts", layers, steps=1, num_chosen=1)
    main([str(counts), "--ranks", "2", "--output", str(tmp_path / "placed")])
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        "as they are numbered: the most loaded of 2 ranks has 1.227 times the mean, 1.4"
    )
    assert said[1] == "as proposed: the most loaded of 2 ranks has 1.000 times the mean, 1.000 at worst"
    assert not said[2:]
    written = json.loads((tmp_path / "placed").read_text())
    assert written["placement"][0] == []
    assert written["placement"][1] == list(balanced(layers[1], 2))


@pytest.mark.parametrize(
    ("layer", "more", "words"),
    [
        ([3, 1] * 8, {}, ["a rank holds 8 experts"]),
        ([9] * 16 + [1] * 16, {"steps": 10, "num_chosen": 2}, ["a step has 4 tokens a rank"]),
        ([9] * 32, {"steps": 1, "num_chosen": 1}, ["would have 0.0 % less to do"]),
        (
            [9, 9, 1, 1],
            {"steps": 9, "num_chosen": 1},
            ["a rank holds 2 experts", "a step has 1 tokens a rank"],
        ),
    ],
)
def test_it_says_where_placing_may_not_pay(
    layer: list[int],
    more: dict[str, int],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([str(counted(tmp_path / "counts", [layer], **more)), "--ranks", "2"])
    warned = [each for each in capsys.readouterr().out.splitlines() if each.startswith("it may not pay: ")]
    assert [word for word in words if not any(word in each for each in warned)] == []
    assert len(warned) == len(words) or layer[:2] == [3, 1]


@pytest.mark.parametrize(
    ("said", "ranks", "words"),
    [
        ({"counts": [[1] * 6]}, 4, "4 ranks cannot hold 6 experts evenly; choose one of 2, 3, 6"),
        ({"counts": [[0] * 4]}, 2, "counts no tokens"),
        ({"counts": [[1] * 4, [1] * 6]}, 2, "of equally many experts in each layer"),
        ({"counts": [[1, -1]]}, 2, "has no 'counts': a list of numbers from 0 for each layer"),
        ({"counts": [[True, 1]]}, 2, "has no 'counts'"),
        ([], 2, "has no 'counts'"),
    ],
)
def test_counts_that_cannot_be_placed_are_refused(
    said: object, ranks: int, words: str, tmp_path: Path
) -> None:
    (tmp_path / "counts").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        main([str(tmp_path / "counts"), "--ranks", str(ranks)])
    assert "\n" not in str(caught.value)


def asked(tmp_path: Path, placement: object, *changes: str) -> list[str]:
    model = {**QWEN3_30B_A3B, "num_hidden_layers": 2, "mlp_only_layers": [0], "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**model, "num_experts_per_tok": 2}))
    (tmp_path / "placed").write_text(json.dumps({"placement": placement}))
    return [*CPU, f"model.path={tmp_path}", f"parallel.placement={tmp_path / 'placed'}", *changes]


def test_a_rank_holds_the_experts_that_the_file_names_for_it(tmp_path: Path) -> None:
    recipe = load(TINY, asked(tmp_path, [[], [2, 0, 3, 1]], *SPREAD))
    held = []
    for rank in range(2):
        config, share = share_of(recipe, rank)
        mixture = share.part(config).mixture
        assert mixture is not None
        held.append(list(mixture.held_in(1)))
    assert held == [[2, 0], [3, 1]]


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ([[], [2, 0, 3, 3]], "layer 1 must name each of 4 experts once"),
        ([[], [0, 1, 2]], "layer 1 must name each of 4 experts once"),
        ([[0, 1, 2, 3], [0, 1, 2, 3]], "layer 0 must name no expert: it is dense"),
        ([[2, 0, 3, 1]], "is of 1 layers, and the model has 2"),
        ({}, "has no 'placement'"),
    ],
)
def test_a_placement_of_another_model_is_refused_by_its_key(
    placement: object, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"^parallel.placement: ") as caught:
        share_of(load(TINY, asked(tmp_path, placement, *SPREAD)), 0)
    assert words in str(caught.value)


def test_a_placement_of_divided_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"parallel.expert is 1, so that every rank has a part of every"):
        load(TINY, asked(tmp_path, [[], [2, 0, 3, 1]]))


def test_ranks_compare_what_the_file_says_and_not_where_it_lies(tmp_path: Path) -> None:
    told = []
    for name, placement in (("a", [2, 0, 3, 1]), ("b", [2, 0, 3, 1]), ("c", [2, 3, 0, 1])):
        (tmp_path / name).mkdir()
        told.append(common(load(TINY, asked(tmp_path / name, [[], placement], *SPREAD)))["parallel"])
    assert told[0] == told[1] != told[2]
