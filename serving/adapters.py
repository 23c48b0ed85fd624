"""Keep the LoRA adapters that requests may ask for, by name, and load and unload them while a server runs.

The prefix-cache pages of an adapter's requests are salted with the digest of the adapter's files, so an
adapter that is loaded again under its old name from other files matches none of them. Each new engine gets
the adapters of a running server again. How an engine reads one is left to `serving/engine/worker.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from borders.files import in_one_line
from borders.refusal import BadRequest, abbreviate_json
from continuous_batching.request import Request
from kv_cache.page_keys import adapter_of
from models.checkpoint.adapter_files import CONFIG, WEIGHTS, AdapterFiles, look_at
from recipes.schema.adapters_section import AdaptersSection
from recipes.schema.recipe import ROOT
from recipes.schema.recipe_error import RecipeError
from serving.failures import Unavailable
from serving.roots import Root


class PutAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Tells the engine to load an adapter into a place that no request uses; its files have this digest."""

    number: int
    folder: str
    digest: str


class AdapterPut(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer: the place holds the adapter; or, with a `problem`, no request may use its number."""

    number: int
    digest: str
    problem: str


@dataclass(slots=True)
class NamedAdapter:
    """An adapter: its name, and the number of the place that it has on the device."""

    name: str
    number: int
    files: AdapterFiles
    is_there: bool = True  # the adapter is loaded into its place


class KnownAdapters:
    """The adapters that a recipe names; raises RecipeError for one that cannot be used."""

    def __init__(self, section: AdaptersSection) -> None:
        self._by_name: dict[str, NamedAdapter] = {}
        self.most, self._rank = section.most, section.rank
        for number, (name, folder) in enumerate((section.folders or {}).items(), 1):
            try:
                files = look_at(ROOT / folder, section.rank)
            except (ValueError, OSError) as error:
                problem = in_one_line(error)
                raise RecipeError(
                    f"adapters.folders.{name}", problem, "correct it, or leave it out"
                ) from error
            self._by_name[name] = NamedAdapter(name, number, files)

    @property
    def all(self) -> Sequence[NamedAdapter]:
        return tuple(self._by_name.values())

    def knows(self, name: str) -> bool:
        """Return whether there is an adapter of this name."""
        return name in self._by_name

    def find(self, name: str) -> NamedAdapter:
        """Return the adapter of this name.

        Raises BadRequest if there is none, and Unavailable while it is being loaded.
        """
        found = self._by_name.get(name)
        if found is None:
            known = " or ".join(map(abbreviate_json, self._by_name)) or "left out: there are no adapters"
            raise BadRequest("adapter", value=name, limit=known)
        if not found.is_there:
            raise Unavailable(f"the adapter {name!r} is being loaded")
        return found


NO_ADAPTERS = KnownAdapters(AdaptersSection())


log = logging.getLogger(__name__)

LONGEST_NAME = 256  # characters


class ServedAdapters(KnownAdapters):
    """The adapters of a running server, where more can be loaded and each new engine needs them again.

    `send` sends to the engine, and `requests` yields the requests that it has.
    """

    def __init__(
        self,
        section: AdaptersSection,
        send: Callable[[PutAdapter], None],
        requests: Callable[[], Iterable[Request]],
    ) -> None:
        super().__init__(section)
        self.root = None if section.root is None else Root(section.root, "adapters.root")
        # Adapters of the recipe, which each engine reads by itself, at the first numbers.
        self._at_start = len(self._by_name)
        self._send, self._requests = send, requests
        self._waiting: dict[str, asyncio.Future[None]] = {}  # keyed by the adapter's name

    async def load(self, name: str, path: str) -> None:
        """Load the adapter of a folder below the root.

        Raises BadRequest, or Unavailable where the engine ends meanwhile.
        """
        folder = self._folder(path)
        if not name or len(name) > LONGEST_NAME or name in self._by_name:
            problem = "is loaded already; unload it first" if name in self._by_name else ""
            raise BadRequest("lora_name", problem, value=name, limit=f"of 1 to {LONGEST_NAME} characters")
        if self._free_place() is None:
            fix = "unload one, or raise adapters.most; its requests must have ended"
            raise BadRequest("lora_name", f"has no place: all {self.most} are taken", value=name, fix=fix)
        try:
            files = await asyncio.to_thread(look_at, folder, self._rank)
        except (ValueError, OSError) as error:
            problem = self._hidden(in_one_line(error))
            raise BadRequest("lora_path", f"cannot be used: {problem}") from error
        place = self._free_place()  # another adapter, or a request on one that has gone, may be there now
        if name in self._by_name or place is None:
            raise Unavailable("another adapter has taken the name or the place meanwhile", 0.0)
        self._by_name[name] = adapter = NamedAdapter(name, place, files, is_there=False)
        self._waiting[name] = asyncio.get_running_loop().create_future()
        self._tell(adapter)
        await self._waiting[name]

    def _free_place(self) -> int | None:
        taken = {each.number for each in self.all} | {each.adapter for each in self._requests()}
        return next((number for number in range(1, self.most + 1) if number not in taken), None)

    def unload(self, name: str) -> None:
        """Accept no more requests for an adapter; its place is free when its requests have ended.

        Raises BadRequest.
        """
        try:
            found = self.find(name)
        except BadRequest as error:
            raise error.of_field("lora_name") from error
        if found.number <= self._at_start:
            problem = "is an adapter of the recipe, which each engine loads when it starts"
            raise BadRequest("lora_name", problem, value=name, fix="take it out of adapters.folders")
        del self._by_name[name]

    def begin(self, at_start: Sequence[str]) -> None:
        """Load the adapters again into a new engine, which holds only those of the recipe.

        `at_start` are the digests of these as the engine has read them: their files may have changed since,
        and the pages that are computed with them are found by their digests.
        """
        for each in self.all:
            if each.number > self._at_start:
                each.is_there = False
                self._tell(each)
            else:
                each.files = replace(each.files, digest=at_start[each.number - 1])

    def hear(self, message: AdapterPut) -> None:
        """Handle the engine's report about an adapter."""
        for each in self.all:
            if (each.number, each.files.digest) != (message.number, message.digest):
                continue
            each.is_there = not message.problem
            if message.problem:
                log.error("the adapter %s is gone: %s", each.name, message.problem)
                del self._by_name[each.name]
            waiting = self._waiting.pop(each.name, None)
            if waiting is not None and not waiting.done():
                if message.problem:
                    problem = self._hidden(message.problem)
                    waiting.set_exception(BadRequest("lora_path", f"cannot be used: {problem}"))
                else:
                    waiting.set_result(None)

    def lose(self, failure: Unavailable) -> None:
        """Fail the loads that an engine did not complete before it ended."""
        for name, waiting in self._waiting.items():
            del self._by_name[name]
            if not waiting.done():
                waiting.set_exception(copy(failure))
        self._waiting.clear()

    def check(self, request: Request) -> None:
        """Raise Unavailable if a request's place no longer holds the request's adapter."""
        held = {each.number: each for each in self.all if each.is_there}.get(request.adapter)
        is_same = held is not None and adapter_of(request.cache_salt) == held.files.digest
        if request.adapter and not is_same:
            raise Unavailable("the adapter was unloaded, or is being loaded again", 0.0)

    def digest_of(self, request: Request) -> str:
        """Return the digest of the adapter of a request that is in the engine; "" without one."""
        return next((each.files.digest for each in self.all if each.number == request.adapter), "")

    def _tell(self, adapter: NamedAdapter) -> None:
        self._send(PutAdapter(adapter.number, str(adapter.files.folder), adapter.files.digest))

    def _folder(self, path: str) -> Path:
        """Return the folder of a path below the root; raises BadRequest for a path that leads elsewhere."""
        if self.root is None:
            raise BadRequest(None, "adapters cannot be loaded here: the recipe has no adapters.root")
        folder = self.root.within(path, "lora_path")
        self.root.check_links((folder / CONFIG, folder / WEIGHTS), path, "lora_path")
        return folder

    def _hidden(self, text: str) -> str:
        assert self.root is not None, "there are paths below it alone"
        return self.root.hidden(text)
