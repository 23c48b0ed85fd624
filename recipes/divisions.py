"""Try every feature beside every way to divide an engine, by the checks that a recipe goes through.

The model is a small mixture of experts with one key-value head and a layer of its own that drafts, of which
little but the configuration exists: what is refused is refused before weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from recipes.assembly import sizing
from recipes.assembly.families import share_of
from recipes.assembly.operators import check_operators
from recipes.schema.reader import read
from recipes.schema.recipe_error import RecipeError

MODEL, HEAD = "{model}", "{head}"  # placeholders for the folders of the model and of an EAGLE-3 head
_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_MODEL = _SHAPE | {
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "eos_token_id": 2,
}
_HEAD = _SHAPE | {"model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 512}
_DRAFTING = "speculation.max_tokens=3"

DIVISIONS = {
    "`tensor`": ("parallel.tensor=2",),
    "`pipeline`": ("parallel.pipeline=2",),
    "`expert`": ("parallel.tensor=2", "parallel.expert=2"),
    "`context`": ("parallel.tensor=2", "parallel.context=2"),
}
FEATURES = {
    "shared prefixes": ("cache.prefix_sharing=true",),
    "pages in the host's memory": ("cache.host_gib=0.05",),
    "a tier of pages (`cache.tier`)": (
        "cache.host_gib=0.05",
        "cache.tier={kind: disk, path: out/pages, gib: 1}",
    ),
    "events of pages (`cache.events`)": ("cache.events=tcp://127.0.0.1:29501",),
    "int8 pages (`cache.dtype`)": ("cache.dtype=int8",),
    "prompts for other engines (`server.pages_at`)": ("server.pages_at=tcp://127.0.0.1:29502",),
    "prompts from other engines (`server.prompt_replicas`)": (
        "server.prompt_replicas=[tcp://127.0.0.1:29502]",
    ),
    "overlapped steps": ("scheduler.overlap=true",),
    "adapters (`adapters.folders`)": ("adapters.most=2",),
    "adapters while serving (`adapters.root`)": ("adapters.most=2", "adapters.root=out"),
    "processors of one's own": ("server.logits_processors=['json:loads']",),
    "drafts by `ngram`, `suffix`": ("speculation.kind=ngram", _DRAFTING),
    "drafts by a draft model": (
        "speculation.kind=draft",
        "speculation.draft_path=recipes/tiny/draft",
        _DRAFTING,
    ),
    "drafts by an EAGLE-3 head": ("speculation.kind=eagle3", f"speculation.draft_path={HEAD}", _DRAFTING),
    "drafts by the model's own layer (MTP)": ("speculation.kind=mtp", _DRAFTING),
    "counted experts": ("device.count_experts=true",),
    "W8A8": ("model.quantization=w8a8",),
    "a recording": ("scheduler.record=out/recording",),
}


def table() -> str:
    """Return all pairs as a Markdown table, with the reasons of those that are refused behind it."""
    with TemporaryDirectory() as folder:
        places = _written(Path(folder))
        found = {
            feature: [_refusal([*divided, *settings], places) for divided in DIVISIONS.values()]
            for feature, settings in FEATURES.items()
        }
    reasons = list(dict.fromkeys(why for row in found.values() for why in row if why))
    lines = [f"| | {' | '.join(DIVISIONS)} |", "|---" * (1 + len(DIVISIONS)) + "|"]
    for feature, row in found.items():
        cells = [f"no ({1 + reasons.index(why)})" if why else "yes" for why in row]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{at}. {why}" for at, why in enumerate(reasons, 1))]) + "\n"


def _refusal(settings: Sequence[str], places: dict[str, Path]) -> str:
    """Return why an engine with these settings is refused; empty where it is not."""
    base = [f"model.path={MODEL}", "device.attention=reference", "cache.memory_gib=0.1"]
    texts = [*base, *settings]
    for name, place in places.items():
        texts = [each.replace(name, str(place)) for each in texts]
    try:
        recipe = read("recipes/any/cpu.yaml", texts, None).recipe
        for rank in range(recipe.parallel.ranks):
            config, share = share_of(recipe, rank)
            plan = sizing.plan_memory(recipe, config, None, share=share)
            check_operators(recipe, config, plan.longest_tokens, share)
    except RecipeError as error:
        return f"`{error.keys[0]}`: {error.problem}"
    except ValueError as error:
        return str(error)
    return ""


def _written(folder: Path) -> dict[str, Path]:
    places = {}
    for name, config, tensor in ((MODEL, _MODEL, "model.norm.weight"), (HEAD, _HEAD, "fc.weight")):
        place = places[name] = folder / name.strip("{}")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        header = json.dumps({tensor: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return places
