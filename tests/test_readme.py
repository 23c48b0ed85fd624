"""The README and the other pages are true: commands print what is shown, and links lead somewhere.

Each `bash` block runs as it stands in a copy of the tree, the blocks of a page in their order. `bash slow`
is marked slow, and `bash figures`, which compile for many minutes, run with THOROUGH=1. `bash npu` is for
a machine with NPUs, and runs over the stand-in; `bash npu thorough` with THOROUGH=1. `bash hardware` needs
a driver, CANN or docker, and is held against what the doctor and the files of serving/deploy say. A `text`
block after commands shows lines that they print, whatever the numbers, with `...` for what is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from borders.version import VERSION
from doctor.device import CONTAINER, MOUNTS
from doctor.facts import CONTROL_NODES
from recipes.assembly.families import SUPPORTED
from recipes.schema.keys import table
from recipes.schema.recipe import ROOT, Recipe
from serving.text import field_reference
from tests.device_kinds import stand_in_alone
from tests.each_of import each_of
from tests.forked_commands import forked_python
from tests.ports import free_port
from tests.thorough import THOROUGH

pytestmark = pytest.mark.in_order  # a block may read what an earlier one of its page wrote

README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"  # whose commands, and the README's, are run as a user runs them
DOCS = ROOT / "docs"
DESIGN, FIGURES, USING = DOCS / "design.md", DOCS / "measured/README.md", DOCS / "using.md"
PAGES = [
    README,
    CONTRIBUTING,
    *sorted(DOCS.rglob("*.md")),
    ROOT / "recipes/README.md",
    *sorted(ROOT.glob("recipes/*/README.md")),
]
LARGEST_README = 8192  # bytes
LARGEST_PICTURE = 150_000
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", "out", "*.pyc.*")
Tables = list[list[list[str]]]

ASCEND = DOCS / "ascend.md"
HARDWARE = "bash hardware"
PLACES = ROOT / "scripts/cann_places.txt"
ON_NPU = [pytest.mark.slow, pytest.mark.npu, pytest.mark.timeout(3600), stand_in_alone]
MARKS = {
    "bash": [],
    "bash npu": ON_NPU,
    "bash npu thorough": [
        *ON_NPU,
        pytest.mark.skipif(not THOROUGH, reason="many minutes: THOROUGH=1 asks for them"),
    ],
    "bash slow": [pytest.mark.slow],
    "bash figures": [
        pytest.mark.slow,
        pytest.mark.timeout(3600),
        pytest.mark.skipif(not THOROUGH, reason="many minutes: THOROUGH=1 asks for them"),
        pytest.mark.skipif(shutil.which("g++") is None, reason="the recipes of the figures compile"),
    ],
}


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path) -> list[tuple[str, str]]:
    """Kind and content of each block that has a kind."""
    return re.findall(r"^```(\w[\w ]*)\n(.*?)^```$", read(path), re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^```.*?^```$", "", read(path), flags=re.MULTILINE | re.DOTALL)


def tables(path: Path) -> Tables:
    """The cells of each table, its head among them."""
    found = re.findall(r"(?:^\|.*\|\n)+", read(path), re.MULTILINE)
    return [[re.split(r" *\| *", line)[1:-1] for line in each.splitlines()] for each in found]


def named(path: Path) -> list[list[str]]:
    """What the first column of each table names, as code."""
    return [[name for row in each for name in re.findall(r"`([\w.]+)`", row[0])] for each in tables(path)]


def numbers(path: Path) -> list[list[list[list[str]]]]:
    """The numbers in each cell of each table."""
    return [[[re.findall(r"\d+(?:[.,]\d+)*", cell) for cell in row] for row in each] for each in tables(path)]


def commands() -> list[object]:
    """Each block of commands of every page, with what it is said to print."""
    found = []
    for page in PAGES:
        of_page = blocks(page)
        after = [content if kind == "text" else "" for kind, content in of_page[1:]] + [""]
        for (kind, content), shown in zip(of_page, after):
            if kind in MARKS:
                name = f"{page.relative_to(ROOT)}: {title(content)}"
                block = over_the_stand_in(content) if kind.startswith("bash npu") else content
                found.append(pytest.param(block, shown, id=name, marks=MARKS[kind]))
    return found


def over_the_stand_in(block: str) -> str:
    """The same commands for two requests at once at most, computed by the stand-in.

    This machine itself is not fit, as the doctor says.
    """
    block = re.sub(r"(?<=verify_npu\.sh)", " --virtual --calls 2", block)
    block = re.sub(r"(?<=--requests )\d+", "2", block)
    block = re.sub(
        r"recipes/(?:\S+\.yaml|tiny/weights)", r"\g<0> device.virtual=true scheduler.num_slots=2", block
    )
    return re.sub(r"^python -m scripts\.doctor$", r"\g<0> || (($? == 1))", block, flags=re.MULTILINE)


def title(block: str) -> str:
    """A block's first command, in short."""
    command = re.search(r"(?:bash|python(?: -m)?) \S+(?: [a-z]\S+)?", block)
    assert command, block
    return command[0]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the tree with the environment of this Python, whose commands are run by forks."""
    folder = tmp_path_factory.mktemp("readme")
    copy, programs = folder / "tree", folder / "tree/.venv/bin"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    programs.mkdir(parents=True)
    for inside in (Path(), Path("bin")):
        for each in Path(sys.prefix, inside).iterdir():
            if each.name not in ("bin", "python", "activate"):
                (copy / ".venv" / inside / each.name).symlink_to(each)
    activate = read(Path(sys.prefix, "bin/activate"))
    (programs / "activate").write_text(activate.replace(sys.prefix, str(copy / ".venv")), encoding="utf-8")
    python = programs / "python"
    with forked_python(copy, folder / "socket") as text:
        if text is None:
            python.symlink_to(sys.executable)
        else:
            python.write_text(text, encoding="utf-8")
            python.chmod(0o755)
        yield copy


@cache
def printed(block: str, tree: Path) -> list[str]:
    """The lines that a block prints; each of its commands must succeed."""
    environment = os.environ | {
        "PATH": f"{tree}/.venv/bin{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "--collect-only -q tests/kv_cache/test_pages.py",  # the tests are running already
        "MASTER_PORT": str(free_port()),
    }
    if block in {content for page in (README, CONTRIBUTING) for _, content in blocks(page)}:
        environment["FRESH"] = "1"
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", at_free_ports(block)],
        cwd=tree,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate()
        finally:  # a server that it started in the background ends with it, even where it failed
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output.splitlines()


def at_free_ports(block: str) -> str:
    """The same commands, at ports that no other run of them on this machine has."""
    for port in {*re.findall(r"(?:--port |127\.0\.0\.1:)(\d+)\b", block)}:
        block = re.sub(rf"\b{port}\b", str(free_port()), block)
    return block


def pattern(line: str) -> str:
    """Fits a shown line, with any number in place of a number."""
    escaped = re.escape(" ".join(line.split()))
    any_number = re.sub(r"\d[\d,]*(\\\.\d+)?", lambda _: r"\d[\d.,]*", escaped)
    return any_number.replace(r"\.\.\.", ".*")


def absent(shown: str, output: str) -> list[str]:
    """The shown lines that an output has not, whatever the numbers and the spaces."""
    output = "\n".join(" ".join(line.split()) for line in output.splitlines())
    lines = [line for line in shown.splitlines() if line]
    return [line for line in lines if not re.search(f"^{pattern(line)}$", output, re.MULTILINE)]


def shown_after(path: Path, command: str) -> str:
    """What a page shows behind the block that is this one command."""
    of_page = blocks(path)
    return next(shown for (_, block), (_, shown) in pairwise(of_page) if block == f"{command}\n")


@pytest.mark.parametrize(("block", "shown"), commands())
def test_a_command_prints_what_is_shown(block: str, shown: str, tree: Path) -> None:
    output = "\n".join(printed(block, tree))
    assert not absent(shown, output), output


def test_a_block_of_commands_is_of_a_kind_that_is_run() -> None:
    kinds = {kind for page in [*PAGES, CHINESE] for kind, _ in blocks(page)}
    assert kinds <= {*MARKS, HARDWARE, "text", "python"}
    assert [page for page in PAGES if HARDWARE in dict(blocks(page))] == [ASCEND]


def test_what_needs_hardware_agrees_with_the_doctor_and_the_files_of_deploy() -> None:
    asked = "".join(content for kind, content in blocks(ASCEND) if kind == HARDWARE)
    subprocess.run(["bash", "-n", "-c", asked], check=True)
    commands = asked.replace("\\\n", " ").splitlines()
    (run,) = (each for each in commands if each.startswith("docker run"))
    assert not [each for each in (*CONTAINER, *CONTROL_NODES) if each not in run]
    assert not [each for each in MOUNTS if f"-v {each}:{each}:ro" not in run]
    (compose,) = (each for each in commands if "docker compose" in each)
    file = re.findall(r"-f (\S+)", compose)[0]
    assert {*re.findall(r"(\w+)=", compose)} == {*re.findall(r"\$\{(\w+):\?", read(ROOT / file))}
    sourced = {
        place for each in commands for place in re.findall(r"^source /usr/local/(\S+)/set_env.sh$", each)
    }
    assert {place.replace("Ascend/", "ASCEND/") for place in sourced} <= {*read(PLACES).splitlines()}
    assert len(sourced) == 1
    facts = read(ROOT / "doctor/facts.py")
    (ports,) = (each for each in commands if "hccn_tool" in each)
    assert {*re.findall(r"-i \$i (-\w+) -g", ports)} == {*re.findall(r'answer\("(-\w+)"', facts)}


def test_the_keys_are_those_of_a_recipe() -> None:
    """Else replace the table by what `python -m recipes keys` prints."""
    assert table(Recipe) in read(DOCS / "recipe_keys.md")


def test_the_fields_of_a_request_are_those_of_the_reference() -> None:
    """Else replace the tables by what `python -m serving.text.field_reference` prints."""
    page = read(DOCS / "request_fields.md")
    assert field_reference.request_table() in page
    assert field_reference.answer_table() in page
    assert field_reference.foreign_table() in page


def test_the_fields_of_an_answer_are_those_that_are_written(tree: Path) -> None:
    block = next(content for kind, content in blocks(USING) if kind == "bash" and "--input" in content)
    lines = printed(block, tree)  # a warning is among them where another block has written the file before
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    fields = {name for answer in answers for name in answer}
    assert fields == {name for names, _ in field_reference.ANSWER_FIELDS for name in names}


def test_a_table_of_keys_or_fields_stands_in_one_page_only() -> None:
    others = [page for page in [*PAGES, CHINESE] if page.name not in ("recipe_keys.md", "request_fields.md")]
    rows = {*table(Recipe).splitlines()[2:], *field_reference.request_table().splitlines()[2:]}
    assert not [page for page in others if rows & {*read(page).splitlines()}]


def test_a_figure_of_the_readme_stands_where_it_was_measured() -> None:
    (figures,) = (each for each in tables(README) if "command" in each[0])
    measured = [row for each in tables(FIGURES) for row in each]
    assert len(figures) > 2
    assert not [row for row in figures[2:] if row not in measured]


def test_code_is_quoted_as_it_is() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("recipes/*/model.py")]
    quoted = [content for page in PAGES for kind, content in blocks(page) if kind == "python"]
    assert quoted
    assert all(any(content in source for source in sources) for content in quoted)


@each_of("path", [*PAGES, CHINESE])
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), link
        assert found.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(found), link


def test_every_page_is_in_the_index() -> None:
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", read(DOCS / "README.md"))}
    assert not set(DOCS.glob("*.md")) - linked - {DOCS / "README.md"}


def test_every_page_opens_with_what_it_answers() -> None:
    pages = {*DOCS.rglob("*.md")} - {DOCS / "README.md"}
    assert not [each for each in pages if "\n\nThis page answers: " not in read(each)[:120]]


@each_of("path", [*PAGES, CHINESE])
def test_a_file_that_is_named_exists_unless_it_is_to_come(path: Path) -> None:
    rooms = "|".join(sorted(each.parent.name for each in ROOT.glob("*/__init__.py")))
    name = rf"(?<![\w/.])((?:{rooms})/(?:[\w./-]+\.(?:py|sh|md|yaml|txt)\b|[\w./-]*/))"
    named_files = re.findall(rf"{name}(`? \(to come\))?", read(path))
    wrong = [name for name, to_come in named_files if (ROOT / name).exists() == bool(to_come)]
    assert not wrong
    assert path != DESIGN or len(named_files) > 30


def test_tests_of_the_server_that_are_named_exist() -> None:
    names = re.findall(r"`(test_\w+\.py)`", read(DOCS / "security.md"))
    assert names
    assert not [name for name in names if not (ROOT / "tests/serving" / name).exists()]


def test_the_readme_is_short() -> None:
    for path in (README, CHINESE):
        assert len(path.read_bytes()) <= LARGEST_README, path.name
    pictures = [DOCS / link for link in re.findall(r"\]\(docs/([^)]+\.png)\)", read(README))]
    assert pictures
    assert all(picture.stat().st_size < LARGEST_PICTURE for picture in pictures)


def test_the_chinese_readme_says_the_same() -> None:
    assert blocks(CHINESE) == blocks(README)
    assert named(CHINESE) == named(README)
    assert numbers(CHINESE) == numbers(README)
    links = [re.findall(r"\]\(([^)]+)\)", prose(path)) for path in (CHINESE, README)]
    assert sorted(set(links[0]) - {"README.md"}) == sorted(set(links[1]) - {"README.zh.md"})
    levels = [re.findall("^(#+) ", read(path), re.MULTILINE) for path in (CHINESE, README)]
    assert levels[0] == levels[1]


def test_every_family_stands_in_the_table_of_supported_models() -> None:
    page = (ROOT / "docs/models.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| [`")]
    assert {name for row in rows for name in row.split("`")[1::2]} == set(SUPPORTED)
    words = {24: "Twenty-four", 25: "Twenty-five", 26: "Twenty-six", 30: "Thirty", 38: "Thirty-eight"}
    assert f"{words[len(SUPPORTED)]} kinds of `model_type`" in page
    assert f"{len(SUPPORTED)} kinds of models](docs/models.md)" in (ROOT / "README.md").read_text()


def test_the_newest_change_is_of_this_version() -> None:
    newest = re.search(r"^## (\S+)", read(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == VERSION
    said = subprocess.run(
        [sys.executable, "-m", "recipes", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == f"{VERSION}\n"
