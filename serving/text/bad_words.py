"""Find the token sequences that spell the words which an answer must not contain.

As in vLLM, a word is banned as its tokens, with and without a space before it: inside a longer token, or
tokenized differently, it may still occur.
"""

from __future__ import annotations

from collections.abc import Sequence

from borders.refusal import BadRequest
from continuous_batching.request import TokenSequence
from serving.text.tokenizer import Text

MOST_WORDS = 128
LONGEST_WORD = 128  # characters


def spellings(words: Sequence[str], text: Text | None) -> tuple[TokenSequence, ...]:
    """Return the tokens of each word as an answer would spell it, each spelling once; raises BadRequest."""
    if words and text is None:
        raise BadRequest("bad_words", "needs a tokenizer, and this model has none; use logit_bias")
    if len(words) > MOST_WORDS:
        raise BadRequest("bad_words", value=len(words), limit=f"at most {MOST_WORDS} words")
    found: dict[TokenSequence, None] = {}
    for index, word in enumerate(words):
        if len(word) > LONGEST_WORD or not word.strip(" "):
            limit = f"1 to {LONGEST_WORD} characters, and not spaces alone"
            raise BadRequest("bad_words", value=word, limit=limit, place=f"[{index}]")
        assert text is not None
        bare = word.lstrip(" ")
        found |= {tuple(text.encode_within(each)): None for each in (bare, f" {bare}")}
    return tuple(found)
