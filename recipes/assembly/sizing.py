"""Compute how much memory a recipe needs, and how many pages that leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from devices.ascend_limits import LATENT_HEAD, MOST_GATHERED, PAGE_STEP, PRODUCTS
from devices.host_limits import host_memory_bytes, lies_in_memory
from kv_cache.groups import ITEM_BYTES, most_pages
from models.config import DTYPE_BYTES, DecoderConfig, HeadConfig, IndexConfig, bytes_of_adapters
from models.cost import Counts
from models.drafting.config import MtpConfig
from models.packing import WIDENED_ROWS
from models.parallel.share import Share, most_contexts
from recipes.assembly.families import draft_part
from recipes.assembly.memory_errors import (
    check_fits,
    too_few_host_states,
    too_few_pages,
    too_much_of_the_host,
    too_small_a_part,
)
from recipes.assembly.memory_plan import GIB, WHOLE, MemoryPlan, WindowPages, in_gib, least_cache_bytes
from recipes.schema.recipe import CacheSection, DeviceSection, Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.scheduler_defaults import completed, longest_request

FLOAT32_BYTES = DTYPE_BYTES["float32"]
MOST_PAGES = 2**31 - 1
SCORED_ROWS = 256  # queries whose scores are in memory at once
INDEX_ROWS, INDEX_KEYS = 64, 1024  # rows and keys whose index scores of each head are in memory at once
INDEX_SCORE_BYTES = 32  # bytes of each score of these rows: float32, masks, and what choosing takes
GATHERED_BYTES = 2**27  # gathered latents in both types, their scores, and queries in the space of latents
# Bytes per logit beside the logits: float32 scores, weights, and what choosing from them takes.
LOGIT_BYTES = 16
STEP_BYTES = 16 * 2**20  # bytes that operators keep however small a step is
# Keys of `cache` that are read for models whose layers keep states
STATE_KEYS = ("num_states", "state_fraction", "state_dtype")


def plan_memory(
    recipe: Recipe,
    config: DecoderConfig,
    memory_bytes: int | None = None,
    activation_bytes: int | None = None,
    *,
    tensor: int = 1,
    stages: int = 1,
    share: Share = WHOLE,
    host_memory: int | None = None,
    num_host_pages: int | None = None,
    windows: tuple[WindowPages, ...] | None = None,
    window_host_pages: Sequence[int] = (),
    num_host_states: int = 0,
    num_kept_states: int | None = None,
    ranks_here: int | None = None,
    tiles_weights: bool | None = None,
) -> MemoryPlan:
    """Return the plan of a recipe; raises RecipeError with what is missing and the key to change.

    With `memory_bytes` None, the memory is that of the recipe's device; with `activation_bytes` None, it is
    estimated; with `host_memory` None, it is a rank's part of this machine's, which `ranks_here`, by default
    as many as the recipe says, divide, as they do a CPU's; with `num_host_pages` None, it follows from the
    recipe, as the pages of `windows` and the states kept for later requests do where these are None. The host
    tier has `window_host_pages` and `num_host_states` beside. The model lies on `stages` groups of `tensor`
    devices that share each layer, all with this memory; then the plan, and what the cache may take, is of all
    together, or with a `share` of one rank. With `tiles_weights` None, weights lie as on the product named.
    """
    num_devices, ranks_here = tensor * stages, ranks_here or recipe.parallel.ranks_of_a_machine
    both = _decoders(recipe, config, share)
    most_tokens = min(recipe.scheduler.max_request_tokens or 2**31, config.reach)
    sizing = MemoryPlan(
        num_parameters=both[0].num_parameters,
        weight_bytes=_weight_bytes(recipe, both, share, tiles_weights),
        adapter_bytes=_adapter_bytes(recipe, both[0]),
        page_bytes=_page_bytes(recipe, both, tensor),
        windows=_windows(recipe, both[0], tensor, window_host_pages) if windows is None else windows,
        num_host_pages=num_host_pages or 0,
        host_is_device=recipe.device.kind == "cpu",
        longest_tokens=most_tokens,
        slot_bytes=num_devices * _slot_bytes(recipe, both, most_tokens),
        state_bytes=both[0].state_bytes,
        num_slot_states=1 + recipe.scheduler.num_slots if config.num_recurrent else 0,
        num_kept_states=num_kept_states or 0,
        num_host_states=num_host_states,
        activation_bytes=stages * _estimate(recipe, both, config.vocab_size)
        if activation_bytes is None
        else activation_bytes,
        is_measured=activation_bytes is not None,
        reserve_bytes=num_devices * int(recipe.cache.reserve_gib * GIB),
        memory_bytes=num_devices * _device_bytes(recipe, memory_bytes, ranks_here),
        ranks_here=ranks_here,
    )
    derived = windows is None, num_kept_states is None
    sizing = _with_further_pools(recipe, sizing, num_devices, *derived)
    if num_host_pages is None:
        sizing = _with_host_tier(recipe, sizing, host_memory, num_devices)
        if sizing.host_beside_bytes:  # the host tier takes memory of their pages
            sizing = _with_further_pools(recipe, sizing, num_devices, *derived)
    return _with_pages(recipe, both, sizing, num_devices)


def of_divided_pages(
    recipe: Recipe, config: DecoderConfig, memory_bytes: int | None, share: Share
) -> list[tuple[str, str]]:
    """Return the row on pages that ranks divide, or would if the recipe said so, where they hold copies.

    It says what the cache would hold, and what each decode costs: the part of its context that a rank reads,
    and what it sends to others. Pages keep their size, and on an NPU each rank's part of one is what its
    operators take.
    """
    if config.int8_cache:
        return []
    most, size = most_contexts(config, share.tensors), recipe.cache.page_size
    step, asked = PAGE_STEP if recipe.device.kind == "npu" else 1, recipe.parallel.context
    # Pages may be no multiple of the step, where plain attention reads them
    fitting = (each for each in range(1, most + 1) if most % each == 0 and size % (each * step) == 0)
    count = max(fitting, default=1)
    count = asked if asked > 1 else count
    if count == 1:
        return []
    counts = Counts(config, share.tensors, contexts=count)
    sent = config.num_layers * sum(counts.joined_bytes(1)) / 1e6
    cost = f"a decode reads 1/{count} of its context on each rank, and sends {sent:,.1f} MB"
    if asked > 1:
        return [("divided pages", f"between {count} ranks; {cost}")]
    divided = replace(recipe, parallel=replace(recipe.parallel, context=count))
    plan = plan_memory(divided, config, memory_bytes, share=replace(share, contexts=count))
    held = f"would hold {plan.cache_tokens - 1:,} tokens, a request up to {plan.longest_tokens:,}"
    return [("divided pages", f"parallel.context={count} {held}; {cost}")]


def _page_bytes(recipe: Recipe, both: list[DecoderConfig], tensor: int) -> int:
    """Return the bytes of a page of the layers that need all tokens, and of the features of a head.

    Neighbours divide the pages of the model and of its own prediction layer, but not those of a draft model,
    nor features.
    """
    size, num_bytes = recipe.cache.page_size, 0
    for number, each in enumerate(both):
        contexts = recipe.parallel.context if number == 0 or isinstance(each, MtpConfig) else 1
        num_bytes += tensor * (size // contexts) * each.kv_bytes_by_group(tensor)[0]
    return num_bytes + sum(each.feature_bytes for each in both if isinstance(each, HeadConfig))


def _with_pages(
    recipe: Recipe, both: list[DecoderConfig], sizing: MemoryPlan, num_devices: int
) -> MemoryPlan:
    """Return the plan with its cache, and with the longest request that this cache allows."""
    cache = recipe.cache
    num_pages = _num_pages(recipe, sizing, num_devices)
    # A window's pool that is smaller than the window bounds requests as well
    bounds = [each.num_pages for each in sizing.windows if each.num_pages <= each.most_of_a_request]
    cache_tokens = (min([num_pages, *bounds]) - 1) * cache.page_size + 1  # the last token is never cached
    longest_tokens, longest_because = _longest(recipe, both, cache_tokens)
    sizing = replace(
        sizing,
        num_pages=num_pages,
        cache_tokens=cache_tokens,
        longest_tokens=longest_tokens,
        longest_because=longest_because,
        slot_bytes=num_devices * _slot_bytes(recipe, both, longest_tokens),
    )
    spare_bytes = sizing.memory_bytes - sizing.beside_bytes - sizing.window_bytes - sizing.kept_bytes
    fitting = spare_bytes // sizing.page_bytes if sizing.page_bytes else MOST_PAGES * (spare_bytes >= 0)
    sizing = replace(sizing, num_pages_fitting=max(0, fitting))
    check_fits(recipe, sizing, num_devices)
    return sizing


def estimate(recipe: Recipe, config: DecoderConfig, vocab_size: int | None = None) -> int:
    """Return the bytes that the largest step takes beside weights and cache.

    The estimate serves plans that are made before a model is loaded.

    They consist of all that one layer holds at once, the scores of the longest span that the budget allows,
    what attention makes of the cached tokens that it gathers, and the logits of all slots, and of their
    drafts, as the sampler works on them. The logits have `vocab_size` tokens where `config` is a rank's part.
    """
    num_tokens = step_tokens(recipe, config)
    num_rows = min(num_tokens, recipe.scheduler.num_slots * recipe.speculation.most_sampled)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = max(config.inner_size(layer) for layer in range(config.num_layers))
    widths = 4 * config.hidden_size + 4 * (heads + kv_heads) + 3 * inner
    if config.recurrent is not None:  # a layer's inputs of the convolution, what it makes of them, and gates
        of_states = 3 * config.recurrent.num_channels + 3 * config.recurrent.widths[2]
        widths = max(widths, 4 * config.hidden_size + of_states + 3 * inner)
    if config.mixture is not None:  # a row for each choice, the experts' intermediate results, and routing
        of_choices = config.mixture.num_chosen * (2 * config.hidden_size + 3 * config.mixture.inner_size)
        widths += max(8 * config.hidden_size, of_choices) + 8 * config.mixture.num_experts
    is_latent, is_npu = config.latent is not None, recipe.device.kind == "npu"
    is_plain = recipe.device.attention == "reference" or (is_latent and not is_npu)
    seen = min(num_tokens, config.reach)
    if is_plain:  # a span may attend to more of its request's keys and values than it computes
        seen = max(seen, _longest_cached(recipe, config))
    index = None if config.latent is None else config.latent.index
    most_read = config.reach if index is None else index.top_k  # tokens that one token may read
    seen = min(seen, most_read)
    scores = config.num_heads * min(num_tokens, SCORED_ROWS) * seen * (8 + config.dtype_bytes)
    if index is not None:
        scores += _index_bytes(index, num_tokens, _longest_cached(recipe, config), is_plain=is_plain)
    item_bytes = config.dtype_bytes
    if recipe.device.kind == "cpu" and _multiplied_bytes(config) != item_bytes:
        item_bytes += FLOAT32_BYTES  # rows are widened to float32, and their results lie beside them
    logits = num_rows * (vocab_size or config.vocab_size) * (config.dtype_bytes + LOGIT_BYTES)
    read = 0
    if recipe.parallel.context > 1:  # a request's pages are gathered for a layer at a time
        read += _longest_cached(recipe, config) * config.kv_bytes_by_group()[0] // config.num_layers
    if _gathers(config, is_plain=is_plain, is_npu=is_npu):
        longest = min(_longest_cached(recipe, config), most_read)
        if not is_plain:  # several requests are read together up to this bound
            longest = max(longest, MOST_GATHERED)
        read += _read_bytes(config, longest, in_float32=is_plain)
    widened = 0
    if (
        config.kept_form is not None and not is_npu
    ):  # int4 weights as read, twice in float32, and in the model's type
        most = max(config.hidden_size, heads, inner)
        widened = WIDENED_ROWS * most * (2 * FLOAT32_BYTES + 2 + item_bytes)
    return STEP_BYTES + num_tokens * widths * item_bytes + scores + read + logits + widened


def _gathers(config: DecoderConfig, *, is_plain: bool, is_npu: bool) -> bool:
    """Whether attention gathers the cached tokens that it multiplies with."""
    latent = config.latent
    if is_plain or latent is None:
        return is_plain or (config.int8_cache and is_npu)
    if latent.index is None:
        return True
    # Sparse attention reads what was chosen where it lies. Long spans that read all tokens are expanded if
    # pages have 16 bits and heads these widths
    return not config.int8_cache and latent.nope_dim == latent.value_dim == LATENT_HEAD


def _index_bytes(index: IndexConfig, num_tokens: int, longest: int, *, is_plain: bool) -> int:
    """Return the bytes of choosing among `longest` tokens, and of attention to the gathered ones.

    The positions that are chosen are int32. Plain attention holds the scores of some rows, what choosing from
    them takes, the products of each index head for some keys, and all index keys of one request; operators of
    an NPU keep the scores to themselves.
    """
    num_bytes = 4 * num_tokens * index.top_k
    if is_plain:
        num_bytes += INDEX_ROWS * (
            longest * INDEX_SCORE_BYTES + 2 * index.num_heads * INDEX_KEYS * FLOAT32_BYTES
        )
        num_bytes += 2 * longest * index.head_dim * FLOAT32_BYTES + GATHERED_BYTES
    return num_bytes


def _read_bytes(config: DecoderConfig, num_tokens: int, *, in_float32: bool) -> int:
    """Return the bytes of so many cached tokens' keys and values, gathered for attention to multiply with.

    Plain attention converts them to float32, and fused attention from int8 to the model's type. Latents
    are expanded to the keys and values of each head, and copied to the order that fused attention takes.
    """
    width = 2 * config.num_kv_heads * config.head_dim
    if config.latent is not None:
        width = config.latent.token_width
        width += config.num_heads * (2 * config.latent.query_dim + 2 * config.latent.value_dim)
    beside = FLOAT32_BYTES if in_float32 else ITEM_BYTES["int8"] if config.int8_cache else 0
    return num_tokens * width * (config.dtype_bytes + beside)


def step_tokens(recipe: Recipe, config: DecoderConfig) -> int:
    """Return the most tokens of a step.

    Where the longest request sets it, the longest possible request is assumed.
    """
    num_tokens = completed(recipe.scheduler, _longest_cached(recipe, config)).section.max_batch_tokens
    assert num_tokens is not None, "only a policy of whole prompts can do without it"
    return num_tokens


def _longest_cached(recipe: Recipe, config: DecoderConfig) -> int:
    """Return the most tokens of a request, as far as they are known before the cache is planned."""
    longest_tokens = recipe.scheduler.max_request_tokens or config.reach
    if recipe.cache.num_pages is None:
        return longest_tokens
    return min(longest_tokens, (recipe.cache.num_pages - 1) * recipe.cache.page_size + 1)


def _weight_bytes(recipe: Recipe, both: list[DecoderConfig], share: Share, tiles_weights: bool | None) -> int:
    """Return the bytes of a rank's weights; what drafts is held by one stage alone."""
    num_bytes = 0
    for config, held in zip(both, (share, share.within_stage)):
        num_bytes += config.weight_bytes + _packed_bytes(recipe, config, held, tiles_weights)
        if not held.holds_embedding(config):
            num_bytes -= config.embedding_bytes
        if not held.is_last:
            num_bytes -= config.head_bytes
    return num_bytes


def _packed_bytes(recipe: Recipe, config: DecoderConfig, share: Share, tiles_weights: bool | None) -> int:
    """Return what linear layers take beyond their stored size.

    The device may multiply them in another form.

    A CPU without bfloat16 keeps them in float32 unless it has a compiler, and a tied head is kept apart from
    the embedding in its own order. The layer that predicts further tokens has no head: it calls the target's.
    """
    device, item_bytes, num_bytes = recipe.device, config.dtype_bytes, 0
    if device.kind == "cpu":
        item_bytes = _kept_bytes(device, config)
        held = (each for each in config.linears() if each[0] != "lm_head" or share.is_last)
        num_elements = sum(inputs * outputs for name, inputs, outputs in held if config.form(name) == "plain")
        num_bytes = num_elements * (item_bytes - config.dtype_bytes)
        is_packed = True  # a torch without oneDNN, which would leave float32 as it is, is not counted on
    else:
        if tiles_weights is None:
            tiles_weights = device.product in {each.name for each in PRODUCTS if each.tiles_weights}
        is_packed = device.kind == "npu" and tiles_weights and config.dtype != "float32"
    has_head = share.is_last and not isinstance(config, MtpConfig)
    is_kept_twice = is_packed and config.tie_embeddings and has_head
    return num_bytes + is_kept_twice * config.vocab_size * config.hidden_size * item_bytes


def _multiplied_bytes(config: DecoderConfig) -> int:
    """Return the bytes of a number in the type in which this CPU multiplies the model's."""
    if config.dtype == "float32":
        return FLOAT32_BYTES
    # These are imported here because only torch, whose import takes a second, knows what a processor has.
    from devices.onednn import product_dtype
    from models.layers.dtypes import TORCH_DTYPES

    return product_dtype(TORCH_DTYPES[config.dtype]).itemsize


def _kept_bytes(device: DeviceSection, config: DecoderConfig) -> int:
    """Return the bytes of a number in the type in which this CPU keeps the model's weights."""
    if config.dtype == "float32":
        return FLOAT32_BYTES
    from devices.cpp_sources import missing_for_sources  # imported here because it imports torch

    if device.compile is not False and device.attention == "fused" and missing_for_sources() is None:
        return config.dtype_bytes
    return _multiplied_bytes(config)


def _device_bytes(recipe: Recipe, given: int | None, ranks_here: int) -> int:
    """Return a rank's memory of the recipe's device; unless given, any but a CPU is started for it."""
    if given is not None:
        return given
    if recipe.device.kind == "cpu":
        return host_memory_bytes() // ranks_here
    from recipes.machine import start  # imported here because it imports torch

    return start(recipe.device).memory_bytes()


def _host_bytes(recipe: Recipe, sizing: MemoryPlan) -> int:
    """Return a rank's part of this host's memory, without what its kept weights take there."""
    part, folder = host_memory_bytes() // sizing.ranks_here, recipe.model.kept_in
    kept_bytes = sizing.weight_bytes if folder is not None and lies_in_memory(folder) else 0
    return max(0, part - kept_bytes)


def _adapter_bytes(recipe: Recipe, part: DecoderConfig) -> int:
    """Return the bytes of the places for adapters.

    Raises RecipeError for a model that cannot have adapters.
    """
    asked = recipe.adapters
    if not asked.most:
        return 0
    for has, what in (
        (part.latent is not None, "attention over latents has"),
        (part.recurrent is not None, "layers that keep a recurrent state have"),
    ):
        if has:
            raise RecipeError("adapters.most", f"{what} no adapters here", "set it to 0", value=asked.most)
    return bytes_of_adapters(part, asked.most, asked.rank)


def _decoders(recipe: Recipe, config: DecoderConfig, share: Share) -> list[DecoderConfig]:
    """Return a rank's part of the model and of its head, or the whole draft model."""
    draft, part = draft_part(recipe, config, share), share.part(config)
    return [part] if draft is None else [part, draft]


def _estimate(recipe: Recipe, decoders: list[DecoderConfig], vocab_size: int) -> int:
    """Estimate the largest step of decoders that compute one after the other.

    The features that a head reads of the first decoder are included.
    """
    tapped = sum(
        step_tokens(recipe, each) * (len(each.taps) + 1) * each.hidden_size * each.dtype_bytes
        for each in decoders
        if isinstance(each, HeadConfig)
    )
    return tapped + max(estimate(recipe, each, vocab_size) for each in decoders)


def _check_positions(recipe: Recipe, decoders: list[DecoderConfig], longest_tokens: int) -> None:
    """Raise RecipeError where requests are longer than a draft model's positions."""
    most = min(each.reach for each in decoders)
    if longest_tokens > most:  # the model's own positions have already bounded the requests
        raise RecipeError(
            ("speculation.draft_path", "scheduler.max_request_tokens"),
            f"the draft model has {most} positions, and a request up to {longest_tokens} tokens",
            f"set scheduler.max_request_tokens to {most} or less, or name a draft model of more positions",
            value=recipe.speculation.draft_path,
            limit=most,
        )


def _slot_bytes(recipe: Recipe, configs: list[DecoderConfig], longest_tokens: int) -> int:
    """Return the bytes of the slot table and of the tables of rotary embeddings.

    The slot table has the token ids and the page table of each slot.
    """
    rope_bytes = sum(
        longest_tokens * 2 * max(rope.dim, rope.width) * each.dtype_bytes
        for each in configs
        for rope in (each.rope, each.window_rope)
        if rope is not None
    )
    return rope_bytes + recipe.scheduler.num_slots * 4 * (
        longest_tokens + -(-longest_tokens // recipe.cache.page_size)
    )


def _windows(
    recipe: Recipe, config: DecoderConfig, tensor: int, num_host_pages: Sequence[int] = ()
) -> tuple[WindowPages, ...]:
    """Return the pages of each window, with no number of them on the device yet."""
    size, windows = recipe.cache.page_size, config.window_groups
    counts = num_host_pages or [0] * len(windows)
    return tuple(
        WindowPages(window, size * tensor * token_bytes, most_pages(window, size), num_host_pages=count)
        for window, token_bytes, count in zip(windows, config.kv_bytes_by_group(tensor)[1:], counts)
    )


def _with_windows(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> MemoryPlan:
    """Return the plan with the numbers of pages of windows.

    By default a window has pages for twice as many requests as there are slots, so that prefixes can be
    resumed from while all slots run, and for the prompts of one step. They take at most half of the cache's
    memory that kept states leave, and are no more than all other pages; without layers that keep all tokens,
    they take all of it.
    """
    if recipe.cache.num_window_pages is not None and not sizing.windows:
        raise RecipeError(
            "cache.num_window_pages",
            "is read for models with a window shorter than a request that send no pages to other engines",
            "leave it out",
            value=recipe.cache.num_window_pages,
        )
    cache, scheduler = recipe.cache, recipe.scheduler
    budget, placed = _cache_bytes(recipe, sizing, num_devices), []
    if budget is not None:
        budget -= sizing.kept_bytes
    for each in sizing.windows:
        num_pages = cache.num_window_pages
        if num_pages is None:
            step_pages = -(-(scheduler.max_batch_tokens or 0) // cache.page_size)
            wanted = 1 + 2 * scheduler.num_slots * each.most_of_a_request + step_pages
            if budget is None:
                assert cache.num_pages is not None, "the number of pages is given"
                num_pages = min(wanted, cache.num_pages)
            else:
                equal = budget // max(
                    1, sizing.page_bytes + sum(other.page_bytes for other in sizing.windows)
                )
                half = budget // (2 * len(sizing.windows) * max(1, each.page_bytes))
                num_pages = min(wanted, half, equal) if sizing.page_bytes else equal
        placed.append(replace(each, num_pages=min(max(2, num_pages), MOST_PAGES)))
    return replace(sizing, windows=tuple(placed))


def _with_further_pools(
    recipe: Recipe, sizing: MemoryPlan, num_devices: int, has_windows: bool, has_states: bool
) -> MemoryPlan:
    """Return the plan with the numbers that follow from the recipe: of kept states, and windows' pages."""
    if has_states:
        sizing = _with_kept_states(recipe, sizing, num_devices)
    return _with_windows(recipe, sizing, num_devices) if has_windows else sizing


def _with_kept_states(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> MemoryPlan:
    """Return the plan with the number of states that are kept for later requests."""
    asked, least = recipe.cache.num_states, sizing.num_slot_states
    if not least:
        _check_state_keys(recipe.cache)
        return sizing
    if asked is not None and asked < least:
        raise RecipeError(
            ("cache.num_states", "scheduler.num_slots"),
            f"{least - 1} slots need a state each, and the first one stays empty",
            f"raise it to {least} or more",
            value=asked,
            limit=least,
        )
    _check_state_fraction(recipe.cache)
    if asked is None and not recipe.cache.prefix_sharing:
        return sizing
    budget = _cache_bytes(recipe, sizing, num_devices)
    kept = least - 1 if asked is None else asked - least
    if asked is None and budget is not None:
        kept = int(recipe.cache.state_fraction * max(0, budget) / max(1, sizing.state_bytes))
        left = budget - least_cache_bytes(recipe, sizing)  # a cache without these pages is refused
        kept = max(0, min(kept, left // max(1, sizing.state_bytes)))
    return replace(sizing, num_kept_states=min(kept, MOST_PAGES - least))


def _check_state_keys(cache: CacheSection) -> None:
    """Raise RecipeError for keys of states, which the model does not keep."""
    for each in fields(cache):
        value = getattr(cache, each.name)
        if each.name in STATE_KEYS and value != each.default:
            raise RecipeError(
                f"cache.{each.name}",
                "is read for models whose layers keep a recurrent state",
                "leave it out",
                value=value,
            )


def _check_state_fraction(cache: CacheSection) -> None:
    """Raise RecipeError for a share of the cache's memory where no memory is divided."""
    numbers = [name for name in ("num_states", "num_pages") if getattr(cache, name) is not None]
    if numbers and cache.state_fraction != CacheSection().state_fraction:
        raise RecipeError(
            ("cache.state_fraction", f"cache.{numbers[0]}"),
            f"is not read where `cache.{numbers[0]}` says a number",
            "leave one of them out",
            value=cache.state_fraction,
        )


def _cache_bytes(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> int | None:
    """Return the memory for all pages; None if their number is given."""
    cache = recipe.cache
    if cache.num_pages is not None:
        return None
    if cache.memory_fraction is not None:
        return int(cache.memory_fraction * sizing.memory_bytes) - sizing.beside_bytes
    assert cache.memory_gib is not None, "a recipe says how many pages there are"
    return int(num_devices * cache.memory_gib * GIB)


def _num_pages(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> int:
    """Return the number of pages of group 0, beside those of windows."""
    cache, page_bytes = recipe.cache, sizing.page_bytes
    budget = _cache_bytes(recipe, sizing, num_devices)
    if budget is None:
        assert cache.num_pages is not None, "the number of pages is given"
        return cache.num_pages
    beside = sizing.window_bytes + sizing.kept_bytes
    left, least = budget - beside, 2 * page_bytes
    if left < least and cache.memory_fraction is not None:
        raise too_small_a_part(recipe, sizing, least - left)
    if left < least:
        assert cache.memory_gib is not None, "a recipe says how many pages there are"
        num_pages = max(0, left) // max(1, page_bytes)
        raise too_few_pages("cache.memory_gib", cache.memory_gib, num_pages, page_bytes, sizing, num_devices)
    if not page_bytes:  # all layers have a window: such pages only name what windows hold
        return 1 + 2 * recipe.scheduler.num_slots * -(-sizing.longest_tokens // cache.page_size)
    return min(left // page_bytes, MOST_PAGES)


def _with_host_tier(
    recipe: Recipe, sizing: MemoryPlan, host_memory: int | None, num_devices: int
) -> MemoryPlan:
    """Return the plan with its host tier: as large as the recipe says, or as its share of the host allows."""
    host_gib, share = recipe.cache.host_gib, recipe.cache.host_fraction
    if not host_gib:
        return sizing
    host_bytes = _host_bytes(recipe, sizing) if host_memory is None else host_memory
    # Windows have the same share of the host's pages as of the device's
    num_pages = _num_pages(recipe, sizing, num_devices)
    shares = [each.num_pages / num_pages for each in sizing.windows]
    of_windows = sum(part * each.page_bytes for part, each in zip(shares, sizing.windows))
    states = sizing.num_states / num_pages
    page_bytes = sizing.page_bytes + of_windows + states * sizing.state_bytes

    def with_host_pages(count: int, because: str = "") -> MemoryPlan:
        counts = [max(2, int(part * count)) if count else 0 for part in shares]
        # A request is swapped out only if there is room for what its windows see, so that takes precedence
        least = [max(at, 1 + each.most_of_a_request) for at, each in zip(counts, sizing.windows)]
        beyond = sum(each.page_bytes * at for at, each in zip(least, sizing.windows)) - count * of_windows
        # So does the state of one request, beside the null one
        num_states = max(2, int(states * count)) if states and count else 0
        beyond += (num_states - count * states) * sizing.state_bytes
        left = count - math.ceil(max(0, beyond) / max(1, sizing.page_bytes))
        if count and left >= 2:
            counts, count = least, left
        elif num_states and because:
            count = num_states = 0
        elif num_states:
            raise too_few_host_states(host_gib, num_states, sizing, page_bytes)
        windows = tuple(replace(each, num_host_pages=at) for at, each in zip(counts, sizing.windows))
        sized = replace(sizing, num_host_pages=count, num_host_states=num_states)
        return replace(sized, windows=windows, host_because=because)

    wanted = int(host_gib * GIB / page_bytes)
    if wanted < 2:
        raise too_few_pages("cache.host_gib", host_gib, wanted, math.ceil(page_bytes))
    if share is None:
        if host_gib * GIB > host_bytes and recipe.device.kind != "cpu":
            raise too_much_of_the_host(host_gib, host_bytes, recipe, sizing)
        return with_host_pages(min(wanted, MOST_PAGES))
    left = max(0, _left_for_the_host(recipe, sizing, num_devices) if sizing.host_is_device else host_bytes)
    allowed = int(share * left / page_bytes)
    if wanted <= allowed:
        return with_host_pages(min(wanted, MOST_PAGES))
    allows = f"cache.host_fraction allows {share:g} of the {in_gib(left)} left"
    because = f"cache.host_gib is {host_gib:g}, and {allows}"
    return with_host_pages(allowed if allowed >= 2 else 0, because)


def _left_for_the_host(recipe: Recipe, sizing: MemoryPlan, num_devices: int) -> int:
    """Return the bytes left in a memory that also holds the cache, before the host tier is sized.

    A cache that takes a share of all memory takes what the host tier leaves of that share.
    """
    fraction = recipe.cache.memory_fraction
    if fraction is not None:
        return int(fraction * sizing.memory_bytes) - sizing.beside_bytes
    num_pages = _num_pages(recipe, sizing, num_devices)
    of_cache = sizing.window_bytes + sizing.kept_bytes + num_pages * sizing.page_bytes
    return sizing.memory_bytes - sizing.beside_bytes - of_cache


def _longest(recipe: Recipe, decoders: list[DecoderConfig], cache_tokens: int) -> tuple[int, str]:
    """Return the most tokens of a request, and the reason for this limit."""
    longest, because = _longest_of_model(recipe, decoders[0], cache_tokens)
    _check_positions(recipe, decoders, longest)
    return longest, because


def _longest_of_model(recipe: Recipe, config: DecoderConfig, cache_tokens: int) -> tuple[int, str]:
    asked, positions = recipe.scheduler.max_request_tokens, config.reach
    if asked is None:
        policy = recipe.scheduler.policy
        limits = ((positions, "the model's positions"), (cache_tokens, "what the cache holds"))
        longest, because = min(limits, key=lambda limit: limit[0])
        in_a_step = longest_request(recipe.scheduler, longest)
        return (
            (longest, because)
            if in_a_step == longest
            else (in_a_step, f"one step, in which {policy} computes a prompt")
        )
    for limit, what in ((positions, "positions of the model"), (cache_tokens, "tokens that the cache holds")):
        if asked > limit:
            raise RecipeError(
                "scheduler.max_request_tokens",
                f"{asked} is more than the {limit} {what}",
                f"lower it to {limit}" + ("" if limit == positions else ", or give the cache more pages"),
                value=asked,
                limit=limit,
            )
    return asked, "scheduler.max_request_tokens"
