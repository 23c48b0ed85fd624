"""Read one request as a client writes it.

borders/field_table.py declares the fields, with the names of the OpenAI API and a few further ones that
vLLM's users know; here their values become a request. Nothing is guessed: an unknown field, a wrong type and
a value out of range are refused by name.

A prompt is cut where the request allows it: as in vLLM the last tokens are kept, `truncate_prompt_tokens` of
them, or with -1 as many as leave room for the answer. What the tokenizer or the chat template puts at the
beginning is cut like the rest. Of what is embedded the first tokens are kept, and what the tokenizer ends a
text with. Also as in vLLM, a word of `bad_words` is banned as its tokens, with and without a space before it:
inside a longer token, or tokenized differently, it may still occur.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from borders.field_table import FIELDS, MOST_SAMPLES, WITHOUT_ANSWER, taken_by
from borders.refusal import BadRequest, abbreviate_json
from continuous_batching.request import Request, SamplingParams, TokenIds, TokenSequence, packed_ids
from continuous_batching.scheduling.validation import too_long
from kv_cache.page_keys import page_salt
from serving.adapters import NO_ADAPTERS, KnownAdapters
from serving.grammars.structured_output import FIELDS as STRUCTURED
from serving.grammars.structured_output import formed_answer, grammar_of
from serving.own_processors import read_processors
from serving.text.chat_options import ChatOptions
from serving.text.tokenizer import Text, TextOptions
from serving.tools.definitions import FIELDS as TOOLS
from serving.tools.definitions import ToolUse, channel_grammar, tool_use


def spellings(words: Sequence[str], text: Text | None) -> tuple[TokenSequence, ...]:
    """Return the tokens of each word as an answer would spell it, each spelling once; raises BadRequest."""
    if words and text is None:
        raise BadRequest("bad_words", "needs a tokenizer, and this model has none; use logit_bias")
    found: dict[TokenSequence, None] = {}
    for index, word in enumerate(words):
        if not word.strip(" "):
            raise BadRequest("bad_words", value=word, limit="a word, not spaces alone", place=f"[{index}]")
        assert text is not None
        bare = word.lstrip(" ")
        found |= {tuple(text.encode_within(each)): None for each in (bare, f" {bare}")}
    return tuple(found)


def truncated(
    prompt: TokenIds, asked: int, limit: int | None, num_answer: int, *, ends: Sequence[int] | None = None
) -> TokenIds:
    """Return the tokens of a prompt that are kept beside an answer of `num_answer`.

    They are the last ones; with `ends`, of an embedding, the first ones, and these where the prompt ends with
    them. Raises BadRequest if more than `limit` are asked for.

    Without a limit, -1 keeps all tokens (see `fit`). Where the answer leaves no room, one token is kept, and
    the scheduler refuses the request as too long.
    """
    if limit is not None and asked > limit:
        raise BadRequest(
            "truncate_prompt_tokens",
            value=asked,
            limit=f"-1 (as many as fit) or from 1 to {limit}, the model's maximum context length",
        )
    if asked == -1:
        if limit is None:
            return prompt
        asked = max(1, limit - num_answer)
    if ends is None or asked >= len(prompt):
        return prompt[-asked:]
    is_ended = prompt[len(prompt) - len(ends) :].tolist() == [*ends]
    num_last = min(asked, len(ends)) if is_ended else 0
    return np.concatenate((prompt[: asked - num_last], prompt[len(prompt) - num_last :]))


def fit(request: Request, limit: int, text: Text | None) -> None:
    """Cut the prompt of a request that asked for -1, and of its samples, once the limit is known."""
    params = request.params
    prompt = truncated(request.prompt, -1, limit, params.max_tokens, ends=_ends(params.pooling, text))
    for each in (request, *request.followers):
        each.prompt = each.tokens = prompt


# It is below the likeliest token's probability in any vocabulary, and float32 tells 1 less this from 1
LEAST_TOP_P = 1e-6
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
_SHORT = 500  # most characters or tokens of a short prompt
_LONG = (  # requests with these fields may take longer to read
    *("messages", "logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("n", "best_of"),
    *STRUCTURED,
    *TOOLS,
)


def parse_request(
    fields: object,
    text: Text | None,
    *,
    longest: int | None = None,
    shorten: bool = False,
    limit: int | None = None,
    adapters: KnownAdapters = NO_ADAPTERS,
    defaults: Mapping[str, Any] = NO_DEFAULTS,
    tokens: TokenIds | None = None,
) -> Request:
    """Return the request in a decoded JSON object; raises BadRequest.

    A field that is null counts as absent. With `text` None the model has no tokenizer, and prompts are token
    ids. With `longest`, an answer without max_tokens may be so long that prompt and answer reach that many
    tokens; with `shorten`, a larger max_tokens is lowered to that, and min_tokens with it. `limit` is the
    most tokens that they may ever reach; with None, the caller calls `fit` once it knows the limit. The
    request's adapter is one of `adapters`; raises Unavailable while that is being loaded. `defaults` are
    those of the checkpoint (see `sampling_defaults`). `tokens` are those of the prompt where they are known,
    in place of its text.
    """
    if not isinstance(fields, Mapping):
        raise BadRequest(None, f"a request must be a JSON object, not {abbreviate_json(fields)}")
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in FIELDS:
            raise _unknown(name)
    values = {name: FIELDS[name].kind.read(name, value) for name, value in given.items()}
    _check_alone(values, text)
    if "pooling" in values:
        _check_pooling(values)
    else:
        values = _with_defaults(values, defaults)
    tools = _tools(values, text)
    adapter = adapters.find(values["adapter"]) if "adapter" in values else None
    prompt = np.array(_prompt(values, text, tools), dtype=np.int32) if tokens is None else tokens
    # Cut for an answer that leaves no room, a prompt would be one token: that is refused instead
    shorten = shorten and values.get("truncate_prompt_tokens") != -1
    if tokens is None:
        prompt = _cut(prompt, values, text, limit, fills=longest is not None)
    is_given = bool(values.keys() & {"max_tokens", "max_completion_tokens"})
    if longest is not None and (shorten or not is_given):
        most = defaults.get("max_tokens", longest)
        values |= _bounds(values, longest - len(prompt), most, shorten=shorten)
    salt = values.get("cache_salt", "")
    leader, *followers = (
        Request(
            id=f"{values['id']}#{index}" if index else values["id"],
            prompt=prompt,
            params=params,
            tenant=values.get("tenant", values.get("user", "")),
            cache_salt=page_salt(salt, "" if adapter is None else adapter.files.digest),
            adapter=0 if adapter is None else adapter.number,
            **{name: values[name] for name in ("priority", "arrival_s", "timeout_s") if name in values},
        )
        for index, params in enumerate(_samples(values, text, tools, prompt))
    )
    leader.followers = followers
    return leader


def _bounds(values: dict[str, Any], room: int, most: int, *, shorten: bool) -> dict[str, int]:
    """Return how many tokens an answer has at least and at most where there is `room` for so many.

    The scheduler refuses a request as too long if too little room is left.
    """
    least, given = values.get("min_tokens", 0), values.get("max_tokens")
    if given is None and not shorten:
        return {"max_tokens": max(1, least, min(room, most))}
    given = max(least, most) if given is None else given
    bounds = {"max_tokens": max(1, min(room, given))}
    # A min_tokens above the given max_tokens is refused as it is
    return bounds if least > given else bounds | {"min_tokens": min(least, bounds["max_tokens"])}


def _tools(values: dict[str, Any], text: Text | None) -> ToolUse | None:
    tools = tool_use(values)
    if tools is not None and tools.schemas and text is not None and not text.has_tools:
        problem = "are not supported: the recipe names no server.tool_format for this model"
        raise BadRequest("tools", problem, fix='leave them out, or send tool_choice: "none"')
    return tools


def _check_alone(values: dict[str, Any], text: Text | None) -> None:
    """Check what no single field says of itself."""
    if not values.get("id"):
        raise BadRequest("id", "is missing; it must be a string of at least one character")
    if "tenant" in values and "user" in values:
        raise BadRequest("tenant", "and user are two names of one field; give one of them")
    if "stop" in values and text is None:
        raise BadRequest("stop", "needs a tokenizer, and this model has none; use stop_token_ids")


def _check_pooling(values: dict[str, Any]) -> None:
    """Check the fields of a request for an embedding, which comes with a next token that nobody sees."""
    for name in values:
        if name not in WITHOUT_ANSWER:
            raise BadRequest(name, "must be left out beside pooling, which gives no answer")
    values |= {"max_tokens": 1, "temperature": 0.0}


def _with_defaults(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of a checkpoint that are left out; a beam search draws no tokens."""
    penalty = "repetition_penalty"
    names = (penalty,) if values.get("beam_width") else (name for name in defaults if name != "max_tokens")
    return {name: defaults[name] for name in names if name in defaults} | values


def text_options(fields: Mapping[str, Any], text: Text | None = None) -> TextOptions:
    """Return how the answers to a request that `parse_request` accepted become text."""
    given = {name: fields[name] for name in _SHOWING if fields.get(name) is not None}
    is_chat = fields.get("messages") is not None
    if is_chat and text is not None and text.channels is not None:
        # Channels are told apart by control tokens, none of which is shown.
        given["skip_special_tokens"] = False
    # A form says whether its answer begins with a space
    is_formed = any(fields.get(name) not in (None, {"type": "text"}) for name in STRUCTURED)
    is_turn = is_chat and not is_formed and not fields.get("continue_final_message")
    num_tools = 0 if fields.get("tool_choice") == "none" else len(fields.get("tools") or ())
    marks = text.marks(has_calls=num_tools > 0) if is_chat and text is not None else frozenset()
    return TextOptions(is_chat=is_chat, start=is_turn, num_tools=num_tools, marks=marks, **given)


def check_length(fields: Mapping[str, Any], max_tokens: int, text: Text | None) -> None:
    """Raise BadRequest for a prompt that is too long for any tokenization, before it is tokenized."""
    longest = 1 if text is None else text.longest_token
    num_ids, num_characters = _prompt_lengths(fields)
    if fields.get("truncate_prompt_tokens") is not None:
        return
    if num_ids > max_tokens or num_characters > max_tokens * longest:
        held = f"{num_ids} tokens" if num_ids else f"{num_characters} characters"
        asked = f"the prompt alone holds {held}"
        bad = too_long(max_tokens, asked, max_tokens, value=num_ids or num_characters)
        raise bad.of_field("prompt_token_ids") if num_ids else bad


def is_short(fields: Mapping[str, Any]) -> bool:
    """Return whether reading a request takes less time than waking a thread, which is about 0.3 ms."""
    is_long = any(fields.get(name) is not None for name in _LONG)  # an array is neither true nor false
    return not is_long and max(_prompt_lengths(fields)) <= _SHORT


def _prompt_lengths(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of token ids and characters; 0 for a wrong type, which `parse_request` refuses."""
    ids, prompt = fields.get("prompt_token_ids"), fields.get("prompt")
    return len(ids) if isinstance(ids, list) else 0, len(prompt) if isinstance(prompt, str) else 0


def _prompt(values: dict[str, Any], text: Text | None, tools: ToolUse | None) -> list[int]:
    forms = [name for name in ("prompt", "messages", "prompt_token_ids") if name in values]
    if len(forms) != 1:
        found = " and ".join(forms) if forms else "none of them"
        problem = f"exactly one of prompt, messages and prompt_token_ids must be given, not {found}"
        raise BadRequest(None, problem)
    options = {name: values[name] for name in _CHAT if name in values}
    if tools is not None:
        options["tools"] = tools.tools
    if options and forms[0] != "messages":
        raise BadRequest(next(iter(options)), "needs messages; a prompt goes through no chat template")
    prompt = values[forms[0]]
    if not prompt:
        raise BadRequest(forms[0], "is empty; it must hold at least one token")
    if forms[0] == "prompt_token_ids":
        return list(prompt)
    if text is None:
        raise BadRequest(forms[0], "needs a tokenizer, and this model has none; send token ids")
    return text.encode(prompt) if forms[0] == "prompt" else text.chat(prompt, ChatOptions(**options))


def _cut(
    prompt: TokenIds, values: dict[str, Any], text: Text | None, limit: int | None, *, fills: bool
) -> TokenIds:
    """Return the tokens of a prompt that its request keeps: all of them, if it asks for no cut."""
    asked = values.get("truncate_prompt_tokens")
    if asked is None:
        return prompt
    ends = _ends(values.get("pooling"), text)
    return truncated(prompt, asked, limit, _least_answer(values, fills=fills), ends=ends)


def _ends(pooling: str | None, text: Text | None) -> Sequence[int] | None:
    """Return what a truncated prompt keeps behind its first tokens; None: it keeps its last ones instead.

    An embedding is trained with what the tokenizer puts around a text, and `last` is taken at its end.
    """
    if pooling is None:
        return None
    return () if text is None else text.closing_ids()


def _least_answer(values: dict[str, Any], *, fills: bool) -> int:
    """Return the number of tokens that a truncated prompt leaves for the answer."""
    given = values.get("max_completion_tokens", values.get("max_tokens"))
    if given is None:
        given = max(1, values.get("min_tokens", 0)) if fills else FIELDS["max_tokens"].default
    return int(given)


def _params(
    values: dict[str, Any], text: Text | None, tools: ToolUse | None, prompt: TokenIds
) -> SamplingParams:
    named = {FIELDS[name].attribute: value for name, value in values.items() if FIELDS[name].attribute}
    named["logprobs"] = _logprobs(values)
    if "top_p" in named:
        named["top_p"] = max(named["top_p"], LEAST_TOP_P)
    if "max_completion_tokens" in values:
        named["max_tokens"] = values["max_completion_tokens"]
    if "allowed_token_ids" in values:
        named["allowed_token_ids"] = packed_ids(values["allowed_token_ids"])
    if "bad_words" in values:
        named["bad_words"] = spellings(values["bad_words"], text)
    if "logits_processors" in values:
        named["processors"] = read_processors("logits_processors", values["logits_processors"])
    if text is not None and not values.get("ignore_eos") and "pooling" not in values:
        ends = (*values.get("stop_token_ids", ()), *text.further_end_ids)
        named["stop_token_ids"] = tuple(dict.fromkeys(ends))
    grammar = grammar_of(values)
    if grammar is not None and text is None:
        asked = next(name for name in STRUCTURED if name in values)
        raise BadRequest(asked, "needs a tokenizer, and this model has none; use allowed_token_ids")
    if text is not None and text.channels is not None and "messages" in values:
        _check_one_form(grammar is not None and tools is not None and tools.must_call, values)
        marks, end = text.control_tokens(text.channels.marks), text.since_mark(prompt, text.channels.start)
        grammar = channel_grammar(text.channels, marks, end, use=tools, answer=grammar)
    elif tools is not None and text is not None and text.tool_format is not None:
        answer = formed_answer(grammar) if tools.schemas and not tools.must_call else None
        called = tools.grammar(text.tool_format, text.control_tokens(text.tool_format.marks), answer)
        _check_one_form(called is not None and grammar is not None and answer is None, values)
        grammar = called or grammar
    grammar = _after_thoughts(grammar, values, text, prompt)
    return SamplingParams(**named, grammar=grammar)


def _check_one_form(are_two: bool, values: dict[str, Any]) -> None:
    if are_two:
        asked = next(name for name in STRUCTURED if name in values)
        raise BadRequest(asked, "and the tools both set the form of the answer; give one of them")


def _after_thoughts(
    grammar: str | None, values: dict[str, Any], text: Text | None, prompt: TokenIds
) -> str | None:
    """Put the grammar after the reasoning with which a chat's answer may begin."""
    budget = values.get(BUDGET)
    if budget is not None and (text is None or len(text.think_marks) != 2):
        problem = "is not supported: the recipe has no server.reasoning whose marks are tokens of the model"
        raise BadRequest(BUDGET, problem, fix="leave it out")
    if budget is not None and "messages" not in values:
        raise BadRequest(BUDGET, "needs messages; a prompt goes through no chat template")
    if text is None or "messages" not in values or (grammar is None and budget is None):
        return grammar
    thinking = text.thinking(prompt, budget)
    field = BUDGET if grammar is None else json.loads(grammar)[0]
    return grammar if thinking is None else thinking.before(grammar, field)


def _samples(
    values: dict[str, Any], text: Text | None, tools: ToolUse | None, prompt: TokenIds
) -> list[SamplingParams]:
    """Return the parameters of each sample: `best_of` of them, or `n`, each with its own seed.

    A beam search is one request, and its `n` best hypotheses are the answers.
    """
    num_answers = values.get("n", 1)
    num_samples = values.get("best_of", num_answers)
    if num_samples < num_answers:
        limit = f"an integer from n ({num_answers}) to {MOST_SAMPLES}"
        raise BadRequest("best_of", value=num_samples, limit=limit)
    params = _params(values, text, tools, prompt)
    if params.beam_width:
        if "best_of" in values:
            raise BadRequest("best_of", value=num_samples, limit="left out beside beam_width")
        if num_answers > params.beam_width:
            raise BadRequest("n", value=num_answers, limit=f"at most beam_width ({params.beam_width})")
        return [params]
    if num_samples > num_answers and params.logprobs is None:
        params = replace(params, logprobs=0)  # samples are ranked by their log-probabilities
    if params.seed is None:
        return [params] * num_samples
    further = ((params.seed + index) % 2**63 for index in range(1, num_samples))
    return [params, *(replace(params, seed=seed) for seed in further)]


def _logprobs(values: dict[str, Any]) -> int | None:
    """Read `logprobs: n` of completions, or `logprobs: true` with `top_logprobs: n` of chats."""
    logprobs, top = values.get("logprobs", False), values.get("top_logprobs")
    if logprobs is True:
        return top or 0
    if top:  # none at all, as clients write it, asks for nothing
        raise BadRequest("top_logprobs", f"needs logprobs: true, not {abbreviate_json(logprobs)}")
    return None if logprobs is False else logprobs


def _unknown(name: object) -> BadRequest:
    near = difflib.get_close_matches(str(name), FIELDS, n=1)
    rest = f"did you mean {near[0]}?" if near else "docs/request_fields.md lists the fields"
    return BadRequest(str(name), f"{abbreviate_json(name)}; {rest}", subject="unknown field")


BUDGET = "thinking_token_budget"
_CHAT = [each.name for each in taken_by("tokenize")]  # how messages become a prompt
_SHOWING = ("skip_special_tokens", "include_stop_str_in_output")
