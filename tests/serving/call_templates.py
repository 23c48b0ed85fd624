"""Answers that call tools, as the chat templates of published models write them, and ways in which models
spoil them.

Nothing here uses the product's definitions of formats: the templates are the judges of what its parsers and
grammars make of an answer. Each template writes one assistant's turn; `nl` is its white space, `say` writes a
value that is no text, and `i` counts the calls of the conversation.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jinja2
from llguidance import LLTokenizer

_JSON_CALL = '{"name": "{{ c.name }}", "arguments": {{ js(c.arguments) }}}'
_GLM_PAIR = "<arg_key>{{ k }}</arg_key>{{ nl }}<arg_value>{{ say(v) }}</arg_value>{{ nl }}"
_QWEN_CALL = (
    "<function={{ c.name }}>{{ nl }}{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n{{ say(v) }}\n"
    "</parameter>{{ nl }}{% endfor %}</function>{{ nl }}"
)
_SEED_CALL = _QWEN_CALL.replace("\n", "")
_MINIMAX_PAIRS = (
    '{% for k, v in c.arguments.items() %}<parameter name="{{ k }}">{{ say(v) }}</parameter>{{ nl }}'
    "{% endfor %}</invoke>{{ nl }}"
)
_DSML_PAIRS = (
    '{% for k, v in c.arguments.items() %}<｜DSML｜parameter name="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">{{ say(v) }}</｜DSML｜parameter>{{ nl }}{% endfor %}'
)
_BARE = (
    '{% macro bare(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}{{ "{" }}'
    "{% for k, w in v.items() %}{{ k }}:{{ bare(w) }}{% if not loop.last %},{% endif %}{% endfor %}"
    '{{ "}" }}{% elif v is iterable %}[{% for w in v %}{{ bare(w) }}{% if not loop.last %},{% endif %}'
    "{% endfor %}]{% else %}{{ js(v) }}{% endif %}{% endmacro %}"
)
_KEYWORDS = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ say_in_code(v) }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)


def _each(call: str, between: str = "") -> str:
    gap = "{% if not loop.last %}" + between + "{% endif %}" if between else ""
    return "{% for c in calls %}" + call + gap + "{% endfor %}"


def _when_called(text: str) -> str:
    return "{% if calls %}" + text + "{% endif %}"


_NL = "{{ nl }}"
CALLS = {
    "hermes": _each(f"<tool_call>{_NL}{_JSON_CALL}{_NL}</tool_call>", _NL),
    "longcat": _each(f"<longcat_tool_call>{_NL}{_JSON_CALL}{_NL}</longcat_tool_call>", _NL),
    "llama3_json": _each('{"name": "{{ c.name }}", "parameters": {{ js(c.arguments) }}}', "; "),
    "mistral": _when_called(f"[TOOL_CALLS][{_each(_JSON_CALL, ', ')}]"),
    "mistral_v11": _each("[TOOL_CALLS]{{ c.name }}{{ call_id }}[ARGS]{{ js(c.arguments) }}"),
    "deepseek": _when_called(
        "<｜tool▁calls▁begin｜>"
        + _each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ js(c.arguments) }}\n```"
            "<｜tool▁call▁end｜>",
            "\n",
        )
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": _when_called(
        "<｜tool▁calls▁begin｜>"
        + _each("<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ js(c.arguments) }}<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": _when_called(
        f"<｜DSML｜function_calls>{_NL}"
        + _each(f'<｜DSML｜invoke name="{{{{ c.name }}}}">{_NL}{_DSML_PAIRS}</｜DSML｜invoke>{_NL}')
        + "</｜DSML｜function_calls>"
    ),
    "kimi_k2": _when_called(
        "<|tool_calls_section_begin|>"
        + _each(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ i + loop.index0 }}<|tool_call_argument_begin|>"
            "{{ js(c.arguments) }}<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>"
    ),
    "glm45": _each(
        "<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}"
        + _GLM_PAIR
        + "{% endfor %}</tool_call>",
        _NL,
    ),
    "glm47": _each(
        "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
        "<arg_value>{{ say(v) }}</arg_value>{% endfor %}</tool_call>"
    ),
    "qwen3_coder": _each(f"<tool_call>{_NL}{_QWEN_CALL}</tool_call>", _NL),
    "seed_oss": _each(f"<seed:tool_call>{_NL}{_SEED_CALL}</seed:tool_call>", _NL),
    "minimax_m2": _when_called(
        f"<minimax:tool_call>{_NL}"
        + _each(f'<invoke name="{{{{ c.name }}}}">{_NL}{_MINIMAX_PAIRS}')
        + "</minimax:tool_call>"
    ),
    "hy_v3": _when_called(
        f"<tool_calls>{_NL}"
        + _each(
            f"<tool_call>{{{{ c.name }}}}<tool_sep>{_NL}{{% for k, v in c.arguments.items() %}}{_GLM_PAIR}"
            f"{{% endfor %}}</tool_call>{_NL}"
        )
        + "</tool_calls>"
    ),
    "gemma4": _BARE + _each("<|tool_call>call:{{ c.name }}{{ bare(c.arguments) }}<tool_call|>"),
    "hunyuan_a13b": _when_called(f"<tool_calls>[{_each(_JSON_CALL, ', ')}]</tool_calls>"),
    "olmo3": _when_called(f"<function_calls>{_NL}{_each(_KEYWORDS + _NL)}</function_calls>"),
    "pythonic": _when_called(f"[{_each(_KEYWORDS, ', ')}]"),
    "harmony": _each(
        "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
        "{{ js(c.arguments) }}<|call|>"
    ),
}
# How the models of a format write thoughts, by the name of it in recipes
THOUGHTS = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought\n", "\n<channel|>"),
    "hunyuan": ("<think>\n", "\n</think>\n"),
    "ernie": ("<think>\n", "\n</think>\n\n"),
}
AROUND = {"hunyuan": ("<answer>\n", "\n</answer>"), "ernie": ("<response>\n", "\n</response>\n")}
REASONING = {
    "seed_oss": "seed",
    "mistral_v11": "mistral",
    "gemma4": "gemma4",
    "hunyuan_a13b": "hunyuan",
    "harmony": "harmony",
}
WHOLE = ("llama3_json", "pythonic")  # where a call has no mark of its own, nothing stands before it
KEYWORDS = ("olmo3", "pythonic")
PAIRS = ("glm45", "glm47", "qwen3_coder", "seed_oss", "minimax_m2", "hy_v3", "deepseek_v32")

_TEXT: dict[str, Any] = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": _TEXT,
            "days": {"type": "integer"},
            "unit": {"enum": ["c", "f"]},
            "is_short": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "write": {
        "type": "object",
        "properties": {
            "path": _TEXT,
            "text": _TEXT,
            "note": {"anyOf": [_TEXT, {"type": "null"}]},
            "tags": {"type": "array", "items": _TEXT},
            "place": {"$ref": "#/$defs/Place"},
            "mode": {"type": ["integer", "string"]},
        },
        "required": ["path", "text"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "name": _TEXT},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
        "additionalProperties": False,
    },
    "mcp.now-utc": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
# Texts that look like parts of formats, of JSON or of Python, and none of which may be taken for one
TEXTS = (
    "Peking",
    "",
    "天气 ☀️ é",
    "5",
    "true",
    "null",
    '{"a": 1}',
    'say "hi" \\ and \\n',
    "a\nb\n\n  c",
    " with spaces ",
    "if a < b and b > c: return [a]}])",
    "</parameter> is a tag, and so is </arg_value>",
    "<tool_call> or </tool_call> or <function=f>",
    "<parameter=other> <arg_key>other",
    "it's \t'quoted'",
    'Bei"jing})]',
    "<|tool_call> call: <x|> <｜DSML｜>",
)
_WORDS = ("plain", "a b", "天", "x < y", "")
_SAYS = ("", "Let me see.", "I look: 1 < 2, {x} and [y].", "天气 `<tool` ", "So\n\nthis.")
_THINKS = ("I look up the lamp.", "First\n\nthen 1 < 2 </thin and [so].", "天气")


@dataclass
class Turn:
    """An assistant's turn: what it thinks, says and calls."""

    thoughts: str | None
    says: str
    calls: list[dict[str, Any]]
    first: int = 0  # the number of calls in earlier turns
    text: str = ""  # the turn as a template has written it
    is_open: bool = False  # whether the thoughts are not closed before the calls
    behind: str = ""


@dataclass
class Ways:
    """How a turn is written: white space, values that are no text, and what a model adds."""

    nl: str = "\n"
    words: str = "json"  # or "python", whose constants some models write
    call_id: str = ""
    spaces: tuple[str, str] = field(default=(", ", ": "))


def _say(ways: Ways) -> Callable[[Any], str]:
    def say(value: Any) -> str:
        if isinstance(value, str):
            return value
        if ways.words == "python" and (value is None or isinstance(value, bool)):
            return str(value)
        return json.dumps(value, ensure_ascii=False)

    return say


@functools.cache
def _template(form: str) -> jinja2.Template:
    """The template of a format's calls, whose compilation takes longer than any turn."""
    return jinja2.Environment(keep_trailing_newline=True).from_string(CALLS[form])


def render(form: str, turn: Turn, ways: Ways | None = None) -> str:
    """The turn as a template writes it, from the generation prompt on."""
    ways = ways or Ways()
    reasoning = REASONING.get(form, "think")
    js = lambda value: json.dumps(value, ensure_ascii=False, separators=ways.spaces)  # noqa: E731 - as templates name it
    calls = _template(form).render(
        calls=turn.calls,
        nl=ways.nl,
        i=turn.first,
        say=_say(ways),
        say_in_code=repr if ways.words == "python" else lambda v: json.dumps(v, ensure_ascii=False),
        js=js,
        call_id=ways.call_id,
    )
    if form == "harmony":
        return _harmony(turn, calls)
    begin, end = THOUGHTS[reasoning] if turn.thoughts is not None else ("", "")
    before, behind = AROUND.get(reasoning, ("", "")) if turn.says else ("", "")
    says = f"{before}{turn.says}{behind}" if turn.thoughts is not None else turn.says
    if turn.is_open:
        return f"{begin}{turn.thoughts}\n{calls}"
    gap = "\n" if says and calls and form != "glm47" else ""
    return f"{begin}{turn.thoughts or ''}{end}{says}{gap}{calls}{turn.behind}"


def _harmony(turn: Turn, calls: str) -> str:
    parts = []
    if turn.thoughts is not None:
        parts.append(f"<|channel|>analysis<|message|>{turn.thoughts}<|end|>")
    if turn.says:
        channel = "commentary" if turn.calls else "final"
        end = "<|end|>" if turn.calls else "<|return|>"
        parts.append(f"<|channel|>{channel}<|message|>{turn.says}{end}")
    whole = "<|start|>assistant".join(parts)
    return whole + calls if parts else calls.removeprefix("<|start|>assistant")


def arguments(name: str, rng: random.Random) -> dict[str, Any]:
    """Arguments of a function, in the order of its schema, some of which are left out."""
    values: dict[str, Callable[[], Any]] = {
        "city": lambda: rng.choice(TEXTS),
        "days": lambda: rng.randrange(-3, 1000),
        "unit": lambda: rng.choice("cf"),
        "is_short": lambda: rng.random() < 0.5,
        "limit": lambda: rng.choice((None, 1.5, -2, 1e21)),
        "path": lambda: rng.choice(TEXTS),
        "text": lambda: rng.choice(TEXTS) + rng.choice(TEXTS),
        "note": lambda: rng.choice((None, *_WORDS)),
        "tags": lambda: [rng.choice(TEXTS) for _ in range(rng.randrange(3))],
        "place": lambda: {"x": rng.randrange(9), "name": rng.choice(TEXTS)},
        "mode": lambda: rng.choice((7, *_WORDS)),
    }
    schema = SCHEMAS[name]
    return {
        key: values[key]()
        for key in schema["properties"]
        if key in schema.get("required", ()) or rng.random() < 0.5
    }


def turn(form: str, rng: random.Random, *, num_calls: int | None = None) -> Turn:
    """A drawn turn, which a model of this format could have."""
    count = rng.choice((0, 1, 1, 1, 2, 3)) if num_calls is None else num_calls
    count = min(count, 1) if form == "harmony" else count
    names = [rng.choice(list(SCHEMAS)) for _ in range(count)]
    calls = [{"name": name, "arguments": arguments(name, rng)} for name in names]
    says = "" if calls and form in WHOLE else rng.choice(_SAYS)
    return Turn(rng.choice((None, *_THINKS)), says, calls, first=rng.randrange(4))


@functools.cache
def of_bytes() -> LLTokenizer:
    """The tokenizer whose tokens are bytes, which takes as long to make as a grammar to compile."""
    return LLTokenizer("byte")
