"""A text is shown as early as it is decided, never earlier, and completely in the end."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.text.tokenizer import Detokenizer, Text
from tests.serving.conftest import KINDS
from tests.thorough import cases

SAMPLES = [
    "What is 12 plus 30? It is 42.",
    "  你好，世界！今天天气很好。",
    "龘龗𪚥 family 👩‍👩‍👧‍👦 and flag 🇨🇳!",
    "ok\ufffd then \ufffd",
]
SIGNS = st.text(st.sampled_from("ab <你好👩‍👧\n?é龘"), max_size=25)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=cases(25, 150), deadline=None)
def test_any_tokens_in_any_pieces_add_up_to_their_text(
    texts: dict[str, Text], kind: str, skip: bool, data: st.DataObject
) -> None:
    text = texts[kind]
    token = st.integers(0, text.vocab_size + 2) | st.integers(0, 264)  # where the byte tokens are
    pieces = data.draw(st.lists(st.lists(token, max_size=4), max_size=12))
    start = data.draw(st.booleans())
    whole = text.decode([t for piece in pieces for t in piece], skip_special_tokens=skip, start=start)
    detokenizer = Detokenizer(text, start=start, skip_special_tokens=skip)
    shown = ""
    for piece in pieces:
        shown += detokenizer.push(piece)
        assert whole.startswith(shown)
    assert shown + detokenizer.flush() == whole


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_character_comes_with_its_last_byte_and_not_before(
    texts: dict[str, Text], kind: str, sample: str
) -> None:
    text = texts[kind]
    ids = text.encode(sample)
    detokenizer = Detokenizer(text)
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.push([token])
        complete = b"".join(text.token_bytes(t) for t in ids[:count]).decode("utf-8", errors="ignore")
        assert shown == complete.removeprefix(" " * text.num_lead_spaces)
    assert shown == sample
    assert detokenizer.flush() == ""


# ---- stop strings


def slow_stop(whole: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Sign by sign: the first stop string to be complete, the longest if there are several."""
    for end in range(1, len(whole) + 1):
        complete = [stop for stop in stops if whole[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


@pytest.mark.parametrize("kind", KINDS)
@given(whole=SIGNS, stops=st.lists(SIGNS.filter(bool), max_size=3), data=st.data())
@settings(max_examples=cases(30, 200), deadline=None)
def test_stop_strings_are_found_wherever_tokens_are_cut(
    texts: dict[str, Text], kind: str, whole: str, stops: list[str], data: st.DataObject
) -> None:
    text = texts[kind]
    ids = text.encode(whole)
    if whole and data.draw(st.booleans()):  # one that does occur
        at = data.draw(st.integers(0, len(whole) - 1))
        stops.append(whole[at : at + data.draw(st.integers(1, 6))])
    expected, stopped = slow_stop(whole, tuple(stops))
    detokenizer = Detokenizer(text, tuple(stops))
    shown, at = "", 0
    while at < len(ids):
        size = data.draw(st.integers(1, 4))
        shown += detokenizer.push(ids[at : at + size])
        at += size
        assert expected.startswith(shown)
    assert shown + detokenizer.flush() == expected
    assert detokenizer.stopped == stopped
    if stopped is not None:
        before = text.decode(ids[: detokenizer.num_tokens - 1])
        assert stopped not in before.removesuffix("\ufffd")
        assert stopped in text.decode(ids[: detokenizer.num_tokens])


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_may_begin_a_stop_string_is_held_back(texts: dict[str, Text], kind: str) -> None:
    text = texts[kind]
    detokenizer = Detokenizer(text, ("</end>", "ende"))
    ids = text.encode("a </en")
    assert "".join(detokenizer.push([token]) for token in ids) == "a "
    ids = text.encode("x")
    tail = [token for token in ids if text.token_bytes(token).strip() == b"x"]
    assert detokenizer.push(tail).replace(" ", "") == "</enx"
    assert detokenizer.stopped is None


def test_after_a_stop_string_nothing_more_is_shown(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    detokenizer = Detokenizer(text, ("\n",))
    assert detokenizer.push(text.encode("one\ntwo")) == "one"
    assert detokenizer.stopped == "\n"
    assert detokenizer.push(text.encode("three")) == ""
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
@given(whole=SIGNS, stops=st.lists(SIGNS.filter(bool), min_size=1, max_size=3))
@settings(max_examples=cases(20, 50), deadline=None)
def test_a_stop_string_may_end_the_text_behind_itself(
    texts: dict[str, Text], kind: str, whole: str, stops: list[str]
) -> None:
    text = texts[kind]
    detokenizer = Detokenizer(text, tuple(stops), include_stop=True)
    shown = "".join(detokenizer.push([token]) for token in text.encode(whole)) + detokenizer.flush()
    whole = text.decode(text.encode(whole))  # what this vocabulary can say of it
    before, found = slow_stop(whole, tuple(stops))
    assert (shown, detokenizer.stopped) == (before + (found or ""), found)


def test_stop_strings_count_only_after_min_tokens(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]
    ids = text.encode("1,2,3,4")
    assert len(ids) == 7
    for min_tokens, expected in ((0, "1"), (1, "1"), (2, "1,2"), (4, "1,2,3"), (6, "1,2,3,4")):
        detokenizer = Detokenizer(text, (",",), min_tokens=min_tokens)
        shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
        assert shown == expected, min_tokens


def test_a_stop_string_may_begin_among_min_tokens_and_ends_after_them(texts: dict[str, Text]) -> None:
    text, random = texts["byte_level"], Random(5)
    id_of = {each: text.encode(each)[0] for each in "abc"}
    for _ in range(cases(300, 30_000)):
        whole = "".join(random.choices("abc", k=8))
        stops = tuple("".join(random.choices("abc", k=random.randint(1, 3))) for _ in range(2))
        min_tokens = random.randint(0, 5)
        found = (
            (whole[: end - len(stop)], stop)
            for end in range(min_tokens + 1, len(whole) + 1)
            for stop in sorted(stops, key=len, reverse=True)
            if whole[:end].endswith(stop)
        )
        detokenizer = Detokenizer(text, stops, min_tokens=min_tokens)
        shown = "".join(detokenizer.push([id_of[each]]) for each in whole) + detokenizer.flush()
        assert (shown, detokenizer.stopped) == next(found, (whole, None)), (whole, stops, min_tokens)


def test_a_token_costs_no_more_late_than_early(texts: dict[str, Text]) -> None:
    text = texts["byte_fallback"]
    wrong = text._vocabulary.find("<0xFF>")
    assert wrong is not None
    detokenizer = Detokenizer(text, ("stop",))
    for _ in range(20_000):
        detokenizer.push([wrong])
        assert len(detokenizer._held) < 4
    assert detokenizer.num_tokens == 20_000
