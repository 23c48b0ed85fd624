"""Define the formats in which models write tool calls.

The parser of what models write (parsing.py) and the grammar of what they must write (definitions.py) both
follow from these definitions. A call is `head` NAME `middle` ARGUMENTS `tail`; several calls are separated by
`between`, and `opening` and `closing` enclose all of them. White space in these texts is what models were
trained on; the parser accepts any other white space, or none, in its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LONGEST_ID = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format, whose arguments are a JSON object or Python keywords (`a=1, b="x"`).

    With `is_whole`, calls have no mark of their own, so an answer either begins with a call or has none.
    `marks` are control tokens of some tokenizers. With `text_arguments`, the chat template takes the
    arguments of earlier calls as JSON text, not as an object.
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
    id_length: int = LONGEST_ID  # length of the ids of calls, which some chat templates check

    @property
    def trigger(self) -> str:
        """The text with which a call begins and which other text does not contain; empty if `is_whole`."""
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

# The keys are the values that `server.tool_format` of a recipe may have.
TOOL_FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "pythonic": PYTHONIC,
}
