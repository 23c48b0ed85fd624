"""Every way a recipe file can be wrong, and the one line that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.schema.reader import load, read
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from tests.each_of import each_of
from tests.recipes.conftest import GOOD, error

SIZE, WEIGHTS = "page_size: 16", "path: recipes/tiny/weights"
NOT_ALLOWED = "is not allowed; it must be"


def test_reads_a_recipe_and_says_where_each_value_comes_from(recipe):
    reading = read(recipe(), ["cache.page_size=32"])
    assert reading.recipe.model.path == ROOT / "recipes/tiny/weights"
    assert reading.recipe.cache.page_size == 32
    assert reading.recipe.cache.prefix_sharing is True
    assert reading.origin("cache.page_size") == "command line: cache.page_size=32"
    assert reading.origin("scheduler.num_slots") == "r.yaml:9"
    assert reading.origin("cache.prefix_sharing") == "default"


NOT_SET = "${NO_SUCH_PLACE} is not set in the environment; export NO_SUCH_PLACE=FOLDER, or write the path out"


@each_of(
    "old, new, line",
    [
        (SIZE, "page_sise: 16", "6: cache.page_sise: unknown key; did you mean cache.page_size?"),
        ("device:", "devise:", "3: devise: unknown key; did you mean device?"),
        ("device:", "page_size: 4\ndevice:", "3: page_size: unknown key; did you mean cache.page_size?"),
        (SIZE, "num_slots: 2", "6: cache.num_slots: unknown key; did you mean scheduler.num_slots?"),
        (SIZE, "zzzzzzzz: 1", "6: cache.zzzzzzzz: unknown key; python -m recipes keys lists them"),
        (SIZE, "page_size: 0", f"6: cache.page_size: 0 {NOT_ALLOWED} an integer from 1 to 1024"),
        (SIZE, "page_size:", f"6: cache.page_size: null {NOT_ALLOWED} an integer from 1 to 1024"),
        ("num_pages: 64", "memory_gib: .nan", f"7: cache.memory_gib: nan {NOT_ALLOWED} a number from 0.001"),
        (SIZE, "prefix_sharing: 1", f"6: cache.prefix_sharing: 1 {NOT_ALLOWED} true or false"),
        ("num_slots: 4", "policy: stal_free", f"9: scheduler.policy: 'stal_free' {NOT_ALLOWED} stall_free, "),
        (WEIGHTS, "path: [1]", f"2: model.path: [1] {NOT_ALLOWED} a path, or null"),
        (WEIGHTS, "config: llama", f"2: model.config: 'llama' {NOT_ALLOWED} a mapping, or null"),
        (WEIGHTS, "path: ${NO_SUCH_PLACE}/x", f"2: model.path: {NOT_SET}"),
        (f"  {SIZE}\n  num_pages: 64", "  - 16", "5: cache: [16] is not a mapping of the section's keys"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(recipe, old, new, line):
    assert old in GOOD
    assert error(recipe(GOOD.replace(old, new, 1))).startswith(f"r.yaml:{line}")


@each_of(
    "text, line",
    [
        (f"{GOOD}cache:\n  page_size: 4\n", "11: cache: stands twice, the first time in line 5; remove one"),
        (
            GOOD.replace("num_pages", "page_size"),
            "7: cache.page_size: stands twice, the first time in line 6",
        ),
        ("model: {config: {a: {b: 1, b: 2}}}", "1: model.config.a.b: stands twice, the first time in line 1"),
        ("model:\n  1: x\n", "2: a key is not text; put it in quotes"),
        ("model: &m {path: x}\ncache: *m\n", "2: *m is an alias; write the value out"),
        ("model: {path: x\n", "2: not YAML: expected ',' or '}', but got '<stream end>'"),
        ("model:\n  path: !!python/name:os.system x\n", "2: not YAML: could not determine a constructor"),
        ("model:\n  path: 2026-99-99\n", "2: not YAML: '2026-99-99' is no timestamp (month"),
        ("- model\n", " not a recipe; it must be a mapping of adapters, cache, device, model"),
        ("", " device.kind: required, and missing; it must be cpu, cuda or npu"),
        ("a: \x07", " not YAML: unacceptable character #x0007"),
        ("model: " + "[" * 600 + "]" * 600, "1: nested more than 32 levels deep"),
        ("model:\n" + "".join(f"{' ' * n}a:\n" for n in range(600)), "34: nested more than 32"),
    ],
)
def test_what_is_no_recipe_at_all(recipe, text, line):
    assert error(recipe(text)).startswith(f"r.yaml:{line}")


def test_a_file_that_cannot_be_read(recipe, tmp_path):
    recipe()
    assert error("absent.yaml") == "absent.yaml: no such file or directory"
    near = f"recipes/tiny/cpu.yml: no such file or directory; did you mean {ROOT}/recipes/tiny/cpu.yaml?"
    assert error("recipes/tiny/cpu.yml") == near
    assert error(".") == ".: is a directory"
    Path("latin.yaml").write_bytes(b"model: \xff")
    assert error("latin.yaml") == "latin.yaml: not text in UTF-8 (invalid start byte at byte 7)"


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12), st.integers(0, 9))
def test_an_unknown_key_is_found_on_its_line(tmp_path_factory, tail, at):
    name = f"x{tail}"  # so that it is neither a key nor a word like `yes`
    lines = GOOD.splitlines()
    section = [line[:-1] for line in lines[: at + 1] if not line.startswith(" ")][-1]
    lines.insert(at + 1, f"  {name}: 1")
    path = tmp_path_factory.mktemp("recipe") / "r.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(RecipeError, match=rf":{at + 2}: {section}\.{name}: unknown key"):
        load(path)


@each_of(
    "value",
    [
        *('!!int ""', '!!float ""', "!!bool maybe", "!!timestamp soon", "!!null [", "9" * 5000),
        *("0x" + "f" * 5000, "0b" + "1" * 20000, '"\\U00110000"', "1" + ":59" * 300, f"1{':59' * 300}.5"),
    ],
)
def test_a_value_that_yaml_cannot_make_is_refused_at_its_place(recipe, value):
    said = error(recipe(GOOD.replace("page_size: 16", f"page_size: {value}")))
    assert said.startswith("r.yaml")
    assert "not YAML" in said
    assert len(said) < 300


def test_a_file_without_an_end_is_no_recipe():
    assert "/dev/zero is a device, which has no end" in error("/dev/zero")


def test_a_recipe_is_proposed_by_its_path_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for asked in ("recipes/tiny/cpu.yaml", "recipes/tiny/cpu.yml"):
        said = error(asked)
        assert said.startswith(f"{asked}: no such file or directory; did you mean ")
        proposed = said.rpartition("did you mean ")[2].removesuffix("?")
        assert proposed != asked
        assert (tmp_path / proposed).samefile(ROOT / "recipes/tiny/cpu.yaml")
    monkeypatch.chdir(ROOT / "recipes")
    assert error("recipes/tiny/cpu.yml").endswith("; did you mean tiny/cpu.yaml?")
    monkeypatch.chdir(ROOT)
    assert error("recipes/tiny/cpu.yml").endswith("; did you mean recipes/tiny/cpu.yaml?")
