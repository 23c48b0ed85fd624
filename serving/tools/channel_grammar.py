"""Build the grammar of an answer on channels, whose final message or calls have a given form.

The model may reason as long as it likes; then comes either the answer, whose form begins right after the mark
that opens its text, or a call. A call ends the answer, since models stop at its end mark, so there is never a
second call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from serving.grammars.structured_output import CHANNELS
from serving.tools.channel_parsing import ChannelParser
from serving.tools.channels import ChannelFormat
from serving.tools.definitions import ToolUse
from serving.tools.grammar import json_rule, literal


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
    schemas = {} if use is None else use.schemas
    must_call = use is not None and use.must_call
    if place == "text" and answer is not None:
        return answer  # the prompt has already begun the message that has the form
    if answer is None and (use is None or use.is_free):
        return None

    def spelt(text: str) -> str:
        return literal(text, mark)

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
