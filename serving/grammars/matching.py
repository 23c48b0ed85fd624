"""Compile grammars into masks over the tokens of a model, with llguidance.

llguidance bounds all its computations by its own fuel, and reports what it cannot do: nothing here runs
without an end, and no keyword is ignored. It is imported, and the vocabulary read, when a grammar is first
asked for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from borders.refusal import BadRequest
from continuous_batching.constraints import Constraint, Mask, Matcher
from continuous_batching.request import Request
from serving.grammars.json_schema import without_other_spellings
from serving.grammars.structured_output import CALLS, CHANNELS
from serving.grammars.thinking import KIND, Thinking, ThinkingMatcher, reader

if TYPE_CHECKING:
    import llguidance

# These limits bound the cost of a step: a schema of 500 optional properties needs half of them.
_INITIAL_FUEL, _STEP_FUEL, _ROW_ITEMS = 200_000, 50_000, 4000
# Symbols of the rules: this many or, where that is more, one for so many characters of the grammar, up to a
# maximum. 500 optional properties need 4,100, and 128 tools with 30 of mixed types each 68,000, one for seven
# characters. An allOf of alternatives becomes all their combinations, which may double with each level: few
# characters then need many symbols. One mask of 100,000 symbols may take seconds.
_SYMBOLS, _CHARACTERS_PER_SYMBOL, _MOST_SYMBOLS = 30_000, 4, 120_000
# llguidance compiles a rule inside the one that refers to it, and a chain of 2,687 rules overflows 8 MiB of
# stack, which ends the process; brackets take less each.
MOST_GRAMMAR_LEVELS = 1000
# A thread has 2 MiB of stack where the process may have it without a limit, which the deepest grammars and
# schemas overflow. Only what is used of it takes memory.
threading.stack_size(16 * 2**20)
# Otherwise, where the text must go on in one way, a mask would allow only the first of its usual tokens.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
# The space between the parts of a JSON value is nothing, one space, or a new line with its indentation. If it
# had no bound, a model might write spaces for ever.
_WHITESPACE = r"(\x20|\n[\x20\t]{0,32})"
JSON_OPTIONS = {
    "whitespace_pattern": _WHITESPACE,
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}
_MISSING = "needs the package llguidance, which is not installed here"


class Spelling(Protocol):
    """The bytes that each token stands for."""

    vocab_size: int

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return the bytes of a token; with `skip_special_tokens`, a control token has none."""
        ...

    def encode_within(self, text: str) -> list[int]:
        """Return the tokens of a piece of text that follows other text."""
        ...


@dataclass(slots=True)
class GrammarCounters:
    """The cost of grammars since the start; every counter only grows."""

    compiled: int = 0
    refused: int = 0  # grammars refused when they were compiled
    failed: int = 0  # matchers that failed while an answer was made
    compile_s: float = 0.0
    masks: int = 0
    mask_s: float = 0.0


class Grammars:
    """Compiles grammars for one model with logits of `vocab_size` tokens; `load` returns its tokenizer.

    `constrain` may be called from several threads.
    """

    def __init__(
        self, load: Callable[[], Spelling | None], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.counters = GrammarCounters()
        self._load = load
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._spelling: Spelling | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()

    def constrain(self, request: Request) -> None:
        """Give a request and each of its further samples their constraint, if the request asks for a grammar.

        Raises BadRequest for a grammar that cannot be followed.
        """
        grammar = request.params.grammar
        if grammar is None:
            return
        start = self._compiled(grammar)
        for each in (request, *request.followers):
            each.constraint = Constraint(start)

    def prepare(self) -> None:
        """Read the vocabulary now, if there is one that grammars can use.

        That blocks all threads of the process, for 2 s with 152,000 tokens.
        """
        with contextlib.suppress(BadRequest):  # each request that asks for a grammar is told of it
            self._ready()

    def _compiled(self, grammar: str) -> Callable[[], Matcher]:
        """Return a function that makes matchers at the beginning of a grammar.

        The matchers share a lexer, whose states are computed once. One that exceeds its limits in one request
        ends no other request.
        """
        _, kind, asked = json.loads(grammar)
        if kind == KIND:
            return self._with_thoughts(reader(asked), asked["then"])
        self._ready()
        started_s = time.perf_counter()
        try:
            beginning = self.beginning(grammar)
        except BadRequest:
            self.counters.refused += 1
            raise
        finally:
            self.counters.compile_s += time.perf_counter() - started_s
        self.counters.compiled += 1
        ends = frozenset(self._eos_token_ids)
        cut = self._tokens_of
        return lambda: _Matcher(beginning.deep_copy(), ends, cut, self.counters)

    def _with_thoughts(self, thinking: Thinking, grammar: str | None) -> Callable[[], Matcher]:
        start = None if grammar is None else self._compiled(grammar)
        ends = frozenset(self._eos_token_ids)
        return lambda: ThinkingMatcher(thinking, None if start is None else start(), ends, self._vocab_size)

    def _tokens_of(self, spelt: bytes) -> list[int]:
        """Return tokens that spell a text, or its beginning, in the usual tokenization."""
        spelling = self._spelling
        assert spelling is not None, "no grammar was compiled"
        tokens = spelling.encode_within(spelt.decode("utf-8", "ignore"))
        right = spelt.startswith(b"".join(map(spelling.token_bytes, tokens)))
        return tokens if right else []  # some tokenizers put a space before it

    def beginning(self, grammar: str) -> llguidance.LLMatcher:
        """Return llguidance's matcher at the beginning of a grammar; raises BadRequest."""
        tokenizer = self._ready()
        from llguidance import LLMatcher

        field, kind, asked = json.loads(grammar)
        text = _as_library_has_it(field, kind, asked)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=_limits(text))
        if matcher.is_error():
            raise _refused(field, kind, matcher.get_error())
        tried = matcher.deep_copy()
        # The first mask may cost the most, so it is computed before the engine needs it.
        first = tried.compute_bitmask()
        if tried.is_error() or not any(first):
            raise _refused(field, kind, tried.get_error() or "no token can begin an answer that follows it")
        return matcher

    def _ready(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError as error:
                    raise BadRequest(None, _MISSING, subject="structured output") from error
                spelling = self._spelling = self._load()
                if spelling is None:
                    problem = "needs a tokenizer, and this model has none"
                    raise BadRequest(None, problem, subject="structured output")
                if not self._eos_token_ids:
                    problem = "needs a token that ends an answer, and this model has none"
                    raise BadRequest(None, problem, subject="structured output")
                spelt: Any = _Tokens(spelling, self._vocab_size, self._eos_token_ids)
                self._tokenizer = LLTokenizer(
                    spelt, n_vocab=self._vocab_size, eos_token=list(self._eos_token_ids)
                )
            return self._tokenizer


class _Tokens:
    """The vocabulary in the form that llguidance reads; ids without bytes can never be sampled."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, spelling: Spelling, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        known = min(spelling.vocab_size, vocab_size)
        self._spelling = spelling
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [spelling.token_bytes(token, skip_special_tokens=False) for token in range(known)]
        self.tokens += [b""] * (vocab_size - known)
        shown = [spelling.token_bytes(token) for token in range(known)]
        control = {token for token, text in enumerate(shown) if not text and self.tokens[token]}
        self.special_token_ids = sorted(control | set(eos_token_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spelling.encode_within(text if isinstance(text, str) else text.decode())


class _Matcher:
    """A matcher of llguidance, as a `Matcher`."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        ends: frozenset[int],
        cut: Callable[[bytes], list[int]],
        counters: GrammarCounters,
    ) -> None:
        self._matcher = matcher
        self._ends = ends
        self._cut = cut
        self._counters = counters

    @property
    def error(self) -> str:
        if not self._matcher.is_error():
            return ""
        return _in_one_line(self._matcher.get_error())

    def mask(self) -> Mask:
        started_s = time.perf_counter()
        mask: Mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        self._counters.mask_s += time.perf_counter() - started_s
        self._counters.masks += 1
        if self._matcher.is_error():
            self._counters.failed += 1
        return mask

    def consume(self, token: int) -> bool:
        return token not in self._ends and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def num_possible(self, tokens: list[int]) -> int:
        return self._matcher.validate_tokens(tokens)

    def forced(self) -> list[int]:
        spelt = self._matcher.compute_ff_bytes()
        return self._cut(spelt) if spelt else []


def _limits(text: str) -> llguidance.LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        max_items_in_row=_ROW_ITEMS,
        max_grammar_size=min(max(_SYMBOLS, len(text) // _CHARACTERS_PER_SYMBOL), _MOST_SYMBOLS),
        verbose_errors=False,
    )


def _as_library_has_it(field: str, kind: str, asked: Any) -> str:
    """Return the grammar in the form that llguidance reads."""
    from llguidance import LLMatcher, grammar_from

    if kind == "json":
        return f"{_NO_FORCING}start: {json_rule(asked)}"
    if kind == CHANNELS:
        form = [] if asked["form"] is None else [{"name": "form", "lark_grammar": _part(asked["form"])}]
        return json.dumps({"grammars": [{"lark_grammar": f"{_NO_FORCING}{asked['outer']}"}, *form]})
    if kind == CALLS:
        return f"{_NO_FORCING}{asked}"
    if kind == "regex":
        (written,) = json.loads(LLMatcher.grammar_from_regex(asked))["grammars"]
        return f"{_NO_FORCING}{written['lark_grammar']}"
    if kind == "choice":
        return f"{_NO_FORCING}start: {' | '.join(map(quoted, asked))}"
    if _GBNF.search(asked):
        try:
            asked = grammar_from("grammar", asked)
        except Exception as error:
            raise _refused(field, kind, str(error)) from error
    if (levels := _levels(asked)) > MOST_GRAMMAR_LEVELS:
        problem = (
            f"has {levels} levels, one for each rule that refers to others and one for each bracket around "
            f"its innermost part; it may have {MOST_GRAMMAR_LEVELS}"
        )
        raise BadRequest(field, problem, fix="make it simpler", subject=f"{_NAMES[kind]} in {field}")
    return f"{_NO_FORCING}{asked}"


def _levels(grammar: str) -> int:
    """Return a bound on the levels of rules and brackets of a Lark grammar in each other.

    That is where each rule that names others lies inside the last, none twice, and the deepest of the rest
    inside them all. No order of the rules can nest deeper, so that none has to be found.
    """
    levels = deepest_leaf = 0
    opened = deepest = num_names = at = 0
    while found := _PIECE.search(grammar, at):
        at = found.end()
        piece = found["piece"]
        if piece is None:
            if found["json"]:
                with contextlib.suppress(ValueError, RecursionError):  # then the matcher refuses it
                    _, at = json.JSONDecoder().raw_decode(grammar, at)
        elif piece in "([{":
            opened += 1
            deepest = max(deepest, opened)
        elif piece in ")]}":
            opened = max(opened - 1, 0)
        elif piece[0] != ":":
            num_names += 1
        else:  # the last name before it is that of the next rule
            if num_names > 1:
                levels += 1 + deepest
            deepest_leaf = max(deepest_leaf, 1 + deepest)
            deepest, num_names = opened, 0
    last = 1 + deepest
    return levels + (last + deepest_leaf if num_names else max(last, deepest_leaf))


def json_rule(schema: Any) -> str:
    """Return a rule's body for JSON of a prepared schema, which is any JSON where it is true."""
    asked = without_other_spellings(schema) if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**asked, "x-guidance": JSON_OPTIONS})


# An agent sends the same tools with each turn, and a schema of 500 properties may have as many parts, each
# of which takes 1 ms or more. Answers are kept by digests, since a rule may have hundreds of kilobytes.
_MOST_SAID = 1024
_SAID: dict[bytes, str] = {}


def why_not(rule: str) -> str:
    """Return why the matcher refuses a rule's body by itself; nothing where it takes it, or is not here."""
    key = hashlib.sha256(rule.encode()).digest()
    found = _SAID.get(key)
    if found is None:
        if len(_SAID) >= _MOST_SAID:
            _SAID.clear()
        found = _SAID[key] = _asked(rule)
    return found


def _asked(rule: str) -> str:
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    text = f"{_NO_FORCING}start: {rule}"
    return _said(LLMatcher.validate_grammar(text, limits=_limits(text)))


def quoted(text: str) -> str:
    """Return a text as a literal of a grammar, in which the library takes no U+007F as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _part(grammar: str) -> str:
    return _as_library_has_it(*json.loads(grammar))


_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)  # a rule of it; others are Lark's
# The pieces of a Lark grammar that nest it, as llguidance's lexer has them, and those that may hold the like:
# texts, comments, regular expressions, tokens and JSON. What is not closed ends with the grammar.
_PIECE = re.compile(
    r"""(?sx) "(?:[^"\\]|\\.)*(?:"i?|\\?\Z) | (?:\#|//)[^\n]* | /(?:[^/\\]|\\.)+(?:/[imslux]*|\\?\Z)
    | <[^<>]+> | (?P<json>%(?:json|regex|llguidance)[ \t\r\n]*(?=\{))
    | (?P<piece>[a-z_][a-z0-9_-]*|[A-Z][A-Z0-9_-]*|:+|[()\[\]{}])"""
)
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_QUOTED = re.compile(r"\n(?:<state>|\s*\d+ \|)")
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "grammar": "the grammar",
    CALLS: "a schema",
    CHANNELS: "the form or a schema",
}


def _refused(field: str, kind: str, why: str) -> BadRequest:
    return BadRequest(field, f"cannot be followed: {_said(why)}", subject=f"{_NAMES[kind]} in {field}")


def _said(why: str) -> str:
    """Return an error of the matcher in the words of a refusal."""
    said = _PLACE.sub("", _in_one_line(why))  # the place lies in the text that was generated from the request
    if "coerce_one_of" in said:
        said = "a value could satisfy two branches of its oneOf; use anyOf, or let a const tell them apart"
    if said.startswith("NoExtension"):
        said = "no answer follows it"
    return said


def _in_one_line(text: str) -> str:
    """Return the words of an error, without the text that it quotes below them."""
    return " ".join(_QUOTED.split(text)[0].split())[:300]
