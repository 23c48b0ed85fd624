"""Drafts by the own layer of a checkpoint of msModelSlim, and by a head, are as its arithmetic says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.schema.recipe_error import RecipeError
from tests.models.eagle3_heads import HIDDEN, Published, check_head_drafts, head_for
from tests.models.eagle3_heads import target_of as head_target
from tests.models.modelslim_checkpoints import DESCRIPTION, Types, quantised
from tests.models.mtp_layers import target_beside, target_of
from tests.models.test_draft_model import Watched, serve, tokens_of
from tests.models.test_eagle3 import LLAMA, QWEN3
from tests.models.test_eagle3 import engine_of as head_engine
from tests.models.test_mtp import engine_of
from tests.models.test_state_mtp import DRAFTS
from tests.models.test_state_schedules import built, served

# Of logits whose deviation is 8: what is rounded to int8 may fall to either side with another order of sums
ROUNDED = 0.2


def in_layer(of_layer: str) -> Types:
    """Attention static and experts by token; the layer behind the model's own is of one type."""

    def types(name: str) -> str:
        if name.endswith(("eh_proj", "lm_head")):
            return "FLOAT"
        if ".layers.3." in name:
            return of_layer
        return "W8A8" if "self_attn" in name else "W8A8_DYNAMIC"

    return types


@pytest.mark.slow
@pytest.mark.parametrize("of_layer", ["W8A8_DYNAMIC", "none"])
def test_a_further_layer_says_what_its_arithmetic_says(of_layer: str, tmp_path: Path) -> None:
    """It may be unquantised, and older descriptions do not name its tensors."""
    model, path = target_of("deepseek_v3", tmp_path, moe_intermediate_size=32)
    layer = model.further._layer
    quantised(model, path, in_layer("FLOAT" if of_layer == "none" else of_layer), further=layer)
    if of_layer == "none":
        said = json.loads((path / DESCRIPTION).read_text())
        kept = {key: value for key, value in said.items() if ".layers.3." not in key}
        (path / DESCRIPTION).write_text(json.dumps(kept))
    engine = engine_of(path, "cpu", 3)
    watched = Watched(engine)
    drafted = tokens_of(serve(engine))
    num_made, num_right = check_head_drafts(model.further, watched.drafts, drafted, ROUNDED)
    assert num_made > 100
    assert num_right > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "of_layer"),
    [("qwen3_next", "W8A8_DYNAMIC"), ("qwen3_5", "W8A8")],
)
def test_a_layer_beside_layers_with_states_says_what_its_arithmetic_says(
    name: str, of_layer: str, tmp_path: Path
) -> None:
    """Layers with states stay as they are, as in published checkpoints, and `mtp.*` may be quantised.

    So may the linear in it that joins a token and what is read of the model.
    """

    def types(linear: str) -> str:
        if linear.startswith("mtp."):
            return of_layer
        is_plain = linear == "lm_head" or "linear_attn" in linear or "shared_expert" in linear
        return "FLOAT" if is_plain else "W8A8_DYNAMIC"

    model, path = target_beside(name, tmp_path)
    quantised(model, path, types, further=model.further._layer, further_name="mtp.layers.0.")
    engine = built(path, DRAFTS).engine
    watched = Watched(engine)
    drafted = tokens_of(served(engine))
    num_made, num_right = check_head_drafts(model.further, watched.drafts, drafted, ROUNDED)
    assert num_made > 100
    assert num_right > 10


def turned(path: Path, root: Path, rotation: Tensor) -> Path:
    """The same model with rotated hidden states, whose norms are folded into what reads them."""
    shutil.copytree(path, root)
    tensors, made = load_file(path / "model.safetensors"), {}
    for name, weight in tensors.items():
        prefix, _, role = name.removesuffix(".weight").rpartition(".")
        layer = prefix.rpartition(".")[0]
        if role in ("input_layernorm", "post_attention_layernorm") or name == "model.norm.weight":
            made[name] = torch.ones_like(weight)
        elif role in ("q_proj", "k_proj", "v_proj"):
            made[name] = weight * tensors[f"{layer}.input_layernorm.weight"] @ rotation
        elif role in ("gate_proj", "up_proj"):
            made[name] = weight * tensors[f"{layer}.post_attention_layernorm.weight"] @ rotation
        elif role in ("o_proj", "down_proj"):
            made[name] = rotation.t() @ weight
        elif name == "lm_head.weight":
            made[name] = weight * tensors["model.norm.weight"] @ rotation
        else:
            made[name] = weight @ rotation if role == "embed_tokens" else weight
    save_file({name: each.contiguous() for name, each in made.items()}, root / "model.safetensors")
    (root / "optional").mkdir()
    save_file({"global_rotation": rotation}, root / "optional" / "quarot.safetensors")
    said: dict[str, Any] = dict.fromkeys(made, "FLOAT")
    said["metadata"] = {"quarot": {"max_tp_size": 4, "heads_rotation": {"layers": []}}}
    said["optional"] = {"quarot": {"rotation_map": {"global_rotation": "optional/quarot.safetensors"}}}
    (root / DESCRIPTION).write_text(json.dumps(said))
    return root


@pytest.fixture
def rotation() -> Tensor:
    noise = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5))
    return torch.linalg.qr(noise.double())[0].float().contiguous()


@pytest.mark.parametrize(
    ("variant", "form"),
    [pytest.param(LLAMA, {}, marks=pytest.mark.slow), (QWEN3, {"owns_embedding": True, "head_dim": 20})],
    ids=["shared", "own"],
)
def test_a_head_reads_rotated_hidden_states_as_the_published_one_reads_plain_ones(
    variant: Any, form: dict[str, Any], rotation: Tensor, tmp_path: Path
) -> None:
    model, path = head_target(variant, tmp_path)
    head = head_for(model, tmp_path / "head", **form)
    other = turned(path, tmp_path / "turned", rotation)
    plain = tokens_of(serve(head_engine(path, "cpu")))
    engine = head_engine(other, "cpu", head)
    watched = Watched(engine)
    drafted = tokens_of(serve(engine))
    assert drafted == plain, "and the answers are those of the model as it was"
    num_made, num_right = check_head_drafts(Published(model, head), watched.drafts, drafted)
    assert num_made > 100
    assert num_right > 10


def test_a_rotation_that_is_not_there_or_another_is_named(rotation: Tensor, tmp_path: Path) -> None:
    model, path = head_target(LLAMA, tmp_path)
    head = head_for(model, tmp_path / "head")
    other = turned(path, tmp_path / "turned", rotation)
    file = other / "optional" / "quarot.safetensors"
    for made, words in (
        (rotation[:2], r"global_rotation is \[2, 48\], and the hidden size is 48"),
        (2 * rotation, "is no rotation, whose rows are orthogonal"),
    ):
        save_file({"global_rotation": made.contiguous()}, file)
        with pytest.raises(RecipeError, match=words):
            head_engine(other, "cpu", head)
    file.unlink()
    with pytest.raises(
        RecipeError, match=r"rotated \(metadata.quarot in quant_model_.* no file of the rotation"
    ):
        head_engine(other, "cpu", head)
    with pytest.raises(RecipeError, match="adapters were trained with others"):
        head_engine(other, "cpu", **{"adapters.most": 1, "adapters.rank": 4})
    said = json.loads((other / DESCRIPTION).read_text())
    said["optional"]["quarot"]["rotation_map"]["global_rotation"] = "../../x.safetensors"
    (other / DESCRIPTION).write_text(json.dumps(said))
    with pytest.raises(
        ValueError, match=r"global_rotation is '../../x.safetensors', which is no file of this"
    ):
        head_engine(other, "cpu")
