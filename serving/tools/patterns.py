"""Write the `pattern` of a schema as a regular expression of whole texts, as the matcher needs it.

A pattern may match anywhere in a text, and its anchors may stand in some of its alternatives only, while the
matcher knows no anchors. So each alternative that has one becomes an expression of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from serving.tools.alternatives import Unheld

_MOST_ALTERNATIVES = 64
_MOST_NESTED = 64  # groups within each other
_TOKENS = re.compile(
    r"(?P<escape>\\(?s:.))|(?P<class>\[\^?\]?(?:\\(?s:.)|[^\]\\])*\])|(?P<open>\((?:\?:|\?P?<\w+>)?)"
    r"|(?P<close>\))|(?P<bar>\|)|(?P<anchor>[\^$])|(?P<repeat>[*+?]\??|\{\d+(?:,\d*)?\}\??)|(?P<char>(?s:.))"
)
_ANYTHING = "(?s:.*)"
_TO_SPELL = re.compile(r"\\(?s:.)|[/\n]")  # a slash behind an escaped backslash is not escaped


@dataclass(slots=True)
class _Group:
    """A group, or the whole pattern."""

    alternatives: list[list[_Item]]

    def is_anchored(self) -> bool:
        return any(
            item in ("^", "$") or (isinstance(item, _Group) and item.is_anchored())
            for each in self.alternatives
            for item in each
        )


_Item = str | _Group  # an expression, an anchor or a group


def whole_text(pattern: str) -> str:
    """Return a pattern as an expression between slashes without them; raises Unheld."""
    group = _parsed(pattern)
    if not group.is_anchored():
        return f"{_ANYTHING}{_written(group)}{_ANYTHING}"
    return f"(?:{'|'.join(map(_unanchored, _spread(group)))})"


def _parsed(pattern: str) -> _Group:
    stack = [_Group([[]])]
    for found in _TOKENS.finditer(pattern):
        kind, text = found.lastgroup, found[0]
        items = stack[-1].alternatives[-1]
        match kind:
            case "open":
                if pattern.startswith("?", found.end()) or len(stack) > _MOST_NESTED:
                    raise Unheld("pattern with a look around or a flag")
                stack.append(_Group([[]]))
            case "close":
                if len(stack) == 1:
                    raise Unheld("pattern that is no regular expression")
                group = stack.pop()
                stack[-1].alternatives[-1].append(group)
            case "bar":
                stack[-1].alternatives.append([])
            case "repeat":
                if not items or items[-1] in ("^", "$"):
                    raise Unheld("pattern that repeats nothing")
                last = items.pop()
                if isinstance(last, _Group) and last.is_anchored():
                    raise Unheld("pattern that repeats an anchor")
                items.append((_written(last) if isinstance(last, _Group) else last) + text)
            case "escape" if text[1] in "bBk123456789":
                raise Unheld(f"pattern with {text}")
            case "char" if text == "[":  # a class that does not end
                raise Unheld("pattern that is no regular expression")
            case "anchor":
                items.append(text)
            case _:
                items.append(_TO_SPELL.sub(_spelt, text))
    if len(stack) > 1:
        raise Unheld("pattern that is no regular expression")
    return stack[0]


def _spelt(found: re.Match[str]) -> str:
    """Return an escape, a slash or a line break as it may stand between slashes."""
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _written(group: _Group) -> str:
    alternatives = ("".join(map(_text_of, each)) for each in group.alternatives)
    return f"(?:{'|'.join(alternatives)})"


def _text_of(item: _Item) -> str:
    return _written(item) if isinstance(item, _Group) else item


def _spread(group: _Group) -> Iterator[list[_Item]]:
    """Yield the alternatives of a pattern, with groups that hold anchors spread out into further ones."""
    waiting, number = group.alternatives[::-1], 0
    while waiting:
        items, number = waiting.pop(), number + 1
        if number + len(waiting) > _MOST_ALTERNATIVES:
            raise Unheld("pattern with anchors in many alternatives")
        at = next(
            (at for at, each in enumerate(items) if isinstance(each, _Group) and each.is_anchored()), None
        )
        if at is None:
            yield items
            continue
        inner = items[at]
        assert isinstance(inner, _Group), "only a group is spread"
        waiting += [[*items[:at], *each, *items[at + 1 :]] for each in reversed(inner.alternatives)]


def _unanchored(items: list[_Item]) -> str:
    begin, end = 0, len(items)
    while begin < end and items[begin] == "^":
        begin += 1
    while end > begin and items[end - 1] == "$":
        end -= 1
    inner = items[begin:end]
    if "^" in inner or "$" in inner:
        raise Unheld("pattern with an anchor within a text")
    before, behind = ("" if begin else _ANYTHING), ("" if end < len(items) else _ANYTHING)
    return f"{before}{''.join(map(_text_of, inner))}{behind}"
