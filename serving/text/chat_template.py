"""Render a conversation as one text.

The model's own Jinja template runs in a sandbox with what Hugging Face's templates rely on: the names of the
control tokens, `add_generation_prompt`, `raise_exception`, `strftime_now`, a `tojson` that does not escape
Chinese, loop controls, and `{% generation %}` blocks, which matter only in training.
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

from borders.refusal import BadRequest
from serving.text.chat_messages import Message
from serving.text.chat_options import ChatOptions, up_to_mark, with_end_marked
from serving.text.effort import variables_for

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
