"""How does a model write that it calls tools?

One statement for each format, from which both the parser of what models write (parsing.py) and the grammar of
what they must write (grammar.py) follow. A call is `head` NAME `middle` ARGUMENTS `tail`; several stand
`between` one another, and `opening` and `closing` stand around all of them. White space in these texts is
what models were trained on; the parser takes any other, or none, in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LONGEST_ID = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format. Arguments are a JSON object, or Python's keywords: `a=1, b="x"`.

    `is_whole`: calls have no mark of their own, so an answer either begins with one or has none. `marks`
    are control tokens of some tokenizers. `text_arguments`: the chat template takes the arguments of earlier
    calls as JSON text, not as an object.
    """

    opening: str = ""
    head: str
    middle: str
    tail: str
    between: str
    closing: str = ""
    arguments: Literal["json", "keywords"] = "json"
    is_whole: bool = False
    marks: tuple[str, ...] = ()
    text_arguments: bool = False
    id_length: int = LONGEST_ID  # of the ids of calls, which some chat templates check

    @property
    def trigger(self) -> str:
        """What a call begins with and other text does not hold; empty for formats that are `is_whole`."""
        return "" if self.is_whole else next(iter(self.marks), (self.opening + self.head).split()[0])


HERMES = ToolFormat(
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
)
LLAMA3_JSON = ToolFormat(head='{"name": "', middle='", "parameters": ', tail="}", between="; ", is_whole=True)
MISTRAL = ToolFormat(
    opening="[TOOL_CALLS][",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    closing="]",
    marks=("[TOOL_CALLS]",),
    id_length=9,
)
DEEPSEEK = ToolFormat(
    opening="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n",
    closing="<｜tool▁calls▁end｜>",
    marks=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ),
    text_arguments=True,
)
PYTHONIC = ToolFormat(
    opening="[", head="", middle="(", tail=")", between=", ", closing="]", arguments="keywords", is_whole=True
)

# By the names that `server.tool_format` of a recipe may have
TOOL_FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "pythonic": PYTHONIC,
}
