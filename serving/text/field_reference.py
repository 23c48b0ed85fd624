"""Describe the fields of a request in words, for the tables of docs/request_fields.md.

    python -m serving.text.field_reference

The checks themselves are in `serving.text.request_fields` and `SamplingParams`. A test tries every name and
both ends of every range against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from continuous_batching.request import SamplingParams
from recipes.schema import verb
from serving.text.answer_reference import ANSWER_FIELDS
from serving.text.effort import EFFORTS
from serving.text.effort import FIELD as EFFORT


@dataclass(frozen=True, slots=True)
class RequestField:
    """One row of the table of fields; the range includes `least` (unless `exclusive`) and `most`."""

    names: tuple[str, ...]
    meaning: str
    least: float | None = None
    most: float | None = None
    exclusive: bool = False
    allowed: str = ""  # the allowed values in words, for a field with no range or more than one
    default: str = ""  # the default in words, where SamplingParams has none

    @property
    def described(self) -> str:
        """The allowed values, in words."""
        if self.allowed:
            return self.allowed
        least = f"above {_number(self.least)}," if self.exclusive else _number(self.least)
        return f"{least} to {_number(self.most)}" if self.most is not None else f"{least} or more"

    @property
    def default_text(self) -> str:
        """The default as JSON would write it, or in words."""
        if self.default:
            return self.default
        value = _DEFAULTS[self.names[0]]
        return str(value).lower() if isinstance(value, bool) else f"{value:g}"


FIELDS = (
    RequestField(
        ("id",),
        "names the answer; no two requests have the same, and further samples of one are `ID#1`, `ID#2`, ...",
        allowed="a string",
        default="required",
    ),
    RequestField(
        ("prompt", "messages", "prompt_token_ids"),
        "a text to continue; a conversation, through the model's own template; tokens as they are",
        allowed="a string; a list of `{role, content}`; a list of token ids",
        default="one is required",
    ),
    RequestField(
        ("truncate_prompt_tokens",),
        "keep only so many of the prompt's last tokens; -1: as many as leave the answer its room",
        allowed="-1, or 1 to the model's maximum context length",
        default="none are cut",
    ),
    RequestField(
        ("add_generation_prompt",),
        "the template ends with what the assistant's turn begins with; needs `messages`",
        allowed="true or false",
        default="true",
    ),
    RequestField(
        ("continue_final_message",),
        "the answer continues the last message, which is left open; needs `add_generation_prompt: false`",
        allowed="true or false",
        default="false",
    ),
    RequestField(
        ("chat_template_kwargs",),
        "variables for the template, such as `enable_thinking`; none that the server itself gives it",
        allowed="an object of up to 32 names, 16384 characters and 8 levels",
        default="none",
    ),
    RequestField(
        (EFFORT,),
        "how hard the model thinks: the template's variable `reasoning_effort`, or for `none` and `minimal` "
        "its `enable_thinking` or `thinking`; a template without a word for it refuses; needs `messages`",
        allowed=f"{', '.join(EFFORTS)}; none also where the model never thinks",
        default="the template's",
    ),
    RequestField(("arrival_s",), "seconds from the start until it arrives", 0, default="0"),
    RequestField(
        ("timeout_s",),
        "a request that has not finished so many seconds after it arrived ends where it stands, and its "
        "`finish_reason` is timeout",
        allowed="above 0",
        default="none",
    ),
    RequestField(
        ("max_tokens", "max_completion_tokens"), "the longest answer; two names of one field", 1, 2**31 - 1
    ),
    RequestField(("min_tokens",), "nothing ends the answer before", allowed="0 to `max_tokens`"),
    RequestField(("temperature",), "0: always the likeliest token", 0, 100),
    RequestField(("top_k",), "choose among so many likeliest tokens; 0, or -1: among all", -1, 2**31 - 1),
    RequestField(
        ("top_p",), "choose among the likeliest tokens that have this probability together", 0, 1, True
    ),
    RequestField(
        ("min_p",), "choose among tokens with at least this share of the likeliest one's probability", 0, 1
    ),
    RequestField(
        ("repetition_penalty",), "above 1: what prompt or answer holds becomes less likely", 0.01, 100
    ),
    RequestField(
        ("presence_penalty", "frequency_penalty"),
        "subtracted from the logit of a token in the answer: once; for each time it stands there",
        -2,
        2,
    ),
    RequestField(
        ("logit_bias",),
        "added to the logits of these tokens",
        allowed="an object of up to 1024 token ids and -100 to 100",
        default="none",
    ),
    RequestField(
        ("allowed_token_ids",),
        "no other tokens may be chosen; log-probabilities stay the model's own",
        allowed="a list of 1 to 262144 of the model's token ids",
        default="all",
    ),
    RequestField(
        ("bad_words",),
        "the answer never holds the tokens of such a word in a row, with or without a space before it",
        allowed="a list of up to 128 strings, of up to 128 characters each",
        default="none",
    ),
    RequestField(
        ("logits_processors",),
        "the operator's own that change the logits, of those that the recipe names (docs/serving.md); not "
        "beside `beam_width`",
        allowed='up to 8 of `{"name": ..., "args": {...}}`; the args in up to 4096 characters of JSON',
        default="none",
    ),
    RequestField(
        ("response_format", "structured_outputs"),
        "the answer's form, by OpenAI's name or by vLLM's (docs/structured_output.md); an answer that is cut "
        "at `max_tokens` breaks off; not beside `beam_width` or `ignore_eos`; log-probabilities stay the "
        "model's own",
        allowed="an object with `type`: text, json_object, json_schema; an object with one of json, "
        "json_object, regex, choice, grammar",
        default="any",
    ),
    RequestField(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "the same, by vLLM's older names; one of all these fields at most",
        allowed="a JSON schema of up to 65536 bytes; up to 32768 characters; a list of up to 1000 strings; "
        "up to 32768 characters",
        default="any",
    ),
    RequestField(
        ("tools",),
        "functions that the answer may call (docs/tools.md); needs `messages`",
        allowed="a list of up to 128 `{type, function}`",
        default="none",
    ),
    RequestField(
        ("tool_choice",),
        "whether it may call any of them, must, or must call a named one",
        allowed="`none`, `auto`, `required`, or `{type, function: {name}}`",
        default="auto",
    ),
    RequestField(
        ("parallel_tool_calls",),
        "one answer may call several, or one several times",
        allowed="true or false",
        default="true",
    ),
    RequestField(
        ("thinking_token_budget",),
        "so many tokens of thoughts, and then their block ends; needs `messages`, and `server.reasoning` of "
        "the recipe",
        0,
        2**31 - 1,
        default="any number",
    ),
    RequestField(
        ("seed",),
        "with it, the same request gets the same tokens, whatever else runs",
        0,
        2**63 - 1,
        default="drawn",
    ),
    RequestField(
        ("stop",),
        "ends the text before it, also across the borders of tokens",
        allowed="a string, or a list of up to 16, of up to 1024 characters each",
        default="none",
    ),
    RequestField(
        ("stop_token_ids",),
        "end the answer, as the model's own end tokens do",
        allowed="a list of up to 1024 token ids",
        default="none",
    ),
    RequestField(
        ("ignore_eos",), "the model's own end tokens do not end the answer", allowed="true or false"
    ),
    RequestField(
        ("include_stop_str_in_output",),
        "the stop string or end token is a part of the text",
        allowed="true or false",
        default="false",
    ),
    RequestField(
        ("skip_special_tokens",),
        "control tokens are no part of the text",
        allowed="true or false",
        default="true",
    ),
    RequestField(
        ("n", "best_of"),
        "how many answers; from how many samples, by their log-probability",
        1,
        128,
        default="1; `n`",
    ),
    RequestField(
        ("beam_width",),
        "search for the `n` best answers with so many beams, each in a slot, instead of drawing them; "
        "0: draw",
        allowed="0, or 2 to 128",
    ),
    RequestField(
        ("length_penalty",),
        "a beam search ranks answers by log-probability / tokens^`length_penalty`",
        -10,
        10,
    ),
    RequestField(
        ("early_stopping",),
        "when a search with `beam_width` answers may end: at once; when the best beam is now no better than "
        "the worst answer; when none can become better",
        allowed='true, false or `"never"`',
    ),
    RequestField(
        ("max_draft_tokens",),
        "the most guesses of its tokens that one step checks, where the recipe has `speculation`, whose own "
        "limit holds too; 0: none; tokens stay the same",
        0,
        2**31 - 1,
        default="the recipe's",
    ),
    RequestField(
        ("logprobs", "top_logprobs"),
        "log-probabilities: of each token and so many likeliest ones; how many where `logprobs` is true",
        allowed="0 to 20, or true; 0 to 20",
        default="none",
    ),
    RequestField(
        ("prompt_logprobs",),
        "the same of each prompt token but the first; the prompt is then computed whole, whatever is cached "
        "of it; not beside `beam_width`",
        0,
        20,
        default="none",
    ),
    RequestField(
        ("pooling",),
        "the prompt's embedding in place of an answer: its last hidden state at the last token, or the mean "
        "over all; takes no other field that chooses tokens",
        allowed="last or mean",
        default="none",
    ),
    RequestField(
        ("label_token_ids",),
        "in place of the embedding, how likely each of these tokens comes next; needs `pooling: last`",
        allowed="a list of up to 128 token ids",
        default="none",
    ),
    RequestField(
        ("tenant", "user"),
        "whose request it is; two names of one field",
        allowed="a string",
        default="empty",
    ),
    RequestField(
        ("cache_salt",), "only requests with the same one share pages", allowed="a string", default="empty"
    ),
    RequestField(
        ("adapter",),
        "an adapter of the recipe's, in files of requests; over HTTP `model` names it",
        allowed="a name of `adapters.folders`",
        default="none",
    ),
    RequestField(
        ("priority",),
        "larger goes first where `scheduler.queue` is priority; where `scheduler.victim` is lowest_priority, "
        "the lowest makes room first",
        allowed="an integer",
        default="0",
    ),
)

_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}
_POWERS = {2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1"}


def request_table() -> str:
    """Return the fields of a request as a Markdown table."""
    head = ["| field | allowed | default | meaning |", "|---|---|---|---|"]
    rows = [f"| {_code(e.names)} | {e.described} | {e.default_text} | {e.meaning} |" for e in FIELDS]
    return "\n".join(head + rows) + "\n"


def answer_table() -> str:
    """Return the fields of a line of answers as a Markdown table."""
    rows = [f"| {_code(names)} | {meaning} |" for names, meaning in ANSWER_FIELDS]
    return "\n".join(["| field | meaning |", "|---|---|", *rows]) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _number(value: float | None) -> str:
    assert value is not None, "a field without a range says in words what is allowed"
    return _POWERS.get(int(value), f"{value:g}") if value == int(value) else f"{value:g}"


if __name__ == "__main__":
    verb.run(lambda _: print(f"{request_table()}\n{answer_table()}", end=""))
