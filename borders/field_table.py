"""Declare every field of a request: its type, bounds, default and meaning, and which interfaces take it.

Everything else derives from `FIELDS`: the keys and checks of a line of input (serving/text/request_fields.py)
and of HTTP's bodies (serving/api/schemas.py), Python's `SamplingParams` (serving/outputs.py), the bounds and
defaults of the engine's own `SamplingParams` (continuous_batching/request.py), and docs/request_fields.md.
A new field of a plain type needs a row here, and the attribute of `SamplingParams` that it becomes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from borders.field_types import (
    LAST_ID,
    LONGEST_NAME,
    FieldType,
    Numeric,
    Object,
    String,
    biases,
    choice,
    integer,
    label,
    number,
    strings,
    token_ids,
)
from borders.numbers import Range, numbers

MOST_SAMPLES = 128  # each sample takes a slot, so more samples of one request would crowd out other requests
MOST_LOGPROBS = 20  # most alternatives whose log-probabilities are reported at a position
MOST_NAMED_TOKENS = 1024  # tokens that a request may name, because each of its samples carries them
MOST_ALLOWED = 2**18  # most ids in a list, which is more than any vocabulary has
MOST_PROCESSORS = 8
LONGEST_ARGUMENTS = 4096  # characters of the JSON of a logits processor's arguments
MOST_KWARGS = 32
LONGEST_KWARGS = 16 * 1024  # characters of JSON
DEEPEST_KWARGS = 8
MOST_TOOLS = 128
MOST_SCHEMA_BYTES = 65_536  # bytes of a JSON schema in compact form
LONGEST_GRAMMAR = 32_768  # characters of a regex or a grammar, and of all choices together
MOST_CHOICES = 1000
MOST_SECONDS = 1e15
MOST_LEASE_S = 86_400  # longest time for which pages are held for another engine: a day

Form = Literal["completions", "chats", "responses", "embeddings", "scores", "tokenize", "Python"]
_GENERATED: tuple[Form, ...] = ("completions", "chats")
_SAMPLED: tuple[Form, ...] = (*_GENERATED, "responses")
_CHATS: tuple[Form, ...] = ("chats", "responses")
_TEMPLATED: tuple[Form, ...] = ("chats", "tokenize")
_EVERY: tuple[Form, ...] = (*_SAMPLED, "embeddings", "scores")
_PYTHON: tuple[Form, ...] = ("Python",)


@dataclass(frozen=True, slots=True)
class RequestField:
    """One field of a request, which every line of input takes, and the forms of requests in `forms` too."""

    name: str
    kind: FieldType
    stated: float | str  # the default; a text says in words what holds without a value
    forms: tuple[Form, ...]
    meaning: str
    # The attribute of `SamplingParams` that holds the value as it was read; "": none, or it is converted
    attribute: str = ""

    @property
    def default(self) -> Any:
        """The default, or None if the field has no value unless it is given."""
        return None if isinstance(self.stated, str) else self.stated


def _parameter(
    name: str, kind: FieldType, stated: float | str, forms: tuple[Form, ...], meaning: str
) -> RequestField:
    """Return a field that `SamplingParams` holds under the same name."""
    return RequestField(name, kind, stated, forms, meaning, attribute=name)


_BOOLEAN = choice(True, False)
_NAME = label()

_PROMPT = (
    RequestField("id", _NAME, "required", (),
        "names the answer; no two requests have the same, and more samples of one are `ID#1`, `ID#2`, ..."),
    RequestField("prompt", String(str, "a string"), "one of three is required", ("completions",),
        "a text to continue"),
    RequestField("messages", FieldType(list[Any], "a list of `{role, content}`"), "one of three is required",
        ("chats",), "a conversation, which becomes a prompt through the model's own template"),
    RequestField("prompt_token_ids", token_ids(), "one of three is required", (),
        "the prompt's tokens as they are"),
    RequestField("truncate_prompt_tokens",
        integer(1, also=-1, allowed="-1, or 1 to the model's maximum context length"),
        "none are cut", _EVERY + _PYTHON,
        "keep only so many of the prompt's last tokens, or of an embedding's first ones with what the "
            "tokenizer ends a text with; -1: as many as leave the answer its room"),
    RequestField("add_generation_prompt", _BOOLEAN, True, _TEMPLATED,
        "the template ends with what the assistant's turn begins with; needs `messages`"),
    RequestField("continue_final_message", _BOOLEAN, False, _TEMPLATED,
        "the answer continues the last message, which is left open; needs `add_generation_prompt: false`"),
    RequestField("chat_template_kwargs",
        Object(dict[str, Any], f"an object of up to {MOST_KWARGS} names, {LONGEST_KWARGS} characters and "
            f"{DEEPEST_KWARGS} levels"),
        "none", (*_TEMPLATED, "responses"),
        "variables for the template, such as `enable_thinking`; none that the server itself gives it"),
    RequestField("reasoning_effort", choice("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "the template's", _TEMPLATED,
        "how hard the model thinks: the template's variable `reasoning_effort`, or its `enable_thinking` or "
        "`thinking`, false for `none` and `minimal`; where it has no word for it, the header "
        "`x-reasoning-effort` of the answer says so; needs `messages`"),
)  # fmt: skip
_SAMPLING = (
    _parameter("max_tokens", integer(1), 16, _GENERATED + _PYTHON,
        "the most tokens of the answer; a chat over HTTP that leaves it out may fill the context"),
    RequestField("max_completion_tokens", integer(1), "`max_tokens`", ("chats",),
        "another name of `max_tokens`"),
    _parameter("min_tokens", integer(0, allowed="an integer from 0 to `max_tokens`"), 0, _SAMPLED + _PYTHON,
        "nothing ends the answer before it has so many tokens"),
    _parameter("temperature", number(0, 100), 1.0, _SAMPLED + _PYTHON, "0: always the likeliest token"),
    _parameter("top_k", integer(0, zero=-1), 0, _SAMPLED + _PYTHON,
        "choose among so many likeliest tokens; 0, or -1: among all"),
    _parameter("top_p", number(0, 1), 1.0, _SAMPLED + _PYTHON,
        "choose among the likeliest tokens that have this probability together; 0: the likeliest alone"),
    _parameter("min_p", number(0, 1), 0.0, _SAMPLED + _PYTHON,
        "choose among tokens with at least this share of the likeliest one's probability"),
    _parameter("repetition_penalty", number(0.01, 100), 1.0, _SAMPLED + _PYTHON,
        "above 1: what prompt or answer holds becomes less likely"),  # logits times 100 are finite
    _parameter("presence_penalty", number(-2, 2), 0.0, _SAMPLED + _PYTHON,
        "subtracted once from the logit of a token that the answer holds"),
    _parameter("frequency_penalty", number(-2, 2), 0.0, _SAMPLED + _PYTHON,
        "subtracted from the logit of a token for each time that the answer holds it"),
    _parameter("seed", integer(0, 2**63 - 1), "drawn", _SAMPLED + _PYTHON,
        "with it, the same request draws by the same random numbers, whatever else runs; it gets the same "
        "tokens, too, where logits do not depend on the batch (a CPU with `device.batch_invariant`), and "
        "elsewhere but for near ties, which are rare in float32 and not in 16 bits"),
    _parameter("logit_bias", biases(MOST_NAMED_TOKENS, numbers(-100, 100)), "none", _SAMPLED + _PYTHON,
        "added to the logits of these tokens"),
    RequestField("allowed_token_ids", token_ids(MOST_ALLOWED, least=1), "all", _SAMPLED + _PYTHON,
        "no other tokens may be chosen; log-probabilities stay the model's own"),
    RequestField("bad_words", strings(128, 128), "none", _SAMPLED + _PYTHON,
        "the answer never holds the tokens of such a word in a row, with or without a space before it"),
    RequestField("logits_processors",
        FieldType(list[Any], f'up to {MOST_PROCESSORS} of `{{"name": ..., "args": {{...}}}}`; the args in up '
            f"to {LONGEST_ARGUMENTS} characters of JSON"),
        "none", _SAMPLED,
        "the operator's own that change the logits, of those that the recipe names (docs/serving.md); not "
        "beside `beam_width`"),
    # Text as long as a stop string is held back until it is known not to be one
    _parameter("stop", strings(16, 1024, or_one=True), "none", _SAMPLED + _PYTHON,
        "ends the text before it, also across the borders of tokens"),
    _parameter("stop_token_ids", token_ids(MOST_NAMED_TOKENS), "none", _SAMPLED + _PYTHON,
        "end the answer, as the model's own end tokens do"),
    _parameter("ignore_eos", _BOOLEAN, False, _SAMPLED + _PYTHON,
        "the model's own end tokens do not end the answer"),
    _parameter("beam_width", integer(0, MOST_SAMPLES, f"0, or 2 to {MOST_SAMPLES}"), 0, _GENERATED + _PYTHON,
        "search for the `n` best answers with so many beams, each in a slot; 0: draw them instead"),
    _parameter("length_penalty", number(-10, 10), 1.0, _GENERATED + _PYTHON,
        "a beam search ranks answers by log-probability / tokens^`length_penalty`"),
    _parameter("early_stopping", choice(True, False, "never"), False, _GENERATED + _PYTHON,
        "when a search with `beam_width` answers may end: at once; when the best beam is now no better than "
        "the worst answer; when none can become better"),
    _parameter("max_draft_tokens", integer(0), "the recipe's", _SAMPLED + _PYTHON,
        "the most guesses of its tokens that one step checks, where the recipe has `speculation`, whose own "
        "limit holds too; 0: none; tokens stay the same"),
    _parameter("logprobs",
        integer(0, MOST_LOGPROBS, f"0 to {MOST_LOGPROBS}, or in chats true", takes_bool=True), "none",
        _GENERATED + _PYTHON, "log-probabilities of each token and of so many likeliest ones"),
    RequestField("top_logprobs", integer(0, MOST_LOGPROBS), "none", _CHATS,
        "how many likeliest tokens, where `logprobs` is true"),
    _parameter("prompt_logprobs", integer(0, MOST_LOGPROBS), "none", _GENERATED + _PYTHON,
        "log-probabilities of each prompt token but the first; the prompt is then computed whole, whatever "
        "is cached of it; not beside `beam_width`"),
)  # fmt: skip
_POOLING = (
    _parameter("pooling", choice("last", "mean"), "none", (),
        "the prompt's embedding in place of an answer: its last hidden state at the last token, or the mean "
        "over all; takes no other field that chooses tokens"),
    _parameter("label_token_ids", token_ids(128), "none", (),
        "in place of the embedding, how likely each of these tokens comes next; needs `pooling: last`"),
)  # fmt: skip
_ANSWER = (
    RequestField("n", integer(1, MOST_SAMPLES), 1, _GENERATED + _PYTHON, "how many answers"),
    RequestField("best_of", integer(1, MOST_SAMPLES), "`n`", ("completions", "Python"),
        "from how many samples the `n` answers are chosen, by their log-probability per token"),
    RequestField("response_format",
        FieldType(dict[str, Any], "an object with `type`: text, json_object, json_schema"), "any", _GENERATED,
        "the answer's form (docs/structured_output.md); an answer that is cut at `max_tokens` breaks off; "
        "not beside `beam_width` or `ignore_eos`; log-probabilities stay the model's own"),
    RequestField("structured_outputs",
        FieldType(dict[str, Any], "an object with one of json, json_object, regex, choice, grammar"),
        "any", _GENERATED + _PYTHON, "the same, by vLLM's name; one of all these fields at most"),
    RequestField("guided_json",
        FieldType(dict[str, Any] | str, f"a JSON schema of up to {MOST_SCHEMA_BYTES} bytes"),
        "any", _GENERATED, "the answer fits this schema"),
    RequestField("guided_regex", FieldType(str, f"up to {LONGEST_GRAMMAR} characters"), "any", _GENERATED,
        "the whole answer matches this regular expression"),
    RequestField("guided_choice",
        FieldType(list[str], f"up to {MOST_CHOICES} strings, of {LONGEST_GRAMMAR} characters together"),
        "any", _GENERATED, "the answer is one of these"),
    RequestField("guided_grammar", FieldType(str, f"up to {LONGEST_GRAMMAR} characters"), "any", _GENERATED,
        "a grammar of the answer, as Lark or GBNF"),
    RequestField("tools", FieldType(list[Any], f"a list of up to {MOST_TOOLS} `{{type, function}}`"),
        "none", _CHATS, "functions that the answer may call (docs/tools.md); needs `messages`"),
    RequestField("tool_choice",
        FieldType(str | dict[str, Any], "`none`, `auto`, `required`, or `{type, function: {name}}`"),
        "auto", _CHATS, "whether it may call any of them, must, or must call a named one"),
    RequestField("parallel_tool_calls", FieldType(bool, "true or false"), True, _CHATS,
        "one answer may call several, or one several times"),
    RequestField("thinking_token_budget", integer(0), "any number", _CHATS,
        "so many tokens of thoughts, and then their block ends; needs `messages`, and a `server.reasoning` "
        "of the recipe whose marks are tokens of the model"),
    RequestField("include_stop_str_in_output", _BOOLEAN, False, _GENERATED + _PYTHON,
        "the stop string or end token is a part of the text"),
    RequestField("skip_special_tokens", _BOOLEAN, True, _GENERATED + _PYTHON,
        "control tokens are no part of the text"),
)  # fmt: skip
_QUEUE = (
    RequestField("arrival_s", number(0, MOST_SECONDS, "seconds"), 0.0, (), "when it arrives, from the start"),
    RequestField("timeout_s", number(0, MOST_SECONDS, "seconds", is_open=True), "none", _EVERY,
        "a request that has not finished so many seconds after it arrived ends where it stands, and its "
        "`finish_reason` is timeout"),
    RequestField("tenant", _NAME, "empty", _EVERY, "whose request it is"),
    RequestField("user", _NAME, "empty", _EVERY, "another name of `tenant`"),
    RequestField("cache_salt", _NAME, "empty", _EVERY, "only requests with the same one share pages"),
    RequestField("adapter", String(str, "a name of `adapters.folders`", LONGEST_NAME), "none", (),
        "an adapter of the recipe's; over HTTP `model` names it"),
    RequestField("priority", integer(-LAST_ID), 0, _EVERY,
        "larger goes first where `scheduler.queue` is priority; where `scheduler.victim` is lowest_priority, "
        "the lowest makes room first"),
)  # fmt: skip

FIELDS = {each.name: each for each in (*_PROMPT, *_SAMPLING, *_POOLING, *_ANSWER, *_QUEUE)}
PROMPT = [each.name for each in _PROMPT if each.name != "id"]  # the fields that make a prompt
# The fields that hold for a request without an answer, which `pooling` asks for
WITHOUT_ANSWER = frozenset(each.name for each in (*_PROMPT, *_POOLING, *_QUEUE))


def taken_by(form: Form) -> Iterator[RequestField]:
    """Yield the fields that an interface takes."""
    return (each for each in FIELDS.values() if form in each.forms)


def range_of(name: str) -> Range[Any]:
    """Return the numbers that a field may have."""
    kind = FIELDS[name].kind
    assert isinstance(kind, Numeric), f"{name} is no number"
    return kind.range


def default(name: str) -> Any:
    """Return the default of a field."""
    return FIELDS[name].default
