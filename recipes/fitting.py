"""Choose the recipe that serves a checkpoint folder on this machine.

A verb that takes a recipe takes a folder, or ORG/NAME, in its place: the device is found, the recipe of
recipes/any that fits it is taken, and the keys are set that the model asks for on this device. What was
chosen is said, with the command that gives the same. A key that the user sets is never chosen.

    python -m recipes.fitting VERB [ARGUMENT ...]    for scripts/launch.sh: a verb's arguments with a recipe
                                                     in a model's place, and a null character after each
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from devices.ascend_limits import ATB_MOST_PAGE, ATB_PAGES, MOST_KEYS, PRODUCTS, AscendProduct
from devices.present import FUSED_CAPABILITY, Present, num_npus, present, processor, visible_npus
from models.config import DecoderConfig
from models.parallel.share import Share
from recipes.assembly.families import share_of
from recipes.assembly.memory_plan import GIB, in_gib
from recipes.assembly.sizing import plan_memory
from recipes.cluster.cluster import Cluster, find_cluster, named_cluster, ranks_here
from recipes.model_folder import answer_keys, model_folder, names_model
from recipes.schema import verb
from recipes.schema.command_line import places_of_positionals, profiles_in, with_keys
from recipes.schema.parallel_section import MOST_RANKS
from recipes.schema.reader import overridden, read
from recipes.schema.recipe import ROOT, Recipe, from_root
from recipes.schema.recipe_error import RecipeError

log = logging.getLogger(__name__)

VIRTUAL_DEVICES = 8
ENDLESS_BYTES = 2**50  # more memory than any device has
USEFUL_TOKENS = 32768  # devices that hold the weights and a smaller cache are called too small
CPU_CACHES_GIB = (4.0, 2.0, 1.0, 0.5, 0.25)  # the first is that of recipes/any/cpu.yaml
STAND_IN_CACHE_GIB = 0.25
CACHE_SIZES = ("cache.num_pages", "cache.memory_gib", "cache.memory_fraction")
VERBS_OF_VERBS = ("benchmark", "recipes")  # their first argument is the name of one of several


@dataclass(frozen=True, slots=True)
class Fitting:
    """The recipe for a model: a file of recipes/any, the keys to set in it, and why."""

    recipe: str  # relative to the repository
    overrides: tuple[str, ...]
    reasons: tuple[str, ...]


def fitting(
    model: str, overrides: Sequence[str] = (), profile: str | None = None, found: Present | None = None
) -> Fitting:
    """Return the recipe for a folder or ORG/NAME on the devices `found`, by default those of this machine.

    Raises ValueError for what is no checkpoint, for one that is not supported, and for one that the devices
    do not hold.
    """
    folder = model_folder(model)
    said = overridden(overrides)
    found = _asked(said, found)
    path = f"recipes/any/{(found.product or found.kind).lower()}.yaml"
    choice = _Choice(path, folder, overrides, profile, said)
    several = f"{found.count} x " if found.count > 1 else ""
    choice.reasons.append(f"{several}{found.name} with {in_gib(found.memory_bytes)} free: {choice.path}")
    if found.busy:
        choice.reasons.append(found.busy)
    if said.get("device.virtual"):
        choice.fit_stand_in()
    product = next((each for each in PRODUCTS if each.name == found.product), None)
    if product is not None:
        choice.fit_operators(product)
    if found.capability is not None and found.capability < FUSED_CAPABILITY:
        choice.leave_fused(f"{found.name} is older than compute capability 8.0")
    if found.kind == "cpu":
        choice.fit_cache(found.memory_bytes)
    else:
        choice.fit_devices(found)
    if product is not None:
        choice.fit_longest(product, found.memory_bytes)
    for key, (value, mark) in answer_keys(folder).items():
        choice.set(key, value, f"the chat template writes {mark}")
    return Fitting(choice.path, tuple(choice.keys), tuple(choice.reasons))


def fitted(
    recipe: str | Path, overrides: Sequence[str] = (), profile: str | None = None
) -> tuple[str | Path, tuple[str, ...]]:
    """Return a recipe and its overrides as they are, or those that fit a model, which are logged."""
    given = os.fspath(recipe)
    if not names_model(given):
        return recipe, tuple(overrides)
    chosen = fitting(given, overrides, profile)
    keys = (*chosen.overrides, *overrides)
    for reason in chosen.reasons:
        log.info("chosen: %s", reason)
    log.info("chosen: the same is LLM(%s)", ", ".join(repr(each) for each in (chosen.recipe, *keys)))
    return ROOT / chosen.recipe, keys


def with_settings(overrides: Sequence[str], settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return overrides with a Python caller's keywords, which are other engines' names; None sets nothing."""
    given = {name: value for name, value in settings.items() if value is not None}
    return (*overrides, *(f"{name}={_written(name, value)}" for name, value in given.items()))


def one_of(recipe: str | Path | None, model: str | Path | None) -> str | Path:
    """Return the recipe or the model, of which a caller gives one; raises ValueError for none or both."""
    if recipe is not None and model is not None:
        raise ValueError(f"recipe is {recipe} and model is {model}; give one of the two")
    given = model if recipe is None else recipe
    if given is None:
        raise ValueError(
            "no model is named; give a checkpoint's folder, ORG/NAME, or a recipe ending in .yaml"
        )
    return given


def with_recipe(command: str, arguments: Sequence[str]) -> list[str]:
    """Return a verb's arguments with a recipe in the place of a model, and print what was chosen.

    `command` is the verb's module, such as scripts.generate. Options of other engines become keys.
    """
    settled, chosen = _settled(command, arguments)
    if chosen is None:
        return settled
    _say(chosen)
    print(f"chosen: the same is {shlex.join(['python', '-m', command, *settled])}", file=sys.stderr)
    return settled


class _Choice:
    """A recipe of recipes/any, and the keys that have been chosen for it so far."""

    def __init__(
        self, path: str, folder: Path, overrides: Sequence[str], profile: str | None, said: dict[str, Any]
    ) -> None:
        self.path, self.reasons = path, list[str]()
        self.keys = [f"model.path={_in_yaml(from_root(folder.absolute()))}"]
        self._overrides, self._profile, self._said = overrides, profile, said
        self._cluster = Cluster("this machine")

    def set(self, key: str, value: object, why: str) -> bool:
        """Choose a key's value; returns False where the user has set it."""
        if key in self._said:
            return False
        self.keys.append(f"{key}={value}")
        self.reasons.append(f"{key}={value}, since {why}")
        return True

    def recipe(self, *more: str) -> Recipe:
        """Return the recipe as it is chosen so far, with the user's own keys."""
        return read(ROOT / self.path, [*self.keys, *more, *self._overrides], self._profile).recipe

    def fit_stand_in(self) -> None:
        """Choose a small cache for the virtual NPU, whose memory is this machine's."""
        if not any(key in self._said for key in CACHE_SIZES):
            self.set("cache.memory_gib", STAND_IN_CACHE_GIB, "a stand-in's memory is this machine's")

    def fit_operators(self, product: AscendProduct) -> None:
        """Choose the type, the pages and the attention that the product's operators take."""
        config = share_of(self.recipe(), 0)[0]
        if config.dtype not in product.dtypes:
            why = f"operators of the {product.name} take no {config.dtype}"
            self.set("model.dtype", product.dtypes[0], why)
        if product.is_atb:
            fits = [size for size in ATB_PAGES if size * config.head_dim <= ATB_MOST_PAGE]
            if fits and fits[0] != self.recipe().cache.page_size:
                self.set("cache.page_size", fits[0], f"pages of heads of {config.head_dim} are no larger")
        recipe = self.recipe()
        if recipe.device.attention == "reference":
            return
        try:
            from recipes.assembly.decoders import shape_of  # imported here because it imports torch

            config = share_of(recipe, 0)[0]
            product.check(shape_of(recipe.cache.page_size, config), takes_float32=recipe.device.virtual_fp32)
        except ValueError as error:
            self.leave_fused(str(error).partition(": ")[0])

    def leave_fused(self, why: str) -> None:
        """Choose the attention in plain PyTorch, for which no step is captured."""
        if self.set("device.attention", "reference", why):
            self.set("device.graphs", 0, "plain PyTorch is not captured")

    def fit_cache(self, memory_bytes: int) -> None:
        """Choose a cache that the processor's memory holds beside the weights."""
        if any(key in self._said for key in CACHE_SIZES):
            return
        first = self.recipe().cache.memory_gib
        if first != CPU_CACHES_GIB[0]:  # a profile has another
            return
        parallel = self.recipe().parallel
        here = ranks_here(parallel, find_cluster(parallel, os.environ))
        memory_bytes //= here
        for size_gib in CPU_CACHES_GIB:
            recipe = self.recipe(f"cache.memory_gib={size_gib:g}")
            config, share = share_of(recipe, 0)
            if _planned(recipe, config, memory_bytes, share, here) is None:
                if size_gib != first:
                    why = f"{in_gib(memory_bytes)} hold no larger cache beside the weights"
                    self.set("cache.memory_gib", f"{size_gib:g}", why)
                return

    def fit_longest(self, product: AscendProduct, memory_bytes: int) -> None:
        """Choose the longest request that fused attention takes, where the cache holds a longer one."""
        recipe = self.recipe()
        if recipe.device.attention == "reference" or not product.is_fused:
            return
        config, share = share_of(recipe, 0)
        try:
            longest = plan_memory(recipe, config, memory_bytes, share=share).longest_tokens
        except RecipeError:  # what the user asks for does not fit, which a start explains
            return
        if longest > MOST_KEYS + 1:  # the last token is no key
            why = f"fused attention of the {product.name} reads {MOST_KEYS} keys"
            self.set("scheduler.max_request_tokens", MOST_KEYS + 1, why)

    def _counts(self, found: Present) -> Iterator[int]:
        """Yield the numbers of devices that may hold a model: one, or equally many of each machine.

        All machines that the recipe or the launcher names have as many devices as this one.
        """
        parallel = self.recipe().parallel
        if len(parallel.nodes or ()) < 2:  # one rank is of one machine
            yield 1
        self._cluster = named_cluster(parallel, os.environ)
        machines = self._cluster.num_nodes
        counts = (machines * 2**power for power in range(found.count.bit_length()))
        yield from (count for count in counts if 1 < count <= MOST_RANKS)

    @property
    def _machines(self) -> str:
        """Words for the machines, if there are several."""
        several = self._cluster.num_nodes
        return f" of {several} machines ({self._cluster.source})" if several > 1 else ""

    def fit_devices(self, found: Present) -> None:
        """Choose the number of devices that hold the model; raises RecipeError where all of them do not."""
        if {"parallel.tensor", "parallel.pipeline"} & self._said.keys():
            return
        problem, endless, holds = RecipeError((), ""), None, 0
        for tensor in self._counts(found):
            recipe = self.recipe(f"parallel.tensor={tensor}")
            try:
                config, share = share_of(recipe, 0)
            except RecipeError as error:
                if error.keys[:1] not in (("parallel.tensor",), ("parallel.expert",)) or tensor == 1:
                    raise
                continue  # the model's heads cannot be shared by so many
            here = max(1, tensor // self._cluster.num_nodes)
            refused = _planned(recipe, config, found.memory_bytes, share, here)
            if refused is not None:
                problem, endless = refused, _planned(recipe, config, ENDLESS_BYTES, share, here)
            else:
                holds = tensor
                plan = plan_memory(recipe, config, found.memory_bytes, share=share, ranks_here=here)
                is_fixed = recipe.cache.memory_fraction is None  # more devices would not make it larger
                if is_fixed or plan.cache_tokens > USEFUL_TOKENS:
                    break
        if not holds:
            if endless is not None and endless.problem == problem.problem:  # no memory would mend it
                raise problem
            most = min(found.count * self._cluster.num_nodes, MOST_RANKS)
            devices = (f"{most} x {found.name}" if most > 1 else found.name) + self._machines
            why = f"{devices} cannot hold the model: {problem.problem}"
            raise RecipeError(problem.keys, why, found.busy or problem.fix)
        if holds > 1:
            why = f"fewer of {in_gib(found.memory_bytes)}{self._machines} hold too little beside the weights"
            self.set("parallel.tensor", holds, why)


def _written(name: str, value: object) -> str:
    """Return a setting's value as an override writes it; raises RecipeError for what has no such form."""
    try:
        plain = value if isinstance(value, (str, int, float, list, tuple, dict)) else _plain(value)
        return plain if isinstance(plain, str) else json.dumps(plain, default=_plain)
    except (TypeError, ValueError) as error:  # the second for a value that holds itself
        fix = "give a text, a number, a truth value, or a list or mapping of these"
        raise RecipeError(name, str(error), fix, value=value) from error


def _plain(value: object) -> object:
    """Return what JSON has no form for as a recipe has it: a path, a type of torch, a number of numpy."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return str(value)
    # Importing it takes a second, and where nobody has, no value is of it.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    raise TypeError(f"a value of the type {type(value).__name__} cannot be written in a recipe")


def _in_yaml(path: str) -> str:
    """Return a path as YAML reads it back, quoted where it might be read as something else."""
    return path if re.fullmatch(r"[A-Za-z./][\w./+@-]*", path) else json.dumps(path, ensure_ascii=False)


def _planned(
    recipe: Recipe, config: DecoderConfig, memory_bytes: int, share: Share, ranks_here: int
) -> RecipeError | None:
    """Return why the memory of a rank does not hold a recipe, or None."""
    try:
        plan_memory(recipe, config, memory_bytes, share=share, ranks_here=ranks_here)
    except RecipeError as error:
        return error
    return None


def _asked(said: dict[str, Any], found: Present | None) -> Present:
    """Return the devices that the user's keys ask for, or else those that are here."""
    is_virtual, gib = said.get("device.virtual", False), said.get("device.memory_gib")
    asked = said.get("device.product")
    kind, product = "npu" if is_virtual or asked else said.get("device.kind"), asked or "910B"
    if kind == "cpu":
        return found if found is not None and found.kind == "cpu" else processor()
    # A product is taken for granted where no NPU is here that could say what it is
    if kind == "npu" and (is_virtual or (gib is not None and (asked or not num_npus()))):
        name = f"a virtual {product}" if is_virtual else f"Ascend {product}"
        count = VIRTUAL_DEVICES if is_virtual else len(visible_npus(num_npus(), os.environ))
        found = Present("npu", name, product, max(1, count), processor().memory_bytes)
    found = present() if found is None else found
    if kind is not None and kind != found.kind:
        problem = f"{kind} is asked for, and this machine has {found.name}"
        raise RecipeError("device.kind", problem, "leave it out", value=kind)
    if gib is not None:
        return replace(found, memory_bytes=int(gib * GIB), busy="")
    return found if asked is None else replace(found, product=asked)


def _settled(command: str, arguments: Sequence[str]) -> tuple[list[str], Fitting | None]:
    """Return a verb's arguments with a recipe in a model's place, and why; None if no model stands there."""
    verb_name = command.rpartition(".")[2]
    number = int(verb_name in VERBS_OF_VERBS)
    given = with_keys(arguments, number, verb_name)
    places = places_of_positionals(given)[number:]
    first = given[places[0]] if places else ""
    if not first or not names_model(first):  # the options of a verb without a recipe are its own
        return (given if first.endswith((".yaml", ".yml")) else list(arguments)), None
    place = places[0]
    overrides = [given[at] for at in places[1:] if "=" in given[at]]
    profile = next(iter(reversed(list(profiles_in(given)))), None)
    chosen = fitting(given[place], overrides, profile)
    return [*given[:place], chosen.recipe, *chosen.overrides, *given[place + 1 :]], chosen


def _say(chosen: Fitting) -> None:
    for reason in chosen.reasons:
        print(f"chosen: {reason}", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Print a verb's arguments with the recipe and the keys that replace a model."""
    settled, chosen = _settled(argv[0], argv[1:])
    if chosen is not None:
        _say(chosen)
    sys.stdout.write("".join(f"{each}\0" for each in settled))


if __name__ == "__main__":
    verb.run(main)
