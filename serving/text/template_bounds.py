"""Bound the work and the memory of a chat template, which comes with a checkpoint.

Jinja's sandbox keeps a template from code and files, and not from `'a' * 10**9`. Here every operation that
makes text or lists is counted before it is done, and the time is looked at in loops and calls. One rendering
may make texts of MOST_TEXT characters, and MOST_WORK characters in all. Text that stands in a template as a
constant is bounded in the same way when it is compiled.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import islice
from typing import Any, ClassVar

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_TEXT = 2**25  # characters of one text, or entries of one list
MOST_WORK = 2**28  # characters and entries that one rendering may make
MOST_NUMBER = 10**6  # the largest width, indent or count
_MOST_BITS = 2**12  # the size of an integer
# A width of more digits than 6, or one from an argument: in braces, where a key in brackets may hold a brace
# and any script's digits count, and in what follows a `%`
_WIDE = re.compile(r"\d{7}|\{[^{}]*(?:\{|\[[^\[\]{}]*[{}])")
_WIDE_PERCENT = re.compile(r"[0-9]{7}|\*")
_PERCENT = re.compile(r"%([-+ #0-9.*hlL]*)%?")
_NAMED_PERCENT = re.compile(r"[%)]([-+ #0-9.*hlL]*)")  # a name may hold both, so that each may begin a width
_CHECK, _JOIN = "_check_the_time", "_join_texts"
# Filters that look at what a list or a mapping holds without making text of it
_STRUCTURAL = {
    *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length"),
    *("list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr"),
    *("slice", "sort", "sum", "unique"),
}


class TooMuch(ValueError):
    """A template makes more, or takes longer, than it may."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a rendering, from `begin` on, may take `most_s` of a thread's time."""

    # Jinja reads it of the class, and declares it for instances
    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"+", "*", "**", "%"})  # type: ignore[misc]

    def __init__(self, most_s: float, **options: Any) -> None:
        super().__init__(finalize=self._finalized, **options)
        self._most_s = most_s
        self._of_thread = threading.local()
        self.filters = {name: self._bounded(name, each) for name, each in self.filters.items()}
        del self.globals["lipsum"]  # it makes any number of words in one call
        self.globals |= {_CHECK: self._check_time, _JOIN: self._joined}

    def add_filter(self, name: str, filter: Callable[..., Any]) -> None:
        """Add a filter, whose arguments and results are bounded as those of Jinja's own."""
        self.filters[name] = self._bounded(name, filter)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Keep a template from bytes, of which it needs none, and whose operations would need bounds, too."""
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def begin(self) -> None:
        """Begin a rendering in this thread."""
        self._of_thread.left = MOST_WORK
        self._of_thread.until_s = time.thread_time() + self._most_s

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Return the tree with a look at the time in each loop, and with counted concatenations."""
        for loop in [*tree.find_all(nodes.For)]:
            call = nodes.Call(nodes.Name(_CHECK, "load"), [], [], None, None)
            loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
        found: nodes.Template = _Joins().visit(tree)
        return found

    def concat(self, pieces: Iterable[str]) -> str:
        """Join what a template or a block of it writes."""
        kept = list[str]()
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            self._spend(len(piece), num_chars)
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operation whose result is within the bounds."""
        match operator, left, right:
            case "*", int(), int():
                self._check_bits(left.bit_length() + right.bit_length())
            case "**", int(), int():
                self._check_bits(left.bit_length() * max(1, abs(right)))
            case "*", (str() | list() | tuple()), int():
                self._spend(len(left) * max(0, right))
            case "*", int(), (str() | list() | tuple()):
                self._spend(len(right) * max(0, left))
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                self._spend(len(left) + len(right))
            case "%", str(), _:
                self._check_percent(left, (right,))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **named: Any) -> Any:
        """Call a macro, a function or a method whose result is within the bounds."""
        self._check_time()
        own = getattr(called, "__wrapped__", called)
        text = getattr(own, "__self__", None)
        if isinstance(text, str):
            args = tuple(map(_listed, args))
            self._check_text_call(own.__name__, text, (*args, *named.values()))
        found = super().call(context, called, *args, **named)
        if isinstance(found, (str, list, tuple, dict)):
            self._spend(len(found))
        return found

    def _check_text_call(self, name: str, text: str, args: tuple[Any, ...]) -> None:
        """Raise TooMuch where a method of a text would make too much."""
        if name in ("format", "format_map"):
            self._check_format(text, args)
            return
        numbers = [each for each in args if isinstance(each, int)]
        texts = [each for each in args if isinstance(each, str)]
        if name == "replace" and len(texts) > 1:
            self._spend((text.count(texts[0]) if texts[0] else len(text) + 1) * len(texts[1]))
        elif name == "expandtabs":
            self._spend(text.count("\t") * max(8, *numbers, 0))
        elif name == "join" and args:
            self._spend(self._size_of(args[0]) + len(text) * _num_of(args[0]))
        elif name == "translate" and args:
            longest = max((len(str(each)) for each in dict(args[0]).values()), default=1)
            self._spend(len(text) * longest)
        else:
            self._spend(max([0, *numbers]))

    def _bounded(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter with a bound on what it is given and what it makes."""
        takes = getattr(filter, "jinja_pass_arg", None)

        @wraps(filter)
        def filtered(*args: Any, **named: Any) -> Any:
            if name not in _STRUCTURAL:
                args = tuple(map(_listed, args))
            given = [*args[takes is not None :], *named.values()]
            self._check_filter(name, given)
            found = filter(*args, **named)
            if isinstance(found, (str, list, tuple, dict)):
                self._spend(len(found))
            return found

        return filtered

    def _check_filter(self, name: str, given: list[Any]) -> None:
        self._check_time()
        if any(isinstance(each, int) and abs(each) > MOST_NUMBER for each in given[1:]):
            raise TooMuch(f"{name} is given a number above {MOST_NUMBER:,}")
        value = given[0] if given else None
        if name not in _STRUCTURAL:
            self._spend(self._size_of(value))
        texts = [each for each in given if isinstance(each, str)]
        numbers = [each for each in given[1:] if isinstance(each, int)]
        if name == "format":  # It takes the text of any value
            self._check_percent(str(value), tuple(given[1:]))
        elif name == "replace" and len(texts) > 2:
            self._spend((texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1) * len(texts[2]))
        elif name in ("indent", "wordwrap") and texts:
            lines = texts[0].count("\n") + 1 if name == "indent" else len(texts[0])
            self._spend(lines * max([4, *numbers[:1], *map(len, texts[1:])]))
        elif name == "join":
            self._spend(sum(map(len, texts[:1])) * _num_of(value))
        elif name == "tojson" and numbers:
            self._spend(self._size_of(value) * max(0, *numbers, 1))

    def _check_format(self, text: str, given: tuple[Any, ...]) -> None:
        """Raise TooMuch for a text of `str.format` with a width that is large or comes from an argument."""
        self._check_widths(_WIDE, text)
        widths = sum(map(int, re.findall(r"\d+", text)))
        self._spend(len(text) + widths + text.count("{") * self._size_of(given))

    def _check_percent(self, text: str, given: tuple[Any, ...]) -> None:
        """Raise TooMuch for a text of `%` with a width that is large or comes from an argument."""
        specs = (_NAMED_PERCENT if "%(" in text else _PERCENT).findall(text)
        said = "|".join(specs)
        self._check_widths(_WIDE_PERCENT, said)
        widths = sum(map(int, re.findall(r"[0-9]+", said)))
        self._spend(len(text) + widths + len(specs) * self._size_of(given))

    def _check_widths(self, wide: re.Pattern[str], text: str) -> None:
        if wide.search(text):
            raise TooMuch("a format has a width above 6 digits, or takes it from an argument")

    def _check_bits(self, num_bits: int) -> None:
        if num_bits > _MOST_BITS:
            raise TooMuch(f"it computes an integer of more than {_MOST_BITS} bits")

    def _check_time(self) -> str:
        if time.thread_time() > getattr(self._of_thread, "until_s", float("inf")):
            raise TooMuch(f"it took more than {self._most_s:g} s; send fewer or shorter ones")
        return ""

    def _joined(self, *values: Any) -> str:
        """Join the operands of `~`."""
        self._spend(self._size_of(values))
        return "".join(map(str, values))

    def _finalized(self, value: Any) -> Any:
        """Count what is written of a list or a mapping, whose text may be longer than it."""
        if isinstance(value, (list, tuple, dict)):
            self._spend(self._size_of(value))
        return value

    def _spend(self, count: int, size: int | None = None) -> None:
        left = getattr(self._of_thread, "left", MOST_WORK) - count
        if left < 0 or (count if size is None else size) > MOST_TEXT:
            raise TooMuch(f"it makes texts or lists of more than {MOST_TEXT:,} characters or entries")
        self._of_thread.left = left
        self._check_time()

    def _size_of(self, value: Any) -> int:
        """Return about how long a value is as text, which may hold one text many times."""
        size, rest = 0, [value]
        while rest:
            each = rest.pop()
            size += 8
            if isinstance(each, str):
                size += len(each)
            elif isinstance(each, Mapping):
                rest += [*each.keys(), *each.values()]
            elif isinstance(each, (list, tuple)):
                rest += each
            if size + len(rest) > MOST_TEXT:
                return MOST_TEXT + 1
        return size


class _Joins(NodeTransformer):
    """Makes calls of concatenations, which Jinja lets nobody intercept."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None, lineno=node.lineno)


def _listed(value: Any) -> Any:
    """Return the values of an iterator, whose number is not known, as a list."""
    return [*islice(value, MOST_TEXT)] if isinstance(value, Iterator) else value


def _num_of(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 0
