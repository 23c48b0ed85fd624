"""Define the formats in which models write tool calls and thoughts.

The parser of what models write (parsing.py) and the grammar of what they must write (definitions.py) both
follow from these definitions. A call is `head` NAME `middle` ARGUMENTS `tail`; several calls are separated by
`between`, and `opening` and `closing` enclose all of them. White space in these texts is what models were
trained on; the parser accepts any other white space, or none, in its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

LONGEST_ID = 32
MOST_SPACE = 64  # most white space within the words around a call; more of it makes them content
NO, MAYBE = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Arguments in tags: `key` KEY `value` VALUE `close` `behind`, once for each.

    A value that is text is neither quoted nor escaped; other values are JSON. Which it is follows from the
    schema of the argument or, with `json_value`, from the text: that stands in place of `value` before JSON;
    and `loose_value` where a model does not say which, so that the schema does.
    `margin` stands on each side of a value without belonging to it. With `is_by_line`, a key at the beginning
    of a line, or the call's end there, ends a value that the model forgot to close.
    """

    key: str
    value: str
    json_value: str = ""
    loose_value: str = ""
    close: str
    margin: str = ""
    behind: str = "\n"
    is_by_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format, whose arguments are a JSON object, Python keywords (`a=1, b="x"`), tagged pairs, or an
    object in Gemma's notation: keys are bare, and strings stand between two `quote`.

    With `is_whole`, calls have no mark of their own, so an answer either begins with a call or has none.
    Some models forget the opening and begin a line with `line_head` instead. `other_heads` and
    `other_middles` are what some write in place of the head and the middle.
    `wraps` are pairs of texts that some models write around all calls. `marks` are control tokens of some
    tokenizers.
    A name may have `prefix` before it and, with `is_numbered`, has `:` and a number behind it; `prefix`, name
    and number are then the call's id. `id_mark` precedes an id behind the name, if there is one. With
    `has_suffix`, the tags of a vocabulary may have one before their end, such as `<tool_call:opensource>`.
    With `text_arguments`, the chat template takes the arguments of earlier calls as JSON text, not as an
    object.
    """

    opening: str = ""
    head: str
    middle: str
    tail: str
    between: str
    closing: str = ""
    arguments: Literal["json", "keywords", "pairs", "bare"] = "json"
    pairs: Pairs | None = None
    quote: str = ""
    is_whole: bool = False
    wraps: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    prefix: str = ""
    is_numbered: bool = False
    id_mark: str = ""
    has_suffix: bool = False
    line_head: str = ""
    other_heads: tuple[str, ...] = ()
    other_middles: tuple[str, ...] = ()
    text_arguments: bool = False
    id_length: int = LONGEST_ID  # length of the ids of calls, which some chat templates check

    @property
    def trigger(self) -> str:
        """The text with which a call begins and which other text does not contain; empty if `is_whole`."""
        if self.is_whole:
            return ""
        begin = self.opening + self.head
        return next((mark for mark in self.marks if begin.startswith(mark)), begin.split()[0])

    @property
    def end_mark(self) -> str:
        """The text that ends a call's arguments even where they are malformed; empty if there is none."""
        mark = (self.tail or self.head).split()[-1]
        return "" if mark in ("}", ")") else mark

    @property
    def before_object(self) -> str | None:
        """The text before a call that is a JSON object; None where models write none."""
        if self.is_whole:  # Llama 4 writes them in place of keywords
            return ""
        before, brace, _ = (self.opening + self.head).rpartition("{")
        return before if brace else None

    @property
    def tokens(self) -> list[str]:
        """The texts that are control tokens of some tokenizers, those around all calls included."""
        around = "".join(text for wrap in self.wraps for text in wrap)
        return [*self.marks, *re.findall("<[^<>]*>", around)]

    def with_suffix(self, suffix: str) -> ToolFormat:
        """Return the format with this suffix in each of its tags."""
        pairs = self.pairs
        if pairs is not None:
            key, value, close = (_tags_with(suffix, each) for each in (pairs.key, pairs.value, pairs.close))
            pairs = replace(pairs, key=key, value=value, close=close)
        return replace(
            self,
            opening=_tags_with(suffix, self.opening),
            head=_tags_with(suffix, self.head),
            middle=_tags_with(suffix, self.middle),
            tail=_tags_with(suffix, self.tail),
            closing=_tags_with(suffix, self.closing),
            pairs=pairs,
            marks=tuple(_tags_with(suffix, mark) for mark in self.marks),
        )


def _tags_with(suffix: str, text: str) -> str:
    return re.sub(r"(</?\w+)>", rf"\1{suffix}>", text)


HERMES = ToolFormat(
    head='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    tail="}\n</tool_call>",
    between="\n",
    marks=("<tool_call>", "</tool_call>"),
)
LONGCAT = replace(
    HERMES,
    head='<longcat_tool_call>\n{"name": "',
    tail="}\n</longcat_tool_call>",
    marks=("<longcat_tool_call>", "</longcat_tool_call>"),
)
LLAMA3_JSON = ToolFormat(
    head='{"name": "',
    middle='", "parameters": ',
    tail="}",
    between="; ",
    is_whole=True,
    wraps=(("<|python_tag|>", ""), ("<|python_start|><|python_end|>", ""), ("[", "]")),
    other_heads=('{"type": "function", "name": "',),
    other_middles=('", "arguments": ',),
)
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
MISTRAL_V11 = ToolFormat(
    head="[TOOL_CALLS]",
    middle="[ARGS]",
    tail="",
    between="",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_mark="[CALL_ID]",
    id_length=9,
)
_DEEPSEEK_MARKS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
DEEPSEEK = ToolFormat(
    opening="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    middle="\n```json\n",
    tail="\n```<｜tool▁call▁end｜>",
    between="\n",
    closing="<｜tool▁calls▁end｜>",
    marks=_DEEPSEEK_MARKS,
    text_arguments=True,
)
DEEPSEEK_V31 = replace(
    DEEPSEEK,
    head="<｜tool▁call▁begin｜>",
    middle="<｜tool▁sep｜>",
    tail="<｜tool▁call▁end｜>",
    between="",
)
DEEPSEEK_V32 = ToolFormat(
    opening="<｜DSML｜function_calls>\n",
    head='<｜DSML｜invoke name="',
    middle='">\n',
    tail="</｜DSML｜invoke>",
    between="\n",
    closing="\n</｜DSML｜function_calls>",
    arguments="pairs",
    pairs=Pairs(
        key='<｜DSML｜parameter name="',
        value='" string="true">',
        json_value='" string="false">',
        loose_value='">',
        close="</｜DSML｜parameter>",
    ),
    marks=("｜DSML｜",),
)
KIMI_K2 = ToolFormat(
    opening="<|tool_calls_section_begin|>",
    head="<|tool_call_begin|>",
    middle="<|tool_call_argument_begin|>",
    tail="<|tool_call_end|>",
    between="",
    closing="<|tool_calls_section_end|>",
    marks=(
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    prefix="functions.",
    is_numbered=True,
    text_arguments=True,
)
GLM45 = ToolFormat(
    head="<tool_call>",
    middle="\n",
    tail="</tool_call>",
    between="\n",
    arguments="pairs",
    pairs=Pairs(key="<arg_key>", value="</arg_key>\n<arg_value>", close="</arg_value>"),
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM47 = replace(
    GLM45,
    middle="",
    between="",
    pairs=Pairs(key="<arg_key>", value="</arg_key><arg_value>", close="</arg_value>", behind=""),
)
HY_V3 = replace(
    GLM45,
    opening="<tool_calls>\n",
    middle="<tool_sep>\n",
    closing="\n</tool_calls>",
    has_suffix=True,
    marks=("<tool_calls>", "</tool_calls>", "<tool_sep>", *GLM45.marks),
)
_FUNCTION_PAIRS = Pairs(key="<parameter=", value=">", close="</parameter>", is_by_line=True)
QWEN3_CODER = ToolFormat(
    head="<tool_call>\n<function=",
    middle=">\n",
    tail="</function>\n</tool_call>",
    between="\n",
    arguments="pairs",
    pairs=replace(_FUNCTION_PAIRS, margin="\n"),
    marks=("<tool_call>", "</tool_call>"),
    line_head="<function=",
)
SEED_OSS = replace(
    QWEN3_CODER,
    head="<seed:tool_call>\n<function=",
    tail="</function>\n</seed:tool_call>",
    pairs=_FUNCTION_PAIRS,
    marks=("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX_M2 = ToolFormat(
    opening="<minimax:tool_call>\n",
    head='<invoke name="',
    middle='">\n',
    tail="</invoke>",
    between="\n",
    closing="\n</minimax:tool_call>",
    arguments="pairs",
    pairs=Pairs(key='<parameter name="', value='">', close="</parameter>", is_by_line=True),
    marks=("<minimax:tool_call>", "</minimax:tool_call>"),
)
GEMMA4 = ToolFormat(
    head="<|tool_call>call:",
    middle="",
    tail="<tool_call|>",
    between="",
    arguments="bare",
    quote='<|"|>',
    marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
HUNYUAN = ToolFormat(
    opening="<tool_calls>[",
    head='{"name": "',
    middle='", "arguments": ',
    tail="}",
    between=", ",
    closing="]</tool_calls>",
    marks=("<tool_calls>", "</tool_calls>"),
)
PYTHONIC = ToolFormat(
    opening="[",
    head="",
    middle="(",
    tail=")",
    between=", ",
    closing="]",
    arguments="keywords",
    is_whole=True,
    wraps=(("<|python_start|>", "<|python_end|>"),),
)
OLMO3 = ToolFormat(
    opening="<function_calls>\n",
    head="",
    middle="(",
    tail=")",
    between="\n",
    closing="\n</function_calls>",
    arguments="keywords",
    marks=("<function_calls>", "</function_calls>"),
)

# The keys are the values that `server.tool_format` of a recipe may have.
TOOL_FORMATS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "deepseek": DEEPSEEK,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "kimi_k2": KIMI_K2,
    "glm45": GLM45,
    "glm47": GLM47,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "hy_v3": HY_V3,
    "gemma4": GEMMA4,
    "hunyuan_a13b": HUNYUAN,
    "longcat": LONGCAT,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
}


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The marks around a block of thoughts, with which an answer begins.

    `answer` are marks that some models write around the text behind the block. `limit` is the mark behind
    `begin` with which a prompt begins a remark on how long the thoughts may be.
    """

    begin: str = "<think>"
    end: str = "</think>"
    answer: tuple[str, str] = ("", "")
    limit: str = ""

    @property
    def tokens(self) -> tuple[str, str]:
        """The tokens that begin and end the block."""
        token = re.match(r"[\[<].*?[\]>]", self.begin)
        assert token is not None, "a block begins with a mark"
        return token[0], self.end

    def with_suffix(self, suffix: str) -> ThoughtFormat:
        """Return the format with this suffix in its tags."""
        return replace(self, begin=_tags_with(suffix, self.begin), end=_tags_with(suffix, self.end))


# The keys are the values that `server.reasoning` of a recipe may have, besides that of channels.
THOUGHT_FORMATS = {
    "think": ThoughtFormat(),
    "seed": ThoughtFormat("<seed:think>", "</seed:think>", limit="<seed:cot_budget_reflect>"),
    "mistral": ThoughtFormat("[THINK]", "[/THINK]"),
    "gemma4": ThoughtFormat("<|channel>thought", "<channel|>"),
    "hunyuan": ThoughtFormat(answer=("<answer>", "</answer>")),
    "ernie": ThoughtFormat(answer=("<response>", "</response>")),
}


def match(literal: str, text: str, at: int) -> int:
    """Return where the literal ends in the text, white space ignored, or NO, or MAYBE if it is cut off."""
    num_spaces = 0
    for char in "".join(literal.split()):
        while at < len(text) and text[at].isspace():
            at += 1
            num_spaces += 1
        if num_spaces > MOST_SPACE:
            return NO
        if at == len(text):
            return MAYBE
        if text[at] != char:
            return NO
        at += 1
    return at


def after_space(text: str, at: int, most: int) -> int:
    """Return where the white space ends that begins here, of which `most` characters are looked at."""
    end = min(len(text), at + most)
    while at < end and text[at].isspace():
        at += 1
    return at
