"""Check the messages of a conversation, and render it as one text.

Each message has a role and text; an assistant's may have reasoning and calls, a tool's the id of its call.
Whatever the server answered is taken back: calls without text, thoughts alone, arguments that were cut.
Anything else is refused. A template gets messages in the form that it reads (`MessageForm`).

The model's own Jinja template runs in a sandbox with what Hugging Face's templates rely on: the names of the
control tokens, `add_generation_prompt`, `raise_exception`, `strftime_now`, a `tojson` that does not escape
Chinese, loop controls, and `{% generation %}` blocks, which matter only in training. The reasoning effort
reaches a model by variables of its template, if it has any for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from borders.foreign_fields import same_value
from borders.refusal import BadRequest, abbreviate_json
from serving.text.chat_options import THOUGHTS, ChatOptions, up_to_mark, with_end_marked
from serving.text.template_bounds import BoundedEnvironment, TooMuch

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MOST_CALLS = 128  # most calls in one message
# LiteLLM keeps what else an answer said in the first and sends it back; the second marks where a service of
# Anthropic's keeps a prompt. Neither asks for anything here.
_UNREAD = ("provider_specific_fields", "cache_control")
# The same thoughts once more, in the blocks in which LiteLLM and OpenRouter have them
_THOUGHTS_AGAIN = ("thinking_blocks", "reasoning_details")
_PLAIN = {"role", "content", "name", "id", "cache_control"}
_KNOWN = {
    "assistant": _PLAIN | {"tool_calls", "refusal", *THOUGHTS, *_UNREAD},
    "tool": _PLAIN | {"tool_call_id"},
}

Message = dict[str, Any]


def check_messages(messages: object, *, text_arguments: bool = False) -> list[Message]:
    """Return checked messages; arguments of calls become objects, unless `text_arguments`.

    Content is a string or a list of text parts, and thoughts are `reasoning_content`. An assistant's message
    without text has no content. Arguments that are no JSON, since an answer was cut, stay text. Raises
    BadRequest for anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", 'must be a list of at least one {"role": ..., "content": ...}')
    return [_check_message(f"[{index}]", message, text_arguments) for index, message in enumerate(messages)]


def _check_message(place: str, message: object, text_arguments: bool) -> Message:
    if not isinstance(message, dict):
        raise _wrong(place, 'must be an object {"role": ..., "content": ...}')
    given = {key: value for key, value in message.items() if value is not None and value != []}
    role = given.get("role")
    if any(name in given for name in THOUGHTS):
        given = {key: value for key, value in given.items() if key not in _THOUGHTS_AGAIN}
    known = _KNOWN.get(role, _PLAIN) if isinstance(role, str) else _PLAIN
    unknown = sorted(given.keys() - known)
    if unknown:
        names = "role, content and name"
        raise _wrong(f"{place}.{unknown[0]}", f"is not supported; a message has {names}")
    if role not in ROLES:
        raise _wrong(f"{place}.role", f"must be one of {', '.join(ROLES)}")
    calls = given.get("tool_calls")
    content = message.get("content")
    if content is None:  # a refusal is all that its message says, and a tool may return nothing
        content = given.get("refusal", "" if role in ("tool", "function") else None)
    checked: Message = {"role": "tool" if role == "function" else role}
    if content is not None or role != "assistant":
        checked["content"] = _check_content(f"{place}.content", content)
    for name in ("name", "tool_call_id"):
        if name in given:
            checked[name] = _check_text(f"{place}.{name}", given[name])
    for name in THOUGHTS:
        if name in given:
            checked[THOUGHTS[0]] = _check_text(f"{place}.{name}", given[name])
            break
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
    if (call.get("type") or "function") != "function":  # some join a streamed call to a null or an empty type
        raise _wrong(f"{place}.type", f'is {abbreviate_json(call["type"])}; it must be "function"')
    read: Message = {
        "name": _check_text(f"{place}.function.name", function.get("name")),
        "arguments": _arguments(f"{place}.function.arguments", function.get("arguments"), text_arguments),
    }
    checked: Message = {"type": "function", "function": _in_order_of(function, read)}
    if call.get("id") is not None:
        checked["id"] = _check_text(f"{place}.id", call["id"])
    return _in_order_of(call, checked)


def _arguments(place: str, given: object, is_text: bool) -> Any:
    """Return the arguments of a call, which a client sends as an object or as its text."""
    if isinstance(given, Mapping):
        return json.dumps(given, ensure_ascii=False) if is_text else dict(given)
    written = _check_text(place, given or "{}")
    if is_text:
        return written
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        return written


def _in_order_of(given: Mapping[str, Any], checked: Message) -> Message:
    """Return what was checked in the order in which the client sent it: some templates write it as JSON."""
    names = [name for name in given if name in checked]
    return {name: checked[name] for name in [*names, *checked]}


def _check_content(place: str, content: object) -> str | list[Message]:
    if not isinstance(content, list):
        return _check_text(place, content)
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or kind not in ("text", "refusal"):
            raise _wrong(f"{place}[{index}]", 'must be {"type": "text", "text": ...}; this model reads text')
        parts.append({"type": "text", "text": _check_text(f"{place}[{index}].{kind}", part.get(kind))})
    return parts


def _check_text(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "must be a string")
    return value


def _wrong(place: str, problem: str) -> BadRequest:
    return BadRequest("messages", problem, place=place)


FIELD = "reasoning_effort"
_LEAST = ("none", "minimal")
_SWITCHES = ("enable_thinking", "thinking")  # Qwen3 and GLM-4.5; DeepSeek-V3.1 and Granite


def variables_for(effort: str, variables: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that tell a template the effort.

    Variables that the request has `given` itself may not be set to something else.

    A template that only knows whether to think is told so; one that knows nothing is told nothing, and
    whoever asked is told that (`ChatTemplate.ignores`).
    """
    switch = next((each for each in _SWITCHES if each in variables), None)
    settings: dict[str, Any] = {}
    if switch is not None and effort in _LEAST:
        settings = {switch: False}
    elif FIELD in variables:
        settings = {FIELD: effort}
    elif switch is not None:
        settings = {switch: True}
    for name, value in settings.items():
        if name in given and not same_value(given[name], value):
            raise BadRequest(FIELD, f"and chat_template_kwargs both set {name}", fix="give one of them")
    return settings


@dataclass(frozen=True, slots=True)
class MessageForm:
    """How a template reads messages, found in its syntax tree."""

    reads_parts: bool  # whether it goes through the parts of a content itself
    reads_no_text: bool  # whether it reads a content in no other way
    joins_results: bool  # whether it needs a tool's text whole, since not every such loop shows parts' text
    asks_none: bool  # whether it asks if a content is none, so that its absence is not enough
    thoughts: str  # what it calls the thoughts of an earlier answer
    knows_developer: bool  # whether it has the role "developer"

    @staticmethod
    def of(tree: nodes.Template) -> MessageForm:
        """Return the form that a template reads."""
        named = {"content"}  # variables and parameters that hold a content
        for each in tree.find_all(nodes.Assign):
            if isinstance(each.target, nodes.Name) and _is_content(each.node, named):
                named.add(each.target.name)
        loops = [each for each in tree.find_all(nodes.For) if _is_content(each.iter, named)]
        tests = (each.node for each in tree.find_all(nodes.Test) if each.name == "none")
        compared = (
            each.expr
            for each in tree.find_all(nodes.Compare)
            if any(isinstance(op.expr, nodes.Const) and op.expr.value is None for op in each.ops)
        )
        texts = {each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str)}
        read = texts | {each.attr for each in tree.find_all(nodes.Getattr)}
        reads_no_text = bool(loops) and not _reads_whole(tree, named)
        return MessageForm(
            reads_parts=bool(loops),
            reads_no_text=reads_no_text,
            joins_results=not (reads_no_text or all(map(_shows_text, loops))),
            asks_none=any(_is_content(each, named) for each in (*tests, *compared)),
            thoughts=next((name for name in THOUGHTS if name in read), THOUGHTS[0]),
            knows_developer="developer" in texts,
        )

    def shaped(self, message: Message) -> Message:
        """Return a checked message in this form."""
        shaped = dict(message)
        content = shaped.get("content")
        # GLM's templates take a tool's parts for several results, or for references to tools
        is_joined = not self.reads_parts or (shaped["role"] == "tool" and self.joins_results)
        if isinstance(content, list) and is_joined:
            shaped["content"] = joined(content)
        if isinstance(content, str) and self.reads_no_text:
            shaped["content"] = [{"type": "text", "text": content}]
        if "content" not in shaped and self.asks_none:
            shaped["content"] = None
        if THOUGHTS[0] in shaped:
            shaped[self.thoughts] = shaped.pop(THOUGHTS[0])
        if shaped["role"] == "developer" and not self.knows_developer:
            shaped["role"] = "system"
        return shaped


def _with_content(message: Message) -> Message:
    return message if message.get("content") is not None else {**message, "content": ""}


def _with_objects(message: Message) -> Message:
    """Return a message whose calls have objects as arguments: what can be read of those that were cut."""
    if "tool_calls" not in message:
        return message
    calls = [
        each | {"function": each["function"] | {"arguments": _object_of(each["function"]["arguments"])}}
        for each in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _object_of(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, Mapping) else {}
    try:
        return read_object(arguments) or {}
    except ImportError:  # One of the server's packages is missing: the template refuses the text as before.
        return arguments


def read_object(arguments: str) -> dict[str, Any] | None:
    """Return what can be read of an object in JSON that may have been cut, or None if it is no object.

    Raises ImportError without the server's packages.
    """
    from pydantic_core import from_json

    try:
        read = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return None
    return read if isinstance(read, dict) else None


def _in_other_ways(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in other ways that say the same, as a template may need them that refuses them.

    It may join the content of every message to other text, or go through the arguments of every call.
    """
    before = [*messages]
    for change in (_with_content, _with_objects):
        changed = [change(each) for each in before]
        if changed != before:
            yield changed
            before = changed


def joined(content: str | Sequence[Message] | None) -> str:
    """Return a checked content as one text, in which parts are lines."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part["text"])  # vLLM drops empty parts, too


def _is_content(expression: nodes.Node, named: Collection[str]) -> bool:
    """Whether an expression is the content of a message, perhaps filtered or chosen by a condition."""
    match expression:
        case nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return expression.name in named
        case nodes.Filter():
            return expression.node is not None and _is_content(expression.node, named)
        case nodes.CondExpr():
            return _is_content(expression.expr1, named)
    return False


def _shows_text(loop: nodes.For) -> bool:
    """Whether a loop over the parts of a content reads their text."""
    keys = (each.arg for each in loop.find_all(nodes.Getitem))
    return any(each.attr == "text" for each in loop.find_all(nodes.Getattr)) or any(
        isinstance(each, nodes.Const) and each.value == "text" for each in keys
    )


def _reads_whole(tree: nodes.Template, named: Collection[str]) -> bool:
    """Whether a template reads a content otherwise than by its parts, such as printing or testing it."""
    loops, sets = list(tree.find_all(nodes.For)), list(tree.find_all(nodes.Assign))
    is_set = {each.target.name for each in sets if isinstance(each.target, nodes.Name)}
    parts = {each.target.name for each in loops if isinstance(each.target, nodes.Name)}
    named = {*named} - (parts - is_set)
    roots = [each.iter for each in loops]
    # What an attribute of a namespace holds is not followed, so that it may be anything
    roots += [
        each.node for each in sets if isinstance(each.target, nodes.Name) and _is_content(each.node, named)
    ]
    kinds = (nodes.Getattr, nodes.Getitem, nodes.Name, nodes.Call, nodes.Filter)
    roots += [whole for each in tree.find_all(kinds) if (whole := _with_parts(each)) is not None]
    by_parts = {id(each) for root in roots for each in (root, *root.find_all(kinds))}
    return any(
        id(each) not in by_parts
        and getattr(each, "ctx", "load") == "load"
        and (_is_content(each, named) or _is_looked_up(each))
        for each in tree.find_all(kinds)
    )


def _with_parts(expression: nodes.Node) -> nodes.Node | None:
    """Return what has the part of which an expression is a member, as `content[0].type` is; else None."""
    if isinstance(expression, nodes.Getattr | nodes.Getitem):
        match expression.node:
            case nodes.Getitem(node=whole, arg=nodes.Const(value=int())):
                return whole
    return None


def _is_looked_up(expression: nodes.Node) -> bool:
    """Whether an expression is the content of a message, taken from it by a method or a filter."""
    match expression:
        case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value="content"), *_]):
            return True
        case nodes.Filter(name="attr", args=[nodes.Const(value="content")]):
            return True
    return False


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


class ChatTemplate:
    """A compiled template; `tokens` are the control tokens that it may name: bos_token, eos_token, ...

    `thinks` says that the model reasons unless it is told not to, and `file` from where the source is.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        thinks: bool = False,
        most_s: float = _MOST_S,
        file: Path | None = None,
    ) -> None:
        environment = self._environment = BoundedEnvironment(
            most_s, trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            tree = environment.parse(source)
            self.form = MessageForm.of(tree)
            self._variables = {each.name for each in tree.find_all(nodes.Name)}
            self._template = jinja2.Template.from_code(
                environment,
                environment.compile(environment.bounded(tree)),
                environment.make_globals(None),
            )
        except (jinja2.TemplateError, TooMuch) as error:
            where = "" if file is None else f" of {file}"
            if isinstance(error, jinja2.TemplateSyntaxError):
                where += f", line {error.lineno},"
            raise ValueError(f"the chat template{where} does not compile: {_line(error)}") from error
        self._tokens = dict(tokens)
        self._thinks = thinks

    def ignores(self, effort: str) -> bool:
        """Whether the template cannot be told this reasoning effort, nor the model does what it asks for."""
        is_told = FIELD in self._variables or any(each in self._variables for each in _SWITCHES)
        return not is_told and (effort != "none" or self._thinks)

    def render(self, messages: Sequence[Message], options: ChatOptions = _AS_USUAL) -> str:
        """Render a conversation, by default up to the assistant's next turn.

        Raises BadRequest if the template refuses it.
        """
        if options.continue_final_message:
            return up_to_mark(self._rendered_in_some_way(with_end_marked(messages), options))
        return self._rendered_in_some_way(messages, options)

    def _rendered_in_some_way(self, messages: Sequence[Message], options: ChatOptions) -> str:
        refusals = list[BadRequest]()
        for each in (messages, *_in_other_ways(messages)):
            try:
                return self._rendered(each, options)
            except BadRequest as bad:
                refusals.append(bad)
        raise refusals[0]

    def _rendered(self, messages: Sequence[Message], options: ChatOptions) -> str:
        kwargs, effort = options.chat_template_kwargs, options.reasoning_effort
        if effort is not None:
            kwargs = {**kwargs, **variables_for(effort, self._variables, kwargs)}
        self._environment.begin()
        try:
            return self._template.render(
                **self._tokens,
                messages=messages,
                tools=options.tools or None,
                documents=None,
                add_generation_prompt=options.add_generation_prompt,
                **kwargs,
            )
        except _FAILURES as error:
            further = {"tools": options.tools, "chat_template_kwargs": options.chat_template_kwargs}
            given = " and ".join(["messages", *(name for name, each in further.items() if each)])
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


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class _Generation(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which marks training targets.

    Only its content is rendered, and what is set in it is known in it alone, as in transformers.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own way to declare it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)
