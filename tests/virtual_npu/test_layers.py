"""The C files of the virtual device stand in layers: each calls only what is declared up to its own."""

from __future__ import annotations

import re

from virtual_npu.libraries import SOURCES

FILES = {path.name: path.read_text(encoding="utf-8") for path in SOURCES if path.suffix == ".c"}
HEADER = "\n".join(
    next(path for path in SOURCES if path.name == name).read_text(encoding="utf-8")
    for name in ("device.h", "communicator.h")
)
SECTION = re.compile(r"^/\* ((?:\w+\.c(?:, )?)+)", re.MULTILINE)
FUNCTION = re.compile(r"^(?!static\b)\w[\w *]*?\b(\w+)\([^;{]*\)\s*\{", re.MULTILINE)
DECLARED = re.compile(r"^extern .*?(\w+)\)?(?:\(.*\))?;|^(?!extern\b)\w[\w *]*?\b(\w+)\(", re.MULTILINE)
TOP = {
    "streams.c",
    "events.c",
    "graphs.c",
    "groups.c",
    "hccl.c",
}  # the interface that torch_npu and Python call


def code(text: str) -> str:
    """A file without comments and strings."""
    return re.sub(r'/\*.*?\*/|"(\\.|[^"\\\n])*"', " ", text, flags=re.DOTALL)


def order() -> list[str]:
    """The files from the bottom up, as the sections of the headers name them."""
    return [name for section in SECTION.findall(HEADER) for name in section.split(", ")]


def declared(name: str) -> set[str]:
    """What the section of a file declares."""
    files, texts = SECTION.findall(HEADER), SECTION.split(HEADER)[2::2]
    text = next(text for names, text in zip(files, texts) if name in names.split(", "))
    text = code("/* " + text.partition("#define")[0])
    return {variable or function for variable, function in DECLARED.findall(text)}


def used() -> dict[str, set[str]]:
    """For each file, the other files whose functions or variables it names."""
    words = {name: set(re.findall(r"\w+", code(text))) for name, text in FILES.items()}
    names = {name: declared(name) | set(FUNCTION.findall(code(text))) for name, text in FILES.items()}
    return {
        name: {other for other in FILES if other != name and words[name] & names[other]} for name in FILES
    }


def test_the_header_names_every_file_once() -> None:
    assert sorted(order()) == sorted(FILES)


def test_what_the_header_declares_stands_in_the_file_that_it_names() -> None:
    assert {"lock", "most_graphs", "refuse"} == declared("device.c")
    assert {"graphs", "run_kernel", "thread_mode", "count_busy"} < declared("state.c")
    for name, text in FILES.items():
        assert declared(name) <= set(re.findall(r"\w+", code(text))), name


def test_no_file_uses_one_that_stands_above_it() -> None:
    rank = {name: at for at, name in enumerate(order())}
    wrong = [(name, other) for name, others in used().items() for other in others if rank[other] > rank[name]]
    assert not wrong


def test_the_interface_is_called_by_no_other_file() -> None:
    assert set().union(*used().values()) == set(FILES) - TOP
