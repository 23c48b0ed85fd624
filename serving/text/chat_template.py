"""Check the messages of a conversation, and render it as one text.

Each message has a role and text; an assistant's may have reasoning and calls, a tool's the id of its call.
Anything else is refused. The model's own Jinja template runs in a sandbox with what Hugging Face's templates
rely on: the names of the control tokens, `add_generation_prompt`, `raise_exception`, `strftime_now`, a
`tojson` that does not escape Chinese, loop controls, and `{% generation %}` blocks, which matter only in
training. The reasoning effort reaches a model by variables of its template, if it has any for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from borders.refusal import BadRequest, abbreviate_json
from serving.text.chat_options import ChatOptions, up_to_mark, with_end_marked

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_CALLS = 128  # most calls in one message
# LiteLLM keeps what else an answer said in this field and sends it back; it asks for nothing.
_UNREAD = "provider_specific_fields"
_KNOWN = {
    "assistant": {"role", "content", "name", "tool_calls", "reasoning_content", "reasoning", _UNREAD},
    "tool": {"role", "content", "name", "tool_call_id"},
}
_PLAIN = {"role", "content", "name"}

Message = dict[str, Any]


def check_messages(messages: object, *, text_arguments: bool = False) -> list[Message]:
    """Return messages as a template takes them; arguments of calls become objects, unless `text_arguments`.

    Content may also be a list of text parts, which become lines. Raises BadRequest for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", 'must be a list of at least one {"role": ..., "content": ...}')
    return [_check_message(f"[{index}]", message, text_arguments) for index, message in enumerate(messages)]


def _check_message(place: str, message: object, text_arguments: bool) -> Message:
    if not isinstance(message, dict):
        raise _wrong(place, 'must be an object {"role": ..., "content": ...}')
    given = {key: value for key, value in message.items() if value is not None and value != []}
    role = given.get("role")
    known = _KNOWN.get(role, _PLAIN) if isinstance(role, str) else _PLAIN
    unknown = sorted(given.keys() - known)
    if unknown:
        names = "role, content and name"
        raise _wrong(f"{place}.{unknown[0]}", f"is not supported; a message has {names}")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    calls = given.get("tool_calls")
    content = message.get("content")
    if content is None and calls is not None:
        content = ""
    checked: Message = {"role": role, "content": _text_of(f"{place}.content", content)}
    for name in ("name", "tool_call_id"):
        if name in given:
            checked[name] = _check_text(f"{place}.{name}", given[name])
    thoughts = given.get("reasoning_content", given.get("reasoning"))
    if thoughts is not None:
        checked["reasoning_content"] = _check_text(f"{place}.reasoning_content", thoughts)
    if calls is not None:
        checked["tool_calls"] = _calls(f"{place}.tool_calls", calls, text_arguments)
    return checked


def _calls(place: str, calls: object, text_arguments: bool) -> list[Message]:
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise _wrong(place, f"must be a list of at most {MOST_CALLS} calls")
    return [_call(f"{place}[{index}]", call, text_arguments) for index, call in enumerate(calls)]


def _call(place: str, call: object, text_arguments: bool) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _wrong(place, 'must be {"id": ..., "type": "function", "function": ...}')
    if call.get("type", "function") != "function":
        raise _wrong(f"{place}.type", f'is {abbreviate_json(call["type"])}; it must be "function"')
    name = _check_text(f"{place}.function.name", function.get("name"))
    written = function.get("arguments") or "{}"
    arguments: Any = written
    if not text_arguments:
        try:
            arguments = json.loads(_check_text(f"{place}.function.arguments", written))
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{place}.function.arguments", f"is no JSON: {error}") from error
    checked: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        checked["id"] = _check_text(f"{place}.id", call["id"])
    return checked


def _text_of(place: str, content: object) -> str:
    if not isinstance(content, list):
        return _check_text(place, content)
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _wrong(f"{place}[{index}]", 'must be {"type": "text", "text": ...}; this model reads text')
        parts.append(_check_text(f"{place}[{index}].text", part.get("text")))
    return "\n".join(parts)


def _check_text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "must be a string")
    return value


def _wrong(place: str, problem: str) -> BadRequest:
    return BadRequest("messages", problem, place=place)


FIELD = "reasoning_effort"
_LEAST = ("none", "minimal")
_SWITCHES = ("enable_thinking", "thinking")  # Qwen3 and GLM-4.5; DeepSeek-V3.1 and Granite


def variables_for(
    effort: str, variables: Collection[str], given: Mapping[str, Any], *, thinks: bool
) -> dict[str, Any]:
    """Return the variables that tell a template the effort.

    Variables that the request has `given` itself may not be set twice.

    A model that does not reason (`thinks` false) needs no variable for "none". Raises BadRequest where the
    template has no variable for the effort.
    """
    switch = next((each for each in _SWITCHES if each in variables), None)
    settings: dict[str, Any] = {}
    if switch is not None and effort in _LEAST:
        settings = {switch: False}
    elif FIELD in variables:
        settings = {FIELD: effort}
    elif effort != "none" or thinks:
        limit = "none or minimal" if switch else "left out" if thinks else "none"
        raise BadRequest(FIELD, value=effort, limit=f"{limit}: this model's chat template knows no other")
    for name in settings:
        if name in given:
            raise BadRequest(FIELD, f"and chat_template_kwargs both set {name}", fix="give one of them")
    return settings


_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RuntimeError,
)
_AS_USUAL = ChatOptions()
_MOST_S = 5.0  # processor time to render a conversation

_CHECK_TIME = "_check_the_time"


class ChatTemplate:
    """A compiled template; `tokens` are the control tokens that it may name: bos_token, eos_token, ...

    `thinks` says that the model reasons unless it is told not to.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], *, thinks: bool = False, most_s: float = _MOST_S
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            tree = environment.parse(source)
            self._variables = {each.name for each in tree.find_all(nodes.Name)}
            self._template = jinja2.Template.from_code(
                environment,
                environment.compile(_with_time_limit(tree)),
                environment.make_globals(None),
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not compile: {_line(error)}") from error
        self._tokens = dict(tokens)
        self._thinks = thinks
        self._most_s = most_s

    def render(self, messages: Sequence[Message], options: ChatOptions = _AS_USUAL) -> str:
        """Render a conversation, by default up to the assistant's next turn.

        Raises BadRequest if the template refuses it.
        """
        if options.continue_final_message:
            return up_to_mark(self._rendered(with_end_marked(messages), options))
        return self._rendered(messages, options)

    def _rendered(self, messages: Sequence[Message], options: ChatOptions) -> str:
        kwargs, effort = options.chat_template_kwargs, options.reasoning_effort
        if effort is not None:
            kwargs = {**kwargs, **variables_for(effort, self._variables, kwargs, thinks=self._thinks)}
        until_s = time.thread_time() + self._most_s

        def check_time() -> str:
            if time.thread_time() > until_s:
                raise ValueError(f"it took more than {self._most_s:g} s; send fewer or shorter ones")
            return ""

        try:
            return self._template.render(
                {_CHECK_TIME: check_time},
                **self._tokens,
                messages=messages,
                tools=options.tools or None,
                documents=None,
                add_generation_prompt=options.add_generation_prompt,
                **kwargs,
            )
        except _FAILURES as error:
            given = "messages and chat_template_kwargs" if kwargs else "messages"
            problem = f"refuses these {given}: {_line(error)}"
            raise BadRequest("messages", problem, subject="the chat template") from error


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


def _with_time_limit(tree: nodes.Template) -> nodes.Template:
    """Return the tree with a check of the time in every loop iteration.

    The sandbox itself has no time limit.
    """
    for loop in [*tree.find_all(nodes.For)]:
        call = nodes.Call(nodes.Name(_CHECK_TIME, "load"), [], [], None, None)
        loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
    return tree


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which marks training targets.

    Only its content is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
