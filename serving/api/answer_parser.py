"""Split the answers to a conversation into reasoning, text and tool calls."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from itertools import count

from continuous_batching.request import Request
from serving.answers.answers import AnswerDelta
from serving.grammars.structured_output import begins_behind_thoughts, form_of, may_call, most_thought
from serving.text.tokenizer import Text
from serving.tools.channels import ChannelFormat, ChannelParser
from serving.tools.definitions import ToolUse
from serving.tools.formats import THOUGHT_FORMATS
from serving.tools.parsing import CallDelta, Parsed, ReasoningParser, Thought, ToolParser


class AnswerParser:
    """Parses the answers to one request, each of which has an index.

    `use` are the request's tools. Answers may begin with reasoning where the recipe says in which form. An
    answer whose grammar leaves no place for reasoning has none. A call that is written before the reasoning
    has ended is a call, too, unless the grammar forces a call or a form from there on: nothing would hold
    this one, and there would be two. Where an answer may have one call alone, the first is shown.
    """

    def __init__(self, text: Text | None, request: Request, use: ToolUse | None) -> None:
        self._form = None if text is None else text.tool_format
        self._name, self._num_named = request.id, 0
        self._channels = None if text is None else text.channels
        grammar = request.params.grammar
        is_alone = grammar is not None and not may_call(grammar)
        self._names = () if use is None or is_alone else tuple(use.schemas)
        self._schemas = {} if use is None else use.parameters
        has_text = use is not None and bool(self._names) and not use.must_call
        has_place = has_text or (text is not None and len(text.think_marks) == 2)  # a place for reasoning
        form_asked = None if grammar is None else form_of(grammar)
        self._is_held = form_asked is not None
        # A grammar of `tools` lets a model choose whether it calls; one with a form in it names that field
        is_free = has_text and form_asked is not None and form_asked[0] == "tools"
        is_forced = grammar is not None and begins_behind_thoughts(grammar) and not is_free
        self._has_calls_in_thoughts = not is_forced
        self._is_single = use is not None and use.is_single
        self.thinks = text is not None and text.thoughts is not None and (grammar is None or has_place)
        self._end_mark = text.think_marks[1] if text is not None and len(text.think_marks) == 2 else -1
        is_open = self.thinks and text is not None and text.opens_thoughts(request.prompt)
        form = THOUGHT_FORMATS["think"] if text is None or text.thoughts is None else text.thoughts
        goes_on = is_open and text is not None and text.cuts_thoughts(request.prompt)
        is_formed = self._is_held and not self._names
        self._thoughts = defaultdict[int, ReasoningParser](
            lambda: ReasoningParser(form, is_open=is_open, goes_on=goes_on, is_formed=is_formed)
        )
        self._tools: dict[int, ToolParser | ChannelParser] = {}
        self._tools_in_thoughts: dict[int, ToolParser] = {}
        self._opening = ""  # the opening, held by the prompt, of an answer's first message on channels
        self._end_marks: frozenset[int] = frozenset()
        # Number of tokens of each message of an answer.
        self._sizes = defaultdict[int, list[int]](lambda: [0])
        if text is not None and self._channels is not None:
            self._opening = text.since_mark(request.prompt, self._channels.start)
            self._end_marks = frozenset(text.control_tokens(self._channels.ends).values())
        self._ids = defaultdict[int, set[str]](set)  # the ids that the model gave the calls of each answer
        self._num_tokens = Counter[int]()  # number of tokens of each answer
        self._num_thought = Counter[int]()  # number of reasoning tokens of each answer, marks included
        self._most_thought = None if grammar is None else most_thought(grammar)

    def push(self, index: int, delta: AnswerDelta) -> Parsed:
        """Return the parsed form of a new part of an answer."""
        parsed = self._parsed(index, delta)
        if self._is_single:  # calls in reasoning are held to nothing, so that there may be more
            is_further = [isinstance(each, CallDelta) and each.index > 0 for each in parsed.parts]
            parsed.parts = [each for each, leaves in zip(parsed.parts, is_further) if not leaves]
        for call in parsed.calls:
            if call.id is not None:
                call.id = self._unused(self._ids[index], call.id)
        return parsed

    def _unused(self, ids: set[str], given: str) -> str | None:
        """Return the id of a call in its answer, or None where the model has given another call the same."""
        if given in ids:  # a client could not tell which call a result is of
            if self._form is None or not self._form.is_numbered:
                return None
            name, _, number = given.rpartition(":")
            given = next(each for i in count(int(number or 0)) if (each := f"{name}:{i}") not in ids)
        ids.add(given)
        return given

    def _parsed(self, index: int, delta: AnswerDelta) -> Parsed:
        is_last = delta.finish_reason is not None
        if self._channels is not None:
            return self._by_channels(self._channels, index, delta)
        if not self.thinks:
            return self._with_calls(index, delta.text, delta.finish_reason)
        thoughts, text = self._after_thoughts(index, delta, is_last)
        is_open = self._thoughts[index].is_open and not is_last
        # Thoughts are ended by the model, by its mark or with the answer, or cut by their budget.
        is_cut = self._most_thought is not None and self._num_thought[index] > self._most_thought
        is_ended = not is_cut if self._thoughts[index].has_ended else delta.finish_reason == "stop"
        parsed = self._in_thoughts(index, thoughts, is_open=is_open, is_ended=is_ended)
        if not is_open:
            answer = self._with_calls(index, text, delta.finish_reason)
            parsed.extend(self._thoughts[index].without_mark(answer, is_last=is_last))
        return parsed

    def _in_thoughts(self, index: int, thoughts: str, *, is_open: bool, is_ended: bool) -> Parsed:
        """Return reasoning, and the calls in it: a model may call before it ends its reasoning."""
        if self._form is None or not self._names or not self._has_calls_in_thoughts:
            found = Parsed([thoughts] if thoughts else [])
        else:
            if index not in self._tools_in_thoughts:
                self._tools_in_thoughts[index] = ToolParser(
                    self._form,
                    self._names,
                    schemas=self._schemas,
                    in_thoughts=True,
                    is_held=self._is_held,
                )
            parser = self._tools_in_thoughts[index]
            found = parser.push(thoughts)
            if not is_open:
                found.extend(parser.finish(is_ended=is_ended))
        return Parsed([Thought(each) if isinstance(each, str) else each for each in found.parts])

    def _by_channels(self, form: ChannelFormat, index: int, delta: AnswerDelta) -> Parsed:
        parser = self._tools.get(index)
        if not isinstance(parser, ChannelParser):
            parser = self._tools[index] = ChannelParser(form, self._names, self._opening)
        parsed = parser.push(delta.text)
        if delta.finish_reason is not None:
            parsed.extend(parser.finish(is_ended=delta.finish_reason == "stop"))
        sizes = self._sizes[index]
        for token in delta.tokens:
            sizes[-1] += 1
            if token in self._end_marks:
                sizes.append(0)
        self._num_thought[index] = sum(size for size, is_it in zip(sizes, parser.are_thoughts) if is_it)
        return parsed

    @property
    def counts_by_token(self) -> bool:
        """Whether reasoning can only be counted in parts of a token each, as no token alone ends it."""
        return self.thinks and self._end_mark < 0

    @property
    def num_thought_tokens(self) -> int:
        """The number of reasoning tokens of all answers."""
        return self._num_thought.total()

    def num_held(self, index: int) -> int:
        """Return at how many characters of an answer's end it is open what they are: its last ones."""
        parsers = (self._thoughts.get(index), self._tools_in_thoughts.get(index), self._tools.get(index))
        return sum(each.num_held for each in parsers if each is not None)

    def num_calls(self, index: int) -> int:
        """Return how many calls an answer has begun."""
        parser = self._tools.get(index) or self._tools_in_thoughts.get(index)
        return 0 if parser is None else parser.num_calls

    def call_id(self, call: CallDelta) -> str:
        """Return the id of a call that begins: its own, where the model gave one, or one of the answer's id.

        An answer that goes on at another replica then names its calls as it did before.
        """
        if call.id is not None:
            return call.id
        form = self._form or self._channels
        assert form is not None, "a call without a format"
        self._num_named += 1
        return hashlib.sha256(f"{self._name} {self._num_named}".encode()).hexdigest()[: form.id_length]

    def _after_thoughts(self, index: int, delta: AnswerDelta, is_last: bool) -> tuple[str, str]:
        """Split new text into reasoning and what follows it."""
        reasoning = self._thoughts[index]
        had_ended, tokens = reasoning.has_ended, delta.tokens
        thoughts, text = reasoning.push(delta.text)
        if reasoning.is_open:
            self._num_thought[index] = self._num_tokens[index] + len(tokens)
        elif reasoning.has_ended and not had_ended:
            size = tokens.index(self._end_mark) + 1 if self._end_mark in tokens else len(tokens)
            self._num_thought[index] = self._num_tokens[index] + size
        self._num_tokens[index] += len(tokens)
        if is_last:
            more_thoughts, more = reasoning.finish()
            thoughts, text = thoughts + more_thoughts, text + more
        return thoughts, text

    def _with_calls(self, index: int, text: str, reason: str | None) -> Parsed:
        if self._form is None or not self._names:
            parsed = Parsed()
            parsed.say(text)
            return parsed
        if not text and reason is None:
            return Parsed()
        if index not in self._tools:  # once it is known how many calls the reasoning had
            before = self._tools_in_thoughts.get(index)
            num_calls = 0 if before is None else before.num_calls
            self._tools[index] = ToolParser(
                self._form, self._names, num_calls, schemas=self._schemas, is_held=self._is_held
            )
        parser = self._tools[index]
        parsed = parser.push(text)
        if reason is not None:
            parsed.extend(parser.finish(is_ended=reason == "stop"))
        return parsed
