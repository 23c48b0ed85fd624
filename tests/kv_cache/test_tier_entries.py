"""An entry is used as it was written, for the page and by the model that it is of, or not at all."""

from __future__ import annotations

import pytest

from kv_cache.tier.store import HEAD_BYTES, MAGIC, WrongEntry, content_of, entry_of, identity_of

CONTENT = bytes(range(100))
KEY, IDENTITY = b"k" * 32, identity_of({"model": "tiny", "layout": [((16, 2, 8), "float32")]})
ENTRY = entry_of(CONTENT, KEY, IDENTITY)


def test_what_was_kept_comes_back() -> None:
    assert content_of(ENTRY, KEY, IDENTITY, len(CONTENT)) == CONTENT


def test_no_byte_of_an_entry_may_change() -> None:
    for at in range(len(ENTRY)):
        damaged = bytearray(ENTRY)
        damaged[at] ^= 1
        with pytest.raises(WrongEntry):
            content_of(bytes(damaged), KEY, IDENTITY, len(CONTENT))


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (ENTRY[:-1], "it has 99 bytes"),
        (ENTRY + b"x", "it has 101 bytes"),
        (ENTRY[: HEAD_BYTES - 1], "it has -1 bytes"),
        (b"", "no page of this format"),
        (b"cbpage0\n" + ENTRY[len(MAGIC) :], "no page of this format"),
        (entry_of(CONTENT, b"o" * 32, IDENTITY), "another page"),
        (entry_of(CONTENT, KEY, identity_of({"model": "another"})), "another model"),
        (entry_of(CONTENT[:50], KEY, IDENTITY), "it has 50 bytes"),
    ],
)
def test_what_is_another_is_refused_by_its_name(entry: bytes, why: str) -> None:
    with pytest.raises(WrongEntry, match=why):
        content_of(entry, KEY, IDENTITY, len(CONTENT))


def test_a_head_that_was_made_to_fit_is_found_by_the_checksum() -> None:
    """Neither the identity nor the key can be written over: the sum holds both."""
    other = entry_of(CONTENT, b"o" * 32, IDENTITY)
    with pytest.raises(WrongEntry, match="checksum"):
        content_of(other.replace(b"o" * 32, KEY), KEY, IDENTITY, len(CONTENT))


def test_an_identity_depends_on_every_fact_and_on_no_order() -> None:
    assert identity_of({"a": 1, "b": [2, 3]}) == identity_of({"b": [2, 3], "a": 1})
    facts = [{"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"}, {"a": [1]}, {"a": 1, "b": None}]
    assert len({identity_of(each) for each in facts}) == len(facts)
