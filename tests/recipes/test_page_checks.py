"""Engines that cannot exchange pages are refused by their keys; all other combinations are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.schema.checks import page_contradictions
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.reader import read
from recipes.schema.recipe_error import RecipeError
from recipes.schema.server_section import ServerSection
from tests.each_of import each_of
from tests.serving.server import TINY

HERE, THERE = "tcp://127.0.0.1:7001", "tcp://[::1]:7002"


def said(
    pages_at: str | None = None,
    prompt_replicas: tuple[str, ...] = (),
    *,
    is_sharing: bool = True,
    tensor: int = 1,
    pipeline: int = 1,
    drafts: str = "none",
    **credentials: Any,
) -> list[RecipeError]:
    server = ServerSection(pages_at=pages_at, prompt_replicas=prompt_replicas, **credentials)
    parallel = ParallelSection(tensor=tensor, pipeline=pipeline)
    return [*page_contradictions(server, is_sharing=is_sharing, parallel=parallel, drafts=drafts)]


def test_each_role_both_and_none_are_allowed_and_so_are_ranks_and_a_drafter_of_one() -> None:
    for pages_at, sources in ((None, ()), (HERE, ()), (None, (THERE,)), (HERE, (THERE,))):
        assert not said(pages_at, sources)
    for drafts in ("none", "ngram", "suffix"):
        assert not said(HERE, (THERE,), tensor=4, pipeline=2, drafts=drafts)
    assert not said(HERE, (THERE,), drafts="mtp")
    assert not said(is_sharing=False, tensor=4, pipeline=2)
    assert not said("tcp://localhost:65535")
    assert not said("tcp://localhost:0"), "the system chooses"


@each_of(
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


SECRET = {"pages_key_file": Path("secret")}
TLS: dict[str, Any] = {
    f"pages_tls_{each}": Path(f"{each}.pem") for each in ("certificate", "private_key", "authority")
}


@pytest.mark.parametrize(
    "endpoint", ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1", "tcp://node-7:1"]
)
def test_beyond_this_machine_engines_prove_who_they_are_unless_the_recipe_says_so(endpoint: str) -> None:
    for found, name in (
        (said(endpoint), "server.pages_at"),
        (said(None, (HERE, endpoint)), "server.prompt_replicas"),
    ):
        (error,) = found
        assert (error.keys, error.value) == ((name, "server.pages_key_file"), endpoint)
        assert "neither side would prove who it is; set server.pages_key_file" in str(error)
    for credentials in (SECRET, TLS, SECRET | TLS, {"pages_open": True}):
        assert not said(endpoint, **credentials)
        assert not said(None, (endpoint,), **credentials)


def test_credentials_are_whole_and_have_a_use() -> None:
    for missing in TLS:
        (error,) = said(HERE, **{name: path for name, path in TLS.items() if name != missing})
        assert error.keys == (f"server.{missing}",)
        assert "set all three, or none" in str(error)
    assert [each.keys for each in said(**SECRET | TLS)] == [
        (f"server.{name}", "server.pages_at") for name in (*TLS, *SECRET)
    ]


def test_an_engine_does_not_compute_for_itself() -> None:
    (error,) = said(HERE, (THERE, HERE))
    assert (error.keys, error.value) == (("server.pages_at", "server.prompt_replicas"), HERE)


@pytest.mark.parametrize(
    ("cause", "key"),
    [
        ({"is_sharing": False}, "cache.prefix_sharing"),
        ({"tensor": 2, "pipeline": 3}, "parallel.pipeline"),
        ({"tensor": 2, "drafts": "draft"}, "speculation.kind"),
        ({"tensor": 2, "drafts": "eagle3"}, "speculation.kind"),
        ({"tensor": 2, "drafts": "mtp"}, "speculation.kind"),
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
    assert len(said(HERE, (HERE,), is_sharing=False, pipeline=3)) == 5


def test_a_recipe_is_refused_in_one_line() -> None:
    with pytest.raises(RecipeError) as refused:
        read(TINY, ["server.pages_at=somewhere"])
    line = str(refused.value)
    assert "server.pages_at" in line
    assert "is no tcp://HOST:PORT" in line
    assert "\n" not in line


def test_mooncake_has_a_host_and_a_network_of_its_own() -> None:
    assert not said(None, (HERE,), page_transport="mooncake", mooncake_host="127.0.0.1", pages_open=True)
    (error,) = said(None, (HERE,), page_transport="mooncake", pages_open=True)
    assert error.keys == ("server.mooncake_host", "server.page_transport")
    (error,) = said(None, (HERE,), page_transport="mooncake", mooncake_host="a", **SECRET)
    assert error.keys == ("server.page_transport", "server.pages_open")
    assert "asks nobody who it is" in str(error)
    (error,) = said(None, (HERE,), mooncake_host="a")
    assert "read only where server.page_transport is mooncake, and it is tcp" in str(error)


def test_events_beyond_this_machine_need_a_secret_or_an_open_network() -> None:
    for endpoint in ("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557"):
        with pytest.raises(RecipeError, match=r"set cache\.events_key_file to a secret"):
            read(TINY, [f"cache.events={endpoint}"])
        for allowed in ("cache.events_key_file=secret", "cache.events_open=true"):
            read(TINY, [f"cache.events={endpoint}", allowed])
    for endpoint in ("tcp://127.0.0.1:5557", "tcp://[::1]:5557", "ipc:///tmp/events"):
        read(TINY, [f"cache.events={endpoint}"])
