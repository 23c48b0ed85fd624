"""Explain why a recipe does not fit into the machine, and which key makes it fit."""

from __future__ import annotations

import math

from recipes.assembly.memory_plan import GIB, MemoryPlan, in_gib, least_cache_bytes
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError


def check_fits(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> None:
    """Raise RecipeError if the recipe needs more than the memory of its devices."""
    if sizing.num_pages <= sizing.num_pages_fitting:
        return
    cache, missing = recipe.cache, sizing.total_bytes - sizing.memory_bytes
    problem = (
        f"{_parts(sizing)} and {in_gib(sizing.cache_bytes)} of cache are {in_gib(missing)} more than the"
        f" {in_gib(sizing.memory_bytes)} of this machine{_each(sizing)}"
    )
    host_bytes = sizing.host_beside_bytes
    if host_bytes - missing >= 2 * sizing.page_bytes or host_bytes >= sizing.memory_bytes:
        most = max(0.0, _floor(host_bytes - missing))
        raise RecipeError("cache.host_gib", problem, f"set at most {most}", value=cache.host_gib, limit=most)
    name = next(
        name
        for name in ("cache.num_pages", "cache.memory_gib", "cache.memory_fraction")
        if recipe.value(name) is not None
    )
    limit = _most(recipe, sizing, num_devices)
    if limit is None:
        least = least_cache_bytes(recipe, sizing)
        lacking = max(0, sizing.beside_bytes + least - sizing.memory_bytes)
        raise RecipeError(name, problem, _other_fix(recipe, sizing, lacking), value=recipe.value(name))
    raise RecipeError(name, problem, f"set at most {limit}", value=recipe.value(name), limit=limit)


def _most(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> float | None:
    """Return the largest value that fits of the key that sizes the cache; None where none does."""
    cache, growth = recipe.cache, _tier_growth(recipe, sizing)
    spare = sizing.memory_bytes - sizing.beside_bytes - growth
    least = least_cache_bytes(recipe, sizing)
    if cache.num_pages is None:  # states and windows take their parts of the same memory
        most = _floor(spare // num_devices)
        return most if int(num_devices * most * GIB) >= least else None
    if spare < least:
        return None
    if cache.num_window_pages is not None:
        return sizing.num_pages_fitting
    # A window has no more pages than there are of the other layers
    of_all = sizing.page_bytes + sum(each.page_bytes for each in sizing.windows)
    return max(sizing.num_pages_fitting, (spare - sizing.kept_bytes) // of_all)


def _tier_growth(recipe: Recipe, sizing: MemoryPlan) -> int:
    """Return by how much the host tier may be larger in this memory beside a cache of another size.

    It has whole pages, whose states and pages of windows follow from the cache.
    """
    host_gib = recipe.cache.host_gib
    if host_gib is None or recipe.cache.host_fraction is not None or not sizing.host_beside_bytes:
        return 0
    return max(0, int(host_gib * GIB) - sizing.host_beside_bytes)


def too_small_a_part(recipe: Recipe, sizing: MemoryPlan, lacking: int) -> RecipeError:
    """Return the error for a `cache.memory_fraction` that leaves no room for two pages."""
    fraction = recipe.cache.memory_fraction
    assert fraction is not None, "only a recipe with a fraction can have too small a one"
    growth = _tier_growth(recipe, sizing)
    least = math.ceil(1000 * (fraction + (lacking + growth) / sizing.memory_bytes)) / 1000
    return RecipeError(
        "cache.memory_fraction",
        f"{fraction} of the {in_gib(sizing.memory_bytes)} of this machine{_each(sizing)} are"
        f" {in_gib(lacking)} less than"
        f" {', '.join([_parts(sizing), *_further(sizing)])} and a cache of 2 pages",
        f"set at least {least}" if least <= 1 else _other_fix(recipe, sizing, lacking),
        value=fraction,
        limit=least,
    )


def too_few_pages(
    name: str,
    gib: float,
    num_pages: int,
    page_bytes: int,
    sizing: MemoryPlan | None = None,
    num_devices: int = 1,
) -> RecipeError:
    """Return the error for memory that holds less than the null page and one to use.

    Windows take a part of this memory, as do kept states, of which any are left here only where
    `cache.num_states` asks for them. These and the pages are those of all devices together.
    """
    further = [] if sizing is None else _further(sizing)
    further_bytes = 0 if sizing is None else sizing.window_bytes + sizing.kept_bytes
    least = math.ceil(1000 * (2 * page_bytes + further_bytes) / num_devices / GIB) / 1000
    beside = f" beside {' and '.join(further)}" if further else ""
    fewer = "fewer cache.num_states or " if sizing is not None and sizing.kept_bytes else ""
    on_each = f" on each of {num_devices} devices" if num_devices > 1 else ""
    return RecipeError(
        (name, "cache.page_size"),
        f"{gib} GiB{on_each} hold {num_pages} pages of {page_bytes} bytes{beside}, and 2 is the least",
        f"set at least {least}, or {fewer}a smaller cache.page_size",
        value=gib,
        limit=least,
    )


def too_few_host_states(
    gib: float, num_states: int, sizing: MemoryPlan, bytes_for_a_page: float
) -> RecipeError:
    """Return the error for a host tier that cannot hold a state and a page, each beside a null one.

    A tier takes whole pages, each with `bytes_for_a_page` for itself and its part of the states.
    """
    state_bytes = sizing.state_bytes
    least_bytes = num_states * state_bytes + 2 * sizing.page_bytes
    # Less than one page and its part is left over where the tier's memory is divided
    least = math.ceil(1000 * (least_bytes + bytes_for_a_page) / GIB) / 1000
    return RecipeError(
        "cache.host_gib",
        f"{gib} GiB do not hold {num_states} states of {in_gib(state_bytes)}, of which the first stays empty,"
        " and 2 pages",
        f"set at least {least}, or 0",
        value=gib,
        limit=least,
    )


def too_much_of_the_host(gib: float, memory_bytes: int, recipe: Recipe, sizing: MemoryPlan) -> RecipeError:
    """Return the error for a host tier larger than the host's memory, where the device has its own.

    Of that, `memory_bytes` are a rank's, beside its kept weights.
    """
    most, beside = _floor(memory_bytes), "" if recipe.model.kept_in is None else ", beside model.kept_in"
    return RecipeError(
        "cache.host_gib",
        f"{gib} is more than the {in_gib(memory_bytes)} of this host{_each(sizing)}{beside}",
        f"set at most {most}",
        value=gib,
        limit=most,
    )


def _each(sizing: MemoryPlan) -> str:
    return f" for each of its {sizing.ranks_here} ranks" if sizing.ranks_here > 1 else ""


def _parts(sizing: MemoryPlan) -> str:
    """Return all that lies beside the cache, in words."""
    return ", ".join(
        _sized(
            {
                "weights": sizing.weight_bytes,
                "adapters": sizing.adapter_bytes,
                "states of slots": sizing.slot_state_bytes,
                "activations": sizing.activation_bytes,
                "reserve": sizing.reserve_bytes,
                "slot table": sizing.slot_bytes,
                "host tier": sizing.host_beside_bytes,
            }
        )
    )


def _further(sizing: MemoryPlan) -> list[str]:
    """Return what lies in the cache beside the pages of all tokens, in words."""
    return _sized({"kept states": sizing.kept_bytes, "pages for windows": sizing.window_bytes})


def _sized(parts: dict[str, int]) -> list[str]:
    return [f"{in_gib(count)} of {name}" for name, count in parts.items() if count]


def _other_fix(recipe: Recipe, sizing: MemoryPlan, lacking: int) -> str:
    """Return what to change where no number of pages helps."""
    cache = recipe.cache
    are_said = cache.num_states is not None
    slots = max(0, sizing.num_slot_states - 2)  # the null state and that of one slot remain
    kept = sizing.num_kept_states
    if not are_said:  # one is kept for each slot beside a number of pages; else the cache's memory says
        kept = 0 if cache.num_pages is None else min(slots, kept)
    of_slots = (slots + kept) * sizing.state_bytes
    for name, count in (
        ("cache.host_gib", sizing.host_beside_bytes),
        ("cache.num_states", sizing.kept_bytes if are_said else 0),
        ("cache.num_states and scheduler.num_slots" if are_said else "scheduler.num_slots", of_slots),
        ("scheduler.max_batch_tokens", sizing.activation_bytes),
        ("cache.reserve_gib", sizing.reserve_bytes),
        ("scheduler.max_request_tokens", sizing.slot_bytes),
    ):
        if count > lacking:
            return f"lower {name}, or choose a smaller model or model.dtype"
    return "choose a smaller model or model.dtype"


def _floor(count: int) -> float:
    return int(1000 * count / GIB) / 1000
