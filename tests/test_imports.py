"""An import never runs against the order of the rooms, and the host wing knows no torch."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOST = {"borders", "kv_cache", "continuous_batching"}
MODEL = HOST | {"devices", "attention", "models"}

# What each room may import beside itself; `virtual_npu` knows none of them, and only recipes start it
MAY_IMPORT = {
    "borders": set(),
    "virtual_npu": set(),
    "kv_cache": {"borders"},
    "continuous_batching": {"borders", "kv_cache"},
    "simulation": HOST,
    "devices": HOST,
    "attention": HOST | {"devices"},
    "models": HOST | {"devices", "attention"},
    "recipes": MODEL | {"virtual_npu"},
    "serving": MODEL | {"recipes"},
    "doctor": MODEL | {"recipes", "serving"},
}
# Modules of rooms that a room may not import otherwise: what a model and a device are, without what computes
MAY_IMPORT_ALONE = {"simulation": ("models.config", "models.cost", "devices.rates")}
MAY_IMPORT["benchmark"] = set(MAY_IMPORT) - {"virtual_npu", "doctor"}
MAY_IMPORT["scripts"] = set(MAY_IMPORT) - {"virtual_npu"}

HOST_WING = [  # folders, and files of folders that know torch otherwise
    "borders",
    "continuous_batching",
    *(f"kv_cache/{each.name}" for each in sorted((ROOT / "kv_cache").iterdir()) if each.name != "device"),
    "devices/rates.py",
    "models/config.py",
    "models/cost.py",
    "models/checkpoint/huggingface.py",
    "models/quantization.py",
    "models/parallel/share.py",
    "recipes/assembly/memory_plan.py",
    "recipes/assembly/sizing.py",
    "simulation",
]
UNWANTED = {"utils", "util", "core", "common", "helpers", "misc"}


def files(*rooms: str) -> list[Path]:
    """The modules of rooms, or of files of them, that exist by now."""
    paths = [ROOT / room for room in rooms]
    return sorted(each for path in paths for each in ([path] if path.is_file() else path.rglob("*.py")))


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes(path: Path) -> list[ast.AST]:
    """A file's syntax tree, the module first, for all tests that read it.

    None of it is garbage, for which a collector would look four times as long as parsing takes.
    """
    gc.disable()
    try:
        return [*ast.walk(ast.parse(text(path)))]
    finally:
        gc.enable()


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively; name the room"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


Graph = dict[str, set[str]]


@cache
def file_graph() -> Graph:
    """Which file of the rooms imports which, by name."""
    paths = {module_of(path): path for path in files(*MAY_IMPORT)}
    graph: Graph = {}
    for path in paths.values():
        modules = set()
        for node in nodes(path):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):  # a module of a package, or else what a module defines
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                modules |= {each if each in paths else str(node.module) for each in names}
        graph[name(path)] = {name(paths[each]) for each in modules if each in paths} - {name(path)}
    return graph


def module_of(path: Path) -> str:
    return name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def folder_graph(files_: Graph) -> Graph:
    """Which sub-folder imports which; a file that lies directly in a room stands for itself."""

    def node(file: str) -> str:
        return file if file.count("/") == 1 else file.rpartition("/")[0]

    graph: Graph = {}
    for file, others in files_.items():
        graph.setdefault(node(file), set()).update({node(other) for other in others} - {node(file)})
    return graph


def in_circles(graph: Graph) -> Graph:
    """What is left when everything is taken away that nothing imports, or that imports nothing."""
    while True:
        wanted = {other for others in graph.values() for other in others}
        left = {each: others & set(graph) for each, others in graph.items() if each in wanted}
        left = {each: others for each, others in left.items() if others}
        if left == graph:
            return left
        graph = left


def test_no_import_runs_against_the_order_of_the_rooms():
    wrong = []
    for path in files(*MAY_IMPORT):
        room = name(path).partition("/")[0]
        allowed = MAY_IMPORT[room] | {room}
        modules = {each for each in imported(path) if each.partition(".")[0] in {*MAY_IMPORT, "tests"}}
        for alone in MAY_IMPORT_ALONE.get(room, ()):
            modules = {each for each in modules if not f"{each}.".startswith(f"{alone}.")}
        wrong += [f"{name(path)} imports {each}" for each in modules if each.partition(".")[0] not in allowed]
    assert not wrong


def test_no_files_import_in_a_circle():
    assert not in_circles(file_graph())


def test_no_sub_folders_import_in_a_circle():
    assert not in_circles(folder_graph(file_graph()))


def test_a_circle_is_found():
    line = {"a/b/x.py": {"a/c/y.py"}, "a/c/y.py": {"a/z.py"}, "a/z.py": set()}
    assert not in_circles(line)
    circle = line | {"a/z.py": {"a/b/w.py"}, "a/b/w.py": set()}
    assert not in_circles(circle), "its files import in a line"
    assert set(in_circles(folder_graph(circle))) == {"a/b", "a/c", "a/z.py"}


def test_torch_npu_is_imported_only_where_it_belongs():
    importing = [
        path for path in files(*MAY_IMPORT) if "torch_npu" in {m.partition(".")[0] for m in imported(path)}
    ]
    belongs = [
        path
        for path in importing
        if path.name == "npu.py" or path.parent.name == "npu" or "virtual_npu" in name(path)
    ]
    assert importing == belongs


def test_the_host_wing_brings_no_torch():
    modules = [module_of(path) for path in files(*HOST_WING) if path.stem != "__main__"]
    assert len(modules) > 5
    code = f"import sys, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_room_is_in_the_order():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"tests"} <= set(MAY_IMPORT)


def test_no_folder_or_file_is_a_drawer_for_everything():
    found = {part for path in files(*MAY_IMPORT, "tests") for part in (path.stem, path.parent.name)}
    assert not found & UNWANTED
