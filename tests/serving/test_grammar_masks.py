"""A mask holds exactly the tokens that may come, by brute force over the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from borders.refusal import BadRequest
from continuous_batching.constraints import Constraint
from continuous_batching.request import Request, SamplingParams
from serving.grammars.matching import Grammars
from serving.text.tokenizer import Text

WORDS = [
    "yes",
    "no",
    "nothing",
    "not a thing",
    "是",
    "今天天气",
    "今天很好",
    '"\\/\n',
    " lead",
    "1",
    "12",
    "123",
]
PADDING = 37  # logits beyond the tokenizer's ids
KINDS = ("byte_level", "byte_fallback", "sentence_pieces")


def constraint_of(text: Text, kind: str, asked: object, ends: tuple[int, ...] | None = None) -> Constraint:
    grammars = Grammars(lambda: text, text.vocab_size + PADDING, text.eos_token_ids if ends is None else ends)
    params = SamplingParams(grammar=json.dumps(["guided", kind, asked]))
    request = Request("a", np.array([1]), params)
    grammars.constrain(request)
    assert request.constraint is not None
    return request.constraint


def allowed(mask: np.ndarray, vocab_size: int) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def expected(text: Text, said: bytes, words: list[str], ends: tuple[int, ...]) -> set[int]:
    """The tokens that lead to a word, and the end tokens where one is complete."""
    wanted = [word.encode() for word in words]
    found = {
        token
        for token in range(text.vocab_size)
        if (spelt := text.token_bytes(token)) and any(word.startswith(said + spelt) for word in wanted)
    }
    return (found - set(ends)) | (set(ends) if said in wanted else set())


@pytest.mark.parametrize("kind", KINDS)
def test_choices(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    ends = text.eos_token_ids
    constraint = constraint_of(text, "choice", WORDS)
    waiting: list[list[int]] = [[]]
    seen = 0
    while waiting and seen < 150:
        answer = waiting.pop()
        seen += 1
        said = b"".join(map(text.token_bytes, answer))
        constraint.leave()  # the next answer is no continuation of the last
        (mask,) = constraint.masks(np.array(answer, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert mask is not None
        found = allowed(mask, text.vocab_size + PADDING)
        assert found == expected(text, said, WORDS, ends), said
        waiting += [[*answer, token] for token in sorted(found - set(ends))]
    assert seen > len(WORDS)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_behind_drafts_are_those_behind_answers(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    (end,) = text.eos_token_ids
    constraint = constraint_of(text, "regex", "(ab|cd|12)*")
    random = np.random.default_rng(3)
    spelt = [
        token for token in range(text.vocab_size) if text.token_bytes(token) in {b"a", b"b", b"c", b"d", b"1"}
    ]
    for _ in range(30):
        answer: list[int] = []
        constraint.leave()
        for _ in range(int(random.integers(0, 6))):
            (mask,) = constraint.masks(np.array(answer, dtype=np.int64), np.empty(0, dtype=np.int64))
            assert mask is not None
            answer.append(int(random.choice(sorted(allowed(mask, text.vocab_size) - {end}))))
        drafts = random.choice([*spelt, end], 4).tolist()
        masks = constraint.masks(np.array(answer, dtype=np.int64), np.array(drafts, dtype=np.int64))
        assert len(masks) == 5
        num_possible = constraint.num_possible(np.array(answer, dtype=np.int64), drafts)
        for count, mask in enumerate(masks):
            if count > num_possible or end in drafts[:count]:
                assert mask is None
                continue
            before = np.array([*answer, *drafts[:count]], dtype=np.int64)
            (again,) = constraint_of(text, "regex", "(ab|cd|12)*").masks(before, np.empty(0, dtype=np.int64))
            assert mask is not None
            assert again is not None
            assert (mask == again).all()


def test_no_answer_is_spaces_for_ever(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    constraint = constraint_of(text, "json", {"type": "array", "items": {"type": "integer"}})
    answer = text.encode_within("[")
    spaces = [
        token
        for token in range(text.vocab_size)
        if text.token_bytes(token) and not text.token_bytes(token).strip()
    ]
    while True:
        (mask,) = constraint.masks(np.array(answer, dtype=np.int64), np.empty(0, dtype=np.int64))
        assert mask is not None
        may = allowed(mask, text.vocab_size) & set(spaces)
        if not may:
            break
        answer.append(min(may, key=lambda token: len(text.token_bytes(token))))
        assert len(answer) < 50
    assert len(answer) > 1


def test_all_end_tokens_may_end_it(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    ends = (text.eos_token_ids[0], text.eos_token_ids[0] - 1)
    (mask,) = constraint_of(text, "choice", ["a", "ab"], ends).masks(
        np.array([text.encode_within("a")[0]]), np.empty(0, dtype=np.int64)
    )
    assert mask is not None
    assert allowed(mask, text.vocab_size) == {*ends, *text.encode_within("b")}


def test_tokens_behind_a_gap_of_ids_may_come(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "1": 20}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text.load(tmp_path)
    assert text is not None
    none = np.empty(0, dtype=np.int64)
    (mask,) = constraint_of(text, "regex", "[0-9]b", (0,)).masks(none, none)
    assert mask is not None
    assert allowed(mask, text.vocab_size) == {20}


def test_a_control_token_is_no_text(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    constraint = constraint_of(text, "regex", r"<\|im_start\|>|(?s:.)*")
    (mask,) = constraint.masks(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    assert mask is not None
    control = {token for token in range(text.vocab_size) if not text.token_bytes(token)}
    assert control & allowed(mask, text.vocab_size) == set(text.eos_token_ids)


def test_what_is_missing_is_said() -> None:
    request = Request("a", np.array([1]), SamplingParams(grammar=json.dumps(["guided", "regex", "a"])))
    with pytest.raises(BadRequest, match="needs a tokenizer"):
        Grammars(lambda: None, 10, (1,)).constrain(request)


def test_a_model_without_an_end_token_is_refused(texts: dict[str, Text]) -> None:
    with pytest.raises(BadRequest, match="needs a token that ends an answer"):
        constraint_of(texts["byte_level"], "regex", "a", ends=())


def test_without_the_package_a_request_says_so(
    texts: dict[str, Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(BadRequest, match="needs the package llguidance, which is not installed"):
        constraint_of(texts["byte_level"], "regex", "a")
