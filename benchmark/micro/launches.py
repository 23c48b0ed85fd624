"""Count the launches, copies and host waits that a decode step asks of an NPU.

They are counted over the stand-in for CANN, which sees every call, even where the recipe names a real NPU.
The model has the recipe's heads, norms, biases, windows and dtypes, but few layers, narrow products and
random weights: what a layer asks for does not depend on these, so the sums over the whole depth are exact. It
does depend on the width of experts in W8A8, which are narrowed to a width that takes the same launches. A
launch is one operator of torch or torch_npu that computes on the device. Where the recipe names a draft model
or a head, a step of that is counted too, after the step that reads the known tokens. A draft model is
narrowed likewise; a head computes one layer and its choice.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import Module

from benchmark.options import Column, recipe_of, table
from continuous_batching.request import Request, SamplingParams
from devices.ascend_limits import PROLOG_HIDDEN, fuses_gate
from models.checkpoint import weights
from models.config import DecoderConfig, HeadConfig
from models.decoder import Decoder
from models.drafting.config import Eagle3Config, MtpConfig, mtp_config
from models.drafting.drafter import Drafter
from models.drafting.eagle import Eagle3
from models.drafting.mtp import Mtp
from models.head import Head
from models.parallel.group import ALONE
from models.parallel.share import Share
from recipes.assembly import decoders
from recipes.assembly.decoders import cache_of, shape_of
from recipes.assembly.engine import BuiltEngine, build
from recipes.assembly.families import draft_config, model_config, read
from recipes.machine import Npu, start
from recipes.schema.parallel_section import ParallelSection
from recipes.schema.recipe import Recipe
from recipes.schema.recipe_error import RecipeError
from recipes.schema.speculation_section import SpeculationSection

LAYERS = 3  # the first has no residual before it; the layers after it are alike
NARROW = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512, "eos_token_id": 2}
NARROW_EXPERT = {"moe_intermediate_size": 64}
UNFUSED_EXPERT = 24  # columns of an int8 expert that no single launch both multiplies and gates
ROWS = 2
SETTLED = 3  # steps before the counted one; the first computes the prompts
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "top-k and top-p": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "temperature": {"temperature": 0.8},
}
COLUMNS = (
    Column("a_layer", "launches a layer"),
    Column("in_graph", "in the graph"),
    Column("drawing", "in the graph that draws"),
    Column("outside_graph", "outside the graph"),
    Column("to_device", "copies to the device"),
    Column("to_host", "copies to the host"),
    Column("waits", "waits of the host"),
    Column("updates", "updates of tasks"),
    Column("prefetches", "prefetches"),
)


def measure(recipe: Recipe, samplings: Iterable[str] = SAMPLING) -> dict[str, object]:
    """Count a decode step of the recipe's model, eager and captured, by way of sampling, the greedy first."""
    config, small = model_config(recipe), _narrow(recipe)
    num_layers, num_first = config.num_layers, 1  # so many layers are like the first
    if config.mixture is not None:  # the dense layers before the mixtures
        num_first = max(1, num_layers - config.num_mixtures)
    machine = start(small.device)
    assert isinstance(machine, Npu), "a narrow recipe names an NPU"
    if machine.product.joins_latents and config.hidden_size in PROLOG_HIDDEN:
        # The fused prolog accepts the whole model's hidden size, so the narrow one gets one that it accepts.
        hf = dict(small.model.config or {}) | {"hidden_size": PROLOG_HIDDEN[0]}
        small = replace(small, model=replace(small.model, config=hf))
    log = machine.launch_log
    assert log is not None, "and the stand-in for it"
    built = build(small)
    _name_layers(built.runner.decoder.layers, lambda place: setattr(log, "place", place))
    built.runner.capture(ROWS)  # the engine captures nothing itself, since its layers have no names before
    graphs, steps = built.runner.graphs, []
    for way in ("eager", "captured"):
        built.runner.graphs = graphs if way == "captured" else None
        # Launches outside layers in the greedy graph; what other graphs have beyond these draws tokens.
        greedy: Counter[str] = Counter()
        for sampling in samplings:
            params = SamplingParams(max_tokens=SETTLED + 2, ignore_eos=True, **SAMPLING[sampling])
            for row in range(ROWS):
                built.engine.add(Request(str(row), np.arange(3, 8, dtype=np.int32), params))
            for _ in range(SETTLED):  # the next step, like those before and after it, has decodes only
                built.engine.step()
            with log.reading() as asked:
                built.engine.step()
            greedy = greedy or _around(asked, in_graph=True)
            steps.append({"step": f"{way}, {sampling}"} | _sums(asked, num_layers, num_first, greedy))
            while built.engine.has_work:
                built.engine.step()
    draft = draft_config(recipe, config)
    if draft is not None:
        drafter = drafter_of(small, narrow_draft(draft, built.config, LAYERS), built, machine)
        layers = [drafter.decoder] if isinstance(drafter.decoder, Head) else drafter.decoder.layers
        _name_layers(layers, lambda place: setattr(log, "place", place))
        for way, asked in draft_steps(drafter, built, machine):
            rest = _around(asked, in_graph=True)
            steps.append({"step": f"{way}, a draft"} | _sums(asked, draft.num_layers, 1, rest, len(layers)))
    return {"num_layers": num_layers, "steps": steps}


def _narrow(recipe: Recipe) -> Recipe:
    """Return the recipe with few layers and narrow products, on the stand-in."""
    if recipe.device.kind != "npu":
        raise RecipeError(
            "device.kind", "no NPU, whose launches are counted", "choose a recipe of an NPU",
            value=recipe.device.kind,
        )  # fmt: skip
    hf = dict(recipe.model.config or {}) if recipe.model.path is None else read(recipe.model.path)
    config = model_config(recipe)
    hf |= {**NARROW, "num_hidden_layers": LAYERS}
    hf |= {key: value for key, value in NARROW_EXPERT.items() if key in hf}
    sharing = recipe.parallel.tensor // recipe.parallel.expert  # ranks that share an expert
    # One launch gates a dense MLP in int8, and a rank's part of an expert of some widths.
    gates_apart = config.mixture is not None and not fuses_gate(config.mixture.inner_size // sharing)
    if config.quantization is not None and gates_apart:
        hf["moe_intermediate_size" if "moe_intermediate_size" in hf else "intermediate_size"] = UNFUSED_EXPERT
    # More dense layers than one would leave too few of experts among the layers that are kept.
    dense = ("first_k_dense_replace", "moe_layer_start_index")
    hf |= {key: 1 for key in dense if (hf.get(key) or 0) > 1}
    if config.latent is None:
        hf["head_dim"] = config.head_dim
    else:
        # The products depend on the number of heads, so these are a rank's.
        num_heads = config.num_heads // recipe.parallel.tensor
        hf |= {"first_k_dense_replace": 1, "num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    if isinstance(hf.get("layer_types"), list):
        hf["layer_types"] = hf["layer_types"][:LAYERS]
    if isinstance(kinds := hf.get("mlp_layer_types"), list):
        others = ["sparse"] * (LAYERS - 1) if "sparse" in kinds else kinds[1:LAYERS]
        hf["mlp_layer_types"] = [*kinds[:1], *others]
    model = replace(recipe.model, path=None, config=hf, weights="random")
    device = replace(recipe.device, virtual=True, graphs=0)
    cache = replace(recipe.cache, num_pages=8, memory_gib=None, memory_fraction=None, host_gib=None)
    scheduler = replace(
        recipe.scheduler, num_slots=ROWS, max_batch_tokens=16, max_request_tokens=None, record=None
    )
    return replace(
        recipe,
        model=model,
        device=device,
        cache=cache,
        scheduler=scheduler,
        speculation=SpeculationSection(),
        parallel=ParallelSection(),  # collectives are not counted
    )


def _name_layers(layers: Iterable[Module], name: Callable[[str], None]) -> None:
    """Call `name` with a layer's number where the layer begins, and with "" where it ends."""
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, at=str(number): name(at))
        layer.register_forward_hook(lambda *_: name(""))


def _around(asked: Sequence[Any], *, in_graph: bool) -> Counter[str]:
    """Count the launches outside of layers, by name."""
    return Counter(
        each.name for each in asked if each.kind == "launch" and not each.place and each.in_graph == in_graph
    )


def _sums(
    asked: Sequence[Any], num_layers: int, num_first: int, greedy: Counter[str], num_narrow: int = LAYERS
) -> dict[str, object]:
    kinds = Counter(each.kind for each in asked)
    launches = [each for each in asked if each.kind == "launch"]
    layers = [Counter(each.name for each in launches if each.place == str(at)) for at in range(num_narrow)]
    assert layers[1:] == layers[-1:] * (num_narrow - 1), f"layers differ: {layers[1:]}"
    depth = num_first * layers[0].total() + (num_layers - num_first) * layers[-1].total()
    outside, drawing = _around(asked, in_graph=False), _around(asked, in_graph=True) - greedy
    is_captured = any(each.in_graph for each in launches)
    return {
        "a_layer": layers[-1].total(),
        "in_graph": depth + greedy.total() if is_captured else 0,
        "drawing": drawing.total(),
        "outside_graph": outside.total() + (0 if is_captured else depth),
        "to_device": kinds["to device"],
        "to_host": kinds["to host"],
        "waits": kinds["wait"],
        "updates": kinds["update"] // num_narrow * num_layers,
        "prefetches": kinds["prefetch"] // num_narrow * num_layers,
        "operators": {
            "first layer": dict(layers[0]),
            "each further layer": dict(layers[-1]),
            "rest of the graph": dict(greedy),
            "graph that draws": dict(drawing),
            "outside": dict(outside),
            "waits": dict(Counter(each.name for each in asked if each.kind == "wait")),
        },
    }


def narrow_draft(draft: DecoderConfig, target: DecoderConfig, num_layers: int) -> DecoderConfig:
    """Return the draft model's configuration with few layers and the target's widths and vocabulary."""
    if isinstance(draft, MtpConfig):
        return mtp_config(replace(target, num_unread_layers=1), draft.num_kept)
    if isinstance(draft, Eagle3Config):
        taps = tuple(range(num_layers))
        draft = replace(draft, taps=taps, draft_vocab_size=min(draft.draft_vocab_size, target.vocab_size))
        num_layers = draft.num_layers
    quantization = draft.quantization and replace(draft.quantization, is_stored=False)
    return replace(
        draft,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        layers=(draft.layers * num_layers)[:num_layers],
        eos_token_ids=target.eos_token_ids,
        quantization=quantization,
    )


def drafter_of(recipe: Recipe, config: DecoderConfig, built: BuiltEngine, machine: Npu) -> Drafter:
    """Build a draft model or a head of random weights beside an engine that was built without one."""
    slots = built.engine.slots
    if isinstance(config, HeadConfig):
        operators = machine.operators(shape_of(recipe.cache.page_size, config))
        head: Head
        if isinstance(config, Eagle3Config):
            head = Eagle3(config, *operators)
        else:
            assert isinstance(config, MtpConfig), "there are two kinds of heads"
            head = Mtp(config, *operators, ALONE, Share())
        for parameter in head.parameters():
            parameter.data.fill_(1 / config.hidden_size)
        head.pack()
        cache = cache_of([head], recipe, built.memory)
        return decoders.drafter_of(head, built.runner.decoder, cache, slots, slots.num_slots, recipe)
    decoder = Decoder(config, *machine.operators(shape_of(recipe.cache.page_size, config)))
    weights.random(decoder, recipe.model.seed)
    return Drafter(decoder, cache_of([decoder], recipe, built.memory), slots, slots.num_slots)


def draft_steps(drafter: Drafter, built: BuiltEngine, machine: Npu) -> Iterator[tuple[str, list[Any]]]:
    """Yield what a step for all rows asks for, eager and captured; the rows' tokens are on the null page."""
    log, rows = machine.launch_log, np.arange(built.engine.slots.num_slots)
    assert log is not None, "launches are draft_steps over the stand-in"
    assert built.runner.graphs is not None, "a narrow_draft recipe captures its steps"
    for way in ("eager", "captured"):
        if way == "captured":
            drafter.capture(built.runner.graphs)
        with torch.inference_mode():
            device = drafter.decoder.attention.device
            drafter.begin(torch.zeros(len(rows), dtype=torch.int64, device=device), rows)
            drafter.follow(rows, np.full_like(rows, 5))  # reaches the state in which later steps run
            with log.reading() as asked:
                drafter.follow(rows, np.full_like(rows, 6))
        yield way, asked


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Count the steps of the recipe that the options name."""
    return measure(recipe_of(options))


def print_table(result: Mapping[str, Any]) -> None:
    """Print a row for each way of stepping, followed by the operators of each."""
    steps = Column("step", f"{result['num_layers']} layers, counted over the stand-in")
    print(table((steps, *COLUMNS), result["steps"]))
    for step in result["steps"]:
        print(f"\n{step['step']}:")
        for place, names in step["operators"].items():
            said = ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
            print(f"  {place}: {said or 'nothing'}")
