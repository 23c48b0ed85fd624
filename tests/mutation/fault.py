"""Describe one seeded fault, and plant it in a copy of the tree.

A fault in Python names its place by the qualified name of a function and by a pattern of the syntax tree, so
that comments, line breaks, indentation and the code beside it may change without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
KINDS = ("expression", "statements", "arguments", "items")


@dataclass(frozen=True, slots=True)
class Fault:
    """One edit of a Python file that breaks something, as somebody might really write it.

    `place` is a file and the qualified name of a function or class in it, as pytest writes them
    ("kv_cache/pages.py::PagePool.share"), or the file alone for code of the module. Decorators and parameters
    belong to their function. What is defined inside a place is a place of its own.

    `old` is compared with the syntax tree and must be found exactly once in `place`. It is one expression,
    consecutive statements, keyword arguments of a call (`eps=1e-6`) or items of a dictionary (`"a": 1`), and
    `new` is the like, or empty to delete what is not an expression. A body that is `...` stands for any body:
    `if is_full: ...` becomes `if True: ...` whatever is done then. An f-string is compared as a whole.

    `why` says what is wrong with `new`, or where it was seen. `killed_by` is the quickest test that fails
    because of it, as pytest names it without parameters ("tests/kv_cache/test_pages.py::test_share").
    """

    place: str
    old: str
    new: str
    why: str
    killed_by: str

    @property
    def file(self) -> str:
        """The file that is edited, relative to the root of the tree."""
        return self.place.partition("::")[0]

    def plant(self, root: Path) -> None:
        """Edit the file under `root`; raises ValueError if `old` is not found there exactly once."""
        path = root / self.file
        path.write_text(self.applied_to(path.read_text(encoding="utf-8")), encoding="utf-8")

    def applied_to(self, text: str) -> str:
        """Return the file's text with the fault in it, and the rest of it byte for byte as it was."""
        kind, code, block, bodies = self._found(text)
        before, replaced, after = split(text, code)
        if kind == "expression":
            return f"{before}({self.new}){after}"  # brackets let it bind as the old one did
        if kind != "statements":
            return before + (self.new + after if self.new else after.lstrip().removeprefix(","))
        margin = " " * code[0].col_offset
        new = indent(with_bodies(self.new, bodies, text), margin)
        if replaced.startswith("elif") and new:
            new = f"else:\n{indent(new, '    ')}"
        elif len(code) == len(block) and not replaced.startswith("elif"):
            new = new or "pass"
        return before + new.lstrip() + after

    def _found(self, text: str) -> tuple[str, list[Any], list[Any], list[list[ast.stmt]]]:
        """Return what `old` is, the code that it fits, the block which has that, and the bodies of `...`."""
        name, definitions = self.place.partition("::")[2], places(text)
        if name not in definitions:
            near = ", ".join(get_close_matches(name, definitions, cutoff=0))
            raise ValueError(f"{self.file} has no {name}; the nearest are {near}")
        found, others = [], []
        for kind, old in patterns(self.old, self.new):
            for block in (each for node in definitions[name] for each in blocks(node)):
                for start in range(len(block) - len(old) + 1):
                    code = block[start : start + len(old)]
                    bodies: list[list[ast.stmt]] = []
                    if all(fits(node, pattern, bodies) for node, pattern in zip(code, old)):
                        found.append((kind, code, block, bodies))
                    elif type(code[0]) is type(old[0]):
                        others.append(code)
        if len(found) == 1:
            return found[0]
        problem = f"{self.place} has {self.old!r} {len(found)} times, not once"
        if found:
            raise ValueError(f"{problem}: in lines {', '.join(str(each[1][0].lineno) for each in found)}")
        stands = ["\n".join(map(ast.unparse, code)) for code in others]
        near = "".join(get_close_matches(self.old, stands, n=1, cutoff=0))
        raise ValueError(f"{problem}; nearest to it is {near[:300]!r}")


@dataclass(frozen=True, slots=True)
class TextFault(Fault):
    """One edit of what is not Python, as C or a script in a string: `place` is a file that has `old` once."""

    def applied_to(self, text: str) -> str:
        """Return the file's text with the fault in it."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.place} has {self.old!r} {count} times, not once")
        return text.replace(self.old, self.new)


@cache
def places(text: str) -> dict[str, list[ast.AST]]:
    """Return what each qualified name defines, which overloads do more than once; "" is the module."""
    module = ast.parse(text)
    found: dict[str, list[ast.AST]] = {"": [module]}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, DEFINITIONS):
                found.setdefault(prefix + child.name, []).append(child)
                visit(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):  # which defines nothing
                visit(child, prefix)

    visit(module, "")
    return found


def blocks(node: ast.AST) -> Iterator[list[Any]]:
    """Yield lists of what stands beside each other in a place: statements, arguments, items; one expression.

    Expressions in an f-string are left out, since Python 3.11 does not know where they stand.
    """
    for field in ("body", "orelse", "finalbody", "keywords"):
        if isinstance(block := getattr(node, field, None), list):
            yield block
    if isinstance(node, ast.Dict):
        yield items(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield [child]
        if not isinstance(child, (*DEFINITIONS, ast.JoinedStr)):
            yield from blocks(child)


def items(node: ast.Dict) -> list[ast.expr]:
    """Return keys and values by turns; what is unpacked has no key."""
    return [each for item in zip(node.keys, node.values) for each in item if each]


def patterns(old: str, new: str) -> list[tuple[str, list[Any]]]:
    """Return what `old` and `new` may both be, and the nodes of `old`; an expression is nothing else."""
    found = [(kind, nodes) for kind in KINDS if (nodes := read(old, kind)) and read(new, kind) is not None]
    if not found:
        raise ValueError(f"{old!r} and {new!r} are not both code of one kind: {', '.join(KINDS)}")
    return found[:1] if found[0][0] == "expression" else found


def read(code: str, kind: str) -> list[Any] | None:
    """Return the nodes of the code as such a kind, or None where it is not."""
    try:
        if kind == "statements":
            return ast.parse(code).body
        around = {"expression": "({})", "arguments": "_({})", "items": "{{{}}}"}[kind]
        node = ast.parse(around.format(code), mode="eval").body
    except SyntaxError:
        return None
    if kind == "expression":
        return [node] if code else None
    if kind == "arguments":
        return node.keywords if isinstance(node, ast.Call) and not node.args else None
    return items(node) if isinstance(node, ast.Dict) else None


def fits(node: Any, pattern: Any, bodies: list[list[ast.stmt]]) -> bool:
    """Whether the code is what the pattern says; `bodies` takes those that stand where it has `...`."""
    if type(node) is not type(pattern):
        return False
    if isinstance(node, ast.AST):
        return all(fits(getattr(node, each), getattr(pattern, each), bodies) for each in pattern._fields)
    if not isinstance(node, list):
        return bool(node == pattern)
    if node and len(pattern) == 1 and is_any_body(pattern[0]):
        bodies.append(node)
        return True
    return len(node) == len(pattern) and all(fits(*both, bodies) for both in zip(node, pattern))


def is_any_body(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def with_bodies(new: str, bodies: list[list[ast.stmt]], text: str) -> str:
    """Return the statements with the source of these bodies in the place of each `...`, in their order."""
    if not bodies:
        return new
    left, lines = iter(bodies), []
    for line in ast.unparse(ast.parse(new)).splitlines():
        if line.strip() == "..." and (body := next(left, None)):
            source = dedent(" " * body[0].col_offset + split(text, body)[1])
            lines.append(indent(source, line.removesuffix("...")))
        else:
            lines.append(line)
    return "\n".join(lines)


def split(text: str, code: list[Any]) -> tuple[str, str, str]:
    """Return the text before these nodes, theirs, and the text behind them."""
    lines = text.encode().splitlines(keepends=True)  # columns count bytes
    first_line = min(each.lineno for each in (code[0], *getattr(code[0], "decorator_list", ())))
    start = sum(map(len, lines[: first_line - 1])) + code[0].col_offset
    stop = sum(map(len, lines[: code[-1].end_lineno - 1])) + code[-1].end_col_offset
    source = b"".join(lines)
    return source[:start].decode(), source[start:stop].decode(), source[stop:].decode()
