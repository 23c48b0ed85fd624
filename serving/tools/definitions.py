"""Check the tools of a request, and whether its answer may or must call them.

The fields are `tools`, `tool_choice` and `parallel_tool_calls`; what cannot be done is refused in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from borders.field_table import MOST_TOOLS
from borders.refusal import BadRequest, abbreviate_json
from serving.grammars.json_schema import SchemaCheck
from serving.grammars.structured_output import FormedAnswer
from serving.tools.formats import ToolFormat
from serving.tools.grammar import lark_of

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    tools: tuple[Mapping[str, Any], ...]  # the tools as they were sent, for the chat template
    schemas: Mapping[str, Any]  # name of each callable tool -> schema of its arguments
    must_call: bool
    is_single: bool  # no answer may make two calls
    is_strict: bool  # arguments are held to their schema although no call is required

    @property
    def is_free(self) -> bool:
        """Whether the answer's calls are unconstrained."""
        return not (self.must_call or self.is_strict or (self.is_single and self.schemas))

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
            form, self.schemas, must_call=self.must_call, is_single=self.is_single, mark=mark, answer=answer
        )


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
    is_strict = False
    for index, each in enumerate(given):
        name, schemas[name], strict = _function(index, each, schemas)
        is_strict |= strict
    must_call, named = _choice(choice, schemas)
    allowed = {} if choice == "none" else schemas if named is None else {named: schemas[named]}
    parallel = fields.get("parallel_tool_calls")
    if parallel not in (None, True, False):
        raise BadRequest("parallel_tool_calls", value=parallel, limit="true or false")
    is_single = parallel is False or named is not None
    return ToolUse(tuple(given), allowed, must_call, is_single, is_strict and bool(allowed))


def _function(index: int, tool: object, known: Mapping[str, Any]) -> tuple[str, Any, bool]:
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
        limit = "1 to 64 letters, digits, _, . and -"
        raise BadRequest("tools", value=name, limit=limit, place=f"{place}.name")
    if name in known:
        raise BadRequest(
            "tools", f"is {abbreviate_json(name)}, which an earlier tool has", place=f"{place}.name"
        )
    if strict not in (None, True, False):
        raise BadRequest("tools", value=strict, limit="true or false", place=f"{place}.strict")
    schema = function.get("parameters")
    if schema is None:
        return name, _NOTHING, bool(strict)
    if not isinstance(schema, Mapping):
        raise BadRequest("tools", value=schema, limit="a JSON schema", place=f"{place}.parameters")
    return name, _enforced(schema, is_strict=bool(strict)), bool(strict)


def _enforced(schema: Mapping[str, Any], *, is_strict: bool) -> Any:
    """Return the schema, or that of any object where it cannot be enforced and need not be."""
    if schema.get("type", "object") != "object":
        problem = f"has a schema of type {abbreviate_json(schema['type'])}; arguments are an object"
        raise BadRequest("tools", problem, subject="a tool in tools")
    try:
        SchemaCheck("tools").check(schema)
    except BadRequest:
        if is_strict:
            raise
        return _ANY
    return {"type": "object", **schema}


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
