"""Build the grammar of an answer that must call tools, or whose calls must have valid arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from serving.grammars.matching import JSON_OPTIONS
from serving.grammars.structured_output import FormedAnswer
from serving.tools.formats import ToolFormat


def lark_of(
    form: ToolFormat,
    schemas: Mapping[str, Any],
    *,
    must_call: bool,
    is_single: bool,
    mark: Mapping[str, int],
    answer: FormedAnswer | None = None,
) -> str:
    """Return a grammar of calls, each with arguments by its schema, in the form of `SamplingParams.grammar`.

    Text may come first, or stand alone, unless the answer `must_call`. With an `answer`, JSON by its schema
    may stand alone, and no text comes first.
    """
    has_text = not must_call and answer is None
    as_json = answer is not None and form.is_whole and form.arguments == "json"
    is_plain = not form.is_whole and form.trigger not in mark  # text may contain what calls begin with
    # A text before calls ends with the trigger, so the call's head omits it.
    dropped = len(form.trigger) if is_plain and has_text else 0
    more = "" if is_single else f" ({literal(form.between, mark)} call)*"
    rules = [f"calls: first{more} {literal(form.closing, mark)}"]
    for rule, opening, start in (("first", form.opening, dropped), ("call", "", 0)):
        bodies = " | ".join(f"{rule}_{index}" for index in range(len(schemas)))
        rules.append(f"{rule}: {bodies}")
        for index, name in enumerate(schemas):
            if (
                as_json
            ):  # when the answer is JSON as well, only a grammar of whole JSON values can tell the two apart
                rules.append(f"{rule}_{index}: {json_rule(_call_schema(form, name, schemas[name]))}")
                continue
            head = literal((opening + form.head + name + form.middle)[start:], mark)
            rules.append(f"{rule}_{index}: {head} arguments_{index} {literal(form.tail, mark)}")
    for index, schema in enumerate(schemas.values()):
        rules += [] if as_json else _arguments(form, index, schema)
    if answer is not None:
        start_rules = [
            "start: BLANK? (answer | calls)",
            "BLANK: /[ \\n]{1,2}/",
            f"answer: {json_rule(answer.schema)}",
        ]
    else:
        start_rules = _with_text(form, is_plain) if has_text else ["start: calls"]
    field = "tools" if answer is None else answer.field
    return json.dumps([field, "lark", "\n".join([*start_rules, *rules])], ensure_ascii=False)


def _with_text(form: ToolFormat, is_plain: bool) -> list[str]:
    """Return the start rules of an answer that need not call anything."""
    if form.is_whole:
        begin = re.escape((form.opening + form.head)[0])
        return ["start: calls | TEXT?", f"TEXT: /[^{begin}\\s](?s:.*)/"]
    if not is_plain:
        return ["start: TEXT? calls?", "TEXT: /(?s:.+)/"]
    trigger = re.escape(form.trigger).replace("/", "\\/")
    return [
        "start: TEXT? | before calls",
        f"before[lazy]: /(?s:.*){trigger}/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){trigger}(?s:.*)/",
    ]


def _arguments(form: ToolFormat, index: int, schema: Any) -> list[str]:
    name = f"arguments_{index}"
    if form.arguments == "json":
        return [f"{name}: {json_rule(schema)}"]
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = set(schema.get("required", []))
    rules = [f"{name}: {name}_first_0"]
    properties = [*schema.get("properties", {}).items()]
    for at, (each, value) in enumerate(properties):
        value = {**value, **shared} if isinstance(value, Mapping) else value
        rules.append(f"{name}_item_{at}: {_quoted(each + '=')} {json_rule(value)}")
        for place, before in (("first", ""), ("rest", '", " ')):
            skip = "" if each in required else f" | {name}_{place}_{at + 1}"
            rules.append(f"{name}_{place}_{at}: {before}{name}_item_{at} {name}_rest_{at + 1}{skip}")
    rules += [f'{name}_{place}_{len(properties)}: ""' for place in ("first", "rest")]
    return rules


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


def json_rule(schema: Any) -> str:
    """Return a rule's body for JSON of this schema."""
    options = {"x-guidance": JSON_OPTIONS}
    return "%json " + json.dumps({**schema, **options} if isinstance(schema, Mapping) else options)


def literal(text: str, mark: Mapping[str, int]) -> str:
    """Return a text as a literal of the grammar, in which control tokens are written as tokens."""
    if not mark:
        return _quoted(text)
    parts = re.split(f"({'|'.join(map(re.escape, mark))})", text)
    return " ".join(f"<[{mark[part]}]>" if part in mark else _quoted(part) for part in parts if part) or '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
