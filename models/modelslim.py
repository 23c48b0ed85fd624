"""Read how an msModelSlim checkpoint is quantised, by its quant_model_description.json.

The description names a type for each tensor, and config.json says nothing of it. The types and their
arithmetic are those of msModelSlim 3de0a3c and of vllm-ascend 182b75e, which reads them on an NPU. Each
linear of the model gets the form in which it is held; models/checkpoint/modelslim.py knows which tensors
belong to a form and where they go. A type that is not read is refused by the name of the file, of the tensor
and of the type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from borders.files import json_object
from borders.numbers import integers
from borders.refusal import abbreviate
from models.checkpoint_names import TOWERS, alone
from models.config import INDEX_KEY_NORM, LAST_NORM, QUERY_NORM, UP, DecoderConfig
from models.quantization import KEY, Quantization, Stored

PATTERN = "quant_model_description*.json"
MOST_DESCRIPTION_BYTES = 2**28  # an entry for each tensor of 256 experts in 61 layers has 18 MiB
FLOAT, DYNAMIC, MIXED, STATIC = "FLOAT", "W8A8_DYNAMIC", "W8A8_MIX", "W8A8"
W4A8, W8A16 = "W4A8_DYNAMIC", "W8A16"
# Form in which a linear of each type is held. A W8A8_MIX has the tensors of both others, of which the static
# ones serve a decode-only engine of vllm-ascend; an engine that computes prompts too is dynamic
READ: dict[str, Stored] = {
    FLOAT: "plain",
    DYNAMIC: "int8",
    MIXED: "int8",
    STATIC: "static",
    W4A8: "w4a8",
    W8A16: "w8a16",
}
# Scales and offsets of keys and values (C8), and of queries, keys and values of latent attention (FAKQuant)
CACHE_SCALE = re.compile(r"\.self_attn\.([kv]_proj\.kv_cache_|fa_[qkv]\.)(scale|offset)$")
CACHE_ENDS = "k_proj.kv_cache_scale", "v_proj.kv_cache_scale"  # C8's scales, as attention has them
EXPERTS = ".experts."  # part of an expert's names, which those of a shared expert lack
_ON_950 = "whose products only the Ascend 950 has, and which this engine does not call"
_BY_4_BITS = "activations in 4 bits, which this engine does not compute"
_INSTEAD = "use a checkpoint of the model in W8A8_DYNAMIC, or the original one with model.quantization: w8a8"
# What a type that is not read would need
NEEDS = {
    "W8A8S": "the sparse products of the Ascend 310P",
    "W8A8SC": "the 310P's operator that decompresses weights, of a number of ranks that was fixed at export",
    "W8A8_MXFP8": f"microscaling floats of 8 bits, {_ON_950}",
    "W4A8_MXFP": f"microscaling floats of 4 and 8 bits, {_ON_950}",
    "W4A4_MXFP4": f"microscaling floats of 4 bits, {_ON_950}",
    "W8A8FP8_DYNAMIC": f"floats of 8 bits, {_ON_950}",
    "WFP8AFP8_DYNAMIC": f"floats of 8 bits, {_ON_950}",
    "W4A4_DYNAMIC": _BY_4_BITS,
    "W4A4_FLATQUANT_DYNAMIC": f"{_BY_4_BITS}, and rotations of each linear's inputs",
}


@dataclass(frozen=True, slots=True)
class Described(Quantization):
    """The types that a description gives to linears. A linear that it does not name is not quantised.

    Its repr is the same in every process and folder, because the identity of stored pages follows from it.
    """

    file: str = field(default="", repr=False)  # path of the description
    types: Mapping[str, str] = field(default_factory=dict, hash=False)
    norm_biases: tuple[str, ...] = ()  # norms that have a bias, sorted
    cache_scale: str | None = None  # a tensor that has scales of keys or values, if there are any
    # Attention whose keys and values have scales by channel (C8), sorted
    scaled_caches: tuple[str, ...] = ()
    is_rotated: bool = False  # whether hidden states are multiplied with an orthogonal matrix (QuaRot)
    # The file with this matrix, if it was exported, as a path from the description's folder
    rotation: str | None = None

    def covers(self, name: str) -> bool:
        """Whether a checkpoint's linear is quantised."""
        return self.form(name) != "plain"

    @property
    def int8_forms(self) -> frozenset[Stored]:
        """See Quantization.int8_forms."""
        forms = {READ[kind] for kind in self.types.values()} - {"plain"}
        return frozenset(forms if self.is_stored else forms and {"int8"})

    def __str__(self) -> str:
        return ", ".join(sorted({*self.types.values()} - {FLOAT})) or FLOAT

    def has_norm_bias(self, name: str) -> bool:
        """See Quantization.has_norm_bias."""
        return name in self.norm_biases

    def has_cache_scales(self, name: str) -> bool:
        """See Quantization.has_cache_scales."""
        return name in self.scaled_caches

    def form(self, name: str) -> Stored:
        """Return how a checkpoint's linear is held."""
        stored = READ[self.types.get(name, FLOAT)]
        if not self.is_stored and stored != "plain":
            return "quantize"
        # The up-projection of latents is multiplied out, whatever would quantise its inputs, and a product of
        # 4 bits with 8 is of experts: another linear is widened when it is read
        if name.endswith(UP) and stored != "plain":
            return "int8"
        return "int8" if stored == "w4a8" and EXPERTS not in name else stored


def check_cache(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration; raises ValueError if the checkpoint has scales of a cache and this has none.

    These are C8's, one for each channel of keys and of values, which an int8 cache uses, and FAKQuant's, of
    latents, in whose place it has a scale of its own for each token.
    """
    form = config.quantization
    if isinstance(form, Described) and form.cache_scale is not None and not config.int8_cache:
        raise ValueError(
            f"{Path(form.file).name} has {form.cache_scale}, a scale of an int8 cache, and this one is in"
            f" {config.dtype}"
        )
    return config


def description_in(path: Path) -> Path | None:
    """Return the description of a checkpoint directory, or None; raises ValueError for several."""
    found = sorted(path.glob(PATTERN))
    if len(found) > 1:
        listed = ", ".join(each.name for each in found[:4])
        raise ValueError(f"{path} holds several descriptions, {listed}: keep the one of these weights")
    return found[0] if found else None


def without_method(hf: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return a parsed config.json without a quantization_config that leaves the types to the description.

    Raises ValueError for one that says another method than the description beside it.
    """
    said, file = hf.get(KEY), description_in(path)
    if not isinstance(said, Mapping) or file is None:
        return hf
    method = said.get("quant_method")
    if method not in (None, "ascend"):
        raise ValueError(
            f"config.json has {KEY}.quant_method: {abbreviate(method)}, and {file.name} beside it describes"
            " a checkpoint of msModelSlim: remove the one that is not of these weights"
        )
    return {name: value for name, value in hf.items() if name != KEY}


def described(config: DecoderConfig, path: Path) -> DecoderConfig:
    """Return the decoder as the description in its directory has it, if there is one.

    Raises ValueError, which begins with the description's name, for what is not read.
    """
    file = description_in(path)
    if file is None:
        return config
    said = json_object(file, MOST_DESCRIPTION_BYTES, "copy it again")
    try:
        said = _text_alone(said, config)
        _check_apart(config)
        _check_whole(said)
        types = {name: _type_of(name, said) for name, *_ in config.linears()}
        types |= dict(_further(said, config, types))
        if said.get("group_size") and W4A8 in types.values():
            raise ValueError(
                f"group_size is {said['group_size']}, and {W4A8} is read with a scale for each output: export"
                " it again by channel, as vllm-ascend needs it too"
            )
        form = Described(
            file=str(file),
            types=types,
            norm_biases=tuple(sorted(_norm_biases(said, config))),
            cache_scale=next((key for key in said if CACHE_SCALE.search(key)), None),
            scaled_caches=tuple(sorted({*_scaled_caches(said)})),
            is_rotated=bool(_quarot(said, "metadata") or _quarot(said, "optional")),
            rotation=_rotation(said, file.parent),
        )
        made = replace(config, quantization=form)
        _check_joined(made, types)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error
    return made


def _text_alone(said: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Return a description as if its text model were alone, as its tensors are named when they are read.

    Towers are left out if they are not read. Raises ValueError for a tensor with two types.
    """
    found: dict[str, Any] = {}
    for key, kind in said.items():
        if config.reads_text_alone and key.startswith(TOWERS):
            continue
        if found.setdefault(alone(key), kind) != kind:
            raise ValueError(f"it has {abbreviate(alone(key))} under two names with two types; copy it again")
    return found


def _check_apart(config: DecoderConfig) -> None:
    """Raise ValueError if the family's checkpoints store linears as one, of which no described form is known.

    msModelSlim's own list of what is multiplied as one has none of these families.
    """
    joined = [*config.stored_joined]
    if config.mixture is not None and config.mixture.is_stacked:
        joined.append("the experts of a layer")
    if joined:
        raise ValueError(
            f"checkpoints of {config.family} store {' and '.join(joined)} as one tensor, and how msModelSlim"
            " describes such a tensor is not known: use the original checkpoint with model.quantization: w8a8"
        )


def _check_whole(said: Mapping[str, Any]) -> None:
    """Raise ValueError for what a description says of the whole model and this engine does not compute."""
    size = said.get("group_size", 0)
    if size and integers(0, 2**24).read(size) is None:
        raise ValueError(f"group_size is {abbreviate(size)}, which is no number of inputs; copy it again")
    turned = _quarot(said, "metadata")
    for name in ("heads_rotation", "kronecker_rotation"):
        online = turned.get(name)
        if isinstance(online, Mapping) and online.get("layers"):
            raise ValueError(
                f"metadata.quarot.{name} names layers whose inputs are rotated at run time, which this engine"
                f" does not compute: {_INSTEAD}"
            )


def _quarot(said: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """Return what a part of the description says of QuaRot (arXiv 2404.00456); nothing if it is not there."""
    found = said.get(part)
    turned = found.get("quarot") if isinstance(found, Mapping) else None
    return turned if isinstance(turned, Mapping) else {}


def _rotation(said: Mapping[str, Any], folder: Path) -> str | None:
    """Return the file in this folder with the rotation of hidden states; ValueError if it leads elsewhere."""
    named = _quarot(said, "optional").get("rotation_map")
    name = named.get("global_rotation") if isinstance(named, Mapping) else None
    if name is None:
        return None
    if not isinstance(name, str) or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"optional.quarot.rotation_map.global_rotation is {abbreviate(name)}, which is no file of this"
            " folder; copy it again"
        )
    return name


def _type_of(name: str, said: Mapping[str, Any]) -> str:
    """Return the type of a linear of the model; raises ValueError if it is not named or not read."""
    if f"{name}.weight" not in said:
        raise ValueError(f"it has no entry {name}.weight, which the model of config.json has; copy it again")
    return _checked(name, said[f"{name}.weight"])


def _checked(name: str, kind: Any) -> str:
    if isinstance(kind, str) and kind in READ:
        return kind
    needed = NEEDS.get(str(kind), f"a form that is not known here; read are {', '.join(READ)}")
    raise ValueError(f"{name}.weight is {abbreviate(kind)}, which needs {needed}: {_INSTEAD}")


def _further(
    said: Mapping[str, Any], config: DecoderConfig, types: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the types of linears behind the model's own layers, which predict further tokens.

    Raises ValueError if a tensor that is no linear of this model, such as an embedding, is quantised.
    """
    behind = tuple(f"model.layers.{layer}." for layer in config.layers_behind)
    if config.unread_block:
        behind = (config.unread_block,)
    for key, kind in said.items():
        name = key.removesuffix(".weight")
        if name == key or name in types or kind == FLOAT:
            continue
        if not key.startswith(behind):
            _check_layer(key, config)
            raise ValueError(f"{key} is {abbreviate(kind)}, and this engine reads it unquantised: {_INSTEAD}")
        yield name, _checked(name, kind)


def _check_layer(key: str, config: DecoderConfig) -> None:
    """Raise ValueError for a tensor of a layer that the model does not have."""
    layer = re.match(r"model\.layers\.(\d+)\.", key)
    if layer and int(layer[1]) >= config.num_layers:
        raise ValueError(
            f"it has an entry {key}, and the model of config.json has {config.num_layers} layers: copy both"
            " from one export"
        )


def _scaled_caches(said: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of attention with scales by channel; raises ValueError if only keys or values have."""
    for key in said:
        if not key.endswith(CACHE_ENDS):
            continue
        attention, _, of = key.removesuffix(".kv_cache_scale").rpartition(".")
        other = f"{attention}.{'v_proj' if of == 'k_proj' else 'k_proj'}.kv_cache_scale"
        if other not in said:
            raise ValueError(f"it has {key}, and no {other}: copy it again")
        yield attention


def _norm_biases(said: Mapping[str, Any], config: DecoderConfig) -> Iterator[str]:
    """Yield the norms that have a bias; raises ValueError for one that this engine does not add.

    An exporter that shifted activations (anti_method m4) wrote the shift so.
    """
    prefixes = [f"model.layers.{layer}." for layer in range(config.layers_behind.stop)]
    if config.unread_block:
        prefixes += [f"{config.unread_block}layers.{layer}." for layer in range(config.num_unread_layers)]
    names = [*config.norms[:2], *([] if config.latent is None else [f"self_attn.{QUERY_NORM}"])]
    known = {prefix + name for prefix in prefixes for name in names} | {LAST_NORM}
    for key in said:
        name = key.removesuffix(".bias")
        if name == key or not name.endswith("norm") or name.endswith(INDEX_KEY_NORM):
            continue
        if name not in known:
            raise ValueError(
                f"it has {key}, and a bias is added to the norms before a layer's blocks: {_INSTEAD}"
            )
        yield name


def _check_joined(config: DecoderConfig, types: Mapping[str, str]) -> None:
    """Raise ValueError if linears that are multiplied as one are held in different forms."""
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}.{config.mixer_name(layer)}"
        first = [[f"{block}.{name}" for name in names] for names in config.first_linears(layer)]
        shared, experts = config.shared_names(layer), config.mlp_names(layer)
        pairs = [names[:2] for names in (*experts, *([shared] if shared else []))]
        downs = [names[2] for names in experts]
        for names in (*first, *pairs, [pair[0] for pair in pairs[: len(experts)]], downs):
            if len({config.form(name) for name in names}) > 1:
                said = ", ".join(f"{name} {types[name]}" for name in names[:3])
                raise ValueError(f"{said}: of linears that are multiplied as one, all must have one type")
