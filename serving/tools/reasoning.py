"""Split an answer into the model's reasoning and the answer proper.

The reasoning is the text of a think block, `<think>` to `</think>`, with which an answer begins, or which its
prompt has opened. As in parsing.py, no decision depends on how the text was cut.
"""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


class ReasoningParser:
    """Parses one answer.

    `is_open` says that the prompt ends with the beginning of the block and, later, that the text so far ends
    inside it. `has_ended` says that the block's end has been found.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.has_ended = False
        self._has_begun = is_open
        self._is_blank = True  # white space around the block, and at its beginning, is dropped
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text, and return the reasoning and the answer that are certain with it."""
        self._held += text
        if not self._has_begun:
            begun = self._held.lstrip()
            if len(begun) < len(BEGIN) and BEGIN.startswith(begun):
                return "", ""
            self._has_begun = True
            if not begun.startswith(BEGIN):
                self._is_blank = False
            else:
                self.is_open, self._held = True, begun.removeprefix(BEGIN)
        thoughts = self._thoughts() if self.is_open else ""
        return thoughts, "" if self.is_open else self._shown(len(self._held))

    def finish(self) -> tuple[str, str]:
        """Return the rest, when no more text comes."""
        held, self._held = self._held, ""
        if self.is_open:
            return ("" if self._is_blank else held.rstrip()), ""
        return "", "" if self._is_blank and self._has_begun else held

    def _thoughts(self) -> str:
        """Return reasoning that is certain: without white space with which the block may end."""
        at = self._held.find(END)
        if at >= 0:
            thoughts = self._held[:at].rstrip()
            thoughts = thoughts.lstrip() if self._is_blank else thoughts
            self._held, self._is_blank = self._held[at + len(END) :], True
            self.is_open, self.has_ended = False, True
            return thoughts
        sizes = range(min(len(END) - 1, len(self._held)), 0, -1)
        kept = next((size for size in sizes if self._held.endswith(END[:size])), 0)
        return self._shown(len(self._held[: len(self._held) - kept].rstrip()))

    def _shown(self, size: int) -> str:
        shown, rest = self._held[:size], self._held[size:]
        if self._is_blank:
            shown = shown.lstrip()
            if not shown:
                return ""
            self._is_blank = False
        self._held = rest
        return shown
