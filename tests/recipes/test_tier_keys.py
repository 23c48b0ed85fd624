"""The keys of `cache.tier` are checked, and what cannot be is refused by its name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.__main__ import show
from recipes.assembly.engine import build
from recipes.assembly.page_tier import tier_for
from recipes.assembly.scheduler import SchedulerLimits, facts_of, scheduler_from
from recipes.schema.reader import load
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from recipes.schema.tier_section import TierSection, tier_of
from tests.each_of import each_of
from tests.kv_cache import device

TINY = "recipes/any/cpu.yaml"
OVERRIDES = [f"{key}={value}" for key, value in device.OVERRIDES.items()]
DISK, REDIS = "kind: disk, gib: 1, path: pages", "kind: redis, gib: 1, url: redis://localhost:6379/0"


def loaded(tier: str, *more: str):
    return load(ROOT / TINY, [*OVERRIDES, "cache.host_gib=0.01", f"cache.tier={{{tier}}}", *more])


def test_a_tier_says_where_pages_rest_and_how_many() -> None:
    assert tier_of(loaded(DISK).cache.tier) == TierSection(kind="disk", gib=1, path="pages")
    said = loaded(f"{REDIS}, wait_s: 2, password_file: /run/secrets/redis").cache.tier
    assert tier_of(said) == TierSection(
        kind="redis", gib=1, url="redis://localhost:6379/0", wait_s=2, password_file="/run/secrets/redis"
    )
    assert tier_of(loaded(REDIS, "cache.tier.gib=3").cache.tier) == TierSection(
        kind="redis", gib=3, url="redis://localhost:6379/0"
    )
    assert tier_of(loaded(DISK, "cache.tier=null").cache.tier) is None


@each_of(
    "tier, more, refusal",
    [
        ("kind: disk, path: pages", "", "cache.tier.gib: required, and missing; it must be a number from"),
        ("gib: 1", "", "cache.tier.kind: required, and missing; it must be disk or redis"),
        ("kind: tape, gib: 1", "", "cache.tier.kind: 'tape' is not allowed; it must be disk or redis"),
        ("kind: disk, gib: 0, path: p", "", "cache.tier.gib: 0 is not allowed; it must be a number from"),
        (f"{DISK}, size: 1", "", "cache.tier.size: unknown key; it has kind, gib, path, url, password_file"),
        ("kind: disk, gib: 1", "", "cache.tier.path: required where cache.tier.kind is disk, and missing"),
        ("kind: redis, gib: 1", "", "cache.tier.url: required where cache.tier.kind is redis, and missing"),
        (f"{DISK}, url: redis://h", "", "cache.tier.url: read only where cache.tier.kind is redis, and it"),
        (f"{REDIS}, path: p", "", "cache.tier.path: read only where cache.tier.kind is disk, and it is"),
        ("kind: redis, gib: 1, url: http://h", "", "'http://h' is not allowed; it must be"),
        ("kind: redis, gib: 1, url: 'redis://:secret@h'", "", "holds a password, which logs and recordings"),
        (DISK, "cache.prefix_sharing=false", "cache.tier: no page can be found; set cache.prefix_sharing to"),
        (DISK, "cache.host_gib=0", "by way of the host's memory, and cache.host_gib is not set; set it"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(tier: str, more: str, refusal: str) -> None:
    with pytest.raises(RecipeError) as refused:
        loaded(tier, *filter(None, [more]))
    assert refusal in str(refused.value)
    assert "secret" not in str(refused.value).partition("holds a password")[2]
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize(
    ("tier", "refusal"),
    [
        ("kind: disk, gib: 1, path: README.md/pages", "cache.tier.path: .*README.md/pages cannot be used"),
        (f"{REDIS}, password_file: nowhere", "cache.tier.password_file: .*nowhere cannot be read: No such"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_when_the_engine_is_built(tier: str, refusal: str) -> None:
    with pytest.raises(RecipeError, match=refusal):
        build(loaded(tier))


def test_a_tier_too_small_for_a_single_page_is_refused(tmp_path: Path) -> None:
    """By the least that holds one, which is not."""
    large = "model.config.head_dim=64", "cache.page_size=1024", "cache.num_pages=3"
    small = f"kind: disk, gib: 0.001, path: {tmp_path}"
    with pytest.raises(RecipeError) as refused:
        build(loaded(small, *large))
    assert "cache.tier.gib: 0.001 GiB hold no page, of which the largest takes 2097256" in str(refused.value)
    assert str(refused.value).endswith("raise it to at least 0.002")
    built = build(loaded(small.replace("0.001", "0.002"), *large))
    built.engine.close()


def test_a_host_with_no_room_for_a_page_is_refused() -> None:
    memory: Any = SimpleNamespace(num_host_pages=0)
    runner: Any = None  # it is not asked
    with pytest.raises(RecipeError, match=r"cache.tier: .* has no room for any; raise cache.host_fraction"):
        tier_for(loaded(DISK), runner, memory)


def test_show_tells_what_rests_where(capsys: pytest.CaptureFixture[str]) -> None:
    show(TINY, [*OVERRIDES, "cache.host_gib=0.01", f"cache.tier={{{DISK}}}"])
    said = capsys.readouterr().out
    (line,) = [each for each in said.splitlines() if each.startswith("tier below")]
    page_bytes = 2 * 2 * device.PAGE_SIZE * 2 * 8 * 4
    assert (
        f"disk pages, 1.00 GiB, {2**30 // (page_bytes + 104):,} pages; up to 0.25 GiB of the host's" in line
    )


def test_a_recording_says_that_there_was_a_tier_and_no_password() -> None:
    recipe = loaded(f"{REDIS}, password_file: /run/secrets/redis")
    limits = SchedulerLimits(20, 10, 96, 128, (0,), None)
    facts = facts_of(recipe.scheduler, recipe.cache, limits)
    scheduler = scheduler_from(facts)
    assert scheduler.lifecycle.matching._has_tier
    without = facts | {"cache": {name: each for name, each in facts["cache"].items() if name != "tier"}}
    assert not scheduler_from(without).lifecycle.matching._has_tier, (
        "as one that was made before there were any"
    )
