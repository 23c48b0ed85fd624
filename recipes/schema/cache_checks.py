"""Check that the machine can keep keys and values in int8, and that a cache has events to publish."""

from __future__ import annotations

from collections.abc import Iterator

from recipes.schema.recipe_error import RecipeError

# These are ratios of query heads to key-value heads, of 128 numbers each, for which
# npu_fused_infer_attention_score_v2 reads int8 pages in FRACTAL_NZ. It takes a scale for each channel, or one
# for each token that all heads share.
NPU_HEADS = ("10:1", "64:8", "80:8", "128:16")


def int8_contradictions(dtype: str, kind: str, attention: str) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.dtype: int8`, which has one scale for each token and head."""
    if dtype != "int8":
        return
    if kind == "npu":
        yield RecipeError(
            ("cache.dtype", "device.kind"),
            f"an NPU reads int8 keys and values only for {', '.join(NPU_HEADS)} heads of 128, and none with a"
            " scale for each token and head",
            "set it to auto",
            value=dtype,
        )
    if attention != "reference":
        yield RecipeError(
            ("cache.dtype", "device.attention"),
            f"only plain torch reads int8 keys and values, and device.attention is {attention}",
            "set device.attention to reference, or this to auto",
            value=dtype,
        )


def event_contradictions(endpoint: str | None, *, is_sharing: bool) -> Iterator[RecipeError]:
    """Yield what contradicts `cache.events`."""
    if endpoint is not None and not is_sharing:
        yield RecipeError(
            ("cache.events", "cache.prefix_sharing"),
            "no page can be found, so that there is nothing to publish",
            "set cache.prefix_sharing to true, or leave this out",
            value=endpoint,
        )
