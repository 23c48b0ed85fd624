"""Say of releases of torch_npu whether they take this project's calls, by their wheels and the code alone.

    python -m tests.doctor.wheels_truth VERSION ...

It is the judge of the doctor, and shares nothing with it: the calls are those in the code, with the
arguments that stand there as keywords, and torch's own parser reads the schemas in the wheels.
version_pairs.json has what it prints, and pairs with CANN that were added by hand: those of images and
recipes that somebody has published, and some that a user may make.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def written() -> dict[str, set[str]]:
    """The operators that the code calls on a 910B, each with the keywords that stand in such a call."""
    calls: dict[str, set[str]] = {}
    for folder in ("attention/npu", "models/ops/npu"):
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name == "atb_attention.py":  # that of a 310P
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = ast.unparse(node)[10:] if isinstance(node, ast.Attribute) else ""
                if name and ast.unparse(node).startswith("torch_npu.") and re.fullmatch(r"_?npu_\w+", name):
                    calls.setdefault(name, set())
                called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if isinstance(node, ast.Call) and re.fullmatch(r"torch_npu\.npu_\w+", called):
                    names = {each.arg for each in node.keywords if each.arg}
                    calls.setdefault(called[10:], set()).update(names)
    return calls


def registered(wheel: Path) -> dict[str, list[set[str]]]:
    """The operators in the libraries of a wheel, each with the arguments of its schemas."""
    found: dict[str, list[set[str]]] = {}
    with zipfile.ZipFile(wheel) as archive:
        texts = archive.read("torch_npu/lib/libtorch_npu.so").split(b"\0")
    for text in texts:
        if re.match(rb"_?npu_\w+(\.\w+)?\(.*\) -> ", text):
            try:
                schema = torch._C.parse_schema(text.decode())
            except (RuntimeError, UnicodeDecodeError):  # text that only looks like one
                continue
            found.setdefault(schema.name, []).append({each.name for each in schema.arguments})
    return found


def lacks(wheel: Path) -> Iterator[str]:
    """The operators that a wheel does not have with the arguments that the code writes."""
    there = registered(wheel)
    for name, arguments in sorted(written().items()):
        if not any(arguments <= known for known in there.get(name, ())):
            yield name


def main(versions: list[str]) -> None:
    """Print what the wheel of each version lacks, as JSON."""
    truth = {}
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            where = ["--dest", folder, "--python-version", "3.11", "--only-binary=:all:"]
            where += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *where]
            subprocess.run([*pip, f"torch-npu=={version}"], check=True)
            truth[version] = list(lacks(next(Path(folder).glob("*.whl"))))
    print(json.dumps(truth, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
