"""Convert text to token ids, and token ids to text, at once or as they arrive.

Arriving tokens are joined as bytes, and an incremental UTF-8 decoder emits a character when its last byte has
arrived: half a character is never shown, and the pieces add up to the text of all tokens. What may be the
beginning of a stop string is held back until that is decided. The cost of a token is proportional to its own
length, not to the answer's.

Control tokens that a message spells out are kept as text, apart from the chat template's own.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from borders.field_table import default
from borders.field_types import check_unicode
from borders.refusal import BadRequest
from continuous_batching.request import SamplingParams, TokenIds
from recipes.schema.recipe import Recipe
from serving.grammars.thinking import Thinking
from serving.text.chat_options import ChatOptions, strings_in
from serving.text.chat_template import ChatTemplate, check_messages, joined
from serving.text.shield import Shield
from serving.text.tokenizer_settings import (
    TEMPLATES,
    end_tokens_of_model,
    special_tokens,
    template_file,
    token_text,
)
from serving.text.vocabulary import Vocabulary, missing_in, read_tokenizer_files
from serving.tools.channels import HARMONY, NAME, ChannelFormat, check_marks, with_thinking
from serving.tools.formats import THOUGHT_FORMATS, TOOL_FORMATS, ThoughtFormat, ToolFormat

log = logging.getLogger(__name__)


def _suffix_of(tag: str, vocabulary: Vocabulary) -> str:
    """Return what stands before the end of the token that is this tag; empty where it is the tag itself."""
    begin = tag.removesuffix(">").encode()
    tokens = map(vocabulary.token_bytes, range(vocabulary.size))
    suffixes = (token.removeprefix(begin)[:-1] for token in tokens if token.startswith(begin + b":"))
    return next((suffix.decode() for suffix in suffixes), "")


_END_TOKENS = 32  # tokens at the end of a prompt, more than "<think>", a mark and a line break take
_ROLE_LINE = re.compile(r"\w+\s*\n\s*")
_AS_USUAL = ChatOptions()


class Text:
    """The text side of a model: its tokenizer and its chat template.

    `decode` does not clean up spaces, and bytes that are not UTF-8 become U+FFFD, one for each maximal
    invalid sequence (Unicode 15, section 3.9). `eos_token_ids` are the tokenizer's; the model's own
    configuration may name more. `longest_token` is in bytes: no token stands for more characters.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        settings: dict[str, Any],
        templates: Mapping[str, str],
        tool_format: ToolFormat | None = None,
        *,
        thoughts: ThoughtFormat | None = None,
        channels: ChannelFormat | None = None,
        ends_of_model: Sequence[int] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.tool_format = tool_format
        self.channels = channels  # used in place of a tool format and of reasoning marks
        self.thoughts = thoughts
        marks = [] if thoughts is None else [vocabulary.find(each) for each in thoughts.tokens]
        # Both marks, or fewer, which cannot be used.
        self.think_marks = tuple(each for each in marks if each is not None)
        self._vocabulary = vocabulary
        self._settings = settings
        self._sources = dict(templates)
        self._names = tokens = {key: token_text(each) for key, each in special_tokens(settings).items()}
        reasons = thoughts is not None or channels is not None
        compiled = {
            name: ChatTemplate(
                source, tokens, thinks=reasons, file=None if folder is None else template_file(folder, name)
            )
            for name, source in templates.items()
            if name in TEMPLATES
        }
        self._template = compiled.get("default")
        self._tool_template = compiled.get("tool_use", self._template)
        eos = vocabulary.find(tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        # Those that end an answer although the model's configuration does not say so, as in vLLM
        known = self.eos_token_ids if ends_of_model is None else ends_of_model
        self.further_end_ids = tuple(token for token in self.eos_token_ids if token not in known)
        self.vocab_size = vocabulary.size
        self.num_lead_spaces = vocabulary.num_lead_spaces
        self._control_ids = frozenset(vocabulary.control.values())
        self._shield = Shield(() if vocabulary.splits_control else vocabulary.control)
        self._bytes: dict[int, bytes] = {}
        self.longest_token = max(len(vocabulary.token_bytes(token)) for token in range(vocabulary.size))

    @staticmethod
    def of(recipe: Recipe) -> Text | None:
        """Return the tokenizer of a recipe's model, with the formats of its answers."""
        return Text.load(recipe.model.path, recipe.server.tool_format, recipe.server.reasoning)

    @staticmethod
    def load(
        path: str | Path | None, tool_format: str = "none", reasoning: str = "none", *, is_told: bool = True
    ) -> Text | None:
        """Return the tokenizer in a Hugging Face directory: tokenizer.json, or else a file of another kind.

        Returns None if the directory holds none, or if there is no directory; `tool_format` and
        `reasoning` are those of a recipe. Raises ValueError for files that cannot be used; `is_told` warns
        of a download that is not whole.
        """
        if path is None:
            return None
        try:
            files = read_tokenizer_files(Path(path))
            if files is None:
                if is_told and (warning := missing_in(Path(path))):
                    log.warning("%s", warning)
                return None
            form, thoughts = TOOL_FORMATS.get(tool_format), THOUGHT_FORMATS.get(reasoning)
            if form is not None and form.has_suffix:
                suffix = _suffix_of(form.trigger, files.vocabulary)
                form = form.with_suffix(suffix)
                suffixed = None if thoughts is None else thoughts.with_suffix(suffix)
                if suffixed is not None and files.vocabulary.find(suffixed.begin) is not None:
                    thoughts = suffixed
            channels = HARMONY if reasoning == NAME else None
            check_marks(channels, files.vocabulary.control, path)
            return Text(
                files.vocabulary,
                files.settings,
                files.templates,
                form,
                thoughts=thoughts,
                channels=channels,
                ends_of_model=end_tokens_of_model(Path(path)),
                folder=Path(path),
            )
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # a file of another shape
            raise ValueError(
                f"the tokenizer in {path} cannot be used ({error}); download it again"
            ) from error

    @property
    def has_tools(self) -> bool:
        """Whether it is known how the model's answers call functions."""
        return self.tool_format is not None or self.channels is not None

    @property
    def has_chat_template(self) -> bool:
        return self._tool_template is not None

    def ignores_effort(self, effort: str, *, has_tools: bool) -> bool:
        """Whether the chat template has no way to be told this reasoning effort."""
        template = self._tool_template if has_tools else self._template
        return template is not None and template.ignores(effort)

    def describe(self) -> dict[str, Any]:
        """Return what a remote tokenizer of the same kind needs to know; control tokens are plain strings."""
        named = [{"name": name, "template": source} for name, source in self._sources.items()]
        template = self._sources.get("default") if [*self._sources] in ([], ["default"]) else named
        return {**self._settings, **self._names, "chat_template": template, "vocab_size": self.vocab_size}

    def opens_thoughts(self, prompt: TokenIds) -> bool:
        """Return whether a prompt ends inside a block of reasoning, which some chat templates begin."""
        form = self.thoughts or THOUGHT_FORMATS["think"]
        said = self._end_of(prompt).removesuffix(form.limit).rstrip()
        return said.endswith(form.begin) or self.cuts_thoughts(prompt)

    def cuts_thoughts(self, prompt: TokenIds) -> bool:
        """Return whether a prompt ends within thoughts that have begun, with which an answer goes on.

        They are all text, so that no control token stands behind them that would end them or the turn. What
        begins them begins the turn, behind no more than the name of its role.
        """
        form, places = self.thoughts or THOUGHT_FORMATS["think"], range(len(prompt) - 1, -1, -1)
        at = next((at for at in places if int(prompt[at]) in self._control_ids), None)
        if not at:  # turns without control tokens cannot be told from their text
            return False
        said = self.decode(prompt[at:].tolist(), skip_special_tokens=False)
        head, *blocks = said.split(form.begin)
        while len(blocks) > 1 and blocks[0].strip() == form.end.strip():  # some templates write an empty one
            del blocks[0]
        thoughts = form.begin.join(blocks)
        head = head.removeprefix(self.decode([int(prompt[at])], skip_special_tokens=False))
        is_first = not head.strip() or _ROLE_LINE.fullmatch(head) is not None
        has_begun = is_first and thoughts.strip().removesuffix(form.limit)
        return bool(has_begun) and form.end not in thoughts

    def _end_of(self, prompt: TokenIds) -> str:
        return self.decode(prompt[-_END_TOKENS:].tolist(), skip_special_tokens=False).rstrip()

    def thinking(self, prompt: TokenIds, budget: int | None = None) -> Thinking | None:
        """Return how an answer to this prompt may begin with reasoning.

        The result is None where the model does not reason, or the prompt has closed the block.
        """
        if self.thoughts is None or len(self.think_marks) != 2:
            return None
        if self._end_of(prompt).endswith(self.thoughts.end):
            return None
        return Thinking(*self.think_marks, is_open=self.opens_thoughts(prompt), budget=budget)

    def since_mark(self, prompt: TokenIds, mark: str) -> str:
        """Return the end of a prompt from the last of these control tokens on; empty where it has none."""
        at = np.flatnonzero(prompt == self._vocabulary.control[mark])
        return self.decode(prompt[at[-1] :].tolist(), skip_special_tokens=False) if len(at) else ""

    def marks(self, *, has_calls: bool) -> frozenset[int]:
        """Return the control tokens by which an answer's thoughts and, if it `has_calls`, calls are found."""
        names = [] if self.thoughts is None else [*self.thoughts.tokens, *self.thoughts.answer]
        if has_calls and self.tool_format is not None:
            names += self.tool_format.tokens
        return frozenset(self.control_tokens(names).values())

    def control_tokens(self, names: Iterable[str]) -> dict[str, int]:
        """Return the ids of those names that are control tokens."""
        return {name: self._vocabulary.control[name] for name in names if name in self._vocabulary.control}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt.

        With `add_special_tokens` it begins and ends as the tokenizer's files say.

        Control tokens written in a prompt are encoded as control tokens, since its author writes all of it,
        unless the files say `split_special_tokens`.
        """
        check_unicode("prompt", text)
        return self._vocabulary.encode(text, add_special_tokens=add_special_tokens)

    def closing_ids(self) -> list[int]:
        """Return the ids that the tokenizer's files put behind a whole text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        places = range(len(whole) - len(bare), -1, -1)
        at = next((at for at in places if whole[at : at + len(bare)] == bare), len(whole))
        return whole[at + len(bare) :]

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of a piece of text that follows other text."""
        return self._vocabulary.encode(text, start=False)

    def chat(self, messages: object, options: ChatOptions = _AS_USUAL) -> list[int]:
        """Return the ids of a conversation, by default up to the assistant's next turn.

        Control tokens come from the template alone; those written in a message, or in a value sent for the
        template, are encoded as text, as are the template's own where the files say `split_special_tokens`.
        Raises BadRequest for messages that are malformed or that the template refuses.
        """
        template = self._tool_template if options.tools else self._template
        if template is None:
            kind = "" if self._tool_template is None else " for conversations without tools"
            problem = f"has no chat template{kind}; send prompt instead of messages"
            raise BadRequest("messages", problem, subject="this model")
        is_text = self.tool_format is not None and self.tool_format.text_arguments
        checked = check_messages(messages, text_arguments=is_text)
        if self.channels is not None:
            whole = [each | {"content": joined(each.get("content"))} for each in checked]
            checked = [with_thinking(each) for each in whole]
        else:
            checked = [template.form.shaped(each) for each in checked]
        for index, message in enumerate(checked):
            for key, value in message.items():
                for each in strings_in(value):
                    check_unicode("messages", each, place=f"[{index}].{key}")
        for each in strings_in(list(options.tools)):
            check_unicode("tools", each)
        for each in strings_in(options.chat_template_kwargs):
            check_unicode("chat_template_kwargs", each)
        given = [checked, options.chat_template_kwargs, list(options.tools)]
        (shown, kwargs, tools), spelt = self._shield.shielded(given)
        options = replace(options, chat_template_kwargs=kwargs, tools=tools)
        rendered = template.render(shown, options)
        ids: list[int] = []
        for part, is_literal in self._shield.parts(rendered, spelt):
            if is_literal:
                ids += self._vocabulary.encode_literally(part)
            else:
                ids += self._vocabulary.encode(part, start=not ids)
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        start: bool = True,
        marks: frozenset[int] = frozenset(),
    ) -> str:
        """Return the text of some ids.

        With `start` they begin a text; otherwise they continue one, as an answer continues its prompt, and a
        leading space belongs to the text. `marks` are control tokens that are not skipped.
        """
        detokenizer = Detokenizer(self, start=start, skip_special_tokens=skip_special_tokens, marks=marks)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes that a token adds to a text behind other tokens."""
        if skip_special_tokens and token in self._control_ids:
            return b""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._vocabulary.token_bytes(token)
        return known

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text of which it is the first."""
        return self._vocabulary.token_bytes(token, is_first=True)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How an answer's tokens become its text, which the engine does not need to know.

    `is_chat` says that it answers a conversation, and `start` that it is a text of its own (a turn), not the
    continuation of its prompt. With `include_stop_str_in_output`, the string or token that ended the answer
    belongs to its text. `num_tools` is the number of functions that may be called. `marks` are control tokens
    by which calls and thoughts are found, so that they are never skipped.
    """

    is_chat: bool = False
    start: bool = False
    skip_special_tokens: bool = default("skip_special_tokens")
    include_stop_str_in_output: bool = default("include_stop_str_in_output")
    num_tools: int = 0
    marks: frozenset[int] = frozenset()

    def detokenizer(self, text: Text, params: SamplingParams) -> Detokenizer:
        """Return a detokenizer for one answer."""
        return Detokenizer(
            text,
            params.stop,
            min_tokens=params.min_tokens,
            start=self.start,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output,
            marks=self.marks,
        )

    def without_end(self, answer: Sequence[int], finish_reason: str | None) -> Sequence[int]:
        """Return the tokens that belong to an answer's text: not the one that ended it, unless asked for."""
        ended = finish_reason == "stop" and not self.include_stop_str_in_output
        return answer[:-1] if ended else answer


class Detokenizer:
    """Decodes one answer as it grows.

    The text ends before a stop string, or after it with `include_stop`; `stopped` then names it, and
    `num_tokens` is the number of tokens that it took. Of several stop strings, the one that is complete first
    counts (of those, the longest), as if the text came character by character, however it was cut into
    tokens. A stop string must end after the first `min_tokens` tokens, and may begin among them. `start` is
    that of Text.decode.
    """

    def __init__(
        self,
        text: Text,
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        start: bool = True,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        marks: frozenset[int] = frozenset(),
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._text = text
        self._stop = stop
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._marks = marks
        self._include_stop = include_stop
        self._is_start = start  # whether the next token that is shown is the first of a text
        self._spaces_to_drop = text.num_lead_spaces if start else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # text that may be the beginning of a stop string
        self._num_early = 0  # characters of it that no stop string may end in

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain with these tokens; empty once a stop string has been found."""
        if not self._stop:
            pieces = [self._bytes_of(token) for token in token_ids]
            self.num_tokens += len(pieces)
            return self._decoder.decode(self._without_lead(b"".join(pieces)))
        shown = ""
        for token in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            data = self._bytes_of(token)
            shown += self._advance(self._decoder.decode(self._without_lead(data)))
        return shown

    def _bytes_of(self, token: int) -> bytes:
        is_skipped = self._skip_special_tokens and token not in self._marks
        data = self._text.token_bytes(token, skip_special_tokens=is_skipped)
        if self._is_start and data:
            self._is_start = False
            return self._text.first_bytes(token)
        return data

    def flush(self) -> str:
        """Return the rest, when no more tokens come."""
        if self.stopped is not None:
            return ""
        shown = self._advance(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _without_lead(self, data: bytes) -> bytes:
        while self._spaces_to_drop and data:
            if data[:1] != b" ":
                self._spaces_to_drop = 0
                break
            data = data[1:]
            self._spaces_to_drop -= 1
        return data

    def _advance(self, text: str) -> str:
        self._held += text
        ends = []
        if self.num_tokens <= self._min_tokens:
            self._num_early = len(self._held)
        else:
            for stop in self._stop:
                at = self._held.find(stop, max(0, self._num_early + 1 - len(stop)))
                if at >= 0:
                    ends.append((at + len(stop), at, stop))
        if ends:
            end, at, self.stopped = min(ends)
            shown, self._held = self._held[: end if self._include_stop else at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        self._num_early = max(0, self._num_early - cut)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
