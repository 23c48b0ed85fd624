"""Know which models the replicas serve, and which replicas may be sent a request.

A request names its model, by the model's name, an alias or an adapter's name, and goes to a replica that
lists this name in its `/v1/models`. A request without a name, where the API allows that, needs replicas that
all serve the same model. Replicas serve the same model if a name that is no adapter's is common to them.

What a replica listed stays known while it is away, so that a request for its model is told to come again, and
a request without a name is not answered by another model. A server that lists nothing is taken as it is: it
gets what no other replica lists and, where the others all serve one model, whatever they get.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from borders.refusal import BadRequest
from serving.api.errors import NotFound
from serving.failures import Unavailable

RETRY_S = 1.0

log = logging.getLogger("route")


@dataclass(frozen=True, slots=True)
class Listed:
    """What one replica lists: its entries in `/v1/models` by name, as JSON, the model's own first.

    `models` are the names of its model, and `adapters` those of its adapters. All are empty for a server that
    lists nothing.
    """

    entries: Mapping[str, bytes] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


LISTS_NOTHING = Listed()


class FleetModels:
    """The models of all replicas, by the number of each; `recipe_name` is that of the router's recipe."""

    def __init__(self, recipe_name: str = "") -> None:
        self._recipe_name = recipe_name
        self._listed: dict[int, Listed | None] = {}  # None: the replica has not been heard yet
        self._others: dict[str | None, list[int]] = {}  # results of `others_than`
        self._is_one = True
        self._has_warned = False
        self._telling: dict[int, Listed] = {}  # those that list a model, by number

    def join(self, number: int) -> None:
        """Add a replica that has not been heard yet."""
        self._set(number, None)

    def learn(self, number: int, listed: Listed) -> None:
        """Note what a replica lists now."""
        if self._listed.get(number) != listed:
            self._set(number, listed)

    def forget(self, number: int) -> None:
        """Drop what is known of a replica that has left."""
        self._listed.pop(number, None)
        self._changed()

    def of(self, number: int) -> Listed | None:
        """Return what a replica last listed, or None if it has not been heard yet."""
        return self._listed.get(number)

    @property
    def is_one(self) -> bool:
        """Whether all replicas that list a model serve the same one."""
        return self._is_one

    @property
    def entries(self) -> dict[str, bytes]:
        """The entries of all replicas by name, models first; of one name, the entry of the first replica."""
        found: dict[str, bytes] = {}
        for kind in ("models", "adapters"):
            for listed in self._telling.values():
                for name in getattr(listed, kind):
                    found.setdefault(name, listed.entries[name])
        return found

    def others_than(self, model: str | None) -> Sequence[int]:
        """Return the replicas that must not be sent a request for this model (None: it names none).

        Raises NotFound for a name that no replica lists, Unavailable while one may list it that was not heard
        yet, and BadRequest for a missing name where replicas serve several models.
        """
        if model in self._others:
            return self._others[model]
        may = self._may_serve(model)
        others = [number for number in self._listed if number not in may]
        if model is None or any(model in each.entries for each in self._telling.values()):
            self._others[model] = others  # names that clients make up are not kept
        return others

    def turn_of(self, model: str | None) -> str:
        """Return the name under which requests for this model wait: one for all names of the same model."""
        telling = self._telling.values()
        named = telling if model is None else [each for each in telling if model in each.entries]
        return next((each.models[0] for each in named), "")

    def num_open(self, turn: str, is_open: NDArray[np.bool_]) -> int:
        """Return how many open replicas serve the model whose requests wait under this name."""
        if self._is_one or not turn:
            return int(np.count_nonzero(is_open))
        return sum(bool(is_open[number]) for number, each in self._telling.items() if turn in each.models)

    def is_of_recipe(self, model: str | None) -> bool:
        """Return whether the router's recipe is that of the model of a request."""
        if self._is_one or model is None:
            return True
        return any(
            self._recipe_name in each.models for each in self._telling.values() if model in each.entries
        )

    def reads_pages(self, number: int) -> bool:
        """Return whether the router's recipe is that of a replica, so that its pages mean something here."""
        listed = self._listed.get(number)
        return self._is_one or (listed is not None and self._recipe_name in listed.models)

    def _may_serve(self, model: str | None) -> set[int]:
        telling = self._telling
        silent = {number for number, each in self._listed.items() if each is not None and not each.models}
        if not telling or (model is None and self._is_one):
            return {*self._listed}
        names = [*self.entries]
        if model is None:
            raise BadRequest(
                "model",
                f"is missing, and this router's replicas serve several models, {_in_words(names)}",
                fix="name one",
            )
        serving = {number for number, each in telling.items() if model in each.entries}
        if serving:
            return serving | silent if self._is_one else serving
        if silent:
            return silent
        num_unheard = sum(each is None for each in self._listed.values())
        if num_unheard:
            raise Unavailable(
                f"no replica that has been heard serves {model!r}, only {_in_words(names)}, and"
                f" {num_unheard} have not been heard yet; send the request again",
                RETRY_S,
            )
        raise NotFound.of_model(model, names)

    def _set(self, number: int, listed: Listed | None) -> None:
        self._listed[number] = listed
        self._changed()

    def _changed(self) -> None:
        self._others.clear()
        self._telling = {
            number: each for number, each in sorted(self._listed.items()) if each is not None and each.models
        }
        telling = [{*each.models} for each in self._telling.values()]
        self._is_one = not telling or bool(set.intersection(*telling))
        if self._is_one:
            self._has_warned = False
        elif self._recipe_name and not self._has_warned and self._recipe_name not in self.entries:
            self._has_warned = True
            log.warning(
                "replicas serve several models, and none is called %r, the name of the recipe's: all are"
                " judged by text alone; name it with --served-model-name",
                self._recipe_name,
            )


def _in_words(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
