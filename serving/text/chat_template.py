"""How does a conversation become one text?

By the model's own Jinja template, in a sandbox, with what Hugging Face's templates rely on: the names of the
control tokens, `add_generation_prompt`, `raise_exception`, `strftime_now`, a `tojson` that keeps Chinese
legible, loop controls, and `{% generation %}` blocks, which count only in training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "developer", "user", "assistant", "tool")
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
_MOST_S = 5.0  # of a thread's own time, to render a conversation

_LOOK = "_look_at_the_clock"

Message = dict[str, str]


class ChatTemplate:
    """A compiled template; `tokens` are the control tokens it may name: bos_token, eos_token, ..."""

    def __init__(self, source: str, tokens: Mapping[str, str], *, most_s: float = _MOST_S) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = jinja2.Template.from_code(
                environment,
                environment.compile(_watched(environment.parse(source))),
                environment.make_globals(None),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {_line(error)}") from error
        self._tokens = dict(tokens)
        self._most_s = most_s

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant speaks next; ValueError if the template refuses it."""
        until_s = time.thread_time() + self._most_s

        def look() -> str:
            if time.thread_time() > until_s:
                raise ValueError(f"it took more than {self._most_s:g} s; send fewer or shorter ones")
            return ""

        try:
            return self._template.render(
                {_LOOK: look},
                **self._tokens,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except _FAILURES as error:
            raise ValueError(f"the chat template refuses these messages: {_line(error)}") from error


def check_messages(messages: object) -> list[Message]:
    """Messages as a template takes them: a role and plain text each.

    Content may also be a list of text parts, which become lines. Raises ValueError for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError('messages must be a list of at least one {"role": ..., "content": ...}')
    return [_check_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _check_message(name: str, message: object) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f'{name} must be an object {{"role": ..., "content": ...}}')
    given = {key for key, value in message.items() if value is not None and value != []}
    unknown = sorted(given - {"role", "content", "name"})
    if unknown:
        raise ValueError(f"{name}.{unknown[0]} is not supported; a message has role, content and name")
    if message.get("role") not in ROLES:
        raise ValueError(f"{name}.role must be one of {', '.join(ROLES)}")
    checked = {"role": message["role"], "content": _text_of(f"{name}.content", message.get("content"))}
    if message.get("name") is not None:
        checked["name"] = _check_text(f"{name}.name", message["name"])
    return checked


def _text_of(name: str, content: object) -> str:
    if not isinstance(content, list):
        return _check_text(name, content)
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(
                f'{name}[{index}] must be {{"type": "text", "text": ...}}; this model reads text'
            )
        parts.append(_check_text(f"{name}[{index}].text", part.get("text")))
    return "\n".join(parts)


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _watched(tree: nodes.Template) -> nodes.Template:
    """The same, with a look at the clock in each round of each loop: a sandbox has no limit of time."""
    for loop in [*tree.find_all(nodes.For)]:
        call = nodes.Call(nodes.Name(_LOOK, "load"), [], [], None, None)
        loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
    return tree


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what a training run learns: here, its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
