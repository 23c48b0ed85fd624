"""Check a recipe for an NPU against the operators of its product, where there is no device.

An engine checks the same of the device that it finds, which may differ by what verify_npu.sh found there.
"""

from __future__ import annotations

from devices.ascend_limits import PRODUCTS, WIDE_HEAD, AscendProduct
from models.checkpoint.int4 import inputs_of_experts, largest_side
from models.config import DecoderConfig
from models.drafting.config import MtpConfig
from models.parallel.share import Share
from recipes.assembly.families import draft_part
from recipes.schema.recipe import Recipe


def check_operators(recipe: Recipe, config: DecoderConfig, longest_tokens: int, share: Share) -> None:
    """Raise ValueError for what the operators of the recipe's product do not take of a rank's part.

    Nothing is known of an NPU whose product is left to the device.
    """
    device = recipe.device
    if share.contexts > 1 and not divides_pages(recipe, config):
        other = "batch_invariant to false" if device.batch_invariant else "attention to reference"
        raise ValueError(
            f"parallel.context is {share.contexts}; this model's attention on {device.product or device.kind}"
            f" gives no sums by which parts are joined: set it to 1, or device.{other}"
        )
    for product in PRODUCTS:
        if device.kind == "npu" and product.name == device.product:
            _check(recipe, share.part(config), product, longest_tokens, share.contexts)
            draft = draft_part(recipe, config, share)
            if draft is not None and not isinstance(draft, MtpConfig):  # which is as the model's own layers
                _check(recipe, draft, product, longest_tokens)


def divides_pages(recipe: Recipe, config: DecoderConfig) -> bool:
    """Whether the attention of a recipe's device gives the sums by which parts of a context are joined.

    An NPU whose product is left to the device may, and so may a CPU whose compiler is looked for at a start.
    """
    device, is_latent = recipe.device, config.latent is not None
    if device.attention == "reference":
        return True
    if device.kind == "cuda":
        return is_latent  # Latents are read by plain torch there, which returns sums.
    if device.kind == "cpu":
        return not device.batch_invariant if is_latent else device.compile is not False
    for product in PRODUCTS:
        if product.name == device.product:
            if is_latent:
                return product.sums_latents
            is_wide = config.head_dim == WIDE_HEAD and not config.int8_cache
            return product.is_fused and not is_wide
    return True


def _check(
    recipe: Recipe, config: DecoderConfig, product: AscendProduct, longest_tokens: int, contexts: int = 1
) -> None:
    # Imported here because they import torch, which takes a second
    from attention.divided import check_divided, shapes_of
    from models.layers.dtypes import TORCH_DTYPES
    from recipes.assembly.decoders import shape_of

    dtype, shape = TORCH_DTYPES[config.dtype], shape_of(recipe.cache.page_size, config)
    product.check_dtype(dtype)
    shapes = [shape]
    if contexts > 1:
        check_divided(shape, contexts)
        shapes = [*shapes_of(shape, contexts)]
    if recipe.device.attention != "reference":
        for each in shapes:
            product.check(each, takes_float32=recipe.device.virtual_fp32)
        product.check_longest(longest_tokens)
    if config.int8_forms:
        product.check_int8(dtype, config.int8_forms, config.largest_int8_side)
    if config.kept_form is not None:
        size = config.kept_form.group_size
        product.check_int4(dtype, size, largest_side(config), inputs_of_experts(config))
