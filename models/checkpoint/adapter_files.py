"""Read and check the files of a LoRA adapter.

An adapter is a folder as peft saves it: adapter_config.json and adapter_model.safetensors. Forms of peft that
are not implemented here are refused by name. Where its weights go in a decoder is the task of `adapters`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from borders.files import check_regular
from borders.numbers import integers, numbers
from borders.refusal import abbreviate_json
from models.quantization import MOST_PATTERN, REPEATED_GROUP

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_WEIGHTS_BYTES = 2**34
MOST_ALPHA = 10**9  # far beyond any trained value, and a number that every float type holds
# Options of peft that change what is computed, with the values that change nothing
_UNCHANGED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (None, False),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# Initialisations of peft that leave the base weights unchanged. The others first subtract a part from them,
# so that the trained adapter belongs to weights which the checkpoint does not have.
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CONVERT = (
    "convert it with peft: model.save_pretrained(FOLDER, path_initial_model_for_weight_conversion=INITIAL),"
    " where INITIAL holds the adapter as it was before training"
)
_REPEAT, _MOST_REPEATS = re.compile(r"[*+?{]"), 3  # each multiplies the time by the length of a name
Number = TypeVar("Number", int, float)
_MERGE = "merge it with peft: model.merge_and_unload(), and serve the checkpoint that this makes"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter whose configuration has been read, but not its weights."""

    folder: Path
    rank: int
    alpha: float
    is_root_scaled: bool  # whether its contribution is scaled by alpha / sqrt(rank) and not alpha / rank
    ranks: dict[str, int]  # ranks of the linears that have another rank, by the ends of their names
    alphas: dict[str, float]
    digest: str  # digest of its files: equal adapters compute the same for a prompt

    def rank_of(self, linear: str) -> int:
        """Return the rank of a linear, named as in a checkpoint."""
        return _by_name(self.ranks, linear, self.rank)

    def scale_of(self, linear: str) -> float:
        """Return the factor of what the adapter adds to a linear."""
        rank = self.rank_of(linear)
        return _by_name(self.alphas, linear, self.alpha) / (math.sqrt(rank) if self.is_root_scaled else rank)


def look_at(folder: Path, most_rank: int) -> AdapterFiles:
    """Read what the files of an adapter say.

    Raises ValueError in one line if it cannot be used, OSError if a file is missing.
    """
    check_regular(folder / CONFIG, fix="save the adapter again")
    check_regular(folder / WEIGHTS, MOST_WEIGHTS_BYTES, fix="save the adapter again")
    text = (folder / CONFIG).read_bytes()
    try:
        config = json.loads(text)
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is no configuration of a LoRA adapter ({error})") from None
    if config.get("peft_type") is None:
        problem = "does not say of which kind it is; peft writes peft_type: save the adapter again"
        raise ValueError(f"{folder / CONFIG} {problem}")
    for name, harmless in _UNCHANGED.items():
        if config.get(name) not in harmless:
            raise ValueError(
                f"{folder}: adapters with {name}: {abbreviate_json(config[name])} are not computed"
            )
    is_root_scaled = config.get("use_rslora")
    if not isinstance(is_root_scaled, bool | None):
        raise ValueError(
            f"{folder / CONFIG}: use_rslora is {abbreviate_json(is_root_scaled)}; it must be true or false"
        )
    _check_start(folder, config.get("init_lora_weights"))
    ranks, alphas = (_pattern(folder, config, name) for name in ("rank_pattern", "alpha_pattern"))
    of_ranks, of_alphas = (
        ((each, alpha) for each in ranks.values()),
        ((rank, each) for each in alphas.values()),
    )
    for pair in ((rank, alpha), *of_ranks, *of_alphas):
        _check_numbers(folder, *pair, most_rank)
    hashed = hashlib.sha256(text)
    with (folder / WEIGHTS).open("rb") as file:
        while data := file.read(2**20):
            hashed.update(data)
    return AdapterFiles(folder, rank, alpha, bool(is_root_scaled), ranks, alphas, hashed.hexdigest())


def _check_numbers(folder: Path, rank: object, alpha: object, most_rank: int) -> None:
    """Raise ValueError for a rank or an alpha out of its bounds."""
    ranks, alphas = integers(1, most_rank), numbers(-MOST_ALPHA, MOST_ALPHA)
    if ranks.read(rank) is None:
        fix = f"it must be {ranks}, for which adapters.rank leaves room"
        raise ValueError(f"{folder / CONFIG}: r is {abbreviate_json(rank)}; {fix}")
    if alphas.read(alpha) is None:
        raise ValueError(f"{folder / CONFIG}: lora_alpha is {abbreviate_json(alpha)}; it must be {alphas}")


def _pattern(folder: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what `rank_pattern` or `alpha_pattern` says of linears, by the ends of their names.

    peft takes the names as regular expressions. Those that may take long to match are refused, because
    evaluating such an expression from an untrusted file may take hours.
    """
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise ValueError(f"{folder}: {name} is {json.dumps(pattern)[:60]}; it must map linears to numbers")
    for key in pattern:
        try:
            re.compile(key)
            is_short = len(key) <= MOST_PATTERN and len(_REPEAT.findall(key)) <= _MOST_REPEATS
        except (re.error, RecursionError, OverflowError):
            is_short = False
        if not is_short or REPEATED_GROUP.search(key):
            raise ValueError(
                f"{folder}: {name} has the expression {json.dumps(key)[:60]}, which is none or may take long"
                " to match; name its linears one by one, as in model.layers.0.self_attn.q_proj or q_proj"
            )
    return pattern


def _by_name(pattern: dict[str, Number], linear: str, default: Number) -> Number:
    """Return the value of the first name that fits, as peft chooses it; after `^`, it is the whole name."""
    for name, value in pattern.items():
        if re.match(rf"(?:.*\.)?({name})$", linear):
            return value
    return default


def _check_start(folder: Path, start: Any) -> None:
    """Raise ValueError for an adapter whose training began with a change of the base weights."""
    if start in _PLAIN_STARTS or (isinstance(start, str) and start.lower() in _PLAIN_STARTS):
        return
    fix = _MERGE if start == "loftq" else _CONVERT
    raise ValueError(
        f"{folder}: init_lora_weights is {json.dumps(start)[:60]}, with which peft changes the base weights"
        f" before it trains, so the adapter does not fit the plain ones; {fix}"
    )
