"""A tier of pages in memory, whose lookups end when a test wants it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from continuous_batching.engine import Engine
from kv_cache.pages import PageCopy
from kv_cache.tier.lookup import Lookup, Sought
from tests.continuous_batching.checksum import POISON, ChecksumRunner


class MemoryTier:
    """The tier of one engine, over pages that several may share. `wait` says how many times a lookup is asked
    after before it has ended, `most` how many pages it finds.
    """

    def __init__(
        self,
        runner: ChecksumRunner,
        pages: dict[bytes, bytes],
        wait: Callable[[], int] = lambda: 0,
        most: Callable[[], int] = lambda: 1000,
    ) -> None:
        self.runner, self.pages = runner, pages
        self.wait, self.most = wait, most
        self.is_asked = True
        self.rests: dict[int, int] = {}
        self.handed = deque[bytes]()
        self.num_lookups = 0
        runner.tier = self

    def look_up(self, sought: Sought) -> Lookup | None:
        lookup, most = Lookup(sought, 0.0), self.most()
        if not self.is_asked or not lookup.next(1):
            return None
        self.num_lookups += 1
        while (wanted := lookup.next(1)) and len(lookup.contents) < most:
            lookup.take(wanted, [self.pages.get(lookup.key(wanted[0]))])
        self.rests[id(lookup)] = self.wait()
        return lookup

    def is_over(self, lookup: Lookup) -> bool:
        self.rests[id(lookup)] -= 1
        return self.rests[id(lookup)] < 0

    def hand_over(self, contents: Sequence[bytes]) -> None:
        self.handed.extend(contents)

    def make(self, copies: tuple[PageCopy, ...]) -> None:
        self.runner.make(copies)

    def close(self) -> None:
        pass

    def apply(self, copy: PageCopy) -> None:
        if copy.way == "to_tier":
            for key, content in zip(copy.keys, self.runner.read(copy.sources, copy.group)()):
                assert POISON not in np.frombuffer(content, dtype=np.uint64), "kept what nobody computed"
                assert self.pages.get(key, content) == content, "kept another page"
                self.pages[key] = content
        elif copy.way == "off_tier":
            for key in copy.keys:
                self.pages.pop(key, None)
        else:
            assert copy.way == "from_tier"
            contents = [self.handed.popleft() for _ in copy.targets]
            self.runner.write_host(copy.targets, contents, copy.group)


def attach(engine: Engine, pages: dict[bytes, bytes], **options: Callable[[], int]) -> MemoryTier:
    """Give an engine over a `ChecksumRunner` a tier; its scheduler has one."""
    assert isinstance(engine.runner, ChecksumRunner)
    engine.tier = tier = MemoryTier(engine.runner, pages, **options)
    return tier
