"""Declare the fields of other engines' requests that are read, or taken where they ask for nothing.

A client that was written for another engine sends its fields along, mostly with the values that its own
library has by default. `FOREIGN` names those fields, the values that ask for nothing, and the field of this
project where the meaning is the same. Any other value is refused by name, because the answer would not be
what was asked for. HTTP's bodies (serving/api/schemas.py) and docs/request_fields.md derive from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]
Reader = Callable[[Any, Fields], Fields | None]


@dataclass(frozen=True, slots=True)
class ForeignField:
    """One field of other engines' requests.

    `read` takes its value and the whole body, and returns the fields of this project that mean the same: none
    where the value asks for nothing. It returns None for a value that cannot be met.
    """

    name: str
    engines: str
    taken: str  # the values that are accepted, in words
    becomes: str  # what they are read as, in words
    read: Reader
    fix: str = "leave it out"


def _neutral(
    name: str, engines: str, *values: Any, taken: str = "", fix: str = "leave it out"
) -> ForeignField:
    """Return a field of which only the given values are accepted: they ask for nothing."""

    def read(given: Any, _: Fields) -> Fields | None:
        return {} if any(same_value(given, each) for each in values) else None

    words = taken or " or ".join(f"`{_written(each)}`" for each in values) or "null"
    return ForeignField(name, engines, words, "", read, fix)


def _label(name: str, engines: str, kinds: tuple[type, ...], taken: str, why: str) -> ForeignField:
    """Return a field of which any value is accepted, because nothing here depends on it."""

    def read(given: Any, _: Fields) -> Fields | None:
        return (
            {} if isinstance(given, kinds) and not (isinstance(given, bool) and bool not in kinds) else None
        )

    return ForeignField(name, engines, taken, f"nothing: {why}", read)


def _renamed(name: str, engines: str, own: str, *absent: Any, without: str = "left out") -> ForeignField:
    """Return a field that another one means; the values in `absent` leave it out, which is `without` it."""

    def read(given: Any, _: Fields) -> Fields | None:
        return {} if any(type(given) is type(each) and given == each for each in absent) else {own: given}

    more = "".join(f"; `{_written(each)}`: {without}" for each in absent)
    return ForeignField(name, engines, f"what `{own}` takes{more}", f"`{own}`", read)


def same_value(given: Any, value: Any) -> bool:
    """Return whether two JSON values are the same; Python takes true for 1."""
    try:
        return _same(given, value)
    except RecursionError:  # they are nested more deeply than can be compared
        return False


def _same(given: Any, value: Any) -> bool:
    if isinstance(given, Mapping) and isinstance(value, Mapping):
        return given.keys() == value.keys() and all(_same(each, value[name]) for name, each in given.items())
    if isinstance(given, list) and isinstance(value, list):
        return len(given) == len(value) and all(map(_same, given, value))
    return isinstance(given, bool) == isinstance(value, bool) and bool(given == value)


def _written(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


_OFF = ("none", "minimal")  # the efforts at which a model does not think


def _switch(is_on: bool, beside: Fields, budget: Any = None) -> Fields | None:
    """Return what a switch for thinking asks for: nothing more where another field says how hard.

    The result is None where another field contradicts it.
    """
    kwargs = beside.get("chat_template_kwargs")
    said = kwargs.get("enable_thinking") if isinstance(kwargs, Mapping) else None
    if isinstance(said, bool) and said != is_on:
        return None
    inner = {name: beside.get(name) for name in ("reasoning", "thinking")}
    reasoning, thinking = (each if isinstance(each, Mapping) else {} for each in inner.values())
    if is_on:
        efforts = beside.get("reasoning_effort"), beside.get("think"), reasoning.get("effort")
        is_said = any(isinstance(each, str) and each not in _OFF for each in efforts)
        return {} if is_said else {"reasoning_effort": "medium"}
    budgets = (
        *(budget, beside.get("thinking_token_budget")),
        *(reasoning.get("max_tokens"), thinking.get("budget_tokens")),
    )
    if any(each is not None for each in budgets):
        return None
    return {} if beside.get("reasoning_effort") == "minimal" else {"reasoning_effort": "none"}


def _effort(given: Any, beside: Fields) -> Fields | None:
    """Read whether to think, or how hard."""
    if isinstance(given, bool):
        return _switch(given, beside)
    return {"reasoning_effort": given} if given in ("low", "medium", "high") else None


def _thinking(given: Any, beside: Fields) -> Fields | None:
    """Read Anthropic's object, which GLM's and DeepSeek's services take, too."""
    if not isinstance(given, Mapping) or not given.keys() <= {"type", "budget_tokens", "clear_thinking"}:
        return None
    kind, budget = given.get("type"), given.get("budget_tokens")
    if given.get("clear_thinking") is not None or kind not in ("enabled", "disabled"):
        return None
    switched = _switch(kind == "enabled", beside, budget)
    return switched if switched is None or budget is None else {**switched, "thinking_token_budget": budget}


def _reasoning(given: Any, beside: Fields) -> Fields | None:
    """Read OpenRouter's object."""
    if not isinstance(given, Mapping) or not given.keys() <= {"effort", "enabled", "max_tokens", "exclude"}:
        return None
    effort, enabled, budget = given.get("effort"), given.get("enabled"), given.get("max_tokens")
    if not (given.get("exclude") is None or given["exclude"] is False):
        return None
    if not isinstance(enabled, (bool, type(None))) or (enabled is True and effort in _OFF):
        return None
    if enabled is False and effort not in (None, *_OFF):
        return None
    if effort in _OFF or enabled is not None:
        is_on = effort not in _OFF and enabled is not False
        switched = _switch(is_on, beside, budget)
        if switched is None or (not is_on and not switched):
            return switched
        efforts = switched if effort is None else {"reasoning_effort": effort}
    else:
        efforts = {} if effort is None else {"reasoning_effort": effort}
    return {**efforts, **({} if budget is None else {"thinking_token_budget": budget})}


def _form(given: Any, _: Fields) -> Fields | None:
    """Read Ollama's `format`."""
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    return {} if given == "" else {"guided_json": given} if isinstance(given, Mapping) else None


def _usage(given: Any, beside: Fields) -> Fields | None:
    """Read OpenRouter's `usage`; a whole answer always has it."""
    if not isinstance(given, Mapping) or given.keys() != {"include"}:
        return None
    options, include = beside.get("stream_options"), given["include"]
    if not isinstance(include, bool):
        return None
    if not include:
        is_asked = isinstance(options, Mapping) and options.get("include_usage") is True
        return None if is_asked else {}
    return {"stream_options": {"include_usage": True}} if beside.get("stream") else {}


def _as_usual(given: Any, beside: Fields) -> Fields | None:
    """Take what vLLM does by default: a template's text gets no further tokens, a prompt gets them."""
    return {} if given is ("prompt" in beside) else None


def _is_without_penalty(beside: Fields) -> bool:
    neutral = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    return all(beside.get(name) in (None, value) for name, value in neutral.items())


def _looks_back(given: Any, beside: Fields) -> Fields | None:
    """Take the span of the penalties where it is the whole context, or where there is no penalty."""
    return {} if type(given) is int and (given == -1 or _is_without_penalty(beside)) else None


def _newlines(given: Any, beside: Fields) -> Fields | None:
    """Take that line breaks are penalized as all tokens are; whether they are matters to penalties alone."""
    return {} if given is True or (given is False and _is_without_penalty(beside)) else None


_VLLM, _SGLANG, _LLAMA, _OLLAMA = "vLLM", "SGLang", "llama.cpp", "Ollama"
_ROUTERS, _STUDIO = "OpenRouter", "LM Studio"
_NUMBER, _TEXT = (int, float), (str,)
_ID = "send it as the header x-request-id"
_UNBOUNDED = "as many as fit"
_NOT_ALONE = "no effect without the field that switches it on"

_TABLE = (
    _neutral("add_generation_prompt", _VLLM, True),
    ForeignField("add_special_tokens", _VLLM, "`false` in chats, `true` in completions", "", _as_usual),
    _neutral("chat_template", _VLLM, fix="the model's own is used; name another in the recipe"),
    _neutral("detokenize", _VLLM, True),
    _neutral("documents", _VLLM, [], fix="put them in the messages"),
    _neutral("echo", _VLLM, False),
    _label("guided_decoding_backend", _VLLM, _TEXT, "a string", "llguidance holds every form"),
    _neutral("guided_whitespace_pattern", _VLLM),
    _neutral("include_reasoning", _VLLM, True),
    _neutral("kv_transfer_params", _VLLM),
    _neutral("media_io_kwargs", _VLLM, {}),
    _neutral("mm_processor_kwargs", _VLLM, {}),
    _neutral("prompt_embeds", _VLLM),
    _neutral("request_id", _VLLM, fix=_ID),
    _neutral("return_tokens_as_token_ids", _VLLM, False, fix="use return_token_ids"),
    _neutral("spaces_between_special_tokens", _VLLM, True),
    _neutral("structural_tag", _VLLM, fix="use response_format or tools"),
    _neutral("use_beam_search", _VLLM, False, fix="use beam_width"),
    _neutral("vllm_xargs", _VLLM, {}, fix="use logits_processors"),
    _neutral("custom_params", _SGLANG, {}, fix="use logits_processors"),
    _renamed("ebnf", _SGLANG, "guided_grammar"),
    _renamed("json_schema", _SGLANG, "guided_json"),
    _neutral("lora_path", _SGLANG, fix="name the adapter as the model"),
    _renamed("max_new_tokens", "SGLang, transformers", "max_tokens", -1, without=_UNBOUNDED),
    _renamed("min_new_tokens", "SGLang, transformers", "min_tokens"),
    _neutral("no_stop_trim", _SGLANG, False, fix="use include_stop_str_in_output"),
    _renamed("regex", _SGLANG, "guided_regex"),
    _neutral("return_hidden_states", _SGLANG, False),
    _neutral("rid", _SGLANG, fix=_ID),
    _neutral("separate_reasoning", _SGLANG, True),
    _neutral("stream_reasoning", _SGLANG, True),
    _neutral("cache_prompt", _LLAMA, True, fix="use cache_salt to share with nobody"),
    _neutral("dry_multiplier", _LLAMA, 0),
    *(_label(name, _LLAMA, _NUMBER, "a number", _NOT_ALONE)
        for name in ("dry_allowed_length", "dry_base", "dry_penalty_last_n")),
    _label("dry_sequence_breakers", _LLAMA, (list,), "a list", _NOT_ALONE),
    _label("dynatemp_exponent", _LLAMA, _NUMBER, "a number", _NOT_ALONE),
    _neutral("dynatemp_range", _LLAMA, 0),
    _renamed("grammar", _LLAMA, "guided_grammar", ""),
    _neutral("id_slot", _LLAMA, -1),
    _neutral("image_data", _LLAMA, []),
    _neutral("min_keep", _LLAMA, 0),
    _neutral("mirostat", _LLAMA, 0),
    *(_label(name, _LLAMA, _NUMBER, "a number", _NOT_ALONE) for name in ("mirostat_eta", "mirostat_tau")),
    _neutral("n_keep", _LLAMA, 0, -1),
    _renamed("n_predict", _LLAMA, "max_tokens", -1, without=_UNBOUNDED),
    _neutral("n_probs", _LLAMA, 0, fix="use logprobs"),
    ForeignField("penalize_nl", _LLAMA, "true; false without a penalty", "", _newlines),
    _neutral("post_sampling_probs", _LLAMA, False),
    _neutral("reasoning_format", _LLAMA, "auto", "deepseek"),
    ForeignField("repeat_last_n", _LLAMA, "-1; others without a penalty", "", _looks_back),
    _renamed("repeat_penalty", "llama.cpp, Ollama", "repetition_penalty"),
    _neutral("return_progress", _LLAMA, False),
    _neutral("samplers", _LLAMA),
    _neutral("tfs_z", _LLAMA, 1),
    _neutral("timings_per_token", _LLAMA, False),
    _neutral("top_n_sigma", _LLAMA, -1),
    _neutral("typical_p", _LLAMA, 1),
    _neutral("xtc_probability", _LLAMA, 0),
    _label("xtc_threshold", _LLAMA, _NUMBER, "a number", _NOT_ALONE),
    ForeignField("format", _OLLAMA, '`"json"`, or a schema', "`response_format`, `guided_json`", _form),
    _label("keep_alive", _OLLAMA, (str, *_NUMBER), "a duration", "the model stays loaded"),
    _neutral("options", _OLLAMA, {}, fix="send each of them as a field of its own"),
    _neutral("raw", _OLLAMA, False),
    ForeignField("think", _OLLAMA, "true, false, or how hard", "`reasoning_effort`", _effort),
    ForeignField("enable_thinking", "Qwen's services", "true or false", "`reasoning_effort`", _effort),
    ForeignField("thinking", "services of GLM, DeepSeek and Anthropic",
        '`{"type": "enabled"}`, with `budget_tokens`; `{"type": "disabled"}`',
        "`reasoning_effort`, `thinking_token_budget`", _thinking),
    _label("models", _ROUTERS, (list,), "a list", "`model` alone is asked"),
    _neutral("plugins", _ROUTERS, []),
    _label("provider", _ROUTERS, (dict,), "an object", "this server is the only one"),
    ForeignField("reasoning", _ROUTERS, "`effort`, `enabled` and `max_tokens`",
        "`reasoning_effort`, `thinking_token_budget`", _reasoning),
    _neutral("route", _ROUTERS, "fallback"),
    _neutral("top_a", _ROUTERS, 0),
    _neutral("transforms", _ROUTERS, []),
    ForeignField("usage", _ROUTERS, '`{"include": true}`', "`stream_options.include_usage`", _usage),
    _label("ttl", _STUDIO, (int,), "an integer", "the model stays loaded"),
    # Values of fields of our own by which others mean that the field is left out
    _renamed("max_completion_tokens", "llama.cpp", "max_completion_tokens", -1, without=_UNBOUNDED),
    _renamed("max_tokens", "llama.cpp, LM Studio", "max_tokens", -1, without=_UNBOUNDED),
    _renamed("seed", "llama.cpp, vLLM", "seed", -1),
)  # fmt: skip
FOREIGN = {each.name: each for each in _TABLE}
assert len(FOREIGN) == len(_TABLE), "each field stands once"


def foreign_table() -> str:
    """Return the fields of other engines as a Markdown table."""
    head = ["| field | of | accepted | read as |", "|---|---|---|---|"]
    rows = [f"| `{e.name}` | {e.engines} | {e.taken} | {e.becomes} |" for e in _TABLE]
    return "\n".join(head + rows) + "\n"
