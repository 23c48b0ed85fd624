"""Make a rank's part of the pages that its engine exchanges with other engines."""

from __future__ import annotations

from itertools import groupby

import msgspec

from kv_cache.device.rank_pages import HeldLayer, RankHolds, RankPages, held_by
from kv_cache.exchange.shares import Held
from models.config import DecoderConfig
from models.parallel.group import Group
from models.parallel.share import Share
from models.step.runner import ModelRunner
from models.step.stage_runner import StageRunner
from recipes.machine import Machine
from recipes.schema.recipe import Recipe

_HOLDS = "pages/{}"  # the key of the ranks' store under which a rank says what it holds


def rank_pages(
    recipe: Recipe, config: DecoderConfig, runner: ModelRunner, world: Group, share: Share, machine: Machine
) -> RankPages | None:
    """Return this rank's part, or None where the leader exchanges no pages or has no other ranks.

    All ranks must call it at the same time; a rank of another machine may have another section `server`.
    """
    asked = recipe.server
    exchanges = not world.rank and (asked.pages_at is not None or bool(asked.prompt_replicas))
    if world.size == 1 or world.least(int(not exchanges) if not world.rank else 1, machine.device):
        return None
    assert world.store is not None, "these ranks have joined through a store"
    num_heads = [_heads_of(config, layer) for layer in share.layers(config)]
    held, at = [], share.layers(config).start
    for heads, alike in groupby(num_heads):
        first = share.tensor * heads // share.tensors if heads > 1 else 0
        stop = at + len(list(alike))
        turn = share.tensor % share.contexts, share.contexts
        held.append(Held(at, stop, first, first + max(1, heads // share.tensors), *turn))
        at = stop
    own = held_by(runner.cache, tuple(held), num_heads, _state_of(config))
    world.store.set(_HOLDS.format(world.rank), msgspec.json.encode(own).decode())
    holds = [
        msgspec.json.decode(world.store.get(_HOLDS.format(rank)), type=RankHolds)
        for rank in range(world.size)
    ]
    # The last stage computes a batch later than others, and its leader decides before that
    later = {"later": runner.later} if isinstance(runner, StageRunner) and not world.rank else {}
    return RankPages(runner.cache, world.on_hosts(), holds, **later)


def _heads_of(config: DecoderConfig, layer: int) -> int:
    """Return the heads by which a layer's pages divide; latents count as one."""
    recurrent = config.recurrent_of(layer)
    if recurrent is not None:
        return recurrent.num_key_heads
    return 1 if config.latent is not None else config.num_kv_heads


def _state_of(config: DecoderConfig) -> HeldLayer | None:
    """Describe what all ranks keep of a request in a layer with a recurrent state."""
    if config.recurrent is None:
        return None
    planes = config.recurrent.state(config.dtype).planes
    layout = " and ".join(f"{each.dtype} {[*each.shape]}" for each in planes)
    runs, heads = config.recurrent.head_runs(config.dtype), config.recurrent.num_key_heads
    return HeldLayer(layout, runs, heads, holds_state=True)
