"""The ledger holds against what is really allocated, and what cannot fit is refused with the mend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attention.reference import Attention, AttentionShape
from kv_cache.storage import KVCache
from models.decoder import Decoder
from models.fused import Fused
from recipes.keys import RecipeError
from recipes.recipe import CacheSection, DeviceSection, ModelSection, Recipe, SchedulerSection
from recipes.sizing import GIB, machine_memory_bytes, max_positions, model_config, report, size

LLAMA = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
PAGE_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, kv heads, head size, float32


def made(
    changes: dict[str, Any] | None = None,
    *,
    dtype: Any = "auto",
    pages: int | None = 64,
    gib: float | None = None,
    page_size: int = 16,
    longest: int | None = None,
) -> Recipe:
    return Recipe(
        model=ModelSection(config={**LLAMA, **(changes or {})}, weights="random", dtype=dtype),
        device=DeviceSection(kind="cpu"),
        cache=CacheSection(page_size=page_size, num_pages=pages, memory_gib=gib),
        scheduler=SchedulerSection(num_slots=4, max_batch_tokens=64, max_request_tokens=longest),
    )


def sized(recipe: Recipe, memory_bytes: int = 4 * GIB):
    return size(recipe, model_config(recipe), memory_bytes)


def refusal(recipe: Recipe, memory_bytes: int = 4 * GIB) -> str:
    with pytest.raises(RecipeError) as caught:
        sized(recipe, memory_bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_ledger_equals_what_is_allocated(family, tied, dtype):
    recipe = made({"model_type": family, "tie_word_embeddings": tied}, dtype=dtype)
    config, sizing = model_config(recipe), sized(recipe)
    shape = AttentionShape(4, 2, config.head_dim, 16, 1.0, config.dtype, config.windows)
    decoder = Decoder(config, Fused(), Attention(shape))
    assert sizing.weight_bytes == sum(each.nbytes for each in decoder.parameters())
    cache = KVCache(2, sizing.num_pages, 16, 2, config.head_dim, config.dtype)
    assert sizing.cache_bytes == sum(each.nbytes for each in (*cache.keys, *cache.values))


def test_memory_is_turned_into_whole_pages():
    sizing = sized(made(pages=None, gib=1.0))
    assert sizing.page_bytes == PAGE_BYTES
    assert sizing.num_pages == GIB // PAGE_BYTES
    assert sizing.cache_bytes <= GIB


def test_the_longest_request_is_what_every_limit_allows():
    assert sized(made()).longest_tokens == 512
    assert sized(made(longest=500)).longest_tokens == 500
    few = sized(made(pages=3))
    assert few.longest_tokens == 2 * 16 + 1
    assert few.longest_because == "what the cache holds"


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, 512),
    ],
)
def test_a_stretched_rope_reaches_further(rope, positions):
    assert max_positions(model_config(made({"rope_scaling": rope}))) == positions


def test_what_cannot_fit_is_refused_with_the_mend():
    assert refusal(made(longest=513)) == (
        "scheduler.max_request_tokens: 513 is more than the 512 positions of the model; lower it to 512"
    )
    assert refusal(made({"head_dim": 64}, pages=None, gib=0.001, longest=500)).startswith(
        "scheduler.max_request_tokens: 500 is more than the 497 tokens that the cache holds; lower it"
    )
    coarse = {"changes": {"head_dim": 64}, "pages": None, "page_size": 1024}
    few = refusal(made(**coarse, gib=0.002))
    assert few.startswith("cache.memory_gib: 0.002 GiB hold 1 pages of 2097152 bytes, and 2 is the least; ")
    assert sized(made(**coarse, gib=float(few.partition("at least ")[2].partition(",")[0]))).num_pages == 2
    many = refusal(made(pages=2**20), GIB)
    assert many.startswith("cache.num_pages: ")
    mend = int(many.rpartition(" ")[2])
    sized(made(pages=mend), GIB)
    assert refusal(made(pages=mend + 1), GIB)
    much = refusal(made(pages=None, gib=2.0), GIB)
    sized(made(pages=None, gib=float(much.rpartition(" ")[2])), GIB)
    assert refusal(made(), GIB // 2).endswith("choose a smaller model or model.dtype")


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="eos_token_id: 320; its vocabulary goes from 0 to 319"):
        model_config(made({"eos_token_id": 320}))


def test_the_dtype_of_the_recipe_replaces_that_of_the_model():
    assert model_config(made()).dtype == torch.float32
    assert model_config(made(dtype="bfloat16")).dtype == torch.bfloat16


def test_the_report_says_what_was_counted():
    recipe = made(pages=65)
    config = model_config(recipe)
    lines = dict(report(recipe, config, sized(recipe)))
    assert lines["pages"].startswith("65; ")
    assert lines["all slots at longest"] == "4 x 32 pages; the cache holds 50%"
    assert lines["longest request"] == "512 tokens (the model's positions)"


def test_this_machine_has_memory():
    assert 2**28 < machine_memory_bytes() < 2**50
