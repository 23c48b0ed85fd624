"""Which replicas have the keys of which pages, or of which parts of texts?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
_FEW = 8


class KeyHolders:
    """Which replicas have which keys: of each key, one bit a replica."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}  # the replicas that have a key, as bits; of a key that one has

    def __len__(self) -> int:
        return len(self.masks)

    def __contains__(self, key: int) -> bool:
        return key in self.masks

    def add(self, replica: int, keys: Iterable[int]) -> int:
        """A replica has these keys; return how many it did not have."""
        bit, masks, num_new = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                masks[key] = mask | bit
                num_new += 1
        return num_new

    def discard(self, replica: int, keys: Iterable[int]) -> int:
        """A replica has none of these keys; return how many it had."""
        bit, masks, num_gone = 1 << replica, self.masks, 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                num_gone += 1
                if mask == bit:
                    del masks[key]
                else:
                    masks[key] = mask ^ bit
        return num_gone

    def clear(self, replica: int) -> None:
        """A replica has no key at all."""
        bit = 1 << replica
        self.discard(replica, [key for key, mask in self.masks.items() if mask & bit])


def num_first(
    keys: Sequence[int], count: int, held: KeyHolders, supposed: KeyHolders
) -> tuple[Counts | None, int]:
    """How many of these keys, from the first on without a gap, each of `count` replicas has in one or the
    other, None where nobody has any; and how many the second has of those that have most.
    """
    one, other = held.masks.get, supposed.masks.get
    there = one(keys[0], 0) | other(keys[0], 0) if len(keys) else 0
    if not there:
        return None, 0
    found, second = np.zeros(count, dtype=np.int64), 0
    for number, key in enumerate(keys):
        still = there & (one(key, 0) | other(key, 0))
        if still != there:
            _put(found, there ^ still, number)
            second = number if there & (there - 1) else second
            there = still
            if not there:
                return found, second
    _put(found, there, len(keys))
    return found, len(keys) if there & (there - 1) else second


def _put(counts: Counts, mask: int, value: int) -> None:
    """Set the counts of the replicas whose bits a mask has."""
    if mask.bit_count() <= _FEW:  # one by one is faster
        while mask:
            number = mask.bit_length() - 1
            counts[number] = value
            mask ^= 1 << number
        return
    bits = np.frombuffer(mask.to_bytes(-(-len(counts) // 8), "little"), dtype=np.uint8)
    counts[np.unpackbits(bits, count=len(counts), bitorder="little").astype(np.bool_)] = value
