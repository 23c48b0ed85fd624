"""Check the tools of a request, and build the grammar of an answer that may or must call them.

The fields are `tools`, `tool_choice` and `parallel_tool_calls`; what cannot be done is refused in one line.
The grammar is that of calls with valid arguments. On channels, the model may reason as long as it likes; then
comes either the answer, whose form begins right after the mark that opens its text, or a call. A call ends
the answer, since models stop at its end mark, so there is never a second call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from borders.field_table import MOST_TOOLS
from borders.refusal import BadRequest, abbreviate_json
from serving.grammars.json_schema import LONGEST_NOTE, Prepared, prepared
from serving.grammars.matching import json_rule, why_not
from serving.grammars.structured_output import CALLS, CHANNELS, FormedAnswer
from serving.tools.argument_rules import argument_rules, literal, slashed
from serving.tools.channels import ChannelFormat, ChannelParser
from serving.tools.formats import ToolFormat
from serving.tools.parsing import LONGEST_NAME


def lark_of(
    form: ToolFormat,
    schemas: Mapping[str, Any],
    *,
    must_call: bool,
    is_single: bool,
    mark: Mapping[str, int],
    strict: Collection[str] = (),
    answer: FormedAnswer | None = None,
) -> str:
    """Return a grammar of calls, each with arguments by its schema, in the form of `SamplingParams.grammar`.

    Text may come first, or stand alone, unless the answer `must_call`. With an `answer`, JSON by its schema
    may stand alone, and no text comes first. Raises BadRequest where the schema of a `strict` tool has what
    the format's notation cannot be held to, or what the matcher refuses.
    """
    if form.arguments == "json":
        schemas = _followed(schemas, strict)
    has_text = not must_call and answer is None
    # When the answer is JSON as well, only a grammar of whole JSON values can tell the two apart.
    as_json = answer is not None and form.is_whole and form.arguments == "json"
    # A text before calls ends with the trigger, so the call's head omits it.
    dropped = _trigger_end(form, mark) if has_text else 0
    more = "" if is_single else f" ({literal(form.between, mark)} call)*"
    # The matcher takes the longest piece that it can, so that a line break is one of its own where calls may
    # end or go on behind it.
    closing = form.closing.removeprefix("\n")
    line = '"\\n"' if form.head else '"\\n"?'
    end = f"{line} {literal(closing, mark)}" if closing != form.closing else literal(closing, mark)
    rules = [f"calls: first{more} {end}"]
    for rule, opening, start in (("first", form.opening, dropped), ("call", "", 0)):
        bodies = " | ".join(f"{rule}_{index}" for index in range(len(schemas)))
        rules.append(f"{rule}: {bodies}")
        for index, name in enumerate(schemas):
            if as_json:
                rules.append(f"{rule}_{index}: {json_rule(_call_schema(form, name, schemas[name]))}")
                continue
            head = _head((opening + form.head)[start:], form, name, mark)
            rules.append(f"{rule}_{index}: {head} arguments_{index} {literal(form.tail, mark)}")
    for index, (name, schema) in enumerate(schemas.items()):
        if not as_json:
            rules += _held(form, index, name, schema, mark, is_strict=name in strict)
    if form.is_numbered:
        rules.append("NUMBER: /[0-9]{1,6}/")
    if answer is not None:
        start_rules = [
            "start: BLANK? (answer | calls)",
            "BLANK: /[ \\n]{1,2}/",
            f"answer: {json_rule(answer.schema)}",
        ]
    else:
        start_rules = _with_text(form, mark) if has_text else ["start: calls"]
    field = "tools" if answer is None else answer.field
    return json.dumps([field, CALLS, "\n".join([*start_rules, *rules])], ensure_ascii=False)


def _followed(schemas: Mapping[str, Any], strict: Collection[str]) -> dict[str, Any]:
    """Return the schema of each tool, or that of any object where the matcher refuses it.

    Otherwise one tool would have all of them refused. Raises BadRequest where that one is strict.
    """
    followed: dict[str, Any] = {}
    for name, schema in schemas.items():
        why = why_not(json_rule(schema))
        if why and name in strict:
            problem = f"has parameters that cannot be followed: {why}"
            fix = "change the schema, or leave out strict"
            raise BadRequest("tools", problem, fix=fix, subject=f"the strict tool {name} in tools")
        followed[name] = _ANY if why else schema
    return followed


def _held(
    form: ToolFormat, index: int, name: str, schema: Any, mark: Mapping[str, int], *, is_strict: bool
) -> list[str]:
    """Return the rules of one function's arguments; raises BadRequest if a strict one is not held."""
    rules, unheld = argument_rules(form, f"arguments_{index}", schema, mark)
    if is_strict and unheld:
        problem = (
            f"has {unheld[0]} in its parameters, which cannot be held in the notation of this model's calls"
        )
        fix = "change the schema, or leave out strict"
        raise BadRequest("tools", problem, fix=fix, subject=f"the strict tool {name} in tools")
    return rules


def _head(begin: str, form: ToolFormat, name: str, mark: Mapping[str, int]) -> str:
    """Return what stands before the arguments of a call, as the grammar has it.

    Where a call has no head, some models write no line break between the opening and it.
    """
    if not form.head and begin.endswith("\n"):
        return f'{literal(begin[:-1], mark)} "\\n"? {literal(name + form.middle, mark)}'
    if not form.is_numbered:
        return literal(begin + form.prefix + name + form.middle, mark)
    return f"{literal(f'{begin}{form.prefix}{name}:', mark)} NUMBER {literal(form.middle, mark)}"


def _trigger_end(form: ToolFormat, mark: Mapping[str, int]) -> int:
    """Return how much of a call's beginning the rules of the text before it contain."""
    if form.is_whole or form.trigger in mark:
        return 0
    ends = [form.trigger.index(each) + len(each) for each in mark if each in form.trigger]
    return min(ends, default=len(form.trigger))


def _with_text(form: ToolFormat, mark: Mapping[str, int]) -> list[str]:
    """Return the start rules of an answer that need not call anything."""
    if form.is_whole:
        begin = re.escape((form.opening + form.head)[0])
        return ["start: calls | TEXT?", f"TEXT: /[^{begin}\\s](?s:.*)/"]
    if form.trigger in mark:
        return ["start: TEXT? calls?", "TEXT: /(?s:.+)/"]
    end = form.trigger[: _trigger_end(form, mark)]
    token = next((each for each in mark if each in end), None)
    if token is not None:  # what precedes the control token is text, and may stand alone
        begin = end.removesuffix(token)
        return [
            f"start: until* TEXT? | until+ {literal(token, mark)} calls",
            f"until[lazy]: /(?s:.*){slashed(begin)}/",
            f"TEXT: /(?s:.+)/ & ~/(?s:.*){slashed(begin)}(?s:.*)/",
        ]
    trigger = slashed(end)
    return [
        "start: TEXT? | before calls",
        f"before[lazy]: /(?s:.*){trigger}/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){trigger}(?s:.*)/",
    ]


def _call_schema(form: ToolFormat, name: str, schema: Any) -> dict[str, Any]:
    """Return the schema of a call that is a JSON object."""
    call = json.loads(f"{form.head}{name}{form.middle}null{form.tail}")
    values = {key: schema if value is None else {"const": value} for key, value in call.items()}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {
        "type": "object",
        "properties": values,
        "required": [*values],
        "additionalProperties": False,
        **shared,
    }


FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")  # OpenAI has 64, and Anthropic 128
_NOTHING = Prepared({"type": "object", "properties": {}, "additionalProperties": False}, ())
_ANY = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    tools: tuple[Mapping[str, Any], ...]  # the tools as they were sent, for the chat template
    schemas: Mapping[str, Any]  # name of each callable tool -> schema that holds its arguments
    parameters: Mapping[str, Any]  # name of each callable tool -> schema of its arguments as it was sent
    must_call: bool
    is_single: bool  # no answer may make two calls
    strict: frozenset[str]  # tools whose arguments are held to their schema although no call is required
    notes: tuple[str, ...]  # constraints of the schemas that are not enforced, each after its tool's name

    @property
    def is_free(self) -> bool:
        """Whether the answer's calls are unconstrained."""
        return not (self.must_call or self.strict or (self.is_single and self.schemas))

    def grammar(
        self, form: ToolFormat, mark: Mapping[str, int], answer: FormedAnswer | None = None
    ) -> str | None:
        """Return the grammar of the answer, as `structured_output.grammar_of` does, or None if unconstrained.

        `mark` has the token of each of the format's marks that is a control token. With an `answer`, the
        answer is either that object or calls.
        """
        if self.is_free and answer is None:
            return None
        return lark_of(
            form,
            self.schemas,
            must_call=self.must_call,
            is_single=self.is_single,
            mark=mark,
            strict=self.strict,
            answer=answer,
        )

    def notes_in(self, form: ToolFormat | None) -> tuple[str, ...]:
        """Return all notes; the grammar cannot hold all that a schema says, least in some formats.

        Without a `form`, calls come on channels, with arguments as JSON.
        """
        if self.is_free:
            return self.notes
        found = {
            name: ["parameters"] * bool(why_not(json_rule(schema)))
            if form is None or form.arguments == "json"
            else argument_rules(form, "arguments", schema, {})[1]
            for name, schema in self.schemas.items()
        }
        return (*self.notes, *(_note(f"{name}: {each}") for name in found for each in found[name]))


def _note(text: str) -> str:
    """Return a text as it may stand in a header."""
    return "".join(each if " " <= each <= "~" else "?" for each in text)[:LONGEST_NOTE].strip()


def tool_use(fields: Mapping[str, Any]) -> ToolUse | None:
    """Return the tools that the fields define, or None without tools; raises BadRequest."""
    given = fields.get("tools") or []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise BadRequest("tools", f"must be a list of at most {MOST_TOOLS} tools")
    choice = fields.get("tool_choice")
    if not given:
        if choice not in (None, "none", "auto"):
            raise BadRequest(
                "tool_choice", f"is {abbreviate_json(choice)}, and there are no tools", fix="send tools"
            )
        return None
    schemas: dict[str, Any] = {}
    held, notes = set[str](), dict[str, list[str]]()
    for index, each in enumerate(given):
        name, read, strict = _function(index, each, schemas)
        schemas[name] = {"type": "object", **read.schema}
        notes[name] = [f"{name}: {note}" for note in read.notes]
        held |= {name} if strict else set()
    must_call, named = _choice(choice, schemas)
    allowed = {} if choice == "none" else schemas if named is None else {named: schemas[named]}
    parallel = fields.get("parallel_tool_calls")
    if not isinstance(parallel, (bool, type(None))):
        raise BadRequest("parallel_tool_calls", value=parallel, limit="true or false")
    is_single = parallel is False or named is not None
    sent = {each["function"]["name"]: each["function"].get("parameters") for each in given}
    return ToolUse(
        tools=tuple(given),
        schemas=allowed,
        parameters={name: sent[name] for name in allowed},
        must_call=must_call,
        is_single=is_single,
        strict=frozenset(held) if allowed else frozenset(),
        notes=tuple(note for name in allowed for note in notes[name]),
    )


def _function(index: int, tool: object, known: Mapping[str, Any]) -> tuple[str, Prepared, bool]:
    """Return the name and the schema of a function, and whether it is strict."""
    place = f"[{index}]"
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise BadRequest("tools", value=tool, limit='{"type": "function", "function": ...}', place=place)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest("tools", value=function, limit="an object with a name", place=f"{place}.function")
    place = f"{place}.function"
    for other in function.keys() - {"name", "description", "parameters", "strict"}:
        problem = f"has no {abbreviate_json(other)}; it may have description, name, parameters and strict"
        raise BadRequest("tools", problem, place=place)
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        limit = f"1 to {LONGEST_NAME} letters, digits, _, . and -"
        raise BadRequest("tools", value=name, limit=limit, place=f"{place}.name")
    if name in known:
        raise BadRequest(
            "tools", f"is {abbreviate_json(name)}, which an earlier tool has", place=f"{place}.name"
        )
    if not isinstance(strict, (bool, type(None))):
        raise BadRequest("tools", value=strict, limit="true or false", place=f"{place}.strict")
    schema = function.get("parameters")
    if schema is None:
        return name, _NOTHING, bool(strict)
    if not isinstance(schema, Mapping):
        raise BadRequest("tools", value=schema, limit="a JSON schema", place=f"{place}.parameters")
    return name, _enforced(schema, is_strict=bool(strict)), bool(strict)


def _enforced(schema: Mapping[str, Any], *, is_strict: bool) -> Prepared:
    """Return the schema, or that of any object where it cannot be enforced and need not be."""
    kind = schema.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        problem = f"has a schema of type {abbreviate_json(kind)}; arguments are an object"
        raise BadRequest("tools", problem, subject="a tool in tools")
    try:
        others = {keyword: value for keyword, value in schema.items() if keyword not in ("type", "nullable")}
        return prepared(others if kind is None else {"type": "object", **others}, "tools", strict=is_strict)
    except BadRequest:
        if is_strict:
            raise
        return Prepared(_ANY, ("parameters",))


def _choice(choice: object, names: Mapping[str, Any]) -> tuple[bool, str | None]:
    """Return whether there must be a call, and of which tool."""
    if choice in (None, "auto", "none", "required"):
        return choice == "required", None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        limit = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
        raise BadRequest("tool_choice", value=choice, limit=limit)
    if name not in names:
        raise BadRequest("tool_choice", f"names {abbreviate_json(name)}, which is none of the tools")
    return True, name


def channel_grammar(
    form: ChannelFormat,
    mark: Mapping[str, int],
    prompt: str,
    *,
    use: ToolUse | None = None,
    answer: str | None = None,
) -> str | None:
    """Return the grammar in the form of `SamplingParams.grammar`; None: the answer is free.

    `mark` has the token of each of the format's marks, and `prompt` is the prompt's text from its last
    `start` on. `answer` is the grammar of the answer's text, if it has one; `use` are the tools that the
    answer may call instead.
    """
    place = ChannelParser(form, (), prompt).place
    must_call = use is not None and use.must_call
    if place == "text" and answer is not None:
        return answer  # the prompt has already begun the message that has the form
    if answer is None and (use is None or use.is_free):
        return None

    def spelt(text: str) -> str:
        return literal(text, mark)

    schemas = {} if use is None else _followed(use.schemas, use.strict)
    goes_on = spelt(form.goes_on)
    starts = {
        "head": "turn",
        "between": f"{spelt(form.begin)} turn",
        "thought": f"TEXT? {goes_on} turn",
        "text": f"TEXT? {goes_on} turn" if must_call else f"TEXT? ({goes_on} turn)?",
    }
    # Notes are content as well, so there are none where a form or a call is required.
    before = [form.thoughts] if must_call or answer is not None else [form.thoughts, form.notes]
    last = [] if must_call else [f"{spelt(form.head(form.answer))} {'TEXT?' if answer is None else '@form'}"]
    rules = [f"start: {starts[place]}", "turn: before* last", "TEXT: /(?s:.+)/"]
    rules.append("before: " + " | ".join(f"{spelt(form.head(each))} TEXT? {goes_on}" for each in before))
    for index, (name, schema) in enumerate(schemas.items()):
        heads = " | ".join(map(spelt, form.call_heads(name)))
        last.append(f"call_{index}")
        rules.append(f"call_{index}: ({heads}) arguments_{index}")
        rules.append(f"arguments_{index}: {json_rule(schema)}")
    rules.append(f"last: {' | '.join(last)}")
    field = "tools" if answer is None else json.loads(answer)[0]
    return json.dumps([field, CHANNELS, {"outer": "\n".join(rules), "form": answer}], ensure_ascii=False)
