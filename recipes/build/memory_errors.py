"""Why can a recipe not fit, and which key mends it?"""

from __future__ import annotations

import math

from recipes.build.memory_plan import GIB, Sizing, in_gib
from recipes.schema.keys import RecipeError
from recipes.schema.recipe import Recipe


def check_fits(recipe: Recipe, sizing: Sizing) -> None:
    """Raise RecipeError if all together is more than the device's memory."""
    if sizing.num_pages <= sizing.num_pages_fitting:
        return
    cache, missing = recipe.cache, sizing.total_bytes - sizing.memory_bytes
    text = (
        f"{_parts(sizing)} and {in_gib(sizing.cache_bytes)} of cache are {in_gib(missing)} more than the"
        f" {in_gib(sizing.memory_bytes)} of this machine; "
    )
    host_bytes = sizing.host_beside_bytes
    if host_bytes - missing >= 2 * sizing.page_bytes or host_bytes >= sizing.memory_bytes:
        most = max(0.0, _floor(host_bytes - missing))
        raise RecipeError(f"cache.host_gib: {text}set at most {most}", "cache.host_gib")
    name = next(
        name
        for name in ("cache.num_pages", "cache.memory_gib", "cache.memory_fraction")
        if recipe.value(name) is not None
    )
    fitting = sizing.num_pages_fitting
    if fitting < 2:
        lacking = sizing.beside_bytes + 2 * sizing.page_bytes - sizing.memory_bytes
        raise RecipeError(f"{name}: {text}{_other_mend(sizing, lacking)}", name)
    mend = fitting if cache.num_pages is not None else _floor(fitting * sizing.page_bytes)
    raise RecipeError(f"{name}: {text}set at most {mend}", name)


def too_small_a_part(recipe: Recipe, sizing: Sizing, lacking: int) -> RecipeError:
    """The error for a `cache.memory_fraction` that leaves no room for two pages."""
    fraction = recipe.cache.memory_fraction
    assert fraction is not None, "only a recipe with a fraction can have too small a one"
    least = math.ceil(1000 * (fraction + lacking / sizing.memory_bytes)) / 1000
    mend = f"set at least {least}" if least <= 1 else _other_mend(sizing, lacking)
    return RecipeError(
        f"cache.memory_fraction: {fraction} of the {in_gib(sizing.memory_bytes)} of this machine are"
        f" {in_gib(lacking)} less than {_parts(sizing)} and a cache of 2 pages; {mend}",
        "cache.memory_fraction",
    )


def too_few_pages(name: str, gib: float, num_pages: int, page_bytes: int) -> RecipeError:
    """The error for memory that holds less than the null page and one to use."""
    least = math.ceil(2000 * page_bytes / GIB) / 1000
    return RecipeError(
        f"{name}: {gib} GiB hold {num_pages} pages of {page_bytes} bytes, and 2 is the least;"
        f" set at least {least}, or a smaller cache.page_size",
        name,
        "cache.page_size",
    )


def too_much_of_the_host(gib: float, memory_bytes: int) -> RecipeError:
    """The error for a host tier larger than the host's memory, where the device has its own."""
    return RecipeError(
        f"cache.host_gib: {gib} is more than the {in_gib(memory_bytes)} of this host; set at most"
        f" {_floor(memory_bytes)}",
        "cache.host_gib",
    )


def _parts(sizing: Sizing) -> str:
    parts = {
        "weights": sizing.weight_bytes,
        "activations": sizing.activation_bytes,
        "reserve": sizing.reserve_bytes,
        "slot table": sizing.slot_bytes,
        "host tier": sizing.host_beside_bytes,
    }
    return ", ".join(f"{in_gib(count)} of {name}" for name, count in parts.items() if count)


def _other_mend(sizing: Sizing, lacking: int) -> str:
    """What to change where no number of pages helps."""
    for name, count in (
        ("cache.host_gib", sizing.host_beside_bytes),
        ("scheduler.max_batch_tokens", sizing.activation_bytes),
        ("cache.reserve_gib", sizing.reserve_bytes),
        ("scheduler.max_request_tokens", sizing.slot_bytes),
    ):
        if count > lacking:
            return f"lower {name}, or choose a smaller model or model.dtype"
    return "choose a smaller model or model.dtype"


def _floor(count: int) -> float:
    return int(1000 * count / GIB) / 1000
