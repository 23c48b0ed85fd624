"""Forbid tokens by a request's allow list, bad words or grammar.

`allowed_token_ids` leaves only these tokens, and a grammar only those that may come next: its masks are made
on the host, while the device computes the logits (see MaskMaker). The last token of each of the `bad_words`
is forbidden where the answer ends with the tokens before it; as in vLLM the prompt does not count, unlike in
Hugging Face's NoBadWordsLogitsProcessor.

Legend: A rows with allowed tokens, G rows with a mask of their grammar, of the R that are changed; V
  vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from continuous_batching.constraints import Mask
from continuous_batching.request import TokenIds, TokenSequence
from continuous_batching.slots import SlotPool
from kv_cache.device.transfer import Arrays, Tensors
from kv_cache.pages import Index

_PLACES = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)  # the bits of a word


def gather_masks(rows: Index, targets: Index, slots: SlotPool) -> Arrays:
    """Return the masks of these rows, for a token at position `targets`, as flat arrays on the host.

    Samples of one prompt share their allowed tokens, which are sent once: `allowed_set` has the number of
    each row's set, and `listed_set` and `listed_token` list the members of the sets.
    """
    set_of: dict[bytes, int] = {}
    allowed: list[tuple[int, int]] = []
    banned: list[tuple[int, int]] = []
    for index, (row, target) in enumerate(zip(rows.tolist(), targets.tolist())):
        params = slots.requests[row].params
        if params.allowed_token_ids is not None:
            allowed.append((index, set_of.setdefault(params.allowed_token_ids, len(set_of))))
        if params.bad_words:
            answer = slots.token_ids[row, slots.num_prompt[row] : target]
            banned += [(index, token) for token in banned_tokens(params.bad_words, answer)]
    sets = [np.frombuffer(each, dtype=np.int32) for each in set_of]
    lens = [len(each) for each in sets]
    return {
        **_columns(allowed, "allowed_row", "allowed_set"),
        **_columns(banned, "banned_row", "banned_token"),
        "listed_set": np.repeat(np.arange(len(sets), dtype=np.int64), lens),
        "listed_token": np.concatenate(sets, dtype=np.int64) if sets else np.empty(0, dtype=np.int64),
    }


def grammar_columns(rows: list[int], masks: list[Mask]) -> Arrays:
    """Return the masks of rows whose answer follows a grammar, in words of 32 tokens, as flat arrays."""
    bits = np.zeros((len(masks), max(map(len, masks), default=0)), dtype=np.int32)
    for at, mask in enumerate(masks):
        bits[at, : len(mask)] = mask
    return {"grammar_row": np.array(rows, dtype=np.int64), "grammar_bits": bits.ravel(), "place": _PLACES}


def banned_tokens(bad_words: tuple[TokenSequence, ...], answer: TokenIds) -> list[int]:
    """Return the tokens that would complete a bad word at the end of an answer."""
    longest = max(map(len, bad_words)) - 1
    end = tuple(answer[max(0, len(answer) - longest) :].tolist())
    return [word[-1] for word in bad_words if len(word) <= len(end) + 1 and _ends_with(end, word[:-1])]


def apply_masks(scores: Tensor, masks: Tensors) -> None:
    """Forbid the tokens that these masks leave out in scores [R, V], in place.

    The masks are on the device.
    """
    rows = masks["allowed_row"]
    if len(rows):
        is_allowed = torch.zeros(len(rows), scores.shape[1], dtype=torch.bool, device=scores.device)
        is_allowed[masks["listed_set"], masks["listed_token"]] = (
            True  # there are at most as many sets as rows
        )
        scores[rows] = scores[rows].masked_fill(~is_allowed[masks["allowed_set"]], -float("inf"))
    at = masks["banned_row"], masks["banned_token"]
    if len(at[0]):
        scores[at] = -float("inf")
    formed = masks.get("grammar_row")
    if formed is not None and len(formed):
        words = masks["grammar_bits"].view(len(formed), -1)
        is_possible = unpacked(words, masks["place"], scores.shape[1])
        scores[formed] = scores[formed].masked_fill(~is_possible, -float("inf"))


def unpacked(words: Tensor, place: Tensor, vocab_size: int) -> Tensor:
    """Unpack words [G, any], whose bits are at `place` [32], to bool [G, V].

    Tokens beyond them are forbidden.
    """
    is_possible = ((words[:, :, None] & place) != 0).flatten(1)[:, :vocab_size]
    missing = vocab_size - is_possible.shape[1]
    return torch.nn.functional.pad(is_possible, (0, missing)) if missing > 0 else is_possible


def _ends_with(tokens: TokenSequence, end: TokenSequence) -> bool:
    return tokens[len(tokens) - len(end) :] == end


def _columns(pairs: list[tuple[int, int]], *names: str) -> Arrays:
    return dict(zip(names, np.array(pairs, dtype=np.int64).reshape(-1, 2).T))
