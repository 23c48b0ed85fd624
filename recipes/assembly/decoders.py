"""Build the decoders of a recipe: the model's shape for operators, its cache, and the drafter beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from attention.divided import DividedAttention, DividedLatentAttention, check_divided, shapes_of
from attention.reference import Attention
from attention.sparse import SparseAttention
from borders.version import VERSION
from continuous_batching.slots import SlotPool
from devices.shapes import AttentionShape, IndexShape, LatentShape
from kv_cache.device.storage import KVCache, LayerPages
from models.checkpoint import weights
from models.checkpoint.kept_weights import KeptWeights, origin_of
from models.checkpoint.modelslim import rotation_of
from models.config import DecoderConfig, HeadConfig, LatentConfig, LayerState
from models.decoder import Decoder
from models.drafting import eagle as head_weights
from models.drafting import mtp as mtp_weights
from models.drafting.config import Eagle3Config, MtpConfig
from models.drafting.drafter import Drafter, HeadDrafter
from models.drafting.eagle import Eagle3
from models.drafting.mtp import Mtp
from models.head import FIRST_KEY, FeaturePages, Head
from models.layers.dtypes import TORCH_DTYPES
from models.layers.latent import LatentSelfAttention
from models.layers.recurrent import new_states
from models.ops.reference import Ops
from models.parallel.group import Group, dividing_pages
from models.parallel.share import Share
from recipes.assembly import versions
from recipes.assembly.families import draft_config, draft_part
from recipes.assembly.memory_plan import MemoryPlan
from recipes.machine import Machine
from recipes.schema.keys import keys_of
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import DRAFTERS


def shape_of(page_size: int, config: DecoderConfig) -> AttentionShape:
    """Return what this decoder needs of the attention operators, in pages of `page_size` tokens."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        scale=config.scale,
        dtype=TORCH_DTYPES[config.dtype],
        windows=config.windows,
        int8_pages=config.int8_cache,
        first_key=FIRST_KEY if isinstance(config, HeadConfig) else 0,
        score_cap=config.score_cap,
        has_sinks=config.has_sinks,
        latent=None if config.latent is None else latent_shape(config.latent),
    )


def operators_of(
    recipe: Recipe, machine: Machine, part: DecoderConfig, share: Share, group: Group
) -> tuple[Ops, Attention]:
    """Return the device's operators, and attention over the pages that a rank with this share holds.

    Raises ValueError where its neighbours cannot divide them.
    """
    shape, count = shape_of(recipe.cache.page_size, part), share.contexts
    if count == 1:
        return machine.operators(shape)
    check_divided(shape, count)
    of_parts, of_whole = shapes_of(shape, count)
    (ops, parts), (_, whole) = machine.operators(of_parts), machine.operators(of_whole)
    kind = DividedAttention if shape.latent is None else DividedLatentAttention
    return ops, kind(shape, parts, whole, dividing_pages(group, count))


def latent_shape(latent: LatentConfig) -> LatentShape:
    """Return what latent attention adds to a shape."""
    index = latent.index
    of_index = None if index is None else IndexShape(index.num_heads, index.head_dim, index.top_k)
    return LatentShape(latent.rope_dim, latent.nope_dim, latent.value_dim, of_index)


def draft_decoder(
    recipe: Recipe,
    config: DecoderConfig,
    memory: MemoryPlan,
    machine: Machine,
    group: Group,
    share: Share,
) -> Decoder | Head | None:
    """Return the loaded draft model, or head, of a recipe, if it names one and this is the last stage.

    Raises ValueError for one that cannot be used. A rank of the group holds only its share of a head.
    """
    path, draft, part = (
        recipe.speculation.draft_path,
        draft_config(recipe, config),
        draft_part(recipe, config, share),
    )
    if draft is None or part is None:
        return None
    if isinstance(draft, MtpConfig):
        return _own_layer(recipe, draft, machine, group, share)
    assert path is not None, "a draft model and a head of their own have a folder"
    try:
        ops, attention = machine.operators(shape_of(recipe.cache.page_size, part))
        attention.check()
        attention.check_longest(memory.longest_tokens)
        if draft.int8_forms:
            ops.check_int8(TORCH_DTYPES[draft.dtype], draft.int8_forms, part.largest_int8_side)
        if isinstance(draft, Eagle3Config):
            head = Eagle3(draft, ops, attention, group, share.within_stage)
            head_weights.load(head, path, rotation_of(config.quantization, config.hidden_size))
            return head
        decoder = Decoder(draft, ops, attention)
        weights.load(decoder, path)
    except ValueError as error:
        name = DRAFTERS[recipe.speculation.kind]
        raise RecipeError("speculation.draft_path", f"the {name}: {error}", value=path) from error
    return decoder


def kept_weights(
    recipe: Recipe,
    config: DecoderConfig,
    share: Share,
    name: str,
    module: nn.Module,
    tell: Callable[[str], None] = lambda _: None,
) -> KeptWeights | None:
    """Return where a rank with this share keeps the weights of a module of this name.

    None where the recipe keeps none.
    """
    folder, path = recipe.model.kept_in, recipe.model.path
    if folder is None or path is None:
        return None
    asked = {
        each.name: recipe.value(each.name)
        for each in keys_of(Recipe)
        if each.name.startswith("model.") and each.kind is not Path
    }
    placement = None if config.mixture is None else config.mixture.placement
    # Rows of queries lie as the device's operators take them, which follows from what was found out of it too
    orders = [each.joins for each in module.modules() if isinstance(each, LatentSelfAttention)]
    made_by = VERSION, versions.installed(), recipe.device.kind, recipe.device.product
    facts = *made_by, asked, share, placement, orders
    file = f"{name}-{share.stage}-of-{share.stages}-{share.tensor}-of-{share.tensors}.safetensors"
    return KeptWeights(folder / file, origin_of(path, *map(repr, facts)), tell)


def _own_layer(recipe: Recipe, config: MtpConfig, machine: Machine, group: Group, share: Share) -> Mtp:
    """Return the loaded layer by which the model's checkpoint predicts further tokens (MTP).

    Its needs of the device are those of the model's own layers.
    """
    assert recipe.model.path is not None, "the layer is read from the model's checkpoint"
    own = share.within_stage
    head = Mtp(config, *operators_of(recipe, machine, own.part(config), own, group), group, own)
    try:
        mtp_weights.load(head, recipe.model.path, kept_weights(recipe, config, share, "mtp", head))
    except ValueError as error:
        raise RecipeError("speculation.kind", f"its layer: {error}", value="mtp") from error
    return head


def layers_of(decoder: Decoder | Head) -> list[LayerPages]:
    """Return what the cache holds for a decoder, layer by layer; the features that a head reads come last."""
    config, attention = decoder.part, decoder.attention
    layers: list[LayerPages] = []
    made: dict[LayerState, partial[tuple[torch.Tensor, ...]]] = {}
    for layer, spec in enumerate(config.layers):
        state = config.layer_state(layer)
        if state is None:
            planes = new_planes(attention, spec.index == "shared")
            heads = 1 if config.latent is not None else config.num_kv_heads
            own = attention.head_axis, attention.num_runs
            layers.append(LayerPages(planes, config.group_of(layer), heads, *own, order=attention.order))
        else:  # one function for all layers that make equal planes
            new = made.setdefault(state, partial(new_states, state, device=attention.device))
            assert config.recurrent is not None, "a layer keeps a state by the sizes of its attention"
            group, heads = 1 + len(config.window_groups), config.recurrent.num_key_heads
            layers.append(LayerPages(new, group, heads, holds_state=True))
    if isinstance(config, HeadConfig):
        shape, dtype = (config.num_kept, config.hidden_size), TORCH_DTYPES[config.dtype]
        layers.append(
            LayerPages(lambda count: (torch.zeros(count, *shape, dtype=dtype, device=attention.device),))
        )
    return layers


def new_planes(attention: Attention, shares_choice: bool) -> Callable[[int], tuple[torch.Tensor, ...]]:
    """Return what makes the planes of a layer; without an indexer of its own it keeps no index keys."""
    if not shares_choice:
        return attention.new_planes
    assert isinstance(attention, SparseAttention), "the device's operators are those of the model"
    return attention.new_shared_planes


def cache_of(decoders: Sequence[Decoder | Head], recipe: Recipe, memory: MemoryPlan) -> KVCache:
    """Return the cache of a decoder, and of the draft model or head after it, in as many pages as planned."""
    return KVCache(
        [layer for decoder in decoders for layer in layers_of(decoder)],
        recipe.cache.page_size,
        [memory.num_pages, *memory.further_pools],
        [memory.num_host_pages, *(each.num_host_pages for each in memory.windows), memory.num_host_states],
        indexed=decoders[0].attention.indexed,
    )


def drafter_of(
    draft: Decoder | Head,
    target: Decoder,
    cache: KVCache,
    slots: SlotPool,
    most_tokens: int,
    recipe: Recipe,
) -> Drafter:
    """Return the drafter, whose layers come last in the cache."""
    count = draft.part.num_layers
    first = len(cache.layers) - len(layers_of(draft))
    own = cache.part(first, count)
    if isinstance(draft, Decoder):
        return Drafter(draft, own, slots, most_tokens)
    draft.attach(target, FeaturePages(cache, first + count))
    return HeadDrafter(draft, own, slots, most_tokens, recipe.speculation.max_tokens)
