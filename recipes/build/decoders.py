"""What do a model and the draft model beside it need of a machine?"""

from __future__ import annotations

from devices.shapes import AttentionShape
from kv_cache.storage import KVCache
from models import weights
from models.config import DecoderConfig
from models.decoder import Decoder
from models.dtypes import TORCH_DTYPES
from recipes.build.families import draft_config
from recipes.build.machine import Machine
from recipes.build.memory_plan import MemoryPlan
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError


def shape_of(recipe: Recipe, config: DecoderConfig) -> AttentionShape:
    """What the attention of this decoder is asked for."""
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=recipe.cache.page_size,
        scale=config.head_dim**-0.5,
        dtype=TORCH_DTYPES[config.dtype],
        windows=config.windows,
        int8_pages=config.int8_cache,
    )


def draft_decoder(
    recipe: Recipe, config: DecoderConfig, memory: MemoryPlan, machine: Machine
) -> Decoder | None:
    """The loaded draft model of a recipe, if it names one; raises ValueError for one that cannot be used."""
    path, draft = recipe.speculation.draft_path, draft_config(recipe, config)
    if draft is None or path is None:
        return None
    try:
        ops, attention = machine.operators(shape_of(recipe, draft))
        attention.check()
        attention.check_longest(memory.longest_tokens)
        if draft.quantization is not None:
            ops.check_int8(TORCH_DTYPES[draft.dtype])
        decoder = Decoder(draft, ops, attention)
        weights.load(decoder, path)
    except ValueError as error:
        raise RecipeError("speculation.draft_path", f"the draft model: {error}", value=path) from error
    return decoder


def cache_of(decoder: Decoder, recipe: Recipe, memory: MemoryPlan, beside: KVCache | None = None) -> KVCache:
    """Keys and values of a decoder, in as many pages as were planned."""
    config, attention = decoder.part, decoder.attention
    return KVCache(
        config.num_layers,
        memory.num_pages,
        recipe.cache.page_size,
        config.num_kv_heads,
        config.head_dim,
        TORCH_DTYPES[config.dtype],
        attention.device,
        num_host_pages=memory.num_host_pages,
        allocate=attention.new_pages,
        indexed=attention.indexed,
        beside=beside,
    )
