"""Engines that cannot exchange pages are refused by their keys; all other combinations are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.schema.checks import page_contradictions
from recipes.schema.reader import read
from recipes.schema.recipe_error import RecipeError
from tests.serving.server import TINY

HERE, THERE = "tcp://127.0.0.1:7001", "tcp://[::1]:7002"


def said(
    pages_at: str | None = None,
    prompt_replicas: tuple[str, ...] = (),
    *,
    is_sharing: bool = True,
    ranks: int = 1,
    speculation: str = "none",
    weights_root: Path | None = None,
) -> list[RecipeError]:
    return [
        *page_contradictions(
            pages_at,
            prompt_replicas,
            is_sharing=is_sharing,
            ranks=ranks,
            speculation=speculation,
            weights_root=weights_root,
        )
    ]


@pytest.mark.parametrize("speculation", ["none", "ngram", "suffix"])
def test_either_role_and_both_are_allowed(speculation: str) -> None:
    for pages_at, sources in ((None, ()), (HERE, ()), (None, (THERE,)), (HERE, (THERE,))):
        assert not said(pages_at, sources, speculation=speculation)


def test_an_engine_without_a_role_may_be_anything() -> None:
    assert not said(is_sharing=False, ranks=8, speculation="draft")


@pytest.mark.parametrize(
    "endpoint",
    ["", "127.0.0.1:7001", "http://a:1", "tcp://:7001", "tcp://a", "tcp://a:", "tcp://a:x", "tcp://a:65536"],
)
def test_what_is_no_address_is_named(endpoint: str) -> None:
    for found, key in (
        (said(endpoint), "server.pages_at"),
        (said(None, (endpoint,)), "server.prompt_replicas"),
    ):
        (error,) = found
        assert (error.keys, error.value) == ((key,), endpoint)
        assert str(error) == f"{key}: is no tcp://HOST:PORT; write it so"


def test_weights_that_change_are_those_of_an_engine_that_exchanges_nothing() -> None:
    for found, key in (
        (said(HERE, weights_root=Path("a")), "server.pages_at"),
        (said(None, (THERE,), weights_root=Path("a")), "server.prompt_replicas"),
    ):
        (error,) = found
        assert error.keys == (key, "server.weights_root")
    assert not said(weights_root=Path("a"))


def test_ports_to_the_last_one_are_addresses() -> None:
    assert not said("tcp://a:65535")
    assert not said("tcp://a:0"), "the system chooses"


def test_an_engine_does_not_compute_for_itself() -> None:
    (error,) = said(HERE, (THERE, HERE))
    assert (error.keys, error.value) == (("server.pages_at", "server.prompt_replicas"), HERE)


@pytest.mark.parametrize(
    ("cause", "key"),
    [
        ({"is_sharing": False}, "cache.prefix_sharing"),
        ({"ranks": 2}, "parallel"),
        *(({"speculation": each}, "speculation.kind") for each in ("draft", "eagle3", "mtp")),
    ],
)
def test_each_role_contradicts_what_cannot_exchange_pages(cause, key: str) -> None:
    for pages_at, sources, names in (
        (HERE, (), ["server.pages_at"]),
        (None, (THERE,), ["server.prompt_replicas"]),
        (HERE, (THERE,), ["server.pages_at", "server.prompt_replicas"]),
    ):
        assert [each.keys for each in said(pages_at, sources, **cause)] == [(name, key) for name in names]


def test_all_that_is_wrong_is_said() -> None:
    assert len(said(HERE, (HERE,), is_sharing=False, ranks=2, speculation="mtp")) == 7


def test_a_recipe_is_refused_in_one_line() -> None:
    with pytest.raises(RecipeError) as refused:
        read(TINY, ["server.pages_at=somewhere"])
    line = str(refused.value)
    assert "server.pages_at" in line
    assert "is no tcp://HOST:PORT" in line
    assert "\n" not in line
