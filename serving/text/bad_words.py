"""Find the token sequences that spell the words which an answer must not contain.

As in vLLM, a word is banned as its tokens, with and without a space before it: inside a longer token, or
tokenized differently, it may still occur.
"""

from __future__ import annotations

from collections.abc import Sequence

from borders.refusal import BadRequest
from continuous_batching.request import TokenSequence
from serving.text.tokenizer import Text


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
