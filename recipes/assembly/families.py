"""Read the decoder's configuration that a recipe or a checkpoint names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from borders.abbreviate import abbreviate
from borders.file_bounds import check_regular, is_there
from kv_cache.groups import DType
from models.checkpoint.files import tensor_names
from models.checkpoint.huggingface import check_attended
from models.checkpoint.int4 import check_groups, kept_int4
from models.config import DecoderConfig
from models.drafting.config import Eagle3Config, MtpConfig, mtp_config
from models.parallel.placement import read as read_placement
from models.parallel.share import Share, check_experts, check_ranks, check_stages
from models.quantization import Quantization
from recipes.config_overrides import named_overrides, with_overrides
from recipes.deepseek.model import v2 as deepseek_v2
from recipes.deepseek.model import v3 as deepseek_v3
from recipes.gemma2.model import config as gemma2
from recipes.gemma3.model import config as gemma3
from recipes.glm4.model import config as glm4
from recipes.glm4_moe.model import config as glm4_moe
from recipes.gpt_oss.model import config as gpt_oss
from recipes.internlm3.model import config as internlm3
from recipes.llama.eagle3 import config as eagle3
from recipes.llama.model import config as llama
from recipes.mistral.model import config as mistral
from recipes.mixtral.model import config as mixtral
from recipes.model_folder import check_kind
from recipes.phi3.model import config as phi3
from recipes.qwen2.model import config as qwen2
from recipes.qwen2_moe.model import config as qwen2_moe
from recipes.qwen3.model import config as qwen3
from recipes.qwen3_moe.model import config as qwen3_moe
from recipes.schema.recipe import Recipe, from_root
from recipes.schema.recipe_error import RecipeError

Auto = Literal["auto"]
FAMILIES = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
    "internlm3": internlm3,
    "kimi_k2": deepseek_v3,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def model_config(recipe: Recipe) -> DecoderConfig:
    """Return the decoder that a recipe names; raises ValueError for one that is not supported."""
    model = recipe.model
    if model.path is not None:
        config = config_in(model.path, model.config_overrides)
    else:
        assert model.config is not None, "a recipe has a model.path or a model.config"
        config = decoder_config(model.config)
    config = _as_asked(config, recipe, model.quantization, model.dtype)
    if model.weights == "random" and config.quantization is not None:
        config = replace(config, quantization=replace(config.quantization, is_stored=False))
    return replace(config, window_groups=window_groups(recipe, config))


def overridden_fields(recipe: Recipe) -> list[str]:
    """Return a line for each field of the checkpoint's config.json that the recipe replaces."""
    model = recipe.model
    if model.path is None or not model.config_overrides:
        return []
    return list(named_overrides(read(model.path), model.config_overrides))


def window_groups(recipe: Recipe, config: DecoderConfig) -> tuple[int, ...]:
    """Return the windows whose layers have pages of their own, which are given back behind the window.

    Pages that go to a tier or to another engine hold all layers, so there are none with these. A window that
    holds the longest request would give nothing back.
    """
    asked = recipe.server
    if recipe.cache.tier is not None or asked.pages_at is not None or asked.prompt_replicas:
        return ()
    longest = recipe.scheduler.max_request_tokens or config.max_positions
    return tuple(sorted({each for each in config.windows if each is not None and each < longest}))


def share_of(recipe: Recipe, rank: int) -> tuple[DecoderConfig, Share]:
    """Return the decoder that a recipe names, and this rank's share of it; raises ValueError."""
    config, parallel = model_config(recipe), recipe.parallel
    if recipe.device.count_experts and not config.num_mixtures:
        raise RecipeError("device.count_experts", "the model has no experts", "leave it out", value=True)
    try:
        name = "expert"
        check_experts(config, parallel.tensor, parallel.expert)
        name = "tensor"
        check_ranks(config, parallel.tensor, parallel.expert)
        check_groups(config, parallel.tensor, parallel.expert)
        name = "pipeline"
        check_stages(config, parallel.pipeline)
        if parallel.placement is not None and config.mixture is not None:
            name = "placement"
            placement = read_placement(parallel.placement, config)
            config = replace(config, mixture=replace(config.mixture, placement=placement))
    except ValueError as error:
        raise RecipeError(f"parallel.{name}", str(error), value=getattr(parallel, name)) from error
    return config, Share.of_rank(rank, parallel.tensor, parallel.pipeline, parallel.expert)


def draft_config(recipe: Recipe, config: DecoderConfig) -> DecoderConfig | None:
    """Return the smaller decoder, or the head, that drafts for this one, or None if a recipe names none.

    Raises RecipeError for one that cannot draft for this decoder.
    """
    asked = recipe.speculation
    if asked.kind == "mtp":
        return _mtp_config(recipe, config)
    if asked.draft_path is None:
        return None
    name, place = "speculation.draft_path", from_root(asked.draft_path)
    if asked.kind == "eagle3":
        return _head_config(recipe, config, asked.draft_path)
    try:
        draft = config_in(asked.draft_path)
    except ValueError as error:
        raise RecipeError(name, str(error), value=asked.draft_path) from error
    if draft.vocab_size != config.vocab_size:
        raise RecipeError(
            name,
            f"{place} has a vocabulary of {draft.vocab_size} tokens, and the model one of"
            f" {config.vocab_size}",
            "name a smaller model of the same family and tokenizer",
            value=asked.draft_path,
            limit=config.vocab_size,
        )
    dtype = recipe.model.dtype if asked.draft_dtype == "auto" else asked.draft_dtype
    return _as_asked(draft, recipe, asked.draft_quantization, dtype)


def _mtp_config(recipe: Recipe, config: DecoderConfig) -> MtpConfig:
    if recipe.model.weights == "random":
        raise RecipeError(
            ("speculation.kind", "model.weights"),
            "the layer that predicts further tokens is read from the model's checkpoint, and its weights are"
            " random",
            "take another kind, or the weights of model.path",
            value="mtp",
        )
    try:
        return mtp_config(config, _num_kept(recipe))
    except ValueError as error:
        raise RecipeError("speculation.kind", str(error), "take another kind", value="mtp") from error


def _num_kept(recipe: Recipe) -> int:
    """Return the number of features that a page keeps for a head."""
    return min(recipe.cache.page_size, recipe.speculation.max_tokens + 1)


def _head_config(recipe: Recipe, config: DecoderConfig, path: Path) -> Eagle3Config:
    try:
        head = eagle3(_json(path / "config.json"), config, tensor_names(path), _num_kept(recipe))
    except ValueError as error:
        raise RecipeError("speculation.draft_path", f"the head: {error}", value=path) from error
    return head


def _as_asked(config: DecoderConfig, recipe: Recipe, quantization: str, dtype: DType | Auto) -> DecoderConfig:
    if quantization == "w8a8" and config.quantization is None:
        config = replace(config, quantization=Quantization(is_stored=False))
    if quantization == "w4a16":
        try:
            config = kept_int4(config)
        except ValueError as error:
            fix = "leave it out"
            raise RecipeError("model.quantization", str(error), fix, value=quantization) from error
    if dtype != "auto":
        config = replace(config, dtype=dtype)
    return replace(config, int8_cache=recipe.cache.dtype == "int8")


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder of a parsed config.json, by its `model_type`.

    Raises ValueError for a family that is not supported, and for a value that the decoder cannot honour.
    """
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"the model's family is {abbreviate(family)}; supported are {', '.join(FAMILIES)}")
    config = FAMILIES[family](hf)
    check_attended(hf, config.windows, config.max_positions)
    outside = [token for token in config.eos_token_ids if not 0 <= token < config.vocab_size]
    if outside and hf.get("eos_token_id") is None:  # the family's default, which a smaller vocabulary lacks
        return replace(
            config, eos_token_ids=tuple(each for each in config.eos_token_ids if each not in outside)
        )
    if outside:
        raise ValueError(
            f"the model's configuration has eos_token_id: {abbreviate(outside[0])}; its vocabulary goes"
            f" from 0 to {config.vocab_size - 1}"
        )
    return config


def config_in(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return the decoder of a checkpoint directory, with some fields of its config.json replaced.

    Raises ValueError like `decoder_config`, with the directory's path.
    """
    hf = with_overrides(read(path), overrides or {})
    try:
        return decoder_config(hf)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint directory.

    The end tokens of its generation_config.json, if there is one, replace those of config.json: a chat model
    often ends its turn with a token of its own.
    """
    check_kind(Path(path))
    hf = _json(Path(path) / "config.json")
    generation = Path(path) / "generation_config.json"
    if is_there(generation):
        end = _json(generation).get("eos_token_id")
        hf = hf if end is None else {**hf, "eos_token_id": end}
    return hf


def _json(path: Path) -> dict[str, Any]:
    if not is_there(path):
        raise ValueError(f"{path} does not exist; give the directory of a Hugging Face checkpoint")
    check_regular(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return value
