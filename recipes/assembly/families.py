"""Read the decoder's configuration that a recipe or a checkpoint names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from borders.files import is_there, json_object
from borders.refusal import abbreviate
from kv_cache.groups import DType
from kv_cache.states import GRID
from models.checkpoint.files import first_dtype, is_body, tensor_names
from models.checkpoint.huggingface import check_attended, refused
from models.checkpoint.int4 import check_groups, kept_int4
from models.checkpoint_names import PREDICTION, alone
from models.config import DecoderConfig, check_fused
from models.drafting.config import Eagle3Config, MtpConfig, mtp_config
from models.modelslim import check_cache, described, without_method
from models.parallel.placement import read as read_placement
from models.parallel.share import Share, check_contexts, check_experts, check_ranks, check_stages
from models.quantization import KEY, Quantization
from recipes.config_overrides import named_overrides, with_overrides
from recipes.deepseek import model as deepseek
from recipes.ernie4_5 import model as ernie4_5
from recipes.gemma2 import model as gemma2
from recipes.gemma3 import model as gemma3
from recipes.glm4 import model as glm4
from recipes.glm4_moe import model as glm4_moe
from recipes.glm4_moe_lite import model as glm4_moe_lite
from recipes.glm_moe_dsa import model as glm_moe_dsa
from recipes.gpt_oss import model as gpt_oss
from recipes.hunyuan import model as hunyuan
from recipes.hy_v3 import model as hy_v3
from recipes.internlm3 import model as internlm3
from recipes.kimi_linear import model as kimi_linear
from recipes.llama import model as llama
from recipes.llama.eagle3 import config as eagle3
from recipes.minimax_m2 import model as minimax_m2
from recipes.mistral import model as mistral
from recipes.mixtral import model as mixtral
from recipes.model_folder import check_kind
from recipes.olmo3 import model as olmo3
from recipes.phi3 import model as phi3
from recipes.qwen2 import model as qwen2
from recipes.qwen2_moe import model as qwen2_moe
from recipes.qwen3 import model as qwen3
from recipes.qwen3_5 import model as qwen3_5
from recipes.qwen3_moe import model as qwen3_moe
from recipes.qwen3_next import model as qwen3_next
from recipes.schema.recipe import Recipe, from_root
from recipes.schema.recipe_error import RecipeError
from recipes.seed_oss import model as seed_oss

Auto = Literal["auto"]
CONFIG, GENERATION = "the model's configuration", "generation_config.json"
# Keys that a configuration may have beside its text_config
_OF_THE_WHOLE = ("tie_word_embeddings", "eos_token_id", "quantization_config", "dtype", "torch_dtype")
# Families whose layer for further tokens is known
WITH_MTP = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
# Drafts of a step beside a recurrent state: with the known token as many as advance token by token
MOST_DRAFTS = 7
MOST_UNKNOWN = 20  # fields that one message lists
GPTQ_FILE, AWQ_FILE = "quantize_config.json", "quant_config.json"
MODELOPT_FILE = "hf_quant_config.json"
FAMILIES = {
    "deepseek_v2": deepseek.v2,
    "deepseek_v3": deepseek.v3,
    "deepseek_v32": deepseek.v32,
    "ernie4_5": ernie4_5.dense,
    "ernie4_5_moe": ernie4_5.sparse,
    "gemma2": gemma2.config,
    "gemma3_text": gemma3.config,
    "glm4": glm4.config,
    "glm4_moe": glm4_moe.config,
    "glm4_moe_lite": glm4_moe_lite.config,
    "glm_moe_dsa": glm_moe_dsa.config,
    "gpt_oss": gpt_oss.config,
    "hunyuan_v1_dense": hunyuan.dense,
    "hunyuan_v1_moe": hunyuan.sparse,
    "hy_v3": hy_v3.config,
    "internlm3": internlm3.config,
    "kimi_k2": deepseek.v3,
    "kimi_linear": kimi_linear.config,
    "llama": llama.config,
    "minimax_m2": minimax_m2.config,
    "ministral3": mistral.ministral3,
    "mistral": mistral.config,
    "mixtral": mixtral.config,
    "olmo3": olmo3.config,
    "phi3": phi3.config,
    "qwen2": qwen2.config,
    "qwen2_moe": qwen2_moe.config,
    "qwen3": qwen3.config,
    "qwen3_5_moe_text": qwen3_5.sparse,
    "qwen3_5_text": qwen3_5.dense,
    "qwen3_moe": qwen3_moe.config,
    "qwen3_next": qwen3_next.config,
    "seed_oss": seed_oss.config,
}
# What each family makes of the fields of its config.json
FIELDS = {
    "deepseek_v2": deepseek.V2_FIELDS,
    "deepseek_v3": deepseek.V3_FIELDS,
    "deepseek_v32": deepseek.V32_FIELDS,
    "ernie4_5": ernie4_5.DENSE_FIELDS,
    "ernie4_5_moe": ernie4_5.SPARSE_FIELDS,
    "gemma2": gemma2.FIELDS,
    "gemma3_text": gemma3.FIELDS,
    "glm4": glm4.FIELDS,
    "glm4_moe": glm4_moe.FIELDS,
    "glm4_moe_lite": glm4_moe_lite.FIELDS,
    "glm_moe_dsa": glm_moe_dsa.FIELDS,
    "gpt_oss": gpt_oss.FIELDS,
    "hunyuan_v1_dense": hunyuan.DENSE_FIELDS,
    "hunyuan_v1_moe": hunyuan.SPARSE_FIELDS,
    "hy_v3": hy_v3.FIELDS,
    "internlm3": internlm3.FIELDS,
    "kimi_k2": deepseek.V3_FIELDS,
    "kimi_linear": kimi_linear.FIELDS,
    "llama": llama.FIELDS,
    "minimax_m2": minimax_m2.FIELDS,
    "ministral3": mistral.MINISTRAL_FIELDS,
    "mistral": mistral.FIELDS,
    "mixtral": mixtral.FIELDS,
    "olmo3": olmo3.FIELDS,
    "phi3": phi3.FIELDS,
    "qwen2": qwen2.FIELDS,
    "qwen2_moe": qwen2_moe.FIELDS,
    "qwen3": qwen3.FIELDS,
    "qwen3_5_moe_text": qwen3_5.SPARSE_FIELDS,
    "qwen3_5_text": qwen3_5.DENSE_FIELDS,
    "qwen3_moe": qwen3_moe.FIELDS,
    "qwen3_next": qwen3_next.FIELDS,
    "seed_oss": seed_oss.FIELDS,
}
# Families that read images, too, whose text is read: the families of their text, the usual one first, and
# whether the head is tied to the embedding where config.json is silent
NESTED = {
    "gemma3": (("gemma3_text",), True),
    "kimi_k25": (("kimi_k2", "deepseek_v3"), False),
    "mistral3": (("mistral", "ministral3"), False),
    "qwen3_5": (("qwen3_5_text",), False),
    "qwen3_5_moe": (("qwen3_5_moe_text",), False),
}
SUPPORTED = sorted({*FAMILIES, *NESTED})


def model_config(recipe: Recipe) -> DecoderConfig:
    """Return the decoder that a recipe names; raises ValueError for one that is not supported."""
    model = recipe.model
    if model.path is not None:
        config = config_in(model.path, model.config_overrides)
    else:
        assert model.config is not None, "a recipe has a model.path or a model.config"
        config = decoder_config(model.config)
    if config.recurrent is not None:
        check_states(recipe, config)
        drafts = recipe.speculation.max_tokens if recipe.speculation.kind != "none" else 0
        kept = replace(config.recurrent, state_dtype=recipe.cache.state_dtype, num_tail=drafts)
        config = replace(config, recurrent=kept)
    config = _as_asked(config, recipe, model.quantization, model.dtype)
    if recipe.device.batch_invariant and recipe.device.kind == "cpu":
        check_invariance(recipe, config)
    if model.weights == "random" and config.quantization is not None:
        config = replace(config, quantization=replace(config.quantization, is_stored=False))
    return replace(config, window_groups=window_groups(recipe, config))


def check_states(recipe: Recipe, config: DecoderConfig) -> None:
    """Raise RecipeError for what a model whose layers keep a recurrent state cannot do here."""
    scheduler = recipe.scheduler
    drafts = recipe.speculation.max_tokens if recipe.speculation.kind != "none" else 0
    if drafts > MOST_DRAFTS:
        raise RecipeError(
            "speculation.max_tokens",
            f"a {config.family} keeps recurrent states, and at most {MOST_DRAFTS} drafts follow one",
            "leave it out",
            value=drafts,
            limit=MOST_DRAFTS,
        )
    chunk = scheduler.chunk_tokens
    if chunk is not None and chunk < GRID:
        problem = f"prompts of a {config.family} are cut at multiples of {GRID}, and at nothing smaller"
        raise RecipeError("scheduler.chunk_tokens", problem, f"raise it to {GRID}", value=chunk, limit=GRID)
    budget = scheduler.max_batch_tokens
    if budget is not None and budget - scheduler.num_slots < GRID:
        raise RecipeError(
            ("scheduler.max_batch_tokens", "scheduler.num_slots"),
            f"{budget} tokens for {scheduler.num_slots} slots may leave a prompt less than {GRID} in a step,"
            f" and prompts of a {config.family} are cut at multiples of {GRID}",
            f"raise it to {scheduler.num_slots + GRID} or more",
            value=budget,
            limit=scheduler.num_slots + GRID,
        )


def check_invariance(recipe: Recipe, config: DecoderConfig) -> None:
    """Raise RecipeError for what has not been shown to have the same bits in any batch on a CPU."""
    kinds = {rope.kind for rope in (config.rope, config.window_rope) if rope is not None}
    asked = (
        ("model", config.latent is not None and config.latent.index is not None, "sparse attention"),
        (
            "cache.state_dtype",
            config.recurrent is not None and config.recurrent.state_dtype != "float32",
            "recurrent states that are rounded where a step ends",
        ),
        ("model", config.gate != "silu", f"a gate of the kind {config.gate}"),
        ("model", config.logit_cap is not None, "capped logits"),
        ("model", config.query_growth is not None, "queries that grow with their position"),
        ("model", "dynamic" in kinds, "a rotary embedding that depends on the length"),
        ("model.quantization", config.quantization is not None, "quantized weights"),
        ("adapters.most", bool(recipe.adapters.most), "adapters"),
        ("parallel", recipe.parallel.tensor * recipe.parallel.pipeline > 1, "several ranks"),
    )
    for name, is_asked, what in asked:
        if is_asked:
            raise RecipeError(
                (name, "device.batch_invariant"),
                f"device.batch_invariant on a CPU is not promised for {what}",
                "set device.batch_invariant to false",
            )


def overridden_fields(recipe: Recipe) -> list[str]:
    """Return a line for each field of the checkpoint's config.json that the recipe replaces."""
    model = recipe.model
    if model.path is None or not model.config_overrides:
        return []
    return list(named_overrides(read(model.path), model.config_overrides))


def window_groups(recipe: Recipe, config: DecoderConfig) -> tuple[int, ...]:
    """Return the windows whose layers have pages of their own, which are given back behind the window.

    Pages that go to another engine hold all layers, so there are none with these. A window that holds the
    longest request would give nothing back.
    """
    if recipe.server.pages_at is not None or recipe.server.prompt_replicas:
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
        name = "context"
        check_contexts(config, parallel.tensor, parallel.context)
        name = "pipeline"
        check_stages(config, parallel.pipeline)
        if parallel.placement is not None and config.mixture is not None:
            name = "placement"
            placement = read_placement(parallel.placement, config)
            config = replace(config, mixture=replace(config.mixture, placement=placement))
    except ValueError as error:
        raise RecipeError(f"parallel.{name}", str(error), value=getattr(parallel, name)) from error
    parts = parallel.tensor, parallel.pipeline, parallel.expert, parallel.context
    share = Share.of_rank(rank, *parts)
    if share.stages > 1 and recipe.speculation.kind in ("mtp", "eagle3"):
        head = draft_config(recipe, config)
        reads_tokens = not isinstance(head, Eagle3Config) or not head.owns_embedding
        share = replace(share, drafts_from_tokens=reads_tokens)
    return config, share


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
    if draft.num_recurrent:
        raise RecipeError(
            name,
            f"layers of {place} keep recurrent states, of which an engine has those of its model alone",
            "name a draft model whose layers all attend to keys and values",
            value=asked.draft_path,
        )
    dtype = recipe.model.dtype if asked.draft_dtype == "auto" else asked.draft_dtype
    return _as_asked(draft, recipe, asked.draft_quantization, dtype, is_draft=True)


def draft_part(recipe: Recipe, config: DecoderConfig, share: Share) -> DecoderConfig | None:
    """Return a rank's part of the head that drafts for a decoder, or the whole draft model; None without one.

    The last stage has it, where the hidden states are.
    Raises RecipeError as `draft_config` does, and for a head that the ranks cannot share.
    """
    draft = draft_config(recipe, config)
    if not share.is_last:
        return None
    share = share.within_stage
    if isinstance(draft, MtpConfig):
        return share.part(draft)
    if not isinstance(draft, Eagle3Config):
        return draft
    try:
        return draft.part(share)
    except ValueError as error:
        raise RecipeError(
            "speculation.draft_path", f"the head: {error}", value=recipe.speculation.draft_path
        ) from error


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
        found = mtp_config(config, _num_kept(recipe))
        if found.rope.kind == "dynamic":
            raise ValueError("the model's rope is dynamic, by which its prediction layer cannot keep keys")
        return found
    except ValueError as error:
        raise RecipeError("speculation.kind", str(error), "take another kind", value="mtp") from error


def _num_kept(recipe: Recipe) -> int:
    """Return the number of features that a page keeps for a head.

    A step writes those of the last known token and of its drafts. If a token comes late, the entry of the
    last known one is computed again, from the feature before these.
    """
    return min(recipe.cache.page_size, recipe.speculation.max_tokens + 2)


def _head_config(recipe: Recipe, config: DecoderConfig, path: Path) -> Eagle3Config:
    try:
        head = eagle3(_json(path / "config.json"), config, tensor_names(path), _num_kept(recipe))
    except ValueError as error:
        raise RecipeError("speculation.draft_path", f"the head: {error}", value=path) from error
    return head


def _as_asked(
    config: DecoderConfig, recipe: Recipe, quantization: str, dtype: DType | Auto, *, is_draft: bool = False
) -> DecoderConfig:
    """Return the decoder in the form and the type that the recipe asks for, with its cache.

    Where scales of channels are needed, a draft model without them has its own cache in its own type.
    """
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
    is_int8, device = recipe.cache.dtype == "int8", recipe.device
    is_sparse = config.latent is not None and config.latent.index is not None  # whose rows hold their scales
    by_channel = device.kind == "npu" and device.attention != "reference" and not is_sparse
    config = replace(config, int8_cache=is_int8, scales_in_pages=not by_channel)
    lacking = config.without_cache_scales if is_int8 and by_channel else []
    if lacking and is_draft:
        config, lacking = replace(config, int8_cache=False), []
    if lacking:
        problem = (
            "fused attention of an NPU multiplies keys and values in int8 by a scale for each channel, and"
            f" {lacking[0]} has none (C8 of msModelSlim)"
        )
        fix = "set it to auto, or device.attention to reference, or use a checkpoint that has them"
        raise RecipeError(("cache.dtype", "device.attention"), problem, fix, value="int8")
    try:
        return check_cache(config)
    except ValueError as error:
        fix = "set it to int8, where the device has such a cache, or use a checkpoint without C8 or FAKQuant"
        raise RecipeError("cache.dtype", str(error), fix, value=recipe.cache.dtype) from error


def decoder_config(hf: Mapping[str, Any], ends_from: str = CONFIG) -> DecoderConfig:
    """Return the decoder of a parsed config.json, by its `model_type`; `ends_from` gave the end tokens.

    An end token outside the vocabulary, which is never chosen, is left out where another one remains. Raises
    ValueError for a family that is not supported, and for a value that the decoder cannot honour.
    """
    family = hf.get("model_type")
    is_nested = isinstance(family, str) and family in NESTED
    if is_nested:
        hf = text_config(hf)
        family = hf["model_type"]
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"the model's family is {abbreviate(family)}; supported are {', '.join(SUPPORTED)}")
    hf = FIELDS[family].read_of(hf)
    config = FAMILIES[family](hf)
    check_fused(config)
    if is_nested:
        config = replace(config, reads_text_alone=True)
    check_attended(hf, config.layers, config.max_positions)
    usable = tuple(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
    # A family's default may be one that a smaller vocabulary lacks.
    if not usable and config.eos_token_ids and hf.get("eos_token_id") is not None:
        raise ValueError(
            f"{ends_from} has eos_token_id: {abbreviate(config.eos_token_ids[0])}; the vocabulary goes from 0"
            f" to {config.vocab_size - 1}"
        )
    return replace(config, eos_token_ids=usable)


def text_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text model in that of a model which reads images, too.

    What concerns the whole model may stand at either level; where both say it, the outer level counts.
    """
    families, is_tied = NESTED[hf["model_type"]]
    text = hf.get("text_config")
    if not isinstance(text, Mapping):
        raise refused("text_config", text, "it must be the configuration of the text model")
    if text.get("model_type", families[0]) not in families:
        raise refused("text_config.model_type", text["model_type"], f"supported are {', '.join(families)}")
    outer = {key: hf[key] for key in _OF_THE_WHOLE if hf.get(key) is not None}
    if "dtype" in outer or "torch_dtype" in outer:
        text = {key: value for key, value in text.items() if key not in ("dtype", "torch_dtype")}
    return {"model_type": families[0], "tie_word_embeddings": is_tied, **text, **outer}


def unknown_fields(recipe: Recipe) -> str:
    """List the fields of the model's configuration that its family neither reads nor is known to ignore."""
    path, inline = recipe.model.path, recipe.model.config
    hf: Mapping[str, Any] = read(path) if path is not None else inline or {}
    if hf["model_type"] in NESTED:
        hf = text_config(hf)
    unknown = FIELDS[hf["model_type"]].unknown(hf)
    more = f" and {len(unknown) - MOST_UNKNOWN} more" if len(unknown) > MOST_UNKNOWN else ""
    return ", ".join(map(abbreviate, unknown[:MOST_UNKNOWN])) + more


def impossible_ends(recipe: Recipe, config: DecoderConfig) -> str:
    """List the end tokens of a checkpoint's files that its vocabulary lacks; the empty text for none."""
    path = recipe.model.path
    said = None if path is None else read(path).get("eos_token_id")
    if path is None or not isinstance(said, list):
        return ""
    outside = [token for token in said if not 0 <= token < config.vocab_size]
    file = "config.json" if _ends_apart(path) is None else GENERATION
    return f"{abbreviate(outside)} of {file}" if outside else ""


def unread_layers(recipe: Recipe, config: DecoderConfig) -> str:
    """Say which layers of the checkpoint predict further tokens and are not read; the empty text for none."""
    path = recipe.model.path
    if path is None or recipe.model.weights == "random" or recipe.speculation.kind == "mtp":
        return ""
    prefixes = tuple(f"model.layers.{layer}." for layer in config.layers_behind)
    found = sorted(name for name in tensor_names(path) if name.startswith((*prefixes, *PREDICTION)))
    if not found:
        return ""
    way = "speculation.kind: mtp guesses with them"
    if config.family not in WITH_MTP:
        way = f"speculation.kind: mtp is known of {' and '.join(WITH_MTP)}, and not of {config.family}"
    return f"layers that predict further tokens, in {len(found)} tensors such as {found[0]} ({way})"


def _check_replaced(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Raise RecipeError for a field that a recipe replaces and the model's family does not read."""
    if not overrides:
        return
    family = str(hf.get("model_type"))
    fields = FIELDS.get(str(text_config(hf)["model_type"]) if family in NESTED else family)
    for name in overrides:
        if fields is not None and not fields.is_read(name):
            why = fields.reason(name) or f"a model of the family {family} does not have it"
            problem = f"{name} has no effect: {why}"
            raise RecipeError("model.config_overrides", problem, "leave it out", value=overrides[name])


def config_in(path: Path, overrides: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return the decoder of a checkpoint directory, with some fields of its config.json replaced.

    Raises ValueError like `decoder_config`, with the directory's path.
    """
    hf = with_overrides(read(path), overrides or {})
    _check_replaced(hf, overrides or {})
    try:
        is_apart = _ends_apart(path) is not None and "eos_token_id" not in (overrides or {})
        return described(decoder_config(without_method(hf, path), GENERATION if is_apart else CONFIG), path)
    except ValueError as error:
        apart = _quantized_apart(path, _json(path / "config.json"))
        place = f"{path} ({KEY} stands in {apart[0]})" if apart else f"{path}"
        raise ValueError(f"{place}: {error}") from error


def read(path: str | Path) -> dict[str, Any]:
    """Return the parsed config.json of a checkpoint directory, with what other files say of the weights.

    The end tokens of its generation_config.json, if there is one, replace those of config.json: a chat model
    often ends its turn with a token of its own. What only a quantization's own file describes is added, and
    what only the weights tell.
    """
    check_kind(Path(path))
    hf = _json(Path(path) / "config.json")
    if said := _quantized_apart(Path(path), hf):
        hf = {**hf, KEY: said[1]}
    hf = {**hf, **_told_by_weights(Path(path), hf)}
    if KEY in hf and _is_body(Path(path)):
        hf[KEY] = _with_head(hf[KEY])
    end = _ends_apart(path)
    return hf if end is None else {**hf, "eos_token_id": end}


def _told_by_weights(path: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that a checkpoint's tensors tell in place of config.json: their type, and a tied head.

    A decoder without a head answers by its embedding, whatever is said of the head that it was trained with.
    One with a head answers by it where the text within is said to have its own, as where transformers has
    saved a class's default beside it.
    """
    if not any(path.glob("*.safetensors")):
        return {}
    text, told = hf.get("text_config"), dict[str, Any]()
    levels = (hf, text) if isinstance(text, Mapping) else (hf,)
    is_silent = all(each.get(key) is None for each in levels for key in ("dtype", "torch_dtype"))
    with suppress(OSError, ValueError):  # what is wrong with files is refused where the weights are read
        if is_silent and (dtype := first_dtype(path)) is not None:
            told["dtype"] = dtype
    if hf.get("tie_word_embeddings") is not True and _is_body(path):
        told["tie_word_embeddings"] = True
    is_disputed = isinstance(text, Mapping) and text.get("tie_word_embeddings") is False
    if hf.get("tie_word_embeddings") is True and is_disputed and _has_head(path):
        told["tie_word_embeddings"] = False
    return told


def _has_head(path: Path) -> bool:
    """Whether a checkpoint has a head of its own; one whose files cannot be read has none."""
    with suppress(OSError, ValueError):  # what is wrong with files is refused where the weights are read
        return any(name.startswith("lm_head.") for name in tensor_names(path))
    return False


def _is_body(path: Path) -> bool:
    """Whether a checkpoint is a decoder without its head; one whose files cannot be read is not."""
    with suppress(OSError, ValueError):  # what is wrong with files is refused where the weights are read
        return any(path.glob("*.safetensors")) and is_body(path)
    return False


def _with_head(said: Any) -> Any:
    """Return what is said of the linears of a decoder without its head, which are read as if it had one."""
    if isinstance(said, Mapping):
        return {key: _with_head(value) for key, value in said.items()}
    return [_with_prefix(each) for each in said] if isinstance(said, list) else said


def _with_prefix(name: Any) -> Any:
    """Return a linear's name, or the pattern of some that begins with the layers, as `alone` does."""
    if not isinstance(name, str):
        return name
    return re.sub("^re:(?=layers)", r"re:model\\.", name) if name.startswith("re:") else alone(name)


def told_by_weights(recipe: Recipe) -> list[str]:
    """Return a line for each thing that the model's weights tell in place of its config.json."""
    drafts, lines = recipe.speculation, list[str]()
    paths = {recipe.model.path: recipe.model.dtype}
    if drafts.kind == "draft":
        paths[drafts.draft_path] = drafts.draft_dtype
    for path, dtype in paths.items():
        told = {} if path is None else _told_by_weights(path, _json(path / "config.json"))
        if "dtype" in told and dtype == "auto":
            lines.append(f"{path} has no dtype in config.json: it is the first tensor's, {told['dtype']}")
        if told.get("tie_word_embeddings"):
            lines.append(f"{path} was saved without a head, which is tied to the embedding")
    return lines


def _ends_apart(path: str | Path) -> Any:
    """Return the end tokens of generation_config.json, or None if it is not there or does not name them."""
    generation = Path(path) / GENERATION
    return _json(generation).get("eos_token_id") if is_there(generation) else None


def _quantized_apart(path: Path, hf: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the file that alone describes a quantization, and what it says, or None.

    AutoGPTQ writes quantize_config.json, older versions of AutoAWQ quant_config.json and NVIDIA's Model
    Optimizer hf_quant_config.json; none adds to config.json, as transformers does. Such a file says nothing
    beside weights that are not packed.
    """
    if hf.get(KEY):
        return None
    if is_there(path / MODELOPT_FILE) and any(each.endswith("_scale") for each in tensor_names(path)):
        return MODELOPT_FILE, {"quant_method": "modelopt"}
    if not (is_there(path / GPTQ_FILE) or is_there(path / AWQ_FILE)):
        return None
    if any(path.glob("*.safetensors")) and not any(each.endswith(".qweight") for each in tensor_names(path)):
        return None
    if is_there(path / GPTQ_FILE):
        return GPTQ_FILE, {"quant_method": "gptq", **_json(path / GPTQ_FILE)}
    if is_there(path / AWQ_FILE):
        names = {"w_bit": "bits", "q_group_size": "group_size"}
        said = {names.get(key, key): value for key, value in _json(path / AWQ_FILE).items()}
        return AWQ_FILE, {"quant_method": "awq", **said}
    return None


def _json(path: Path) -> dict[str, Any]:
    if not is_there(path):
        raise ValueError(f"{path} does not exist; give the directory of a Hugging Face checkpoint")
    return json_object(path)
