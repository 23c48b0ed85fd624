"""Keep control tokens out of what a request sends for the chat template.

The template cannot tell the text of a message from its own. So a control token in a text is replaced by a
mark before the template sees it, and texts that could be parts of one have a mark at their edge. What is
rendered is cut at an edge only where a control token would lie across it: elsewhere a cut would change how
ordinary text is encoded. A template that takes words out of a text may still join what stood around them.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from serving.text.chat_options import strings_in, with_strings
from serving.text.vocabulary import any_of

_WRITTEN = re.compile(r"(?:\ue000|\\ue000)([0-9]+)(?:\ue001|\\ue001)")  # marks, as such or escaped


class Shield:
    """Shields texts from these control tokens."""

    def __init__(self, control: Collection[str]) -> None:
        self._control, self._pattern = control, any_of(control)
        self._joined = "\0".join(control)
        self._begins = {token[:size] for token in control for size in range(1, len(token))}
        # A last character alone completes no token that another text has begun and was kept apart from.
        self._ends = {token[size:] for token in control for size in range(1, len(token) - 1)}
        self._longest = max(map(len, control), default=0)

    def shielded(self, values: list[Any]) -> tuple[list[Any], dict[str, str]]:
        """Return the values with marks in their texts, and the text that each mark stands for.

        All other text is unchanged. The text of the mark that keeps texts apart is empty.
        """
        written = "".join(strings_in(values))
        taken = set(_WRITTEN.findall(written))  # looked for once: a client may write as many as it likes
        numbers = (number for number in itertools.count() if str(number) not in taken)
        edge = _mark(next(numbers))
        found = sorted(set(self._pattern.findall(written)))
        marks = {name: _mark(number) for name, number in zip(found, numbers)}
        pattern = any_of(marks)

        def changed(text: str) -> str:
            return self._apart(pattern.sub(lambda match: marks[match[0]], text), edge)

        spelt = {edge: ""} | {mark: name for name, mark in marks.items()}
        # A template may show a value as JSON of ASCII, or as Python writes it
        escaped = {ascii(mark)[1:-1]: name for mark, name in spelt.items()}
        return with_strings(values, changed), spelt | escaped

    def parts(self, rendered: str, spelt: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a rendered text, without marks, and whether each is to be spelt out.

        `spelt` has the text that each mark stands for.
        """
        text, edges = "", list[int]()
        for piece in any_of(spelt).split(rendered):
            name = spelt.get(piece)
            if name is None:
                text += piece
            elif not name:
                edges.append(len(text))
            else:
                yield from self._cut(text, edges)
                yield name, True
                text, edges = "", []
        yield from self._cut(text, edges)

    def _cut(self, text: str, edges: list[int]) -> Iterator[tuple[str, bool]]:
        """Yield the parts of a text, cut at the edges across which a control token would lie."""
        begin = at = 0
        while edges and (found := self._pattern.search(text, at)):
            place = bisect_right(edges, found.start())
            edge = edges[place] if place < len(edges) and edges[place] < found.end() else None
            at = found.end() if edge is None else edge
            if edge is not None:
                yield text[begin:edge], False
                begin = edge
        if text[begin:]:
            yield text[begin:], False

    def _apart(self, text: str, edge: str) -> str:
        """Return a text with the mark where it begins or ends as a control token goes on or begins.

        Templates strip texts, so white space around one is looked past. They compare roles, types and other
        words, so a text that is one word or number is left as it is.
        """
        core = text.strip()
        if not core or core.replace("_", "").isalnum():
            return text
        sizes = range(1, min(len(core) + 1, self._longest))
        is_within = len(core) < self._longest and core in self._joined
        if is_within or any(core[:size] in self._ends for size in sizes):
            text = text.replace(core, edge + core, 1)
        if any(core[-size:] in self._begins for size in sizes):
            at = len(text.rstrip())
            text = text[:at] + edge + text[at:]
        return text


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"  # private-use characters of Unicode
